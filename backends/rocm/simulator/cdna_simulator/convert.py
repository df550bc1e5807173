"""Conversions between number formats, and arithmetic on pairs: two float32 or two halves in one instruction.

Semantics: CDNA3 and CDNA4 ISA. fp8 is FNUZ on gfx942 and OCP elsewhere, in every instruction that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from cdna_simulator.assembly import Instruction
from cdna_simulator.formats import (
    BF8,
    F32,
    F64,
    FP4,
    FP8,
    I32,
    U32,
    Array,
    SmallFloat,
    encode,
    fma,
    from_bf16,
    from_f16,
    to_bf16,
    to_f16,
    values,
)
from cdna_simulator.integers import Compute
from cdna_simulator.lanes import sdwa
from cdna_simulator.operands import Reader, Step, bits32, f16, f32, signed, u32, unknown
from cdna_simulator.vector import Destination, largest, median, smallest, three, whole_number
from cdna_simulator.waves import Waves

FNUZ: Final = frozenset({"gfx940", "gfx941", "gfx942"})


def small_float(kind: str, arch: str) -> SmallFloat:
    """The format that `fp8`, `bf8` or `fp4` is on an architecture."""
    return FP4 if kind == "fp4" else (FP8 if kind == "fp8" else BF8)[arch in FNUZ]


# name -> (from float32 to bits) ; results that are halves clear the upper half
FROM_F32: Final[Mapping[str, Compute]] = {
    "v_cvt_i32_f32": whole_number(-(2**31), 2**31 - 1, I32),
    "v_cvt_u32_f32": whole_number(0, 2**32 - 1, U32),
    "v_cvt_f16_f32": to_f16,
}
# name -> (from bits to float32, or to bits of a half)
TO_F32: Final[Mapping[str, Compute]] = {
    "v_cvt_f32_i32": lambda x: np.asarray(x, U32).view(I32).astype(F32),
    "v_cvt_f32_u32": lambda x: np.asarray(x, U32).astype(F32),
    "v_cvt_f16_i16": lambda x: to_f16(np.asarray(x, U32).astype(np.uint16).view(np.int16).astype(F32)),
    "v_cvt_f16_u16": lambda x: to_f16(np.asarray(x, U32).astype(np.uint16).astype(F32)),
    "v_cvt_f32_f16": lambda x: x,
    "v_cvt_f32_bf16": lambda x: from_bf16(np.asarray(x, U32)),
    **{f"v_cvt_f32_ubyte{i}": lambda x, i=i: (x >> U32(8 * i) & U32(255)).astype(F32) for i in range(4)},
}
# Two float32 -> a word of two halves.
PACK: Final[Mapping[str, Compute]] = {
    "v_cvt_pk_bf16_f32": to_bf16,
    "v_cvt_pk_f16_f32": to_f16,
}
PAIRS: Final[Mapping[str, Compute]] = {"v_pk_add_f32": np.add, "v_pk_mul_f32": np.multiply, "v_pk_fma_f32": fma}
HALVES: Final[Mapping[str, Compute]] = {
    "v_pk_add_f16": np.add, "v_pk_mul_f16": np.multiply, "v_pk_max_f16": largest, "v_pk_min_f16": smallest,
    "v_pk_maximum3_f16": three(np.maximum), "v_pk_minimum3_f16": three(np.minimum),
}  # fmt: skip
SHORTS: Final[Mapping[str, Compute]] = {
    "v_pk_add_u16": np.add, "v_pk_sub_u16": np.subtract, "v_pk_min_u16": np.minimum, "v_pk_max_u16": np.maximum,
    "v_pk_lshrrev_b16": lambda a, b: b >> (a & I32(15)), "v_pk_lshlrev_b16": lambda a, b: b << (a & I32(15)),
}  # fmt: skip
HALF: Final[Mapping[str, Compute]] = {
    "v_add_f16": np.add, "v_sub_f16": np.subtract, "v_mul_f16": np.multiply,
    "v_max_f16": largest, "v_min_f16": smallest,
    "v_max3_f16": three(largest), "v_min3_f16": three(smallest), "v_med3_f16": median,
}  # fmt: skip
_SOURCES: Final = ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")


def _pair(ins: Instruction) -> Step:
    """Two float32 operations; op_sel and op_sel_hi name the register of each source, neg_lo and neg_hi its sign."""
    n = len(ins.operands) - 1
    chosen = {m: ins.bits(m, n, int(m == "op_sel_hi")) for m in _SOURCES}

    def source(k: int, which: str, sign: str) -> Reader:
        op = ins.operands[k + 1]
        read = f32(op, chosen[which][k] if op.count > 1 else 0)
        return (lambda w: -read(w)) if chosen[sign][k] else read

    low = [source(k, "op_sel", "neg_lo") for k in range(n)]
    high = [source(k, "op_sel_hi", "neg_hi") for k in range(n)]
    to, compute = ins.operands[0].index, PAIRS[ins.name]

    def step(w: Waves) -> None:
        x = np.asarray(compute(*[r(w) for r in low]), F32)
        y = np.asarray(compute(*[r(w) for r in high]), F32)
        w.put(to, x.view(U32))
        w.put(to + 1, y.view(U32))

    return step


def _pair_move(ins: Instruction) -> Step:
    """v_pk_mov_b32: the low word from the first source, the high word from the second."""
    to, a, b = ins.operands
    sel = ins.bits("op_sel", 2, 0)
    reads = [u32(op, s if op.count > 1 else 0) for op, s in ((a, sel[0]), (b, sel[1]))]

    def step(w: Waves) -> None:
        x, y = (np.array(r(w)) for r in reads)
        w.put(to.index, x)
        w.put(to.index + 1, y)

    return step


def _halves(ins: Instruction) -> Step:
    n = len(ins.operands) - 1
    chosen = {m: ins.bits(m, n, int(m == "op_sel_hi")) for m in _SOURCES}
    reads, compute = [u32(o) for o in ins.operands[1:]], HALVES[ins.name]

    def part(w: Waves, which: str, sign: str) -> Array:
        xs = [
            from_f16(np.asarray(r(w)) >> U32(16 * s)).astype(np.float16)
            for r, s in zip(reads, chosen[which], strict=True)
        ]
        return np.asarray(compute(*[-x if m else x for x, m in zip(xs, chosen[sign], strict=True)])).view(np.uint16)

    def step(w: Waves) -> None:
        low, high = part(w, "op_sel", "neg_lo"), part(w, "op_sel_hi", "neg_hi")
        w.put(ins.operands[0].index, low.astype(U32) | high.astype(U32) << U32(16))

    return step


def _short_pair(ins: Instruction) -> Step:
    """Two operations on 16 bits without sign; with clamp they stop at the ends of their range."""
    compute, reads, to = SHORTS[ins.name], [u32(o) for o in ins.operands[1:]], ins.operands[0].index
    if set(ins.modifiers) - {"clamp", "op_sel", "op_sel_hi"}:
        raise unknown(ins)
    halves = ins.bits("op_sel", 2, 0), ins.bits("op_sel_hi", 2, 1)
    clamp = "clamp" in ins.modifiers

    def part(w: Waves, chosen: list[int]) -> Array:
        xs = [(np.asarray(r(w)) >> U32(16 * s) & U32(0xFFFF)).astype(I32) for r, s in zip(reads, chosen, strict=True)]
        out = np.clip(compute(*xs), 0, 0xFFFF) if clamp else compute(*xs) & I32(0xFFFF)
        return out.astype(U32)

    return lambda w: w.put(to, part(w, halves[0]) | part(w, halves[1]) << U32(16))


def _half_arithmetic(ins: Instruction) -> Step:
    """Float16 in the low half: computed in float32, which holds every sum and product, and rounded."""
    compute, to = HALF[ins.name], ins.operands[0].index
    if ins.modifiers or ins.encoding in {"dpp", "sdwa"}:
        raise unknown(ins)
    reads = [f16(o) for o in ins.operands[1:]]
    return lambda w: w.put(to, to_f16(np.asarray(compute(*[r(w) for r in reads]), F32)))


def _bit_table(ins: Instruction) -> Step:
    """v_bitop3: any function of three bits, as a table of eight."""
    table, reads = ins.number("bitop3"), [u32(o) for o in ins.operands[1:]]
    half = ins.name.endswith("16")

    def step(w: Waves) -> None:
        a, b, c = (r(w) for r in reads)
        out = U32(0)
        for k in range(8):
            if table >> k & 1:
                out = out | (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        w.put(ins.operands[0].index, out & U32(0xFFFF) if half else out)

    return step


def _mixed(ins: Instruction) -> Step:
    """v_fma_mix: a multiply-add whose sources are float32 or, by op_sel_hi, one half of a word.

    v_fma_mixlo_f16 and v_fma_mixhi_f16 round it to a half and write that half of the destination alone.
    """
    wide, upper = ins.bits("op_sel_hi", 3, 0), ins.bits("op_sel", 3, 0)

    def source(k: int) -> Reader:
        op = ins.operands[k + 1]
        return f16(op, 16 * upper[k]) if wide[k] else f32(op)

    reads, to = [source(k) for k in range(3)], ins.operands[0].index
    if ins.name == "v_fma_mix_f32":
        return lambda w: w.put(to, fma(*[r(w) for r in reads]).view(U32))
    high = ins.name == "v_fma_mixhi_f16"
    return lambda w: w.put_half(to, to_f16(fma(*[r(w) for r in reads])), high=high)


def _to_small(ins: Instruction, kind: str) -> Step:
    """v_cvt_pk_fp8_f32: two float32 into the low or the high half of a word."""
    to, a, b = ins.operands[0].index, f32(ins.operands[1]), f32(ins.operands[2])
    high = ins.bits("op_sel", 3, 0)[2] == 1

    def step(w: Waves) -> None:
        form = small_float(kind, w.arch)
        low8, high8 = (encode(np.asarray(r(w)), form, saturate=w.saturate) for r in (a, b))
        w.put_half(to, low8 | high8 << U32(8), high=high)

    return step


def _from_small(ins: Instruction, kind: str, *, pair: bool) -> Step:
    """v_cvt_f32_fp8 and v_cvt_pk_f32_fp8: a byte, or the two of a half, named by SDWA or op_sel."""
    read = u32(ins.operands[1])
    if ins.encoding == "sdwa":
        read = sdwa(ins, 0, read)
    sel = ins.bits("op_sel", 2, 0)
    shift = U32(16 * sel[0] if pair else 8 * (2 * sel[1] + sel[0]))
    to = ins.operands[0].index

    def step(w: Waves) -> None:
        table, x = values(small_float(kind, w.arch)), np.asarray(read(w)) >> shift
        w.put(to, table[x & U32(255)].view(U32))
        if pair:
            w.put(to + 1, table[x >> U32(8) & U32(255)].view(U32))

    return step


def _scaled_small(ins: Instruction, to_kind: str, from_kind: str) -> Step:
    """v_cvt_scalef32_pk_…: a pair between float32 (or halves) and a small format, times a power of two."""
    ops, sel = ins.operands, ins.bits("op_sel", 4, 0)
    if to_kind in {"fp8", "bf8", "fp4"} and from_kind == "f32":
        a, b, scale = (f32(o) for o in ops[1:4])
        to = ops[0].index
        bits = small_float(to_kind, "gfx950").bits
        width = 2 * bits
        at = (sel[3] * 16) if bits == 8 else 8 * (sel[2] + 2 * sel[3])

        def pack(w: Waves) -> None:
            form, s = small_float(to_kind, w.arch), _power(scale(w))
            codes = [encode((np.asarray(r(w), F64) / s).astype(F32), form, saturate=w.saturate) for r in (a, b)]
            pair = (codes[0] | codes[1] << U32(bits)) << U32(at)
            w.put(to, (w.v[to] & ~U32(((1 << width) - 1) << at)) | pair)

        return pack
    if from_kind in {"fp8", "bf8", "fp4"} and to_kind in {"f32", "bf16", "f16"}:
        read, scale, to = u32(ops[1]), f32(ops[2]), ops[0].index
        bits = small_float(from_kind, "gfx950").bits
        at = 16 * sel[0] if bits == 8 else 8 * (sel[0] + 2 * sel[1])

        def unpack_(w: Waves) -> None:
            table, x, s = values(small_float(from_kind, w.arch)), np.asarray(read(w)) >> U32(at), _power(scale(w))
            mask = U32((1 << bits) - 1)
            low, high = ((table[x >> U32(k) & mask] * s).astype(F32) for k in (0, bits))
            if to_kind == "f32":
                w.put(to, low.view(U32))
                w.put(to + 1, high.view(U32))
            else:
                bits_of = to_bf16 if to_kind == "bf16" else to_f16
                w.put(to, bits_of(low) | bits_of(high) << U32(16))

        return unpack_
    raise unknown(ins)


def _power(scale: Any) -> Any:
    """The power of two that a scale's exponent names."""
    exponent = ((np.asarray(scale).view(U32) >> U32(23)) & U32(255)).astype(np.int64) - 127
    return np.ldexp(1.0, exponent)


