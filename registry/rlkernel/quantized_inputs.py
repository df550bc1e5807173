"""Quantizing an input of a matmul, by the backend that quantizes weights.

A token is coded as a row of a weight is, and 128 columns of one as a row of 128. So the call runs as `quantize`:
policy, `explain("quantize", ...)` and `last_decision("quantize")` are those of that operator. What no format of weights
expresses is computed in plain torch: NVFP4's second scale for each token, and scales in float64.

Imports torch when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import rlkernel as rlk

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel_core.quant.activations import QuantActivation
    from rlkernel_core.quant.spec import QuantSpec

__all__ = ["quantize_activation"]

_DTYPES: Final = frozenset({"torch.bfloat16", "torch.float16", "torch.float32"})
_BLOCK: Final = 128  # columns that share a scale in "block128_fp8"


def quantize_activation(x: Tensor, kind: str | QuantSpec) -> QuantActivation:
    """Quantize an input of a matmul as qmatmul does, with the scales of every token its own.

    Runs as `quantize`, on the backend that this chooses, but for "nvfp4" and float64 x, which plain torch computes.

    Args:
        x: [..., K] bf16, fp16, fp32 or float64; any strides; never written to.
        kind: "token_int8", "token_fp8", "block128_fp8", "mxfp8" or "nvfp4"; or the spec of a weight that asks for one
            by `act`, whose element, scale rule and rounding are taken then (but e4m3fn for mxfp8 beside an mxfp4
            weight).

    Returns:
        Codes and scales; `.value()` is what they stand for, [..., K].

    Raises:
        ArgumentError: `kind` is the spec of a format that leaves x alone; x has no columns, or requires a gradient
            outside `torch.no_grad()`: codes have none.
        ArgumentTypeError: x is no tensor of floats.
        UnknownNameError: no such kind; the message suggests the nearest.
        ResolutionError: the policy admits no backend that quantizes to such a format.
    """
    import torch

    from rlkernel_core.quant import activations

    spec = activations.checked(x, kind)
    if spec.act == "nvfp4" or str(x.dtype) not in _DTYPES or not x.numel():
        return activations.quantize_activation(x, spec)
    K = x.shape[-1]
    rows = x.reshape(-1, K)
    if spec.act == "block128_fp8":
        rows = torch.nn.functional.pad(rows, (0, -K % _BLOCK)) if K % _BLOCK else rows
        rows = rows.reshape(-1, _BLOCK)
    parts = rlk.quantize(rows, activations.row_format(spec)).parts
    codes, scale = (parts[name].view(x.numel() // K, -1) for name in ("codes", "scale"))
    codes = codes[:, :K].contiguous()
    return activations.QuantActivation(codes.view(x.shape), scale.view(*x.shape[:-1], scale.shape[1]), columns=K)
