"""What a weight becomes in a format and back, element by element: numbers of codes first, then what they stand for.

    number     what is multiplied with the scale: an integer less its zero-point, an entry of a table, a small float
    value      fl32(fl32(number) s), of the k-quants fl32(fl32(number s) - m)

Two numbers are right where w / s is at a border between two codes, as quantize@1 says.
"""

from __future__ import annotations

import numpy as np
import torch

from rlkernel_core.definitions import quant, quantize
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.tensor import QuantTensor


def scaled(weight, spec):
    """The weight with the scales of its groups, and codes of 0."""
    shape = tuple(weight.shape)
    parts = {n: torch.zeros(size, dtype=kind) for n, (size, kind) in codec_of(spec).storage(spec, shape).items()}
    found = quantize.scales(weight, spec)
    if spec.double_quant:
        parts["nested_table"] = torch.from_numpy(quantize.dynamic_map().astype(np.float32))
    return QuantTensor(spec, shape, torch.float32, parts | found)


def steps(w):
    """s and m in fp32 [N, K]."""
    spec = w.spec
    if spec.element in quant.TABLES:
        a, count = w.parts["absmax"], w.shape[0] * w.shape[1]
        if spec.double_quant:
            table, b, offset = (w.parts[f"nested_{name}"] for name in ("table", "absmax", "offset"))
            a = table[a.long()] * b.repeat_interleave(256)[: a.numel()] + offset
        s = a.repeat_interleave(spec.group)[:count].view(w.shape)
    elif spec.format.endswith("_k"):
        return quant.k_quant(w)[1:]
    elif spec.scale_dtype in {"e8m0", "float8_e4m3fn"}:
        s = quant.small_scales(w).float()
    else:
        s = quant.spread(w, w.parts["scale"]).float()
    return s, torch.zeros_like(s)


def zero_points(w):
    """Of every element, in float64."""
    if "zero" not in w.parts:
        return 0.0
    return quant.spread(w, w.parts["zero"].float()).double().numpy()


def whole(spec):
    """Numbers are integers."""
    return spec.element.startswith("int")


def extreme_numbers(w):
    """The least and the largest number that is written, each [N, K] or one for all."""
    spec = w.spec
    if spec.format.endswith("_k"):
        return (-32.0, 31.0) if spec.symmetric else (0.0, 2.0 ** int(spec.element[-1]) - 1)
    if whole(spec):
        least, most = quantize.range_of(spec)
        zero = zero_points(w)
        return (np.float32(least) - np.float32(zero), np.float32(most) - np.float32(zero))
    levels = quantize.levels_of(spec.element)
    return levels[0], levels[-1]


def numbers(weight, w):
    """Least and largest of the numbers that are right, [N, K] each."""
    spec, (ratio, exact) = w.spec, quantize.ratios(weight, w)
    if whole(spec):
        zero = zero_points(w)
        if spec.float_zero:
            low, high = quantize.rounded(ratio + zero, 0, 0, 15)
            return np.float32(low) - np.float32(zero), np.float32(high) - np.float32(zero)
        ends = extreme_numbers(w)
        low, high = quantize.rounded(ratio, 0, *ends)
        if spec.format.endswith("_k"):
            return low, high
        one = quantize.to_integer(ratio, spec.rounding).clip(*ends)
        return np.where(exact, one, low), np.where(exact, one, high)
    levels = quantize.levels_of(spec.element)
    low, high = (levels[i] for i in quantize.nearest(ratio, spec.element))
    if spec.element in quant.TABLES:
        return low, high
    one = quantize.tied(ratio, spec)
    exact = exact | (spec.scale_dtype == "e8m0")
    return np.where(exact, one, low), np.where(exact, one, high)


def value(number, w):
    """fp32 [N, K] of numbers."""
    s, m = steps(w)
    return torch.from_numpy(np.broadcast_to(np.asarray(number, np.float32), w.shape).copy()) * s - m


def unknown(number, w):
    """How far a value may be from that of its number in float64: entries of the dynamic map are known to 2^-22."""
    if not w.spec.double_quant:
        return np.zeros(w.shape)
    b = w.parts["nested_absmax"].nan_to_num(0.0).double().repeat_interleave(256 * w.spec.group)
    return np.abs(number) * b[: w.shape[0] * w.shape[1]].view(w.shape).numpy() * 2.0**-21


def fake_quantize(weight, spec):
    """The least and the largest right value of every element, float64 [N, K] each; NaN where a group is lost."""
    w = scaled(weight, spec)
    found = [(value(n, w).double().numpy(), unknown(n, w)) for n in numbers(weight, w)]
    low = np.minimum(*(v - margin for v, margin in found))  # a scale may be negative
    return low, np.maximum(*(v + margin for v, margin in found))


def beyond(weight, spec):
    """Where a weight surely is outside of what the codes of its group stand for, and where it may be; bool [N, K]."""
    w, x = scaled(weight, spec), weight.detach().cpu().float().double().numpy()
    found = [(value(n, w).double().numpy(), unknown(n, w)) for n in extreme_numbers(w)]
    low, high = (how(*(v for v, _ in found)) for how in (np.minimum, np.maximum))
    margin = found[0][1]
    return (x < low - margin) | (x > high + margin), (x < low + margin) | (x > high - margin)
