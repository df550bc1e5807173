"""How a weight, or the input of a matmul, is to be quantized, from the rules of the formats: numpy, group by group.

Scales are fp32 divisions, so their bits are known. Codes are known but where w / s is within 2^-20 of a border.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rlkernel_core.definitions import quant, quant_scales

BORDER = 2.0**-20  # relative; the tolerance row "codes" of quantize@1
LARGEST = {"absmax/7.5": 7.5, "absmax/7": 7.0, "minmax/15": 15.0, "absmax/127": 127.0}
TOP = {"e4m3fn": 448.0, "e5m2": 57344.0, "e4m3fnuz": 240.0, "e5m2fnuz": 57344.0}


def grouped(x, rows, columns, how):
    """`how` of every group [row groups, groups]; a group that sticks out is filled with zeros."""
    rows, columns = rows or x.shape[0], columns or x.shape[1]
    x = np.pad(x, ((0, -x.shape[0] % rows), (0, -x.shape[1] % columns)))
    return how(x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns), axis=(1, 3))


def stored(scale, dtype):
    """fp32 scales in the dtype they are stored in; NaN where that is not finite."""
    s = torch.from_numpy(np.ascontiguousarray(scale, np.float32)).to(getattr(torch, dtype))
    return torch.where(s.isfinite(), s, torch.nan)


def scales(weight, spec):
    """Part name -> expected tensor, for every part but codes and tables."""
    x = weight.detach().cpu().float().numpy()
    if spec.element in quant.TABLES:
        return nf4_scales(x, spec)
    if not spec.act_order and not np.isfinite(x).all():
        return beside_lost_groups(x, spec)
    if spec.scale_dtype == "e8m0":
        return quant_scales.powers_of_two(x, spec)
    if spec.format == "nvfp4":
        return quant_scales.nvfp4(x, spec)
    if spec.format.endswith("_k"):
        return quant_scales.k_quant(x, spec)
    if spec.scale_rule.endswith("_then_round"):
        return {"scale": quant_scales.half(quant_scales.before_rounding(x, spec))[0]}
    if spec.act_order:
        order = quant_scales.columns_in_order(np.where(np.isfinite(x), x, 0))
        g_idx = np.empty(len(order), np.int32)
        g_idx[order] = np.arange(len(order)) // spec.group
        plain = scales(torch.from_numpy(x[:, order]), replace(spec, act_order=False))
        return {**plain, "g_idx": torch.from_numpy(g_idx)}
    if not spec.symmetric:
        low = np.minimum(grouped(x, spec.rows, spec.group, np.min), np.float32(0))
        high = np.maximum(grouped(x, spec.rows, spec.group, np.max), np.float32(0))
        with np.errstate(over="ignore"):
            s = stored((high - low) / np.float32(15), spec.scale_dtype)
        wide = s.float().numpy()
        zero = np.where(wide > 0, np.abs(low) / np.where(wide > 0, wide, np.float32(1)), np.float32(0))
        if spec.float_zero:
            return {"scale": s, "zero": torch.from_numpy(zero).to(s.dtype)}
        zero = np.rint(zero)
        return {"scale": s, "zero": torch.from_numpy(zero.clip(0, 15).astype(np.uint8))}
    largest = LARGEST.get(spec.scale_rule) or TOP[spec.element]
    s = grouped(np.abs(x), spec.rows, spec.group, np.max) / np.float32(largest)
    if spec.scale_rule == "absmax/max_pow2":
        fraction, exponent = np.frexp(s)
        s = np.where(fraction > 0.5, np.ldexp(np.float32(1), exponent), s)
    return {"scale": stored(s, spec.scale_dtype)}


def lost(x, rows, columns):
    """Groups that hold what is not finite, and the weight with zeros in their place."""
    of_group = grouped(~np.isfinite(x), rows, columns, np.any)
    wide = np.repeat(of_group, rows or x.shape[0], 0)[: x.shape[0]]
    return of_group, np.where(np.repeat(wide, columns or x.shape[1], 1)[:, : x.shape[1]], np.float32(0), x)


def beside_lost_groups(x, spec):
    """A group that holds an inf or NaN is a group of zeros whose scale is NaN."""
    of_group, rest = lost(x, spec.rows, spec.group)
    found, at = scales(torch.from_numpy(rest), spec), torch.from_numpy(of_group)
    for name in {"d", "dmin"} & found.keys() or {"scale"}:
        nan = 255 if spec.scale_dtype == "e8m0" else torch.nan
        found[name] = torch.where(at, nan, found[name].float()).to(found[name].dtype)
    return found


def nf4_scales(x, spec):
    a = grouped(np.abs(x.reshape(1, -1)), 1, spec.group, np.max)[0]
    a = np.where(np.isfinite(a), a, np.float32(np.nan))
    if not spec.double_quant:
        return {"absmax": torch.from_numpy(a)}
    finite = a[np.isfinite(a)].astype(np.float64)
    offset = np.float32(finite.mean() if finite.size else 0.0)
    rest = a - offset
    b = grouped(np.abs(rest)[None], 1, 256, np.max)[0]
    of_block = np.repeat(b, 256)[: a.size]
    ratio = np.where(of_block > 0, rest / np.where(of_block > 0, of_block, np.float32(1)), np.float32(0))
    table = dynamic_map().astype(np.float32)
    codes = np.searchsorted((table[1:] + table[:-1]) / np.float32(2), ratio, side="left")
    return {
        "absmax": torch.from_numpy(codes.astype(np.uint8)),
        "nested_absmax": torch.from_numpy(b),
        "nested_offset": torch.tensor([offset]),
    }


def dynamic_map():
    """arXiv 2110.02861, section 1.3: decade i of 7 holds the midpoints of 2^i bins of [0.1, 1], times 10^(i - 6)."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1)
        middle = 10.0 ** (i - 6) * (edges[1:] + edges[:-1]) / 2
        values += [*middle, *-middle]
    return np.sort(np.array(values))


