"""quantize, dequantize and prepack in plain torch: the codecs of `rlkernel_core.quant` behind the operators' checks."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import codec, layouts
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import QuantTensor, check_layout
from rlkernel_core.spec import quantize as contract


def quantize(
    weight: Tensor,  # [Nout, K]
    format: str | QuantSpec,  # noqa: A002  the noun of the field
    *,
    dtype: torch.dtype | None = None,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """See `rlkernel_core.spec.quantize.quantize`."""
    spec = contract.check_quantize(weight, format, dtype=dtype, out=out)
    if weight.requires_grad and torch.is_grad_enabled():
        remedy = "Pass weight.detach(), or call under torch.no_grad()."
        raise ArgumentError("weight", "a tensor that requires grad", "cannot be differentiated through codes", remedy)
    if out is not None:
        check_layout("out", out, layouts.KNOWN)
    return codec.quantize(weight, spec, dtype=dtype, out=out)


def dequantize(w: QuantTensor, *, dtype: torch.dtype | None = None) -> Tensor:  # -> [Nout, K]
    """See `rlkernel_core.spec.quantize.dequantize`."""
    contract.check_dequantize(w, dtype=dtype)
    check_layout("w", w, layouts.KNOWN)
    return codec.dequantize(w, dtype=dtype)


def prepack(w: QuantTensor, *, layout: str | None = None) -> QuantTensor:
    """See `rlkernel_core.spec.quantize.prepack`; the preferred layout is `reference_tiled`."""
    contract.check_prepack(w, layout=layout)
    check_layout("w", w, layouts.KNOWN)
    return layouts.pack(w, layouts.TILED if layout is None else layout)
