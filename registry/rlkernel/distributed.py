"""The same kernels on every rank: compare installs before a run, and decisions after its first step.

A rank that resolved to another implementation (another install, another card) computes another function; the run
looks healthy and is wrong. Ranks speak through the store that their process group was made with, not by a collective:
so a rank that has died, or never came, is named after `timeout` seconds, whatever the backend's own time-out is.

    from rlkernel.distributed import assert_same_decisions, assert_same_install

    assert_same_install()       # after init_process_group
    train_one_step()
    assert_same_decisions()

And a draw from logits whose vocabulary is split over ranks: `sample_shard`.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rlkernel import policy
from rlkernel.provenance import status
from rlkernel.spread import group_of
from rlkernel.wording import implementation
from rlkernel_core import __version__
from rlkernel_core.errors import ResolutionError
from rlkernel_core.ranks import TIMEOUT, by_key, differing, exchange, whole

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from rlkernel_core.spec.sampling import SampleResult

__all__ = ["assert_same_decisions", "assert_same_install", "install", "sample_shard"]


def assert_same_decisions(group: ProcessGroup | None = None, *, timeout: float = TIMEOUT) -> int:
    """Compare what every rank of a group has decided so far; every rank calls it, and waits for the others.

    Kinds of calls that only some ranks have made are compared among those; a rank without any is no error.

    Args:
        group: process group, or a DeviceMesh of one dimension; None for the default one.
        timeout: seconds to wait for the other ranks.

    Returns:
        How many kinds of calls were compared between at least two ranks.

    Raises:
        ResolutionError: two ranks run different implementations or versions; the message names call and ranks.
        RankError: a rank did not answer in time; the message names it.
    """
    ran = sorted({(str(r.decision.call), f"{implementation(r.decision)} [{r.decision.version}]") for r in status()})
    # A kind of call may have been decided under several policies, on each rank in an order of its own.
    mine = {call: ", ".join(target for _, target in same) for call, same in groupby(ran, itemgetter(0))}
    served = by_key(exchange("decisions", mine, group_of(group), timeout))
    if lines := differing(served):
        raise ResolutionError("ranks run different kernels\n" + "\n".join(lines) + "\nPin one with `rlkernel lock`.")
    return sum(len(by_rank) > 1 for by_rank in served.values())


def assert_same_install(group: ProcessGroup | None = None, *, timeout: float = TIMEOUT) -> dict[str, str]:
    """Compare versions of rlkernel, torch, Python and backends, and the policy in force, over the ranks of a group.

    Args:
        group: process group, or a DeviceMesh of one dimension; None for the default one.
        timeout: seconds to wait for the other ranks.

    Returns:
        What all ranks have.

    Raises:
        ResolutionError: something differs; the message says what, and on which ranks.
        RankError: a rank did not answer in time.
    """
    mine = install()
    if lines := differing(whole(exchange("installs", mine, group_of(group), timeout))):
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


def sample_shard(
    logits: Tensor,
    *,
    group: ProcessGroup,
    sizes: tuple[int, ...] | None = None,
    candidates: int = 0,
    **request: Any,
) -> SampleResult:
    """`rlkernel.sample` of rows whose vocabulary is split over the ranks of a group: the same bits on every rank.

    Token, log-probabilities and everything else are bitwise those of the joined rows, on any number of ranks, one
    included; with `candidates` > 0 log-probabilities are those of the law in float64, rounded once, where `sample`
    states the trainer's. Either the logits are gathered and drawn from by `rlkernel.sample`, whichever backend the
    policy chooses, in a graph too: what links between GPUs of one machine are fast enough for. Or (`candidates` >
    0, for slow links) ranks exchange their sums and best ids, in one all-gather of [N, 8 + 3 C] numbers, in the
    arithmetic of the reference and with its bits. Where these do not settle a row (it keeps more ids than were
    sent, or a rounding could go either way), where `top_n`, `rank`, or a kept set without a filter are asked for,
    for float64, and while a graph is recorded, the logits are gathered all the same; to know which, a call reads
    one value on the host.

    Args:
        logits: [N, n] this rank's columns, in rank order; not written to.
        group: process group, or DeviceMesh of one dimension, that the vocabulary is split over.
        sizes: columns of every rank, in rank order, equal or not. None: ranks tell each other in one all-gather of two
            integers, and a value is read on the host; a graph needs them given.
        candidates: C, ids that a rank sends of each row where there are filters; 0 gathers the logits.
        **request: everything else that `sample` takes, the same on every rank. Ids (in `bias`, `banned`, `allowed` and
            `penalties`) and `vocab_size` are those of the whole vocabulary.

    Raises:
        ArgumentError: as `sample`, for sizes that are not those of the ranks or absent in a graph, and without sizes
            for ranks with other numbers of rows.
    """
    import rlkernel
    from rlkernel_torch.sharded import sampling, statistics

    group = group_of(group)
    if candidates == 0:
        whole = statistics.joined(logits, statistics.columns(logits, group, sizes))
        result: SampleResult = rlkernel.sample(whole, **request)
        return result
    return sampling.sample_shard(logits, group=group, sizes=sizes, candidates=candidates, **request)
