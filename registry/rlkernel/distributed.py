"""The same kernels on every rank: compare decisions over a process group.

A rank that resolved to another implementation (another install, another card) computes another function; the run
looks healthy and is wrong. One call after the first step finds it.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from rlkernel.provenance import status
from rlkernel_core.errors import ResolutionError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def assert_same_decisions(group: ProcessGroup | None = None) -> int:
    """Compare what every rank of a group has decided so far; a collective, and a host synchronisation.

    Kinds of calls that only some ranks have made are compared among those. The call waits for all ranks as long as the
    group's own timeout says.

    Args:
        group: process group; None for the default one.

    Returns:
        How many kinds of calls were compared between at least two ranks.

    Raises:
        ResolutionError: two ranks run different implementations or versions; the message names call and ranks.
    """
    from torch import distributed

    ran = sorted({(str(r.decision.call), f"{r.decision.target} [{r.decision.version}]") for r in status()})
    # A kind of call may have been decided under several policies, on each rank in an order of its own.
    mine = {call: ", ".join(target for _, target in same) for call, same in groupby(ran, itemgetter(0))}
    everyone: list[dict[str, str]] = [{}] * distributed.get_world_size(group)
    distributed.all_gather_object(everyone, mine, group=group)
    calls = sorted({call for rank in everyone for call in rank})
    served = {call: {rank: said[call] for rank, said in enumerate(everyone) if call in said} for call in calls}
    differing = [call for call, by_rank in served.items() if len(set(by_rank.values())) > 1]
    if differing:
        lines = [f"{call}: " + "; ".join(f"rank {r}: {t}" for r, t in served[call].items()) for call in differing]
        raise ResolutionError("ranks run different kernels\n" + "\n".join(lines) + "\nPin one with `rlkernel lock`.")
    return sum(len(by_rank) > 1 for by_rank in served.values())
