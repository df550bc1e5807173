"""NVFP4: e2m1 codes, an e4m3fn scale per 16 columns, one fp32 scale for all.

The storage and the rules of NVIDIA's ModelOpt. Quantize, in fp32, with a = max |w| of a block and A that of all blocks
that are finite:
    g = A / 2688                        2688 = 6 * 448, the largest code times the largest scale
    s = saturating cast of a / fl32(6 g)   to e4m3fn; 0 where g is 0
    q = the e2m1 nearest to w / fl32(s g), saturated; ties take the even code, or ("away") the larger one
Dequantize: w' = fl32(q * fl32(s * g)).

A block of zeros, or one so far below A that s underflows, gives zeros. A block with an inf or NaN has s = NaN and
dequantizes to NaN; it has no part in A. The last block of a row is short where K is no multiple of 16.

Storage: `codes` uint8 [Nout, ceil(K/2)], the low nibble is the even column; `scale` float8_e4m3fn [Nout, ceil(K/16)];
`global_scale` fp32 [1].
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlkernel_core.quant import codec, mx
from rlkernel_core.quant.e2m1 import E2M1
from rlkernel_core.quant.float8 import FLOAT8, error_of, saturating_cast
from rlkernel_core.quant.grid import extremes
from rlkernel_core.quant.spec import QuantSpec

_SCALES: Final = FLOAT8["e4m3fn"]


class NVFP4:
    """The codec; `Codec` says what each method promises."""

    def storage(self, spec: QuantSpec, shape: tuple[int, int]) -> codec.Storage:
        """Codes, scales of blocks, the scale of all."""
        rows, columns = shape
        return {
            "codes": ((rows, (columns + 1) // 2), torch.uint8),
            "scale": ((rows, -(-columns // spec.group)), _SCALES.dtype),
            "global_scale": ((1,), torch.float32),
        }

    def constants(self, spec: QuantSpec) -> dict[str, Tensor]:
        """None."""
        del spec
        return {}

    def encode_(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> None:
        """The scale of all, then those of blocks, then codes in blocks of rows."""
        low, high = extremes(weight, 1, spec.group)
        most = torch.maximum(high, -low).abs()
        whole, scale = scales_of(most, torch.where(most.isfinite(), most, 0).amax().view(1))
        parts["global_scale"].copy_(whole)
        parts["scale"].copy_(scale)
        scale = _scales(parts, 0, weight.shape[0])
        divisor = torch.where(scale > 0, scale, torch.inf)
        for start, stop in codec.row_blocks((weight.shape[0], weight.shape[1])):
            block = weight[start:stop].float()
            ratio = (block / mx.spread(divisor[start:stop], spec.group, block.shape[1])).nan_to_num_(nan=0.0)
            parts["codes"][start:stop] = mx.coded(ratio, spec)

    def decode(
        self, parts: dict[str, Tensor], spec: QuantSpec, shape: tuple[int, int], start: int, stop: int
    ) -> Tensor:
        """Codes times the product of two scales in fp32."""
        scale = mx.spread(_scales(parts, start, stop), spec.group, shape[1])
        return mx.valued(parts["codes"][start:stop], spec, shape[1]) * scale

    def error_bound(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> Tensor:
        """Half a step of the element, and what lies beyond its largest value."""
        scale = mx.spread(_scales(parts, 0, weight.shape[0]), spec.group, weight.shape[1]).double()
        return error_of(weight.detach().double(), scale, E2M1)


CODEC: Final = NVFP4()


def scales_of(most: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:  # most [M, G], top [1] or [M, 1]
    """The scale g of all blocks (of each row), and those of blocks in e4m3, from largest magnitudes."""
    whole = top / torch.full_like(top, E2M1.max * _SCALES.max)
    wide = whole * E2M1.max
    ratio = most / torch.where(wide > 0, wide, torch.inf)
    return whole, saturating_cast(torch.where(most.isfinite(), ratio, torch.nan), "e4m3fn")


def _scales(parts: dict[str, Tensor], start: int, stop: int) -> Tensor:  # -> [stop - start, G] fp32
    return parts["scale"][start:stop].float() * parts["global_scale"]
