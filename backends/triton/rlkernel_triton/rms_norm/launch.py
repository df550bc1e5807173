"""rms_norm@1 on Triton: one launch forward; backward one for the rows, and two or three for the weight.

Legend: N rows · D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.fixed_sums import BLOCK, LANES, lanes_of
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.rms_norm import RmsNormCall, RmsNormResult
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.row_layout import RowLayout, layout_of, rows_of
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for
from rlkernel_triton.rms_norm import kernels

MOST_HELD: Final = 8  # tiles of a row that a program keeps in registers: 64 a thread, or 128 in the gradient
COLUMNS: Final = 64  # of a block of rows in the weight's gradient
# Products are rounded before they are added: the bits are those of IEEE 754, whatever the layout.
_ROUNDED: Final = {"enable_fp_fusion": False}


def rms_norm(call: RmsNormCall) -> RmsNormResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: RmsNormCall) -> Callable[[RmsNormCall], RmsNormResult]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.rms_norm.RmsNormCall`."""
    if gradient_wanted("rms_norm", call):
        return RmsNormPair(call)
    host = _Host(call, keep=False)
    return lambda call: host.forward(call)[0]


class RmsNormPair(Pair[RmsNormCall, RmsNormResult]):
    """The normalized rows, and their gradient."""

    op = "rms_norm"

    def __init__(self, call: RmsNormCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host = _Host(call, keep=True)

    def forward(self, call: RmsNormCall) -> tuple[RmsNormResult, Saved]:
        """The result; what is saved are the rows that were normalized, and what they were multiplied with."""
        result, roots = self._host.forward(call)
        return result, (call.x if result.residual is None else result.residual, call.weight, roots)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """A launch for x and residual, whose gradients are equal, and some for the weight."""
        s, weight, roots = saved
        if s is None or weight is None or roots is None:
            raise RLKernelError("rms_norm: its backward pass got less than its forward pass saved")
        g, g_total = (None if x is None else x.contiguous() for x in grads)
        g = torch.zeros_like(s, memory_format=torch.contiguous_format) if g is None else g
        d_s = d_weight = None
        if self.wanted[0] or self.wanted[2]:
            d_s = self._host.of_rows(s, weight, roots, g, g_total)
        if self.wanted[1]:
            d_weight = self._host.of_weight(s, roots, g).to(weight.dtype)
        return (d_s if self.wanted[0] else None, d_weight, d_s if self.wanted[2] else None)

    @classmethod
    def saved_like(cls, call: RmsNormCall, result: RmsNormResult, wanted: tuple[bool, ...]) -> Saved:
        """The rows, the weight, and one number a row."""
        del wanted
        s = call.x if result.residual is None else result.residual
        return s, call.weight, s.new_empty(s.shape[:-1], dtype=torch.float32)


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: RmsNormCall, *, keep: bool) -> None:
        self._shape, self._D = call.x.shape, call.x.shape[-1]
        self._N, self._keep, self._offset = call.x.numel() // self._D, keep, float(call.offset)
        W = lanes_of(self._D)
        tiles = triton.cdiv(self._D, W)
        held = tiles if tiles <= MOST_HELD else 0
        self._tile: dict[str, Any] = {"D": self._D, "HELD": held, "L": max(1, LANES // W), "W": W}
        self._grid = (triton.cdiv(self._N, self._tile["L"]), 1, 1)
        self._plan = Plan(launcher_for(call.x.device))
        layout, self._copied = layout_of(call.x)
        # What is normalized is a tensor of ours where there is a residual.
        dense = rows_of(torch.empty(self._shape, device="meta")).layout
        residual, eps = call.residual is not None, float(call.eps)
        self._layout_of_s: RowLayout = dense if residual else layout
        self._copied_s = self._copied and not residual

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(
                kernels.rms_norm_forward, options=_ROUNDED, **layout._asdict(), **self._tile, eps=eps,
                offset=self._offset, N=self._N, HAS_RESIDUAL=residual, KEEP=keep,
            )  # fmt: skip

        self._forward = bound

    def forward(self, call: RmsNormCall) -> tuple[RmsNormResult, Tensor]:
        """The result, and what each row was multiplied with; that is written where it is kept."""
        x = call.x.clone(memory_format=torch.contiguous_format) if self._copied else call.x
        residual = None if call.residual is None else call.residual.contiguous()
        y = torch.empty(self._shape, dtype=x.dtype, device=x.device)
        total = None if residual is None else torch.empty_like(y)
        roots = torch.empty(self._shape[:-1], dtype=torch.float32, device=x.device) if self._keep else y
        if self._N:
            self._plan.get("forward", self._forward)(
                self._grid, x, x if residual is None else residual, call.weight.contiguous(), y,
                y if total is None else total, roots,
            )  # fmt: skip
        return RmsNormResult(y, total), roots

    def of_rows(self, s: Tensor, weight: Tensor, roots: Tensor, g: Tensor, g_total: Tensor | None) -> Tensor:
        """The gradient of what was normalized."""

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(
                kernels.rms_norm_backward, options=_ROUNDED, any_alignment=("g", "g_total"),
                **self._layout_of_s._asdict(), **self._tile, offset=self._offset, N=self._N,
                HAS_TOTAL=g_total is not None,
            )  # fmt: skip

        d_s = torch.empty(self._shape, dtype=s.dtype, device=s.device)
        if self._N:
            self._plan.get(f"rows, {g_total is not None}", bound)(
                self._grid, self._lying(s), weight.contiguous(), roots, g, g if g_total is None else g_total, d_s
            )
        return d_s

    def of_weight(self, s: Tensor, roots: Tensor, g: Tensor) -> Tensor:  # -> [D] fp32
        """The gradient of the weight: blocks of rows, blocks of blocks, until one is left."""
        if not self._N:
            return torch.zeros(self._D, dtype=torch.float32, device=s.device)
        fixed: dict[str, Any] = {"D": self._D, "ROWS": BLOCK, "C": COLUMNS}

        def first(launcher: Launcher) -> Launch:
            return launcher.bind(
                kernels.weight_gradient, options=_ROUNDED, any_alignment=("g",), **self._layout_of_s._asdict(),
                **fixed, N=self._N,
            )  # fmt: skip

        def next_(launcher: Launcher) -> Launch:
            return launcher.bind(kernels.sum_of_blocks, options=_ROUNDED, **fixed)

        sums = self._blocks(self._N, s)
        self._plan.get("weight", first)((len(sums), triton.cdiv(self._D, COLUMNS), 1), self._lying(s), roots, g, sums)
        while len(sums) > 1:
            parts, sums = sums, self._blocks(len(sums), s)
            grid = (len(sums), triton.cdiv(self._D, COLUMNS), 1)
            self._plan.get("weight of blocks", next_)(grid, parts, sums, len(parts))
        return sums[0]

    def _blocks(self, rows: int, like: Tensor) -> Tensor:
        return torch.empty(triton.cdiv(rows, BLOCK), self._D, dtype=torch.float32, device=like.device)

    def _lying(self, s: Tensor) -> Tensor:
        """What was normalized, as `_layout_of_s` has it."""
        return s.clone(memory_format=torch.contiguous_format) if self._copied_s else s
