"""Weights with scales on a grid of row and column groups: 4- and 8-bit integers and 8-bit floats.

Quantize, all in fp32 (a float64 weight is rounded to fp32 first), per group with a = max |w|:
    s  = cvt_S(a / 7.5 | a / 7 | a / 127 | a / max)      S the scale's dtype; asymmetric: cvt_S((hi - lo) / 15)
    z  = clamp(rint(-lo / s), 0, 15)                     asymmetric only; lo = min(w, 0), hi = max(w, 0)
    q  = clamp(rint(w / s) + z)                          integers: -8..7 (rule 7: -7..7), -127..127; asymmetric 0..15
    q  = saturating cast of w / s                        floats
float_zero: z = cvt_S(-lo / s), and q = clamp(rint(fl32(w / s) + z)).
Rules that end in `_then_round` (llama.cpp's) take codes before the scale is rounded: d = a / 127, or v / -8 with v the
first value of the largest magnitude, r = fl32(1 / d), q = round(fl32(w r)), s = cvt_S(d). Such a scale may be negative.
    rounding: "even" is rint; "away" takes a tie away from zero; "up" takes floor(fl32(x + 1/2)).
act_order: columns are put into groups in the order of their largest finite |w|, descending, the first of equals first;
`g_idx` [K] is the group of each column, and codes stay where their columns are.
Dequantize: w' = fl32(fl32(q - z) * s), then one rounding to the dtype asked for. Integers times 16-bit scales are
exact in fp32, so those are rounded once in all; q - z rounds only where z is a float.

A group of zeros, or one whose scale underflows to 0, gives zeros. A group whose scale is not finite (it holds an inf
or NaN, or S overflows) has scale NaN and dequantizes to NaN; no other group is touched. The last group of a row is
short where K is no multiple of the group.

Storage: `codes` uint8 [Nout, ceil(K/2)], the low nibble is the even column, q + 8 if symmetric; or int8 or float8
[Nout, K]; `scale` [row groups, column groups]; `zero` uint8, or S, like it; `g_idx` int32 [K]. Codes int8 -128 and
zeros 16, which other quantizers write, are read as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from rlkernel_core.quant import codec, nibbles
from rlkernel_core.quant.float8 import FLOAT8, error_of, saturating_cast
from rlkernel_core.quant.spec import QuantSpec

_LARGEST: Final = {
    "absmax/7.5": 7.5,
    "absmax/7": 7.0,
    "minmax/15": 15.0,
    "absmax/127": 127.0,
    "absmax/127_then_round": 127.0,
    "signed_max/-8_then_round": -8.0,
}
_THEN_ROUND: Final = "_then_round"


class Grid:
    """The codec; `Codec` says what each method promises."""

    def storage(self, spec: QuantSpec, shape: tuple[int, int]) -> codec.Storage:
        """Codes, scale, zero where the format is asymmetric, g_idx where groups are no runs of columns."""
        rows, columns = shape
        groups = (_groups(rows, spec.rows), _groups(columns, spec.group))
        scale_dtype = getattr(torch, spec.scale_dtype)
        if spec.element == "int4":
            codes: tuple[tuple[int, ...], torch.dtype] = ((rows, (columns + 1) // 2), torch.uint8)
        else:
            codes = (shape, torch.int8 if spec.element == "int8" else FLOAT8[spec.element].dtype)
        parts: codec.Storage = {"codes": codes, "scale": (groups, scale_dtype)}
        if not spec.symmetric:
            parts["zero"] = (groups, scale_dtype if spec.float_zero else torch.uint8)
        if spec.act_order:
            parts["g_idx"] = ((columns,), torch.int32)
        return parts

    def constants(self, spec: QuantSpec) -> dict[str, Tensor]:
        """None."""
        del spec
        return {}

    def encode_(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> None:
        """Scales first, then codes in blocks of rows."""
        ordered = weight
        if spec.act_order:
            order = _by_magnitude(weight)
            place = torch.arange(order.numel(), device=order.device, dtype=torch.int32) // spec.group
            parts["g_idx"].index_copy_(0, order, place)
            ordered = weight.index_select(1, order)
        low, high = extremes(ordered, spec.rows, spec.group)
        exact = _scale(_span(ordered, low, high, spec), spec)
        scale = exact.to(parts["scale"].dtype)
        parts["scale"].copy_(torch.where(scale.isfinite(), scale, torch.nan))
        # 0 and NaN scales divide as inf: every code of such a group is that of 0.
        usable = parts["scale"].isfinite() & (parts["scale"] != 0)
        early = spec.scale_rule.endswith(_THEN_ROUND)
        divisor = torch.where(usable, exact if early else parts["scale"].float(), torch.inf)
        if not spec.symmetric:
            below = (low.clamp(max=0).abs() / divisor).nan_to_num_()  # no zero-point of -0
            parts["zero"].copy_(below if spec.float_zero else below.round_().clamp_(0, 15))
        for start, stop in codec.row_blocks((weight.shape[0], weight.shape[1])):
            ratio = _grouped(weight[start:stop].float(), 1 if spec.act_order else spec.group)
            of_block = _of_rows(_by_column(divisor, parts), spec.rows, start, stop)
            ratio = ratio * of_block.reciprocal() if early else ratio / of_block
            ratio.nan_to_num_(nan=0.0)
            zero = _of_rows(_by_column(parts["zero"], parts), spec.rows, start, stop) if not spec.symmetric else None
            coded = _code(ratio, zero, spec).flatten(1)[:, : weight.shape[1]]
            parts["codes"][start:stop] = nibbles.pack_low_first(coded) if spec.element == "int4" else coded

    def decode(
        self, parts: dict[str, Tensor], spec: QuantSpec, shape: tuple[int, int], start: int, stop: int
    ) -> Tensor:
        """(q - z) * s in fp32."""
        codes = parts["codes"][start:stop]
        if spec.element == "int4":
            codes = nibbles.unpack_low_first(codes, shape[1])
        value = _grouped(codes.float(), 1 if spec.act_order else spec.group)
        if not spec.symmetric:
            value = value - _of_rows(_by_column(parts["zero"], parts), spec.rows, start, stop).float()
        elif spec.element == "int4":
            value = value - 8
        value = value * _of_rows(_by_column(parts["scale"], parts), spec.rows, start, stop).float()
        return value.flatten(1)[:, : shape[1]]

    def error_bound(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> Tensor:
        """Half a step of the codes, and what lies beyond the largest code; 2^-22 |w| covers the fp32 operations.

        A code taken before its scale was rounded is off by what that changes; a float zero-point by its rounding.
        """
        rows, columns = weight.shape
        exact = _grouped(weight.detach().double(), 1 if spec.act_order else spec.group)
        scale = _of_rows(_by_column(parts["scale"], parts), spec.rows, 0, rows).double()
        if spec.element in FLOAT8:
            return error_of(exact, scale, FLOAT8[spec.element]).flatten(1)[:, :columns]
        least, most = _range(spec)
        zero: Tensor | float = 0.0
        if not spec.symmetric:
            zero = _of_rows(_by_column(parts["zero"], parts), spec.rows, 0, rows).double()
        ends = (least - zero) * scale, (most - zero) * scale
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        beyond = (low - exact).clamp(min=0) + (exact - high).clamp(min=0)
        bound = torch.maximum(scale.abs() / 2, beyond) + exact.abs() * 2.0**-22
        if spec.scale_rule.endswith(_THEN_ROUND):
            bound = bound + (most + 2) * (scale.abs() * 2.0**-11 + 2.0**-25)
        elif spec.float_zero:
            bound = bound + scale * 2.0**-18
        return bound.flatten(1)[:, :columns]


CODEC: Final = Grid()


def extremes(x: Tensor, rows: int, group: int) -> tuple[Tensor, Tensor]:  # [R, C] -> two of [row groups, groups]
    """Smallest and largest value of every group, in fp32; NaN where a group holds one."""
    low, high = (_reduce(_reduce(x, group, 1, how), rows, 0, how) for how in (torch.amin, torch.amax))
    return low.float(), high.float()


def signed_extreme(x: Tensor, group: int) -> Tensor:  # [R, C] -> [R, groups]
    """The value of the largest magnitude of every group with its sign, the first of equals, in fp32."""
    found = x.new_empty(x.shape[0], _groups(x.shape[1], group), dtype=torch.float32)
    for start, stop in codec.row_blocks((x.shape[0], x.shape[1])):
        block = _grouped(x[start:stop].float(), group)
        found[start:stop] = block.gather(2, block.abs().argmax(2, keepdim=True)).squeeze(2)
    return found


def _by_magnitude(weight: Tensor) -> Tensor:  # [R, C] -> [C]
    """Columns by their largest finite |w|, descending; equal ones stay in order."""
    most = torch.zeros(weight.shape[1], device=weight.device)
    for start, stop in codec.row_blocks((weight.shape[0], weight.shape[1])):
        block = weight[start:stop].float().abs()
        most = torch.maximum(most, torch.where(block.isfinite(), block, 0).amax(0))
    return most.argsort(descending=True, stable=True)


def _by_column(grid: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """Grid entries column by column where the groups are listed; as they are where groups are runs of columns."""
    return grid.index_select(1, parts["g_idx"]) if "g_idx" in parts else grid


def _span(x: Tensor, low: Tensor, high: Tensor, spec: QuantSpec) -> Tensor:
    """What is divided to give a scale."""
    if spec.scale_rule.startswith("signed_max"):
        return signed_extreme(x, spec.group)
    span = torch.maximum(high, -low) if spec.symmetric else high.clamp(min=0) - low.clamp(max=0)
    return span.abs()  # no scale of -0


def _reduce(x: Tensor, size: int, dim: int, how: Callable[..., Tensor]) -> Tensor:
    """Reduce groups of a dimension, the last one short; nothing is copied."""
    whole = x.shape[dim]
    if size == 0 or size >= whole:
        return how(x, dim, keepdim=True)
    if size == 1:
        return x
    groups, rest = whole // size, whole % size
    head = how(_split(x.narrow(dim, 0, whole - rest), dim, size), dim + 1)
    if not rest:
        return head
    found = x.new_empty(*x.shape[:dim], groups + 1, *x.shape[dim + 1 :])  # autocast has no `cat` of every dtype
    found.narrow(dim, 0, groups).copy_(head)
    found.narrow(dim, groups, 1).copy_(how(x.narrow(dim, whole - rest, rest), dim, keepdim=True))
    return found


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
    """Smallest and largest integer code that the quantizer writes, before the zero-point."""
    if spec.element == "int8":
        return -127, 127
    if not spec.symmetric:
        return 0, 15
    return (-7, 7) if spec.scale_rule == "absmax/7" else (-8, 7)


def _code(ratio: Tensor, zero: Tensor | None, spec: QuantSpec) -> Tensor:
    """Stored codes of w / s."""
    if spec.element in FLOAT8:
        return saturating_cast(ratio, spec.element)
    least, most = _range(spec)
    if zero is not None and spec.float_zero:
        return ratio.add_(zero).round_().clamp_(least, most).to(torch.uint8)
    rounded = rounded_to_integer(ratio, spec.rounding)
    if spec.element == "int8":
        return rounded.clamp_(least, most).to(torch.int8)
    if zero is None:
        return rounded.add_(8).clamp_(least + 8, most + 8).to(torch.uint8)
    return rounded.add_(zero).clamp_(least, most).to(torch.uint8)


def rounded_to_integer(x: Tensor, rounding: str) -> Tensor:
    """The nearest integer, in place; a tie goes where the module's docstring says."""
    if rounding == "even":
        return x.round_()
    if rounding == "up":
        return x.add_(0.5).floor_()
    whole = x.trunc()
    return whole.add_(((x - whole).abs() >= 0.5) * x.sign())


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
