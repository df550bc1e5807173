"""Weights with scales on a grid of row and column groups: 4- and 8-bit integers and 8-bit floats.

Quantise, all in fp32 (a float64 weight is rounded to fp32 first), per group with a = max |w|:
    s  = cvt_S(a / 7.5 | a / 7 | a / 127 | a / max)      S the scale's dtype; asymmetric: cvt_S((hi - lo) / 15)
    z  = clamp(rint(-lo / s), 0, 15)                     asymmetric only; lo = min(w, 0), hi = max(w, 0)
    q  = clamp(rint(w / s) + z)                          integers: -8..7 (rule 7: -7..7), -127..127; asymmetric 0..15
    q  = saturating cast of w / s                        floats
Dequantise: w' = fl32((q - z) * s), then one rounding to the dtype asked for. Integers times 16-bit scales are exact
in fp32, so those are rounded once in all.

A group of zeros, or one whose scale underflows to 0, gives zeros. A group whose scale is not finite (it holds an inf
or NaN, or S overflows) has scale NaN and dequantises to NaN; no other group is touched. The last group of a row is
short where K is no multiple of the group.

Storage: `codes` uint8 [Nout, ceil(K/2)], the low nibble is the even column, q + 8 if symmetric; or int8 or float8
[Nout, K]; `scale` [row groups, column groups]; `zero` uint8 like it. Codes int8 -128 and zeros 16, which other
quantisers write, are read as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from rlkernel_core.quant import codec, nibbles
from rlkernel_core.quant.float8 import FLOAT8, saturating_cast
from rlkernel_core.quant.spec import QuantSpec

_LARGEST: Final = {"absmax/7.5": 7.5, "absmax/7": 7.0, "minmax/15": 15.0, "absmax/127": 127.0}


class Grid:
    """The codec; `Codec` says what each method promises."""

    def storage(self, spec: QuantSpec, shape: tuple[int, int]) -> codec.Storage:
        """Codes, scale, and zero where the format is asymmetric."""
        rows, columns = shape
        groups = (_groups(rows, spec.rows), _groups(columns, spec.group))
        if spec.element == "int4":
            codes: tuple[tuple[int, ...], torch.dtype] = ((rows, (columns + 1) // 2), torch.uint8)
        else:
            codes = (shape, torch.int8 if spec.element == "int8" else FLOAT8[spec.element].dtype)
        parts: codec.Storage = {"codes": codes, "scale": (groups, getattr(torch, spec.scale_dtype))}
        if not spec.symmetric:
            parts["zero"] = (groups, torch.uint8)
        return parts

    def constants(self, spec: QuantSpec) -> dict[str, Tensor]:
        """None."""
        del spec
        return {}

    def encode_(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> None:
        """Scales first, then codes in blocks of rows."""
        low, high = extremes(weight, spec.rows, spec.group)
        span = high.clamp(min=0) - low.clamp(max=0) if not spec.symmetric else torch.maximum(high, -low)
        scale = _scale(span.abs(), spec).to(parts["scale"].dtype)  # no scale of -0
        parts["scale"].copy_(torch.where(scale.isfinite(), scale, torch.nan))
        # 0 and NaN scales divide as inf: every code of such a group is that of 0.
        divisor = torch.where(parts["scale"] > 0, parts["scale"].float(), torch.inf)
        if not spec.symmetric:
            parts["zero"].copy_((-low.clamp(max=0) / divisor).nan_to_num_().round_().clamp_(0, 15))
        for start, stop in codec.row_blocks((weight.shape[0], weight.shape[1])):
            ratio = _grouped(weight[start:stop].float(), spec.group)
            ratio = ratio / _of_rows(divisor, spec.rows, start, stop)
            ratio.nan_to_num_(nan=0.0)
            zero = _of_rows(parts["zero"], spec.rows, start, stop) if not spec.symmetric else 8
            coded = _code(ratio, zero, spec).flatten(1)[:, : weight.shape[1]]
            parts["codes"][start:stop] = nibbles.pack_low_first(coded) if spec.element == "int4" else coded

    def decode(
        self, parts: dict[str, Tensor], spec: QuantSpec, shape: tuple[int, int], start: int, stop: int
    ) -> Tensor:
        """(q - z) * s in fp32."""
        codes = parts["codes"][start:stop]
        if spec.element == "int4":
            codes = nibbles.unpack_low_first(codes, shape[1])
        value = _grouped(codes.float(), spec.group)
        if not spec.symmetric:
            value = value - _of_rows(parts["zero"], spec.rows, start, stop).float()
        elif spec.element == "int4":
            value = value - 8
        value = value * _of_rows(parts["scale"], spec.rows, start, stop).float()
        return value.flatten(1)[:, : shape[1]]

    def error_bound(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> Tensor:
        """Half a step of the codes, and what lies beyond the largest code; 2^-22 |w| covers the fp32 operations."""
        rows, columns = weight.shape
        exact = _grouped(weight.detach().double(), spec.group)
        scale = _of_rows(parts["scale"], spec.rows, 0, rows).double()
        if spec.element in FLOAT8:
            form = FLOAT8[spec.element]
            low, high = -form.max * scale, form.max * scale
            step = torch.maximum(exact.abs() * 2.0**-form.mantissa, form.smallest * scale)
        else:
            least, most = _range(spec)
            zero = 0.0 if spec.symmetric else _of_rows(parts["zero"], spec.rows, 0, rows).double()
            low, high, step = (least - zero) * scale, (most - zero) * scale, scale.expand_as(exact)
        beyond = (low - exact).clamp(min=0) + (exact - high).clamp(min=0)
        bound = torch.maximum(step / 2, beyond) + exact.abs() * 2.0**-22
        return bound.flatten(1)[:, :columns]


CODEC: Final = Grid()


def extremes(x: Tensor, rows: int, group: int) -> tuple[Tensor, Tensor]:  # [R, C] -> two of [row groups, groups]
    """Smallest and largest value of every group, in fp32; NaN where a group holds one."""
    low, high = (_reduce(_reduce(x, group, 1, how), rows, 0, how) for how in (torch.amin, torch.amax))
    return low.float(), high.float()


def _reduce(x: Tensor, size: int, dim: int, how: Callable[..., Tensor]) -> Tensor:
    """Reduce groups of a dimension, the last one short; nothing is copied."""
    whole = x.shape[dim]
    if size == 0 or size >= whole:
        return how(x, dim, keepdim=True)
    if size == 1:
        return x
    full = whole // size * size
    head = how(_split(x.narrow(dim, 0, full), dim, size), dim + 1)
    if full == whole:
        return head
    return torch.cat((head, how(x.narrow(dim, full, whole - full), dim, keepdim=True)), dim)


def _split(x: Tensor, dim: int, size: int) -> Tensor:
    return x.view(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])


def _scale(span: Tensor, spec: QuantSpec) -> Tensor:
    """fp32 scales from |w| maxima or ranges."""
    largest = _LARGEST.get(spec.scale_rule) or FLOAT8[spec.element].max
    scale = span / torch.full_like(span, largest)  # a scalar divisor is a product with 1 / largest on CUDA
    if spec.scale_rule != "absmax/max_pow2":
        return scale
    fraction, exponent = torch.frexp(scale)  # scale = fraction * 2^exponent, fraction in [0.5, 1)
    above = (fraction > 0.5) & (fraction < 1)  # inf and NaN are their own fractions
    return torch.where(above, torch.ldexp(torch.ones_like(scale), exponent), scale)


def _range(spec: QuantSpec) -> tuple[int, int]:
    """Smallest and largest integer code that the quantiser writes, before the zero-point."""
    if spec.element == "int8":
        return -127, 127
    if not spec.symmetric:
        return 0, 15
    return (-7, 7) if spec.scale_rule == "absmax/7" else (-8, 7)


def _code(ratio: Tensor, zero: Tensor | int, spec: QuantSpec) -> Tensor:
    """Stored codes of w / s."""
    if spec.element in FLOAT8:
        return saturating_cast(ratio, spec.element)
    least, most = _range(spec)
    rounded = ratio.round_()  # ties to even
    if spec.element == "int8":
        return rounded.clamp_(least, most).to(torch.int8)
    if spec.symmetric:
        least, most = least + 8, most + 8
    return rounded.add_(zero).clamp_(least, most).to(torch.uint8)


def _groups(size: int, group: int) -> int:
    return 1 if group == 0 else -(-size // group)


def _grouped(x: Tensor, group: int) -> Tensor:  # [R, C] -> [R, G, group], padded with zeros
    columns = x.shape[1]
    size = group or columns
    if columns % size:
        x = torch.nn.functional.pad(x, (0, -columns % size))
    return _split(x, 1, size)


def _of_rows(grid: Tensor, rows: int, start: int, stop: int) -> Tensor:  # -> [stop - start, G, 1]
    """Grid entries of rows start..stop; `start` is a multiple of the row group."""
    if rows == 0:
        found = grid.expand(stop - start, -1)
    elif rows == 1:
        found = grid[start:stop]
    else:
        found = grid[start // rows : -(-stop // rows)].repeat_interleave(rows, 0)[: stop - start]
    return found.unsqueeze(-1)
