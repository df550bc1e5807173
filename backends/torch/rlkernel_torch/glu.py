"""glu@1 in plain torch: elementwise, with exponentials of IEEE operations, so an element's bits are its own."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from rlkernel_common.exact_functions import exp, normal_cdf, sigmoid
from rlkernel_common.row_statistics import accumulator
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.glu import GluCall

CUBE: Final = 0.044715
TANH_SCALE: Final = 2.0 * math.sqrt(2.0 / math.pi)  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
FLAT: Final = 110.0  # beyond +- that the derivative of every activation is 0 or 1; no cube overflows before
DENSITY: Final = 1.0 / math.sqrt(2.0 * math.pi)


def glu(call: GluCall) -> Tensor:
    """See `rlkernel_core.spec.glu.GluCall`."""
    if gradient_wanted("glu", call):
        return GluPair(call)(call)
    with torch.no_grad():
        return _forward(call)


class GluPair(Pair[GluCall, Tensor]):
    """The gated rows, and their gradient; what was activated is computed again."""

    op = "glu"

    def __init__(self, call: GluCall) -> None:
        """Keep the name of the activation."""
        super().__init__(call)
        self._activation = call.activation

    def forward(self, call: GluCall) -> tuple[Tensor, Saved]:
        """The result, and x."""
        return _forward(call), (call.x,)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """With the upstream gradient g: g up act'(gate) beside g act(gate)."""
        (x,), (g,) = saved, grads
        if x is None or g is None:
            raise RLKernelError("glu: its backward pass got less than its forward pass saved")
        gate, up = x.to(accumulator(x)).chunk(2, -1)
        wide = g.to(gate.dtype)
        d_gate = wide * up * derivative(gate, self._activation)
        return (torch.cat([d_gate, wide * (gate * cdf(gate, self._activation))], -1).to(x.dtype),)

    @classmethod
    def saved_like(cls, call: GluCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """The argument alone."""
        del result, wanted
        return (call.x,)


def _forward(call: GluCall) -> Tensor:
    gate, up = call.x.to(accumulator(call.x)).chunk(2, -1)
    return (gate * cdf(gate, call.activation) * up).to(call.x.dtype)


def cdf(g: Tensor, activation: str) -> Tensor:
    """What a gate is multiplied with."""
    if activation == "gelu":
        return normal_cdf(g)
    return sigmoid(g if activation == "silu" else TANH_SCALE * (g + CUBE * (g * g * g)))


def derivative(g: Tensor, activation: str) -> Tensor:
    """Of the activation."""
    g = g.clamp(-FLAT, FLAT)
    p = cdf(g, activation)
    if activation == "gelu":
        return p + g * (exp(-0.5 * (g * g)) * DENSITY)
    q = g * (p * (1.0 - p))
    return p + (q if activation == "silu" else q * (TANH_SCALE * (1.0 + 3.0 * CUBE * (g * g))))
