"""MX formats: small floats with a power of two per 32 columns (OCP Microscaling Formats 1.0).

Quantize, in fp32, per group with a = max |w| = m 2^p, 1 <= m < 2 (p is -127 below the smallest normal number), and the
element's largest value M = m' 2^p': scale byte E = clamp(p - p' + 127 + up, 0, 254), where `up` is
    "floor"  0: OCP section 6.3, torchao, ggml. Values above M 2^(E - 127) become that
    "rceil"  1 where m > m': the smallest scale under which nothing saturates; triton_kernels, cuBLAS
    "even"   1 where rounding m to the element's mantissa reaches 2: compressed-tensors, torchao
    q = the element nearest to w / 2^(E - 127), saturated; e2m1 ties take the even code, or ("away") the larger one
Dequantize: w' = fl32(q 2^(E - 127)). That is exact, or inf where it is beyond the range of fp32.

E = 255 is NaN: a group with an inf or NaN gets it. A group of zeros has E = 0 and gives zeros. The last group of a row
is short where K is no multiple of 32.

Storage: `codes` uint8 [Nout, ceil(K/2)], the low nibble is the even column (e2m1), or float8 [Nout, K]; `scale` uint8
[Nout, ceil(K/32)].
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlkernel_core.quant import codec, e2m1, nibbles
from rlkernel_core.quant.float8 import FLOAT8, SmallFloat, error_of, saturating_cast
from rlkernel_core.quant.grid import extremes
from rlkernel_core.quant.spec import QuantSpec

_MANTISSA: Final = 23
_BIAS: Final = 127
_NAN: Final = 255


class Microscaled:
    """The codec; `Codec` says what each method promises."""

    def storage(self, spec: QuantSpec, shape: tuple[int, int]) -> codec.Storage:
        """Codes and scale bytes."""
        rows, columns = shape
        scale = ((rows, -(-columns // spec.group)), torch.uint8)
        if spec.element == "e2m1":
            return {"codes": ((rows, (columns + 1) // 2), torch.uint8), "scale": scale}
        return {"codes": (shape, form_of(spec.element).dtype), "scale": scale}

    def constants(self, spec: QuantSpec) -> dict[str, Tensor]:
        """None."""
        del spec
        return {}

    def encode_(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> None:
        """Scales first, then codes in blocks of rows."""
        low, high = extremes(weight, 1, spec.group)
        parts["scale"].copy_(scale_of(torch.maximum(high, -low).abs(), spec))
        for start, stop in codec.row_blocks((weight.shape[0], weight.shape[1])):
            block = weight[start:stop].float()
            ratio = (block / spread(power(parts["scale"][start:stop]), spec.group, block.shape[1])).nan_to_num_(nan=0.0)
            parts["codes"][start:stop] = coded(ratio, spec)

    def decode(
        self, parts: dict[str, Tensor], spec: QuantSpec, shape: tuple[int, int], start: int, stop: int
    ) -> Tensor:
        """Values times powers of two in fp32."""
        scale = spread(power(parts["scale"][start:stop]), spec.group, shape[1])
        return valued(parts["codes"][start:stop], spec, shape[1]) * scale

    def error_bound(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> Tensor:
        """Half a step of the element, and what lies beyond its largest value."""
        scale = spread(power(parts["scale"]), spec.group, weight.shape[1]).double()
        return error_of(weight.detach().double(), scale, form_of(spec.element))


CODEC: Final = Microscaled()


def form_of(element: str) -> SmallFloat:
    """Range and precision of an element."""
    return e2m1.E2M1 if element == "e2m1" else FLOAT8[element]


def power(scale: Tensor) -> Tensor:
    """2^(E - 127) of scale bytes as fp32; NaN for 255."""
    wide = scale.int()
    bits = torch.where(wide == 0, 1 << (_MANTISSA - 1), wide << _MANTISSA)  # 2^-127 is subnormal
    return torch.where(wide == _NAN, bits | 1 << (_MANTISSA - 1), bits).view(torch.float32)


def spread(per_group: Tensor, group: int, columns: int) -> Tensor:  # [R, G] -> [R, columns]
    """The entry of every column's group."""
    return per_group.repeat_interleave(group, 1)[:, :columns]


def coded(ratio: Tensor, spec: QuantSpec) -> Tensor:
    """Stored codes of fp32 ratios [R, K]."""
    if spec.element == "e2m1":
        return nibbles.pack_low_first(e2m1.encode(ratio, spec.rounding))
    return saturating_cast(ratio, spec.element)


def valued(codes: Tensor, spec: QuantSpec, columns: int) -> Tensor:
    """fp32 values [R, K] of stored codes."""
    return e2m1.decode(nibbles.unpack_low_first(codes, columns)) if spec.element == "e2m1" else codes.float()


def scale_of(most: Tensor, spec: QuantSpec) -> Tensor:
    """Scale bytes of the groups' largest magnitudes, by the bits of fp32."""
    form = form_of(spec.element)
    bits = most.view(torch.int32)
    fraction = bits & ((1 << _MANTISSA) - 1)
    exponent = bits >> _MANTISSA
    if spec.scale_rule == "rceil":
        exponent = exponent + (fraction > int((form.largest_fraction - 1) * (1 << _MANTISSA)))
    elif spec.scale_rule == "even":
        exponent = (bits + (1 << (_MANTISSA - form.mantissa - 1))) >> _MANTISSA
    scale = (exponent - form.largest_exponent).clamp(0, _NAN - 1)
    return torch.where(most.isfinite(), scale, _NAN).to(torch.uint8)
