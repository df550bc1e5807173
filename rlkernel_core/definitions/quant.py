"""What packed weights mean, written from the formats' own definitions and apart from the library.

The 4-bit readers follow the storage of bitsandbytes (NF4), AutoAWQ (asymmetric) and compressed-tensors
("pack-quantized", symmetric), and were compared with those packages bit for bit; 8-bit floats are read field by field.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

# Magnitudes over 12, in the order of their bit patterns.
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12
# OCP Microscaling Formats 1.0, table 5.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def nibbles_of_words(words: Tensor) -> Tensor:  # int32 [...] -> [..., 8]: nibble j is bits 4j..4j+3
    return (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15


def compressed_tensors(weight_packed: Tensor, weight_scale: Tensor, shape: tuple[int, int], g: int) -> Tensor:
    """int32 [N, K / 8], nibble j of word i is q[8i + j] + 8."""
    q = nibbles_of_words(weight_packed).reshape(shape[0], -1)[:, : shape[1]] - 8
    return q.float() * weight_scale.float().repeat_interleave(g, 1)[:, : shape[1]]


AWQ_POSITION = [0, 4, 1, 5, 2, 6, 3, 7]  # logical column c of a word sits in this nibble


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, g: int) -> Tensor:
    """int32 [K, N / 8] packed along N, zeros likewise and stored as they are; -> [N, K]."""
    q = nibbles_of_words(qweight)[..., AWQ_POSITION].flatten(1)
    z = nibbles_of_words(qzeros)[..., AWQ_POSITION].flatten(1)
    return ((q - z.repeat_interleave(g, 0)).float() * scales.float().repeat_interleave(g, 0)).t()


def to_awq(codes: Tensor) -> Tensor:  # [R, N] of 0..15 -> int32 [R, N / 8]
    """Pack columns in AWQ's order."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for column, nibble in enumerate(AWQ_POSITION):
        words |= codes[:, column::8].long() << (4 * nibble)
    return words.where(words < 2**31, words - 2**32).int()


TABLES = {"nf4": NF4, "fp4": FP4}


def bitsandbytes(
    packed: Tensor,
    absmax: Tensor,
    shape: tuple[int, int],
    nested: tuple[Tensor, Tensor, Tensor] | None = None,
    table: Tensor = NF4,
    block: int = 64,
) -> Tensor:
    """Blocks of the flat weight, high nibble first; absmax perhaps 8-bit codes in blocks of 256."""
    if nested is not None:
        code, nested_absmax, offset = nested
        absmax = code[absmax.long()] * nested_absmax.repeat_interleave(256)[: absmax.numel()]
        absmax = absmax + offset
    n = shape[0] * shape[1]
    index = torch.stack([packed >> 4, packed & 15], 1).reshape(-1)[:n].long()
    return (table[index] * absmax.repeat_interleave(block)[:n]).reshape(shape)


def scaled_blocks(codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """Value of every code times the scale of its block."""
    spread = scale.repeat_interleave(rows, 0)[: codes.shape[0]].repeat_interleave(columns, 1)[:, : codes.shape[1]]
    return codes * spread.float()


def float8(byte: int, exponent_bits: int, bias: int, *, fnuz: bool) -> float:
    """Value of one byte: sign, exponent and mantissa fields as OFP8 and fnuz define them."""
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if byte & 0x80 else 1.0
    exponent = (byte & 0x7F) >> mantissa_bits
    mantissa = byte & ((1 << mantissa_bits) - 1)
    top = (1 << exponent_bits) - 1
    if fnuz:
        if byte == 0x80:
            return float("nan")
    elif exponent_bits == 4 and byte & 0x7F == 0x7F:
        return float("nan")
    elif exponent_bits == 5 and exponent == top:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


FLOAT8 = {"e4m3fn": (4, 7, False), "e5m2": (5, 15, False), "e4m3fnuz": (4, 8, True), "e5m2fnuz": (5, 16, True)}


@lru_cache
def float8_table(element: str) -> Tensor:  # -> [256] fp32, by byte
    bits, bias, fnuz = FLOAT8[element]
    return torch.tensor([float8(byte, bits, bias, fnuz=fnuz) for byte in range(256)])


def integers(w) -> Tensor:  # -> [N, K] q - z
    """Codes of an integer format less their zero-points; low nibble first."""
    codes = w.parts["codes"]
    if w.spec.element == "int8":
        return codes.int()
    q = nibbles(codes, w.shape[1])
    if w.spec.symmetric:
        return q - 8
    return q.float() - spread(w, w.parts["zero"].float())


def nibbles(packed: Tensor, count: int) -> Tensor:  # [N, ceil(K / 2)] -> [N, K], low nibble first
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)[:, :count].int()