def range_of(spec):
    """Least and most of q - z for a symmetric integer format; 0..15 before the zero-point otherwise."""
    if spec.element == "int8":
        return -127, 127
    if not spec.symmetric:
        return 0, 15
    return (-7, 7) if spec.scale_rule == "absmax/7" else (-8, 7)


def levels_of(element):
    """Finite values of a code, ascending, each once."""
    table = quant.TABLES.get(element, quant.E2M1 if element == "e2m1" else None)
    table = quant.float8_table(element) if table is None else table
    values = np.unique(table.double().numpy())
    return values[np.isfinite(values)] + 0.0


def nearest(ratio, element):
    """Least and most index into `levels_of` that is nearest to the ratio, give or take the border."""
    levels = levels_of(element)
    middle = (levels[1:] + levels[:-1]) / 2
    width = np.abs(ratio) * BORDER
    return np.searchsorted(middle, ratio - width, side="left"), np.searchsorted(middle, ratio + width, side="right")


def rounded(ratio, zero, least, most):
    """Least and most integer code, give or take the border."""
    width = np.abs(ratio) * BORDER
    low, high = np.ceil(ratio - width - 0.5), np.floor(ratio + width + 0.5)
    return (low + zero).clip(least, most), (high + zero).clip(least, most)


def to_integer(ratio, rounding):
    """The nearest integer to an exact ratio; a tie as the format's rounding says."""
    if rounding == "up":  # as llama.cpp does, whose sum is fp32
        return np.floor((ratio + 0.5).astype(np.float32)).astype(np.float64)
    return np.rint(ratio) if rounding == "even" else np.copysign(np.floor(np.abs(ratio) + 0.5), ratio)


def divided(weight, w):
    """w / s in float64 [N, K], 0 where the scale is 0."""
    return ratios(weight, w)[0]


