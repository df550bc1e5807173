"""rope@1 on Triton: one launch forward; backward one for q and k, and one or more for each weight.

Legend: T tokens · H heads of a token · D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.fixed_sums import BLOCK, LANES, lanes_of
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.rope import RopeCall, RopeResult
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.row_layout import layout_of
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for
from rlkernel_triton.rms_norm.kernels import sum_of_blocks
from rlkernel_triton.rope import kernels

COLUMNS: Final = 64  # of a block of heads in a weight's gradient
# Products are rounded before they are added: the bits are those of IEEE 754, whatever the layout.
_ROUNDED: Final = {"enable_fp_fusion": False}
_NAMES: Final = ("q", "k")


def rope(call: RopeCall) -> RopeResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: RopeCall) -> Callable[[RopeCall], RopeResult]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.rope.RopeCall`."""
    if gradient_wanted("rope", call):
        return RopePair(call)
    host = _Host(call, keep=False)
    return lambda call: host.forward(call)[0]


class RopePair(Pair[RopeCall, RopeResult]):
    """The rotated heads, and their gradients."""

    op = "rope"

    def __init__(self, call: RopeCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host = _Host(call, keep=True)

    def forward(self, call: RopeCall) -> tuple[RopeResult, Saved]:
        """The result; what is saved are positions and table, and of the heads that were normalized what that takes."""
        result, (q_roots, k_roots) = self._host.forward(call)
        q, k = (None if r is None else x for x, r in ((call.q, q_roots), (call.k, k_roots)))
        return result, (call.positions, call.table, q, call.q_weight, q_roots, k, call.k_weight, k_roots)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """A launch for q and k, and some for the weights."""
        positions, table, q, q_weight, q_roots, k, k_weight, k_roots = saved
        if positions is None or table is None:
            raise RLKernelError("rope: its backward pass got less than its forward pass saved")
        heads = (_Heads(q, q_weight, q_roots), _Heads(k, k_weight, k_roots))
        return self._host.backward(positions.contiguous(), table.contiguous(), heads, grads, self.wanted)

    @classmethod
    def saved_like(cls, call: RopeCall, result: RopeResult, wanted: tuple[bool, ...]) -> Saved:
        """Positions and table; of the heads that were normalized themselves, their weight, and one number a head."""
        del result, wanted

        def normed(x: Tensor, weight: Tensor | None) -> Saved:
            r = x.new_empty(x.shape[:-1], dtype=torch.float32)
            return (None, None, None) if weight is None else (x, weight, r)

        return call.positions, call.table, *normed(call.q, call.q_weight), *normed(call.k, call.k_weight)


class _Heads:
    """What the backward pass reads of q or of k; all None where the heads were not normalized."""

    def __init__(self, x: Tensor | None, weight: Tensor | None, roots: Tensor | None) -> None:
        self.x, self.weight, self.roots = x, None if weight is None else weight.contiguous(), roots


class _Layout:
    """Where the heads of tensors like x stand; they are copied where their tokens need more than two strides."""

    def __init__(self, x: Tensor) -> None:
        like = torch.empty_strided(x.shape, x.stride(), device="meta")
        layout, self.copied = layout_of(like[..., 0, :])
        if self.copied:
            like = torch.empty(x.shape, device="meta")
            layout, _ = layout_of(like[..., 0, :])
        self.heads, self.shape = x.shape[-2], x.shape
        self.numbers = {**layout._asdict(), "head_stride": like.stride(-2)}

    def lying(self, x: Tensor) -> Tensor:
        """The tensor as the numbers have it."""
        return x.clone(memory_format=torch.contiguous_format) if self.copied else x


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: RopeCall, *, keep: bool) -> None:
        self._D, self._keep, self._dtype = call.q.shape[-1], keep, call.q.dtype
        self._T = call.positions.numel()
        self._layouts = (_Layout(call.q), _Layout(call.k))
        W = lanes_of(self._D)
        L = max(1, LANES // W)
        self._q_blocks, k_blocks = (triton.cdiv(self._T * x.heads, L) for x in self._layouts)
        self._grid = (self._q_blocks + k_blocks, 1, 1)
        self._plan = Plan(launcher_for(call.q.device))
        self._sizes: dict[str, Any] = {
            "D": self._D, "P": call.table.shape[0], "R": call.table.shape[1], "INTERLEAVED": call.interleaved,
        }  # fmt: skip
        self._both: dict[str, Any] = {
            **self._sizes, "L": L, "W": W, "T": self._T, "q_blocks": self._q_blocks,
            "NORM_Q": call.q_weight is not None, "NORM_K": call.k_weight is not None, "offset": float(call.offset),
            **{f"H{name.upper()}": x.heads for name, x in zip(_NAMES, self._layouts, strict=True)},
            **{f"{name}_{n}": i for name, x in zip(_NAMES, self._layouts, strict=True) for n, i in x.numbers.items()},
        }  # fmt: skip
        self._eps = 0.0 if call.eps is None else float(call.eps)

    def forward(self, call: RopeCall) -> tuple[RopeResult, tuple[Tensor | None, Tensor | None]]:
        """The result, and what normalized heads of q and of k were multiplied with, where it is kept."""

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(kernels.rope_forward, options=_ROUNDED, **self._both, eps=self._eps, KEEP=self._keep)

        given, weights = (call.q, call.k), (call.q_weight, call.k_weight)
        q, k = (layout.lying(x) for layout, x in zip(self._layouts, given, strict=True))
        out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]
        roots = [
            None if w is None or not self._keep else torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
            for x, w in zip(given, weights, strict=True)
        ]
        if self._T:
            self._plan.get("forward", bound)(
                self._grid, q, k, call.positions.contiguous(), call.table.contiguous(),
                *(x if w is None else w.contiguous() for x, w in zip((q, k), weights, strict=True)),
                *out, *(y if r is None else r for y, r in zip(out, roots, strict=True)),
            )  # fmt: skip
        return RopeResult(*out), (roots[0], roots[1])

    def backward(
        self, positions: Tensor, table: Tensor, heads: tuple[_Heads, _Heads], grads: Saved, wanted: tuple[bool, ...]
    ) -> Saved:
        """The gradients of q, k and the weights, those that are wanted."""

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(kernels.rope_backward, options=_ROUNDED, any_alignment=("g_q", "g_k"), **self._both)

        upstream = [
            torch.zeros(x.shape, dtype=self._dtype, device=table.device) if g is None else g.contiguous()
            for g, x in zip(grads, self._layouts, strict=True)
        ]
        lying = [None if h.x is None else x.lying(h.x) for h, x in zip(heads, self._layouts, strict=True)]
        found: list[Tensor | None] = [None, None]
        if wanted[0] or wanted[1]:
            d = [torch.empty_like(g) for g in upstream]
            if self._T:
                parts = (lying, [h.weight for h in heads], [h.roots for h in heads])
                (q, k), (q_weight, k_weight), (q_roots, k_roots) = (
                    (y if x is None else x for x, y in zip(each, d, strict=True)) for each in parts
                )
                self._plan.get("backward", bound)(
                    self._grid, q, k, positions, table, q_weight, k_weight, q_roots, k_roots, *upstream, *d
                )
            found = [x if want else None for x, want in zip(d, wanted[:2], strict=True)]
        for i, (g, x, h) in enumerate(zip(upstream, lying, heads, strict=True)):
            due = wanted[2 + i] and x is not None
            found.append(self._of_weight(i, x, positions, table, h, g) if due and x is not None else None)
        return tuple(found)

    def _of_weight(self, i: int, x: Tensor, positions: Tensor, table: Tensor, heads: _Heads, g: Tensor) -> Tensor:
        """The gradient of the weight of q (i = 0) or of k, of its dtype: blocks of heads, until one is left."""
        layout = self._layouts[i]

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(
                kernels.weight_gradient, options=_ROUNDED, any_alignment=("g",), **layout.numbers, **self._sizes,
                T=self._T, H=layout.heads, ROWS=BLOCK, C=COLUMNS,
            )  # fmt: skip

        if heads.weight is None or heads.roots is None:
            raise RLKernelError("rope: its backward pass got less than its forward pass saved")
        if not self._T:
            return torch.zeros_like(heads.weight)

        def next_(launcher: Launcher) -> Launch:
            return launcher.bind(sum_of_blocks, options=_ROUNDED, D=self._D, ROWS=BLOCK, C=COLUMNS)

        columns = triton.cdiv(self._D, COLUMNS)
        sums = self._blocks(self._T * layout.heads, x)
        first = self._plan.get(f"weight of {_NAMES[i]}", bound)
        first((len(sums), columns, 1), x, positions, table, heads.roots, g, sums)
        while len(sums) > 1:
            parts, sums = sums, self._blocks(len(sums), x)
            self._plan.get("weight of blocks", next_)((len(sums), columns, 1), parts, sums, len(parts))
        return sums[0].to(heads.weight.dtype)

    def _blocks(self, heads: int, like: Tensor) -> Tensor:
        return torch.empty(triton.cdiv(heads, BLOCK), self._D, dtype=torch.float32, device=like.device)
