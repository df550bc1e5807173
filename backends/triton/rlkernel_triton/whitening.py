"""whiten@1 in Triton: one read for the moments, one read and write to apply them; nothing leaves the device.

The scalars between the two passes (merging ranks, variance, the factor) are plain torch on 0-dim tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.moments import Moments, across_ranks
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.whiten import WhitenCall, WhitenResult
from rlkernel_triton.language import triton
from rlkernel_triton.launch import INTERPRETED
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for, planned
from rlkernel_triton.moments_kernels import BLOCK, MERGED, merge_kernel, moments_kernel, whiten_kernel
from rlkernel_triton.recursion import Rows
from rlkernel_triton.suffix_scan import refused_float64

_SIZE: Final = 64 if INTERPRETED else BLOCK
_WARPS: Final = 8
_MERGED: Final = 8 if INTERPRETED else MERGED


def _grid(rows: Rows) -> tuple[int, int]:
    """Programs, and chunks of a row: packed sequences, whose lengths the host does not know, take one program each."""
    chunks = 1 if rows.bounds is not None else triton.cdiv(rows.width, _SIZE)
    return rows.sequences * chunks, chunks


def moments(
    x: Tensor, rows: Rows, chosen: Tensor | None = None, times: Tensor | None = None, plan: Plan | None = None
) -> Moments:
    """Moments of the tokens of `x` that count, of the sequences `chosen` [B], each as often as `times` says."""
    programs, chunks = _grid(rows)
    out = torch.zeros(4, dtype=torch.float32, device=x.device)

    def bound(launcher: Launcher) -> tuple[Launch, Launch]:
        layout = _layout(rows, chosen)
        return (
            launcher.bind(moments_kernel, num_warps=_WARPS, **layout, C=chunks, TIMES=times is not None),
            launcher.bind(merge_kernel, P=programs, SIZE=_MERGED),
        )

    if programs:
        partial = torch.empty(programs * 4, dtype=torch.float32, device=x.device)
        each, merge = planned(plan, "moments", x.device, bound)
        mask, member, ends, bounds = _tokens(rows, chosen, x)
        each((programs,), x, mask, member, x if times is None else times, ends, bounds, partial)
        merge((1,), partial, out)
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
    plan: Plan | None = None,
) -> Tensor:
    """`into` = weights (x - mean) rstd, 0 where nothing counts; `whole` None: without whitening."""
    programs, chunks = _grid(rows)
    scalars = x if whole is None else torch.stack(whole)

    def bound(launcher: Launcher) -> Launch:
        return launcher.bind(
            whiten_kernel, num_warps=_WARPS, any_alignment=("rstd", "back"), **_layout(rows, chosen), C=chunks,
            WEIGHTS=weights is not None, WHITEN=whole is not None, BACK=back is not None, CARRY=carry,
        )  # fmt: skip

    if programs:
        mask, member, ends, bounds = _tokens(rows, chosen, x)
        planned(plan, "whitened", x.device, bound)(
            (programs,), x, into, mask, member, x if weights is None else weights.contiguous(), scalars,
            x if rstd is None else rstd, x if back is None else back, ends, bounds,
        )  # fmt: skip
    return into


def _tokens(rows: Rows, chosen: Tensor | None, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mask, chosen sequences, ends and bounds as both kernels read them; `other` stands for what is not there."""
    return (
        other if rows.mask is None else rows.mask,
        other if chosen is None else chosen.contiguous().view(torch.uint8),
        other if rows.ends is None else rows.ends,
        other if rows.bounds is None else rows.bounds,
    )


def _layout(rows: Rows, chosen: Tensor | None) -> dict[str, Any]:
    """The constants of both kernels that say which tokens there are."""
    return {
        "T": rows.width,
        "sequences": rows.sequences,
        "MASK": rows.mask is not None,
        "CHOSEN": chosen is not None,
        "ENDS": rows.ends is not None,
        "PACKED": rows.bounds is not None,
        "SIZE": _SIZE,
    }


def whiten(call: WhitenCall) -> WhitenResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: WhitenCall) -> Callable[[WhitenCall], WhitenResult]:
    """What runs calls of this shape. See `rlkernel_core.spec.whiten.WhitenCall`."""
    plan = Plan(launcher_for(call.x.device))

    @torch.no_grad()
    def run(call: WhitenCall) -> WhitenResult:
        x = call.x.detach().float().contiguous()
        shape = tuple(x.shape) if call.lengths is not None else (1, x.numel())
        rows = Rows.of(shape, shape[0], call.mask, call.lengths, None)
        times = None if call.counts is None else call.counts.contiguous()
        whole = across_ranks(moments(x, rows, times=times, plan=plan), call.process_group)
        rstd = whole.rstd(call.ddof, call.eps, call.eps_mode)
        result = WhitenResult(x, whole.n, whole.mean, whole.variance(call.ddof), rstd)
        y, carry = torch.empty_like(x), call.masked_out == "carry"
        if call.apply:
            back = None if call.shift_mean else result.mean
            y = whitened(x, y, rows, whole, rstd, back=back, carry=carry, plan=plan)
        else:
            y = whitened(x, y, rows, None, None, carry=carry, plan=plan)
        return WhitenResult(y, result.count, result.mean, result.var, rstd)

    return run


def fits(call: WhitenCall) -> Reason | None:
    """The state is fp32: a float64 x is for another implementation."""
    return refused_float64({"x": call.x})
