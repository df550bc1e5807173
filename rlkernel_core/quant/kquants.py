"""The k-quants of GGUF: 4-, 5- and 6-bit integers whose scales are integers too, in super-blocks of 256 columns.

    w' = fl32(fl32(d sc) q - fl32(dmin mn))     q4_k, q5_k: sub-blocks of 32; sc, mn of 6 bits; q of 0..15, 0..31
    w' = fl32(fl32(d sc) (q - 32))              q6_k: sub-blocks of 16; sc of 8 bits, signed; q of 0..63
d and dmin are fp16, so every product is exact in fp32 unless it is subnormal, and w' is rounded once, fused or not.

Quantize, in fp32, with lo = min(w, 0), hi = max(w, 0) of a sub-block and S = those of its super-block:
    q4_k, q5_k ("minmax"):  s = (hi - lo) / top, d = fp16(max_S s / 63), sc = clamp(rint(s / d), 0, 63),
                            dmin = fp16(max_S -lo / 63), mn = clamp(rint(-lo / dmin), 0, 63),
                            q = clamp(rint(fl32(w + dmin mn) / fl32(d sc)), 0, top)
    q6_k ("signed_max"):    s = v / -32, v the first value of the sub-block of the largest magnitude;
                            d = fp16(V / -128), V likewise of the s; sc = clamp(rint(s / d), -128, 127),
                            q = clamp(rint(w / fl32(d sc)) + 32, 0, 63)
llama.cpp searches around such a start for a smaller squared error, so its codes differ; what it writes is read bit for
bit. Ties are to even. What is divided by 0 is 0.

A super-block of zeros gives zeros; one with an inf or NaN, or whose d or dmin overflows, has d = NaN and dequantizes to
NaN, and no other does. The last super-block and sub-block of a row are short where K is no multiple of them.

Storage: `codes` uint8 [Nout, ceil(K/2)], the low four bits of q, low nibble = even column; `high` uint8, the rest of q:
bit j of byte i is column 8i + j ([Nout, ceil(K/8)], q5_k), or bits 2j, 2j + 1 column 4i + j ([Nout, ceil(K/4)], q6_k);
`scale` [Nout, sub-blocks] uint8 (q6_k: int8), `min` like it; `d`, `dmin` fp16 [Nout, super-blocks]. A GGUF file packs
the same fields into blocks of 144, 176 and 210 bytes.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlkernel_core.quant import codec, nibbles
from rlkernel_core.quant.grid import extremes, signed_extreme
from rlkernel_core.quant.mx import spread
from rlkernel_core.quant.spec import QuantSpec

SUB: Final = {"int4": 32, "int5": 32, "int6": 16}  # columns that share sc and mn
_HIGH_BITS: Final = {"int4": 0, "int5": 1, "int6": 2}
_LARGEST: Final = 63


class KQuants:
    """The codec; `Codec` says what each method promises."""

    def storage(self, spec: QuantSpec, shape: tuple[int, int]) -> codec.Storage:
        """Codes, their high bits, integer scales, and what those are multiples of."""
        rows, columns = shape
        subs, supers = -(-columns // SUB[spec.element]), -(-columns // spec.group)
        parts: codec.Storage = {"codes": ((rows, (columns + 1) // 2), torch.uint8)}
        if bits := _HIGH_BITS[spec.element]:
            parts["high"] = ((rows, -(-columns * bits // 8)), torch.uint8)
        parts["scale"] = ((rows, subs), torch.int8 if spec.symmetric else torch.uint8)
        parts["d"] = ((rows, supers), torch.float16)
        if not spec.symmetric:
            parts |= {"min": ((rows, subs), torch.uint8), "dmin": ((rows, supers), torch.float16)}
        return parts

    def constants(self, spec: QuantSpec) -> dict[str, Tensor]:
        """None."""
        del spec
        return {}

    def encode_(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> None:
        """Scales first, then codes in blocks of rows."""
        (_signed if spec.symmetric else _minmax)(parts, weight, spec)
        columns, bits = weight.shape[1], 4 + _HIGH_BITS[spec.element]
        for start, stop in codec.row_blocks((weight.shape[0], columns)):
            scale, least = _affine(parts, spec, columns, start, stop)
            block = weight[start:stop].float()
            shifted = block + least if least is not None else block
            ratio = (shifted / torch.where(scale != 0, scale, torch.inf)).nan_to_num_(nan=0.0).round_()
            if spec.symmetric:
                ratio += 1 << (bits - 1)
            code = ratio.clamp_(0, (1 << bits) - 1).to(torch.uint8)
            parts["codes"][start:stop] = nibbles.pack_low_first(code & 15)
            if "high" in parts:
                parts["high"][start:stop] = nibbles.pack_bits(code >> 4, bits - 4)

    def decode(
        self, parts: dict[str, Tensor], spec: QuantSpec, shape: tuple[int, int], start: int, stop: int
    ) -> Tensor:
        """The formula of the module in fp32."""
        columns, extra = shape[1], _HIGH_BITS[spec.element]
        value = nibbles.unpack_low_first(parts["codes"][start:stop], columns)
        if extra:
            value = value | nibbles.unpack_bits(parts["high"][start:stop], extra, columns) << 4
        scale, least = _affine(parts, spec, columns, start, stop)
        if least is None:
            return (value.float() - 32) * scale
        return value.float() * scale - least

    def error_bound(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> Tensor:
        """Half a step, and what lies beyond the codes; 2^-22 (|w| + dmin mn) covers the fp32 operations."""
        exact = weight.detach().double()
        step, least = _affine(parts, spec, weight.shape[1], 0, weight.shape[0])
        scale = step.double()
        shift = torch.zeros_like(scale) if least is None else least.double()
        bits = 4 + _HIGH_BITS[spec.element]
        first = -(1 << (bits - 1)) if spec.symmetric else 0
        ends = first * scale - shift, (first + (1 << bits) - 1) * scale - shift
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        beyond = (low - exact).clamp(min=0) + (exact - high).clamp(min=0)
        return torch.maximum(scale.abs() / 2, beyond) + (exact.abs() + shift) * 2.0**-22


CODEC: Final = KQuants()


def _minmax(parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> None:
    """Scales and minima of q4_k and q5_k."""
    low, high = extremes(weight, 1, SUB[spec.element])
    low, high = low.clamp(max=0).abs(), high.clamp(min=0)  # no unit of -0
    step = (high + low) / torch.full_like(low, (1 << 4 + _HIGH_BITS[spec.element]) - 1)
    for name, exact in (("d", step), ("dmin", low)):
        _, most = extremes(exact, 1, spec.group // SUB[spec.element])
        parts[name].copy_(most / torch.full_like(most, _LARGEST))
    lost = ~(parts["d"].isfinite() & parts["dmin"].isfinite())
    for name, multiple, exact in (("d", "scale", step), ("dmin", "min", low)):
        parts[name].masked_fill_(lost, torch.nan)
        parts[multiple].copy_(_multiple(exact, parts[name], spec).clamp_(0, _LARGEST))


def _signed(parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> None:
    """Scales of q6_k."""
    step = signed_extreme(weight, SUB[spec.element])
    step = step / torch.full_like(step, -32.0)
    most = signed_extreme(step, spec.group // SUB[spec.element])
    parts["d"].copy_(most / torch.full_like(most, -128.0))
    parts["d"].masked_fill_(~parts["d"].isfinite(), torch.nan)
    parts["scale"].copy_(_multiple(step, parts["d"], spec).clamp_(-128, 127))


def _multiple(exact: Tensor, unit: Tensor, spec: QuantSpec) -> Tensor:
    """rint(exact / unit) per sub-block, 0 where the unit is 0 or no number."""
    wide = spread(unit.float(), spec.group // SUB[spec.element], exact.shape[1])
    return (exact / torch.where(wide != 0, wide, torch.inf)).nan_to_num_(nan=0.0).round_()


def _affine(
    parts: dict[str, Tensor], spec: QuantSpec, columns: int, start: int, stop: int
) -> tuple[Tensor, Tensor | None]:  # -> [R, columns] fp32, twice
    """Values of d sc, and dmin mn where there is one, of every column."""
    sub = SUB[spec.element]

    def product(unit: str, multiple: str) -> Tensor:
        per_sub = parts[multiple][start:stop].float()
        wide = spread(parts[unit][start:stop].float(), spec.group // sub, per_sub.shape[1])
        return spread(wide * per_sub, sub, columns)

    return product("d", "scale"), None if spec.symmetric else product("dmin", "min")
