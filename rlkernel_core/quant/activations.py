"""Quantizing what comes into a matmul: per token to 8-bit integers or floats, or in blocks of 128 columns.

    s = max |x| / 127  (token_int8),  max |x| / max  (token_fp8, block128_fp8; max is 448 for e4m3fn)
    q = rint(x / s) clamped to -127..127, or the saturating cast of x / s

The scale is dynamic: of the token (or the 128 columns of a token) alone, so a row's result does not depend on the
batch. A token of zeros gives zeros; one with an inf or NaN has scale NaN, and its whole row (or block) gives NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel_core.quant.float8 import FLOAT8, saturating_cast
from rlkernel_core.quant.spec import QuantSpec


@dataclass(frozen=True)
class QuantActivation:
    """A quantized input of a matmul."""

    codes: Tensor  # [M, K] int8, or float8
    scale: Tensor  # [M, 1], or [M, ceil(K / 128)] for blocks; fp32 (float64 for float64 x)

    def value(self) -> Tensor:  # -> [M, K]
        """What the codes stand for, in the scale's dtype."""
        columns = self.codes.shape[1]
        size = columns if self.scale.shape[1] == 1 else 128
        codes = self.codes.float().to(self.scale.dtype)  # float8 casts to fp32 everywhere
        return codes * self.scale.repeat_interleave(size, 1)[:, :columns]


def quantize_activation(x: Tensor, spec: QuantSpec) -> QuantActivation:  # x [M, K] fp32 or float64
    """Quantize x, [M, K] fp32 or float64, as `spec.act` says."""
    size = 128 if spec.act == "block128_fp8" else x.shape[1]
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
    blocks = blocks.view(x.shape[0], blocks.shape[1] // size, size)
    largest = 127.0 if spec.act == "token_int8" else FLOAT8[spec.element].max
    most = blocks.abs().amax(-1, keepdim=True)
    scale = most / torch.full_like(most, largest)  # a scalar divisor is a product with 1 / largest on CUDA
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    ratio = (blocks / torch.where(scale > 0, scale, torch.inf)).nan_to_num_(nan=0.0).flatten(1)[:, : x.shape[1]]
    if spec.act == "token_int8":
        codes = ratio.round().clamp(-127, 127).to(torch.int8)
    else:
        codes = saturating_cast(ratio.float(), spec.element)
    return QuantActivation(codes, scale.squeeze(-1))
