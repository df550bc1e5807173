"""Scales that a quantizer finds by other rules than the largest magnitude over the largest code: numpy, block by block.

Powers of two (OCP Microscaling Formats 1.0, section 6.3, and what libraries do instead), NVFP4, the formats of
llama.cpp. Weights are finite fp32; every function returns part name -> tensor.
"""

from __future__ import annotations

import numpy as np
import torch

from rlkernel_core.definitions.quant import SUB_BLOCK

F = np.float32
TOP = {"e2m1": 6.0, "e4m3fn": 448.0, "e5m2": 57344.0}
STORED_BITS = {"e2m1": 1, "e4m3fn": 3, "e5m2": 2}  # of the mantissa


def blocks(x, size):
    """[N, K] -> [N, blocks, size], a short block filled with zeros."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    return x.reshape(x.shape[0], -1, size)


def signed_most(x, size):
    """The first value of the largest magnitude of every block."""
    b = blocks(x, size)
    return np.take_along_axis(b, np.abs(b).argmax(-1)[..., None], -1)[..., 0]


def powers_of_two(x, spec):
    """E of every group: the exponent of its largest magnitude less that of the element's largest value."""
    most = np.abs(blocks(x, spec.group)).max(-1).astype(np.float64)
    top = TOP[spec.element]
    if spec.scale_rule == "even":  # the largest magnitude at the precision of the element
        fraction, exponent = np.frexp(most)
        unit = 2.0 ** (STORED_BITS[spec.element] + 1)
        most = np.ldexp(np.floor(fraction * unit + 0.5) / unit, exponent)
    scale = np.full(most.shape, -127.0)
    some = most > 0
    if spec.scale_rule == "rceil":  # the first power under which it is no more than the top
        lowest = np.floor(np.log2(most[some] / top)) - 1
        scale[some] = np.select([most[some] <= np.ldexp(top, (lowest + i).astype(int)) for i in range(3)],
                                [lowest + i for i in range(3)], lowest + 3)  # fmt: skip
    else:
        scale[some] = np.frexp(most[some])[1] - np.frexp(top)[1]
    return {"scale": torch.from_numpy((scale.clip(-127, 127) + 127).astype(np.uint8))}


def nvfp4(x, spec):
    """The scale of all, then those of blocks in e4m3."""
    most = np.abs(blocks(x, spec.group)).max(-1)
    whole = most.max() / F(6 * 448)
    wide = whole * F(6)
    ratio = most / wide if wide > 0 else np.zeros_like(most)
    scale = torch.from_numpy(ratio.clip(max=F(448))).to(torch.float8_e4m3fn)
    return {"scale": scale, "global_scale": torch.tensor([whole])}


def half(x):
    """fp16, and what it stands for in fp32."""
    with np.errstate(over="ignore"):
        stored = torch.from_numpy(np.ascontiguousarray(x)).half()
    stored = torch.where(stored.isfinite(), stored, torch.nan)
    return stored, stored.float().numpy()


def before_rounding(x, spec):
    """d of llama.cpp's q4_0 and q8_0, by which codes are made before it is stored as fp16."""
    if spec.scale_rule.startswith("signed_max"):
        return signed_most(x, spec.group) / F(-8)
    return np.abs(blocks(x, spec.group)).max(-1) / F(127)


def multiples(x, unit, times):
    """rint(x / unit), where `times` blocks share a unit; 0 where that is 0 or no number."""
    wide = np.repeat(unit, times, 1)[:, : x.shape[1]]
    usable = np.isfinite(wide) & (wide != 0)
    return np.where(usable, np.rint(x / np.where(usable, wide, F(1))), F(0))


def k_quant(x, spec):
    """d, dmin and the integers of sub-blocks."""
    sub = SUB_BLOCK[spec.element]
    many = 256 // sub
    if spec.element == "int6":
        step = signed_most(x, sub) / F(-32)
        d, wide = half(signed_most(step, many) / F(-128))
        return {"d": d, "scale": torch.from_numpy(multiples(step, wide, many).clip(-128, 127).astype(np.int8))}
    b = blocks(x, sub)
    low, high = np.abs(np.minimum(b.min(-1), F(0))), np.maximum(b.max(-1), F(0))  # no unit of -0
    step = (high + low) / F({"int4": 15, "int5": 31}[spec.element])
    found, units = {}, {unit: half(blocks(exact, many).max(-1) / F(63)) for unit, exact in (("d", step), ("dmin", low))}
    gone = ~np.isfinite(units["d"][1]) | ~np.isfinite(units["dmin"][1])  # neither without the other
    for unit, name, exact in (("d", "scale", step), ("dmin", "min", low)):
        found[unit] = units[unit][0].masked_fill(torch.from_numpy(gone), torch.nan)
        wide = np.where(gone, F(np.nan), units[unit][1])
        found[name] = torch.from_numpy(multiples(exact, wide, many).clip(0, 63).astype(np.uint8))
    return found


def columns_in_order(x):
    """Columns by their largest magnitude, descending, the first of equals first."""
    most = np.abs(x).max(0)
    return sorted(range(x.shape[1]), key=lambda k: (-most[k], k))
