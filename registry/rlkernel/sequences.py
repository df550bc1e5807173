"""Sums and means of per-token values over sequences, padded or packed: what DPO and GSPO need of log-probabilities.

    x_i = sum of values_t over the tokens t of sequence i that the mask counts;  with mean, divided by their number

Packed sequences stand end to end; each is summed alone and in its order, in float64, and rounded once: no sequence
changes the bits of another, and a large batch loses nothing. No value is read by the host.

Legend: B sequences · T padded length · N packed tokens. Imports torch when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sequence_sums"]


def sequence_sums(
    values: Tensor,  # [B, T] or [N]
    *,
    cu_seqlens: Tensor | None = None,  # [B + 1]
    mask: Tensor | None = None,  # as values
    mean: bool = False,
) -> Tensor:  # [B]
    """The sum of each sequence's values, differentiable in `values`; the layouts are those of `policy_loss`.

    Args:
        values: [B, T] padded, or [N] packed, floating: log-probabilities, their differences, rewards of tokens.
        cu_seqlens: [B + 1] int32 or int64 starts of packed sequences, cu_seqlens[0] == 0; tokens from cu_seqlens[-1]
            on belong to none.
        mask: as values, bool, True where a token counts; elsewhere values may hold anything, NaN included, and
            their gradient is 0.
        mean: divide by the number of tokens that count.

    Returns:
        [B] in the dtype of `values`; 0 for a sequence without tokens that count.

    Raises:
        ArgumentTypeError: another dtype than the ones above.
        ArgumentError: sizes that do not match, packed values without cu_seqlens, or padded ones with it.
    """
    import torch

    checks.tensor("values", values, ndim=(1, 2), kind="floating")
    checks.aligned("mask", mask, values.shape, "values", kind="bool", beside=values, where="values")
    checks.flags(mean=mean)
    counted = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    kept = torch.where(counted, values, 0.0).double()
    if values.dim() == 2:
        if cu_seqlens is not None:
            told = checks.describe(cu_seqlens)
            raise ArgumentError("cu_seqlens", told, "describes packed tokens", "Pass values as [N], or a mask.")
        total, count = kept.sum(-1), counted.sum(-1)
    else:
        starts = starts_of(cu_seqlens, values)
        total, count = _segments(kept, starts), _segments(counted.double(), starts)
    return (total / count.clamp(min=1) if mean else total).to(values.dtype)


def starts_of(cu_seqlens: Tensor | None, tokens: Tensor) -> Tensor:
    """[B + 1] int64 starts within the tokens [N] and not descending, whatever cu_seqlens holds."""
    if cu_seqlens is None:
        raise ArgumentError("cu_seqlens", None, "[N] alone has no sequences", "Pass cu_seqlens, or [B, T].")
    checks.tensor("cu_seqlens", cu_seqlens, ndim=1, kind="integer")
    checks.same_device("cu_seqlens", cu_seqlens, tokens, "the tokens")
    if cu_seqlens.shape[0] < 1:
        raise ArgumentError("cu_seqlens", checks.describe(cu_seqlens), "must be [B + 1]", "Start it with 0.")
    return cu_seqlens.long().clamp(0, tokens.shape[0]).cummax(0).values


def _segments(x: Tensor, starts: Tensor) -> Tensor:
    """[N] -> [B], one sequence after the other: no atomics, and no check that would wait for the device."""
    import torch

    if starts.shape[0] == 1:
        return x.new_zeros(0) + 0 * x.sum()
    return torch.segment_reduce(x, "sum", offsets=starts, axis=0, initial=0, unsafe=True)
