"""quantize, dequantize and prepack in plain torch: the codecs of `rlkernel_core.quant` behind the operators' checks."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import convert, layouts
from rlkernel_core.quant.spec import spec_of
from rlkernel_core.quant.tensor import QuantTensor, check_layout
from rlkernel_core.spec.quantize import DequantizeCall, PrepackCall, QuantizeCall


def quantize(call: QuantizeCall) -> QuantTensor:
    """See `rlkernel_core.spec.quantize.QuantizeCall`."""
    weight, out = call.weight, call.out
    spec = spec_of(call.format)
    if weight.requires_grad and torch.is_grad_enabled():
        remedy = "Pass weight.detach(), or call under torch.no_grad()."
        raise ArgumentError("weight", "a tensor that requires grad", "cannot be differentiated through codes", remedy)
    if out is not None:
        check_layout("out", out, layouts.KNOWN)
    return convert.quantize(weight, spec, dtype=call.dtype, out=out)


def dequantize(call: DequantizeCall) -> Tensor:  # -> [Nout, K]
    """See `rlkernel_core.spec.quantize.DequantizeCall`."""
    check_layout("w", call.w, layouts.KNOWN)
    return convert.dequantize(call.w, dtype=call.dtype)


def prepack(call: PrepackCall) -> QuantTensor:
    """See `rlkernel_core.spec.quantize.PrepackCall`; the preferred layout is `reference_tiled`."""
    check_layout("w", call.w, layouts.KNOWN)
    return layouts.pack(call.w, layouts.TILED if call.layout is None else call.layout)
