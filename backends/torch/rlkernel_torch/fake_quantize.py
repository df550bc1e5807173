"""fake_quantize@1 in plain torch: the codecs of `rlkernel_core.quant` there and back.

Extra memory is the quantized weight; clipped gradients decode the ends of every group besides, two fp32 weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.quant import convert
from rlkernel_core.quant.ends import ends
from rlkernel_core.quant.spec import QuantSpec, spec_of
from rlkernel_core.spec.fake_quantize import FakeQuantizeCall


def fake_quantize(call: FakeQuantizeCall) -> Tensor:  # -> [Nout, K]
    """See `rlkernel_core.spec.fake_quantize.FakeQuantizeCall`."""
    if gradient_wanted("fake_quantize", call):
        return FakeQuantizePair(call)(call)
    with torch.no_grad():
        return _forward(call)


class FakeQuantizePair(Pair[FakeQuantizeCall, Tensor]):
    """The weight there and back, and its gradient; scales are found again for clipped ones."""

    op = "fake_quantize"

    def __init__(self, call: FakeQuantizeCall) -> None:
        """Keep what the gradient depends on."""
        super().__init__(call)
        self._spec, self._clipped, self._dtype = spec_of(call.format), call.clipped, call.weight.dtype

    def forward(self, call: FakeQuantizeCall) -> tuple[Tensor, Saved]:
        """The result; the weight where gradients are clipped."""
        return _forward(call), (call.weight if call.clipped else None,)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """The upstream gradient, or zero beyond the ends of a group."""
        (weight,), (g,) = saved, grads
        if g is None or (weight is None and self._clipped):
            raise RLKernelError("fake_quantize: its backward pass got less than its forward pass saved")
        if weight is None:
            return (straight_through(g, self._dtype),)
        return (torch.where(beyond(weight, self._spec), 0, g.to(self._dtype)),)

    @classmethod
    def saved_like(cls, call: FakeQuantizeCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """The weight where gradients are clipped."""
        del result, wanted
        return (call.weight if call.clipped else None,)


def _forward(call: FakeQuantizeCall) -> Tensor:
    return convert.dequantize(convert.quantize(call.weight, call.format, dtype=call.dtype))


def straight_through(g: Tensor, dtype: torch.dtype) -> Tensor:  # [Nout, K] -> [Nout, K]
    """A copy of an upstream gradient in the dtype of the weight."""
    return g.to(dtype, copy=True, memory_format=torch.contiguous_format)


def beyond(weight: Tensor, spec: QuantSpec) -> Tensor:  # [Nout, K] -> [Nout, K] bool
    """Where a weight is less than the least value of its group's codes, or more than the largest."""
    one, other = (convert.dequantize(w, dtype=torch.float32) for w in ends(convert.quantize(weight, spec)))
    x = weight.detach().float()
    return (x < torch.minimum(one, other)) | (x > torch.maximum(one, other))
