"""whiten@1 in Triton: one read for the moments, one read and write to apply them; nothing leaves the device.

The scalars between the two passes (merging ranks, variance, the factor) are plain torch on 0-dim tensors.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor

from rlkernel_core.reasons import Reason
from rlkernel_core.reference.advantage.moments import Moments, across_ranks
from rlkernel_core.spec.whiten import WhitenCall, WhitenResult
from rlkernel_triton.launch import FUSED, INTERPRETED, on_device_of
from rlkernel_triton.moments_kernels import BLOCK, MERGED, merge_kernel, moments_kernel, whiten_kernel
from rlkernel_triton.recursion import Rows
from rlkernel_triton.suffix_scan import refused_float64

_SIZE: Final = 64 if INTERPRETED else BLOCK
_MERGED: Final = 8 if INTERPRETED else MERGED


def _grid(rows: Rows) -> tuple[int, int]:
    """Programs, and chunks of a row: packed sequences, whose lengths the host does not know, take one program each."""
    chunks = 1 if rows.bounds is not None else triton.cdiv(rows.width, _SIZE)
    return rows.sequences * chunks, chunks


def moments(x: Tensor, rows: Rows, chosen: Tensor | None = None, times: Tensor | None = None) -> Moments:
    """Moments of the tokens of `x` that count, of the sequences `chosen` [B], each as often as `times` says."""
    programs, _ = _grid(rows)
    out = torch.zeros(4, dtype=torch.float32, device=x.device)
    if programs:
        partial = torch.empty(programs * 4, dtype=torch.float32, device=x.device)
        with on_device_of(x):
            moments_kernel[(programs,)](
                x=x, times=x if times is None else times, out=partial, **_layout(rows, chosen, x),
                TIMES=times is not None,
            )  # fmt: skip
            merge_kernel[(1,)](partial, out, programs, SIZE=_MERGED, **FUSED)
    return Moments(*out.unbind())


def whitened(
    x: Tensor,
    into: Tensor,
    rows: Rows,
    whole: Moments | None,
    rstd: Tensor | None,
    *,
    chosen: Tensor | None = None,
    weights: Tensor | None = None,
    back: Tensor | None = None,
    carry: bool = False,
) -> Tensor:
    """`into` = weights (x - mean) rstd, 0 where nothing counts; `whole` None: without whitening."""
    programs, _ = _grid(rows)
    scalars = x if whole is None else torch.stack(whole)
    if programs:
        with on_device_of(x):
            whiten_kernel[(programs,)](
                x=x, y=into, weights=x if weights is None else weights.contiguous(), moments=scalars,
                rstd=x if rstd is None else rstd, back=x if back is None else back, **_layout(rows, chosen, x),
                WEIGHTS=weights is not None, WHITEN=whole is not None, BACK=back is not None, CARRY=carry,
            )  # fmt: skip
    return into


def _layout(rows: Rows, chosen: Tensor | None, other: Tensor) -> dict[str, Any]:
    """The arguments of both kernels that say which tokens there are; `other` stands for what is not there."""
    return {
        "mask": other if rows.mask is None else rows.mask,
        "chosen": other if chosen is None else chosen.contiguous().view(torch.uint8),
        "ends": other if rows.ends is None else rows.ends,
        "bounds": other if rows.bounds is None else rows.bounds,
        "T": rows.width,
        "C": _grid(rows)[1],
        "sequences": rows.sequences,
        "MASK": rows.mask is not None,
        "CHOSEN": chosen is not None,
        "ENDS": rows.ends is not None,
        "PACKED": rows.bounds is not None,
        "SIZE": _SIZE,
        "num_warps": 8,
        **FUSED,
    }


@torch.no_grad()
def whiten(call: WhitenCall) -> WhitenResult:
    """See `rlkernel_core.spec.whiten.WhitenCall`."""
    x = call.x
    x = x.detach().float().contiguous()
    shape = tuple(x.shape) if call.lengths is not None else (1, x.numel())
    rows = Rows.of(shape, shape[0], call.mask, call.lengths, None)
    whole = across_ranks(
        moments(x, rows, times=None if call.counts is None else call.counts.contiguous()), call.process_group
    )
    rstd = whole.rstd(call.ddof, call.eps, call.eps_mode)
    result = WhitenResult(x, whole.n, whole.mean, whole.variance(call.ddof), rstd)
    y = torch.empty_like(x)
    if call.apply:
        back = None if call.shift_mean else result.mean
        y = whitened(x, y, rows, whole, rstd, back=back, carry=call.masked_out == "carry")
    else:
        y = whitened(x, y, rows, None, None, carry=call.masked_out == "carry")
    return WhitenResult(y, result.count, result.mean, result.var, rstd)


def fits(call: WhitenCall) -> Reason | None:
    """The state is fp32: a float64 x is for another implementation."""
    return refused_float64({"x": call.x})
