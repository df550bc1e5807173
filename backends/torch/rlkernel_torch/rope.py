"""rope@1 in plain torch: elementwise operations in one order, so a head's bits are its own on every device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_common.fixed_sums import inverse_rms, lane_mean, row_sum
from rlkernel_common.row_statistics import accumulator
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.rope import RopeCall, RopeResult


def rope(call: RopeCall) -> RopeResult:
    """See `rlkernel_core.spec.rope.RopeCall`."""
    if gradient_wanted("rope", call):
        return RopePair(call)(call)
    with torch.no_grad():
        return _forward(call)[0]


class RopePair(Pair[RopeCall, RopeResult]):
    """The rotated heads, and their gradients."""

    op = "rope"

    def __init__(self, call: RopeCall) -> None:
        """Keep the numbers of calls of this shape."""
        super().__init__(call)
        self._offset, self._interleaved = float(call.offset), call.interleaved
        self._shapes, self._dtype = (call.q.shape, call.k.shape), call.q.dtype

    def forward(self, call: RopeCall) -> tuple[RopeResult, Saved]:
        """The result; what is saved are positions and table, and of the heads that were normalized what that takes."""
        result, q_r, k_r = _forward(call)
        q, k = (None if r is None else x for x, r in ((call.q, q_r), (call.k, k_r)))
        return result, (call.positions, call.table, q, call.q_weight, q_r, k, call.k_weight, k_r)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """The gradients rotated back, and through the norms."""
        positions, table, *normed = saved
        if positions is None or table is None:
            raise RLKernelError("rope: its backward pass got less than its forward pass saved")
        state = accumulator(table, *(g for g in grads if g is not None))
        angles = _angles(positions, table, state)
        found = []
        for g, shape, (s, weight, r) in zip(grads, self._shapes, (normed[:3], normed[3:]), strict=True):
            wide = torch.zeros(shape, dtype=state, device=table.device) if g is None else g.to(state)
            found.append(self._of_heads(_turned(wide, angles.back(), self._interleaved), angles.known, s, weight, r))
        (d_q, d_q_weight), (d_k, d_k_weight) = found
        given = (d_q, d_k, d_q_weight, d_k_weight)
        return tuple(d if wanted else None for d, wanted in zip(given, self.wanted, strict=True))

    def _of_heads(
        self, g: Tensor, known: Tensor, s: Tensor | None, weight: Tensor | None, r: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """With h = g w' and s before the norm: (h - s mean(h s) r^2) r, and the sum of g s r over all heads."""
        if s is None or weight is None or r is None:
            return torch.where(known, g, 0.0).to(self._dtype), None
        values = s.to(g.dtype)
        h = g * (weight.to(g.dtype) + self._offset)
        t = lane_mean(h * values)
        d = (h - values * (t * r * r)[..., None]) * r[..., None]
        terms = torch.where(known, g * (values * r[..., None]), 0.0).reshape(-1, s.shape[-1])
        return torch.where(known, d, 0.0).to(self._dtype), row_sum(terms).to(weight.dtype)

    @classmethod
    def saved_like(cls, call: RopeCall, result: RopeResult, wanted: tuple[bool, ...]) -> Saved:
        """Positions and table; of the heads that were normalized themselves, their weight, and one number a head."""
        del result, wanted

        def normed(x: Tensor, weight: Tensor | None) -> Saved:
            r = x.new_empty(x.shape[:-1], dtype=accumulator(x))
            return (None, None, None) if weight is None else (x, weight, r)

        return call.positions, call.table, *normed(call.q, call.q_weight), *normed(call.k, call.k_weight)


class _Angles(NamedTuple):
    """Of each token; [..., 1, R / 2], and `known` [..., 1, 1]: whether the table has its position."""

    cos: Tensor
    sin: Tensor
    known: Tensor

    def back(self) -> _Angles:
        """The rotation back."""
        return self._replace(sin=-self.sin)


def _angles(positions: Tensor, table: Tensor, state: torch.dtype) -> _Angles:
    at = positions.to(torch.int64)
    known = (at >= 0) & (at < table.shape[0])
    rows = table.index_select(0, at.clamp(0, table.shape[0] - 1).reshape(-1))
    cos, sin = rows.to(state).reshape(*at.shape, 1, table.shape[1]).chunk(2, -1)
    return _Angles(cos, sin, known[..., None, None])


def _turned(x: Tensor, angles: _Angles, interleaved: bool) -> Tensor:
    """[..., H, D] with each pair of the first R columns rotated."""
    cos, sin, _ = angles
    R = 2 * cos.shape[-1]
    turning = x[..., :R]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned, x[..., R:]], -1)


def _forward(call: RopeCall) -> tuple[RopeResult, Tensor | None, Tensor | None]:
    """The result, and what the heads of q and of k were multiplied with where they are normalized, [..., H]."""
    state, eps = accumulator(call.q), call.eps
    angles = _angles(call.positions, call.table, state)

    def rotated(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        s, r = x.to(state), None
        if weight is not None and eps is not None:
            r = inverse_rms(s, eps)
            s = s * r[..., None] * (weight.to(state) + call.offset)
        y = _turned(s, angles, call.interleaved)
        return torch.where(angles.known, y, torch.nan).to(x.dtype), r

    (q, q_r), (k, k_r) = rotated(call.q, call.q_weight), rotated(call.k, call.k_weight)
    return RopeResult(q, k), q_r, k_r
