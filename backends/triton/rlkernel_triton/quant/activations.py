"""Inputs of a product in 8 bits, coded by the kernel that quantises a weight by rows: a token is a row.

The bits of `rlkernel_core.quant.activations`. Blocks of 128 columns are left to it.

Legend: M tokens · K inputs.
"""

from __future__ import annotations

from torch import Tensor

from rlkernel_core.quant.activations import QuantActivation
from rlkernel_core.quant.activations import quantize_activation as defined
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_triton.quant import codec


def quantize_activation(x: Tensor, spec: QuantSpec) -> QuantActivation:  # x [M, K]
    """Quantise x as `spec.act` says."""
    if spec.act == "block128_fp8" or 0 in x.shape:
        return defined(x.float(), spec)
    if spec.act == "token_int8":
        rows = QuantSpec.named("int8_channel")
    else:
        rows = QuantSpec.named("fp8_channel", element=spec.element)
    made: QuantTensor = codec.encoded(x, rows)
    return QuantActivation(made.parts["codes"], made.parts["scale"])
