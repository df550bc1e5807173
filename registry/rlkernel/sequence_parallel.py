"""Rows of hidden states that are split over a tensor-parallel group: gathered, and their gradients brought back.

    whole = gather_rows(hidden, group=tp)                                    # [n, D] of this rank -> [N, D] of all
    out = rlkernel.linear_logprob(whole, head, ids, group=tp, partial_grad=True)

Under sequence parallelism (Megatron) each rank of a tensor-parallel group has N / R rows of what enters the output
head, whose vocabulary is split over the same ranks. Each rank's gradient of all rows is then a part, that of its
columns of the vocabulary. A rank sends to each other one the part of its rows, and adds what it receives, in fp32 and
in rank order: a reduce-scatter whose bits depend on no network.

Legend: N rows · n those of this rank · R ranks · D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlkernel import spread
from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["gather_rows"]


def gather_rows(hidden: Tensor, *, group: ProcessGroup) -> Tensor:
    """The rows of all ranks in rank order, differentiable: backward adds the ranks' parts of the gradient.

    Use it where what follows leaves the gradient of hidden as this rank's part, as `partial_grad=True` does. Sent by a
    rank, each way: (R - 1) n D numbers of hidden's dtype. Memory beyond the result and the gradient: a copy of either.

    Args:
        hidden: [n, ...] the rows of this rank, in any floating dtype; n is the same on all ranks.
        group: process group, or DeviceMesh of one dimension, that the rows are split over.

    Returns:
        [R n, ...]. The gradient of hidden is the sum of the parts of its rows, in fp32 (float64 for float64), rounded
        once to its dtype.

    Raises:
        ArgumentTypeError: hidden is no floating tensor, or group no process group.
        ArgumentError: hidden has no dimension.
    """
    group = spread.group_of(group)
    checks.tensor("hidden", hidden, kind="floating")
    checks.process_group("group", group)
    if hidden.dim() < 1:
        raise ArgumentError("hidden", checks.describe(hidden), "has no rows", "Pass [n, ...].")
    from rlkernel.torchlib.gathered_rows import GatheredRows

    apply: Any = GatheredRows.apply
    result: Tensor = apply(hidden, group)
    return result
