"""glu@1 on Triton: one launch forward, one back.

Legend: N rows · D width of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.fixed_sums import lanes_of
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.glu import GluCall
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.row_layout import layout_of
from rlkernel_triton.glu import kernels
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for

# Products are rounded before they are added: the bits are those of IEEE 754, whatever the layout.
_ROUNDED: Final = {"enable_fp_fusion": False}


def glu(call: GluCall) -> Tensor:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: GluCall) -> Callable[[GluCall], Tensor]:
    """What runs calls of this shape. The operator's contract is `rlkernel_core.spec.glu.GluCall`."""
    if gradient_wanted("glu", call):
        return GluPair(call)
    return _Host(call).forward


class GluPair(Pair[GluCall, Tensor]):
    """The gated rows, and their gradient; what was activated is computed again."""

    op = "glu"

    def __init__(self, call: GluCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host = _Host(call)

    def forward(self, call: GluCall) -> tuple[Tensor, Saved]:
        """The result, and x."""
        return self._host.forward(call), (call.x,)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """One launch."""
        (x,), (g,) = saved, grads
        if x is None or g is None:
            raise RLKernelError("glu: its backward pass got less than its forward pass saved")
        return (self._host.backward(x, g.contiguous()),)

    @classmethod
    def saved_like(cls, call: GluCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """The argument alone."""
        del result, wanted
        return (call.x,)


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: GluCall) -> None:
        *rows, width = call.x.shape
        self._rows, self._D, self._N = tuple(rows), width // 2, call.x.numel() // width
        layout, self._copied = layout_of(call.x)
        W = lanes_of(self._D)
        self._fixed: dict[str, Any] = {**layout._asdict(), "D": self._D, "ACTIVATION": call.activation, "W": W}
        self._grid = (self._N, triton.cdiv(self._D, W), 1)
        self._plan = Plan(launcher_for(call.x.device))

    def forward(self, call: GluCall) -> Tensor:
        """The result."""

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(kernels.glu_forward, options=_ROUNDED, **self._fixed)

        y = torch.empty((*self._rows, self._D), dtype=call.x.dtype, device=call.x.device)
        if self._N:
            self._plan.get("forward", bound)(self._grid, self._lying(call.x), y)
        return y

    def backward(self, x: Tensor, g: Tensor) -> Tensor:
        """The gradient of x."""

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(kernels.glu_backward, options=_ROUNDED, any_alignment=("g",), **self._fixed)

        d_x = torch.empty((*self._rows, 2 * self._D), dtype=x.dtype, device=x.device)
        if self._N:
            self._plan.get("backward", bound)(self._grid, self._lying(x), g, d_x)
        return d_x

    def _lying(self, x: Tensor) -> Tensor:
        """Rows as the kernels' layout has them."""
        return x.clone(memory_format=torch.contiguous_format) if self._copied else x
