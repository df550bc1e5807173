"""Quantized formats: for each one the exact codec (quantize, pack, unpack, dequantize) in plain torch.

    from rlkernel_core.quant import QuantSpec, dequantize, quantize

    w = quantize(weight, QuantSpec.named("nf4", double_quant=True))
    dequantize(w)

These functions are the meaning of the operators `quantize` and `dequantize`; `rlkernel.quantize` is the same with a
choice of backends. Importing this package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core.quant.spec import FORMATS, QuantSpec
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor

if TYPE_CHECKING:
    from rlkernel_core.quant.activations import quantize_activation
    from rlkernel_core.quant.convert import dequantize, error_bound, quantize, update_
    from rlkernel_core.quant.layouts import pack, unpack
    from rlkernel_core.quant.stacking import stack

__all__ = [
    "CANONICAL",
    "FORMATS",
    "QuantSpec",
    "QuantTensor",
    "dequantize",
    "error_bound",
    "pack",
    "quantize",
    "quantize_activation",
    "stack",
    "unpack",
    "update_",
]

# name -> module; these load torch.
_LAZY: Final = {
    "dequantize": "convert",
    "error_bound": "convert",
    "pack": "layouts",
    "quantize": "convert",
    "quantize_activation": "activations",
    "stack": "stacking",
    "unpack": "layouts",
    "update_": "convert",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"rlkernel_core.quant.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'rlkernel_core.quant' has no attribute {name!r}")