def bind(ins: Instruction) -> Step | None:
    """The function that executes an instruction of this module; None for any other."""
    name = ins.name
    if name in FROM_F32 or name in TO_F32:
        destination, to_bits = Destination(ins), name in FROM_F32
        compute = (FROM_F32 if to_bits else TO_F32)[name]
        read = (f32 if to_bits else f16 if name == "v_cvt_f32_f16" else u32)(ins.operands[1])
        if ins.encoding == "sdwa":
            if to_bits and ins.modifiers.get("src0_sel", "DWORD") != "DWORD":
                raise unknown(ins)
            if name == "v_cvt_f32_f16":
                part = sdwa(ins, 0, bits32(ins.operands[1]))
                read = signed(ins.operands[1], lambda w: from_f16(np.asarray(part(w))))
            elif not to_bits:
                read = sdwa(ins, 0, read)
        elif ins.encoding == "dpp" or "op_sel" in ins.modifiers:
            raise unknown(ins)
        return lambda w: destination.put(w, compute(read(w)))
    if name in PACK:
        a, b, bits = f32(ins.operands[1]), f32(ins.operands[2]), PACK[name]
        to = ins.operands[0].index
        return lambda w: w.put(to, bits(np.asarray(a(w))) | bits(np.asarray(b(w))) << U32(16))
    for table, binder in ((PAIRS, _pair), (HALVES, _halves), (SHORTS, _short_pair), (HALF, _half_arithmetic)):
        if name in table:
            return binder(ins)
    if name in {"v_bitop3_b32", "v_bitop3_b16"}:
        return _bit_table(ins)
    if name == "v_pk_mov_b32":
        return _pair_move(ins)
    if name in {"v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"}:
        return _mixed(ins)
    if found := re.fullmatch(r"v_cvt_pk_(fp8|bf8)_f32", name):
        return _to_small(ins, found[1])
    if found := re.fullmatch(r"v_cvt_(pk_)?f32_(fp8|bf8)", name):
        return _from_small(ins, found[2], pair=bool(found[1]))
    if found := re.fullmatch(r"v_cvt_scalef32_pk_(\w+?)_(f32|bf16|f16|fp8|bf8|fp4)", name):
        return _scaled_small(ins, found[1], found[2])
    return None