def spread(w, grid: Tensor) -> Tensor:  # [row groups, groups] -> [N, K]
    """The entry of every element's group."""
    rows, columns = w.spec.rows or w.shape[0], w.spec.group or w.shape[1]
    of_rows = grid.repeat_interleave(rows, 0)[: w.shape[0]]
    if w.spec.act_order:
        return of_rows[:, w.parts["g_idx"].long()]
    return of_rows.repeat_interleave(columns, 1)[:, : w.shape[1]]


def each(x: Tensor, times: int, count: int) -> Tensor:
    """Every column `times` times."""
    return x.repeat_interleave(times, 1)[:, :count]


SUB_BLOCK = {"int4": 32, "int5": 32, "int6": 16}


def k_quant(w) -> tuple[Tensor, Tensor, Tensor]:  # codes, step, minimum; [N, K]
    """Fields of a super-block of 256 columns, as ggml-quants.c names them."""
    n, k, sub = *w.shape, SUB_BLOCK[w.spec.element]
    q, p = nibbles(w.parts["codes"], k), w.parts
    if w.spec.element == "int5":
        q = q + 16 * ((p["high"].unsqueeze(-1) >> torch.arange(8)) & 1).reshape(n, -1)[:, :k]
    if w.spec.element == "int6":
        q = q + 16 * ((p["high"].unsqueeze(-1) >> torch.arange(0, 8, 2)) & 3).reshape(n, -1)[:, :k]
    step = each(p["d"].float(), 256, k) * each(p["scale"].float(), sub, k)
    if w.spec.element == "int6":
        return q - 32, step, torch.zeros_like(step)
    return q, step, each(p["dmin"].float(), 256, k) * each(p["min"].float(), sub, k)


def small_floats(w) -> Tensor:  # -> [N, K] fp32
    """Values of e2m1 or 8-bit float codes before their scales."""
    if w.spec.element == "e2m1":
        return E2M1[nibbles(w.parts["codes"], w.shape[1]).long()]
    return float8_table(w.spec.element)[w.parts["codes"].view(torch.uint8).long()]


def small_scales(w) -> Tensor:  # -> [N, K] fp64
    """Powers of two of mxfp4 and mxfp8, fp32 products of nvfp4."""
    if w.spec.scale_dtype == "e8m0":
        byte = w.parts["scale"].double()
        scale = torch.where(byte == 255, torch.nan, torch.exp2(byte - 127))
    else:
        scale = (float8_table("e4m3fn")[w.parts["scale"].view(torch.uint8).long()] * w.parts["global_scale"]).double()
    return each(scale, w.spec.group, w.shape[1])


def decode(w) -> Tensor:  # -> [N, K] fp32, on the CPU
    """What a canonical weight stands for, in fp32."""
    w = w.to("cpu")
    if w.spec.element in TABLES:
        names = ("nested_table", "nested_absmax", "nested_offset")
        nested = tuple(w.parts[n] for n in names) if w.spec.double_quant else None
        table, block = TABLES[w.spec.element], w.spec.group
        return bitsandbytes(w.parts["codes"], w.parts["absmax"], w.shape, nested, table, block)
    if "d" in w.parts:
        codes, step, least = k_quant(w)
        return codes.float() * step - least if "dmin" in w.parts else codes.float() * step
    if w.spec.scale_dtype in {"e8m0", "float8_e4m3fn"}:
        return (small_floats(w).double() * small_scales(w)).float()
    if w.spec.element in FLOAT8:
        value = float8_table(w.spec.element)[w.parts["codes"].view(torch.uint8).long()]
    else:
        value = integers(w).float()
    return value * spread(w, w.parts["scale"]).float()
