"""rms_norm@1 in plain torch: elementwise operations in one order, so a row's bits are its own on every device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_common.fixed_sums import inverse_rms, lane_mean, row_sum
from rlkernel_common.row_statistics import accumulator
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.rms_norm import RmsNormCall, RmsNormResult


def rms_norm(call: RmsNormCall) -> RmsNormResult:
    """See `rlkernel_core.spec.rms_norm.RmsNormCall`."""
    if gradient_wanted("rms_norm", call):
        return RmsNormPair(call)(call)
    with torch.no_grad():
        return _forward(call).result


class RmsNormPair(Pair[RmsNormCall, RmsNormResult]):
    """The normalized rows, and their gradient."""

    op = "rms_norm"

    def __init__(self, call: RmsNormCall) -> None:
        """Keep the numbers of calls of this shape."""
        super().__init__(call)
        self._offset = float(call.offset)

    def forward(self, call: RmsNormCall) -> tuple[RmsNormResult, Saved]:
        """The result; what is saved are the rows that were normalized, and what they were multiplied with."""
        found = _forward(call)
        s = call.x if found.result.residual is None else found.result.residual
        return found.result, (s, call.weight, found.r)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """With h = g w': ds = (h - s mean(h s) r^2) r, and dweight the sum of g s r over all rows."""
        s, weight, r = saved
        if s is None or weight is None or r is None:
            raise RLKernelError("rms_norm: its backward pass got less than its forward pass saved")
        g_y, g_s = grads
        values, state = s.to(r.dtype), r.dtype
        g = torch.zeros_like(values) if g_y is None else g_y.to(state)
        d_s = d_weight = None
        if self.wanted[0] or self.wanted[2]:
            h = g * (weight.to(state) + self._offset)
            t = lane_mean(h * values)
            d_s = (h - values * (t * r * r)[..., None]) * r[..., None]
            d_s = d_s if g_s is None else d_s + g_s.to(state)
            d_s = d_s.to(s.dtype)
        if self.wanted[1]:
            d_weight = row_sum((g * (values * r[..., None])).reshape(-1, s.shape[-1])).to(weight.dtype)
        return (d_s if self.wanted[0] else None, d_weight, d_s if self.wanted[2] else None)

    @classmethod
    def saved_like(cls, call: RmsNormCall, result: RmsNormResult, wanted: tuple[bool, ...]) -> Saved:
        """The rows, the weight, and one number a row."""
        del wanted
        s = call.x if result.residual is None else result.residual
        return s, call.weight, s.new_empty(s.shape[:-1], dtype=accumulator(s))


class _Normalized(NamedTuple):
    result: RmsNormResult
    r: Tensor  # [...] of each row, in the accumulator's type


def _forward(call: RmsNormCall) -> _Normalized:
    x, residual, state = call.x, call.residual, accumulator(call.x)
    s = x.to(state)
    if residual is not None:
        residual = (s + residual.to(state)).to(x.dtype)
        s = residual.to(state)
    r = inverse_rms(s, call.eps)
    y = s * r[..., None] * (call.weight.to(state) + call.offset)
    return _Normalized(RmsNormResult(y.to(x.dtype), residual), r)