def ratios(weight, w):
    """w / s in float64 [N, K], 0 where the scale is 0; and where s is a power of two, so that w / s is exact."""
    spec, shape = w.spec, tuple(weight.shape)
    x = weight.detach().cpu().float().double().numpy()
    if spec.element in quant.TABLES:
        a = grouped(np.abs(x.reshape(1, -1)), 1, spec.group, np.max)[0]
        s = np.repeat(a, spec.group)[: x.size].reshape(shape)
    elif spec.format.endswith("_k"):
        _, step, least = quant.k_quant(w)
        s, x = step.double().numpy(), x + least.double().numpy()
    elif spec.scale_dtype in {"e8m0", "float8_e4m3fn"}:
        s = quant.small_scales(w).numpy()
    elif spec.scale_rule.endswith("_then_round"):
        s = quant_scales.before_rounding(x.astype(np.float32), spec).astype(np.float64)
        stored = w.parts["scale"].float().numpy()
        s = np.repeat(np.where(np.isfinite(stored) & (stored != 0), s, 0.0), spec.group, 1)[:, : shape[1]]
    else:
        s = quant.spread(w, w.parts["scale"].double()).numpy()
    usable = np.isfinite(s) & (s != 0)
    return np.where(usable, x / np.where(usable, s, 1.0), 0.0), np.abs(np.frexp(s)[0]) == 0.5


def codes_are_right(weight, w):
    """[N, K] bool: the code of an element is the nearest, or the other where the ratio is at a border.

    Under a power of two the ratio is exact, and so is the code.
    """
    w = w.to("cpu")
    spec, (ratio, exact) = w.spec, ratios(weight, w)
    if spec.format.endswith("_k"):
        bits = int(spec.element[-1])
        least, most = (-32, 31) if spec.symmetric else (0, 2**bits - 1)
        low, high = rounded(ratio, 0, least, most)
        found = quant.k_quant(w)[0].numpy()
        return (low <= found) & (found <= high)
    if spec.element in {"int4", "int8"}:
        zero = 0 if spec.symmetric else quant.spread(w, w.parts["zero"].float()).double().numpy()
        if spec.float_zero:
            low, high = rounded(ratio + zero, 0, 0, 15)
        else:
            low, high = rounded(ratio, zero, *range_of(spec))
            nearest_one = (to_integer(ratio, spec.rounding) + zero).clip(*range_of(spec))
            low, high = np.where(exact, nearest_one, low), np.where(exact, nearest_one, high)
        found = quant.integers(w).double().numpy() + (np.float32(zero) if spec.float_zero else zero)
        found = np.rint(found)
        return (low <= found) & (found <= high)
    if spec.element in quant.TABLES:
        packed = w.parts["codes"]
        index = torch.stack((packed >> 4, packed & 15), 1).flatten()[: ratio.size].view(w.shape)
        value = quant.TABLES[spec.element][index.long()].double().numpy()
    else:
        value = quant.small_floats(w).double().numpy()
    if spec.element not in quant.TABLES:
        unsigned = spec.element.endswith("fnuz") & (value == 0)  # fnuz has no -0
        same = (value == tied(ratio, spec)) & (unsigned | (np.signbit(value) == np.signbit(ratio)))
        if spec.scale_dtype == "e8m0":
            return same
    else:  # a middle of two entries is one of fp32
        same = exact = np.zeros_like(exact)
    levels = levels_of(spec.element)
    found = np.searchsorted(levels, value)
    found = np.where(levels[found.clip(max=levels.size - 1)] == value, found, -1)
    low, high = nearest(ratio, spec.element)
    return np.where(exact, same, (low <= found) & (found <= high))


