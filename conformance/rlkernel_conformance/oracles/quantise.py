"""How a weight, or the input of a matmul, is to be quantised, from the rules of the formats: numpy, group by group.

Scales are fp32 divisions, so their bits are known. Codes are known but where w / s is within 2^-20 of a border.
"""

from __future__ import annotations

import numpy as np
import torch

from rlkernel_conformance.oracles import quant

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
    """Part name -> expected tensor, for every part but codes and tables. The weight is finite."""
    x = weight.detach().cpu().float().numpy()
    if spec.element == "nf4":
        return nf4_scales(x, spec)
    if not spec.symmetric:
        low = np.minimum(grouped(x, spec.rows, spec.group, np.min), np.float32(0))
        high = np.maximum(grouped(x, spec.rows, spec.group, np.max), np.float32(0))
        with np.errstate(over="ignore"):
            s = stored((high - low) / np.float32(15), spec.scale_dtype)
        wide = s.float().numpy()
        zero = np.where(wide > 0, np.rint(-low / np.where(wide > 0, wide, np.float32(1))), 0)
        return {"scale": s, "zero": torch.from_numpy(zero.clip(0, 15).astype(np.uint8))}
    largest = LARGEST.get(spec.scale_rule) or TOP[spec.element]
    s = grouped(np.abs(x), spec.rows, spec.group, np.max) / np.float32(largest)
    if spec.scale_rule == "absmax/max_pow2":
        fraction, exponent = np.frexp(s)
        s = np.where(fraction > 0.5, np.ldexp(np.float32(1), exponent), s)
    return {"scale": stored(s, spec.scale_dtype)}


def nf4_scales(x, spec):
    a = grouped(np.abs(x.reshape(1, -1)), 1, spec.group, np.max)[0]
    if not spec.double_quant:
        return {"absmax": torch.from_numpy(a)}
    offset = np.float32(a.astype(np.float64).mean())
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
    table = quant.NF4 if element == "nf4" else quant.float8_table(element)
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


def divided(weight, w):
    """w / s in float64 [N, K], 0 where the scale is 0."""
    spec, shape = w.spec, tuple(weight.shape)
    x = weight.detach().cpu().float().double().numpy()
    if spec.element == "nf4":
        a = grouped(np.abs(x.reshape(1, -1)), 1, spec.group, np.max)[0]
        s = np.repeat(a, spec.group)[: x.size].reshape(shape)
    else:
        s = quant.spread(w.parts["scale"].double(), spec, shape).numpy()
    return np.where(s > 0, x / np.where(s > 0, s, 1.0), 0.0)


def codes_are_right(weight, w):
    """[N, K] bool: the code of an element is the nearest, or the other where the ratio is at a border."""
    w = w.to("cpu")
    spec, ratio = w.spec, divided(weight, w)
    if spec.element in {"int4", "int8"}:
        zero = 0 if spec.symmetric else quant.spread(w.parts["zero"].int(), spec, w.shape).numpy()
        low, high = rounded(ratio, zero, *range_of(spec))
        found = quant.integers(w).numpy() + zero
        return (low <= found) & (found <= high)
    if spec.element == "nf4":
        packed = w.parts["codes"]
        found = torch.stack((packed >> 4, packed & 15), 1).flatten()[: ratio.size].view(w.shape).numpy()
    else:
        value = quant.float8_table(spec.element)[w.parts["codes"].view(torch.uint8).long()].double().numpy()
        levels = levels_of(spec.element)
        found = np.searchsorted(levels, value)
        found = np.where(levels[found.clip(max=levels.size - 1)] == value, found, -1)
    low, high = nearest(ratio, spec.element)
    return (low <= found) & (found <= high)


def activation(x, spec):
    """The input [M, K] as the format quantises it, how far another right choice may be, and the scales [M, groups].

    `x` is fp32 or float64, and its scales are computed in that.
    """
    size = 128 if spec.act == "block128_fp8" else x.shape[1]
    top = 127.0 if spec.act == "token_int8" else TOP[spec.element]
    scale = grouped(np.abs(x), 1, size, np.max) / x.dtype.type(top)
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


def integer_product(x, w):
    """int8_w8a8: the formula's value [M, N] in float64, and what other right codes of x may change."""
    value, slack, scale = activation(x, w.spec)
    s = np.where(scale > 0, scale, 1.0).astype(np.float64)
    total = np.rint(value / s) @ quant.integers(w).double().numpy().T
    of_rows = w.parts["scale"].double().numpy().T
    reach = slack @ np.abs(quant.decode(w).double().numpy()).T
    kind = x.dtype.type
    return (total.astype(kind) * scale * of_rows.astype(kind)).astype(np.float64), reach
