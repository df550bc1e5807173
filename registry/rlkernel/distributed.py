"""The same kernels on every rank: compare installs before a run, and decisions after its first step.

A rank that resolved to another implementation (another install, another card) computes another function; the run
looks healthy and is wrong. Ranks speak through the store that their process group was made with, not by a collective:
so a rank that has died, or never came, is named after `timeout` seconds, whatever the backend's own time-out is.

    from rlkernel.distributed import assert_same_decisions, assert_same_install

    assert_same_install()       # after init_process_group
    train_one_step()
    assert_same_decisions()
"""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from rlkernel import policy
from rlkernel.discover import guarded
from rlkernel.provenance import status
from rlkernel_core import __version__
from rlkernel_core.errors import RankError, ResolutionError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TIMEOUT: Final = 60.0  # seconds; importing torch on a slow file system takes ten
_ROUNDS: Final[Counter[str]] = Counter()  # exchanges so far by group and purpose: every rank counts the same


def assert_same_decisions(group: ProcessGroup | None = None, *, timeout: float = TIMEOUT) -> int:
    """Compare what every rank of a group has decided so far; every rank calls it, and waits for the others.

    Kinds of calls that only some ranks have made are compared among those; a rank without any is no error.

    Args:
        group: process group; None for the default one.
        timeout: seconds to wait for the other ranks.

    Returns:
        How many kinds of calls were compared between at least two ranks.

    Raises:
        ResolutionError: two ranks run different implementations or versions; the message names call and ranks.
        RankError: a rank did not answer in time; the message names it.
    """
    ran = sorted({(str(r.decision.call), f"{r.decision.target} [{r.decision.version}]") for r in status()})
    # A kind of call may have been decided under several policies, on each rank in an order of its own.
    mine = {call: ", ".join(target for _, target in same) for call, same in groupby(ran, itemgetter(0))}
    everyone = _exchange("decisions", mine, group, timeout)
    served = _by_key(everyone)
    if lines := _differing(served):
        raise ResolutionError("ranks run different kernels\n" + "\n".join(lines) + "\nPin one with `rlkernel lock`.")
    return sum(len(by_rank) > 1 for by_rank in served.values())


def assert_same_install(group: ProcessGroup | None = None, *, timeout: float = TIMEOUT) -> dict[str, str]:
    """Compare versions of rlkernel, torch, Python and backends, and the policy in force, over the ranks of a group.

    Args:
        group: process group; None for the default one.
        timeout: seconds to wait for the other ranks.

    Returns:
        What all ranks have.

    Raises:
        ResolutionError: something differs; the message says what, and on which ranks.
        RankError: a rank did not answer in time.
    """
    mine = install()
    everyone = _exchange("installs", mine, group, timeout)
    absent = "not there"
    names = {name for found in everyone.values() for name in found}
    whole = {name: {rank: found.get(name, absent) for rank, found in everyone.items()} for name in sorted(names)}
    if lines := _differing(whole):
        raise ResolutionError("ranks have different installs\n" + "\n".join(lines) + "\nInstall the same on all.")
    return mine


def install() -> dict[str, str]:
    """What decides which kernel runs here: name -> version or value."""
    import platform

    import torch

    rules = policy.current().policy
    there = policy.installed()
    backends = {f"backend {name}": there[name].provider for name in there}
    chosen = {"lock": str(rules.lock)}
    for of, own in {"": rules.default, **{f"{op}.": own for op, own in rules.ops.items()}}.items():
        chosen |= {f"{of}order": ", ".join(own.order), f"{of}fallback": own.fallback}
    known = {"rlkernel": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {**known, **backends, **{f"policy {name}": value for name, value in chosen.items()}}


def _exchange(
    purpose: str, mine: dict[str, str], group: ProcessGroup | None, timeout: float
) -> dict[int, dict[str, str]]:
    """What every rank of the group said, by rank in the default group."""
    from torch import distributed
    from torch.distributed import distributed_c10d
    from torch.distributed.distributed_c10d import PrefixStore

    ranks = distributed.get_process_group_ranks(group)
    place = f"rlkernel/{purpose}/{','.join(map(str, ranks))}"
    default = distributed_c10d._get_default_store()  # noqa: SLF001 torch has no public name for it
    store: Any = PrefixStore(f"{place}/{_ROUNDS[place]}", default)
    _ROUNDS[place] += 1
    until = time.monotonic() + timeout
    store.set(str(distributed.get_rank()), json.dumps(mine))
    for rank in ranks:
        left = timedelta(seconds=max(until - time.monotonic(), 0.001))
        _, late = guarded(lambda r=rank, t=left: store.wait([str(r)], t))  # type: ignore[misc]
        if late is not None:
            silent = [r for r in ranks if not store.check([str(r)])]
            if silent:
                raise RankError(
                    f"rank {', '.join(map(str, silent))} of {len(ranks)} did not answer within {timeout:g} s when "
                    f"{purpose} were compared: it has died, or does not call this as often as the others; see its log",
                    silent,
                ) from late
    return {rank: json.loads(store.get(str(rank))) for rank in ranks}


def _by_key(everyone: dict[int, dict[str, str]]) -> dict[str, dict[int, str]]:
    """What was said of each key, by rank; ranks that said nothing of it are left out."""
    keys = sorted({key for said in everyone.values() for key in said})
    return {key: {rank: said[key] for rank, said in everyone.items() if key in said} for key in keys}


def _differing(served: dict[str, dict[int, str]]) -> list[str]:
    """A line for every key of which ranks said different things."""
    return [
        f"{key}: " + "; ".join(f"rank {rank}: {text}" for rank, text in said.items())
        for key, said in served.items()
        if len(set(said.values())) > 1
    ]