def tied(ratio, spec):
    """The nearest value to an exact ratio; a tie takes the even mantissa, or the larger magnitude."""
    levels = levels_of(spec.element)
    levels = levels[levels >= 0]  # their index is their bit pattern
    magnitude = np.abs(ratio).clip(max=levels[-1])
    above = np.searchsorted(levels, magnitude).clip(1, levels.size - 1)
    below, middle = above - 1, (levels[above] + levels[above - 1]) / 2
    on_tie = above if spec.rounding == "away" else np.where(above % 2 == 0, above, below)
    found = np.where(magnitude == middle, on_tie, np.where(magnitude > middle, above, below))
    return np.copysign(levels[found], ratio)


@np.errstate(invalid="ignore")  # inf / inf
def activation(x, spec):
    """The input [M, K] as the format quantizes it, how far another right choice may be, and the scales [M, groups].

    `x` is fp32 or float64, and its scales are computed in that.
    """
    if spec.act in {"mxfp8", "nvfp4"}:
        return small_blocks(x.astype(np.float32), spec)
    size = 128 if spec.act == "block128_fp8" else x.shape[1]
    top = 127.0 if spec.act == "token_int8" else TOP[spec.element]
    scale = grouped(np.abs(x), 1, size, np.max) / x.dtype.type(top)
    scale = np.where(np.isfinite(scale), scale, x.dtype.type(np.nan))
    s = np.repeat(scale, size, axis=1)[:, : x.shape[1]].astype(np.float64)
    ratio = np.where(s > 0, x / np.where(s > 0, s, 1.0), 0.0)
    if spec.act == "token_int8":
        low, high = rounded(ratio, 0, -127, 127)
        code = np.rint(ratio).clip(-127, 127)
    else:
        levels = levels_of(spec.element)
        below, above = nearest(ratio, spec.element)
        low, high, code = levels[below], levels[above], levels[below]
    return code * s, (high - low) * s, scale


def small_blocks(x, spec):
    """The same for mxfp8 and nvfp4, row by row: a block with an inf or NaN is NaN, and has no part in other scales."""
    size, rule = spec.group, spec
    if spec.act == "mxfp8" and spec.element == "e2m1":  # of the weight alone
        rule = replace(spec, element="e4m3fn", rounding="even")
    element = rule.element
    lost = grouped(~np.isfinite(x), 1, size, np.any)
    kept = np.where(np.repeat(lost, size, 1)[:, : x.shape[1]], np.float32(0), x)
    scale = np.zeros(lost.shape, np.float32)
    for m, row in enumerate(kept):
        if spec.act == "mxfp8":
            power = quant_scales.powers_of_two(row[None], rule)["scale"].numpy().astype(np.float64)
            scale[m] = np.exp2(power[0] - 127)
        else:
            found = quant_scales.nvfp4(row[None], rule)
            scale[m] = (found["scale"].float() * found["global_scale"]).numpy()[0]
    s = np.repeat(scale, size, 1)[:, : x.shape[1]].astype(np.float64)
    ratio = np.where(s > 0, kept / np.where(s > 0, s, 1.0), 0.0)
    code, levels = tied(ratio, rule), levels_of(element)
    low, high = nearest(ratio, element)
    slack = np.zeros_like(s) if spec.act == "mxfp8" else (levels[high] - levels[low]) * s * (1 + 2.0**-20)
    with np.errstate(over="ignore"):
        value = (code.astype(np.float32) * s.astype(np.float32)).astype(np.float64)
    scale = np.where(lost, np.float32(np.nan), scale)
    return np.where(np.repeat(lost, size, 1)[:, : x.shape[1]], np.nan, value), slack, scale


def integer_product(x, w):
    """int8_w8a8: the formula's value [M, N] in float64, and what other right codes of x may change."""
    value, slack, scale = activation(x, w.spec)
    s = np.where(scale > 0, scale, 1.0).astype(np.float64)
    total = np.rint(value / s) @ quant.integers(w).double().numpy().T
    of_rows = w.parts["scale"].double().numpy().T
    reach = slack @ np.abs(quant.decode(w).double().numpy()).T
    kind = x.dtype.type
    return (total.astype(kind) * scale * of_rows.astype(kind)).astype(np.float64), reach
