"""Vector instructions that make or read masks of lanes: comparisons, selection, sums with a carry.

Semantics: CDNA3 ISA, chapter "Vector ALU operations". A mask is a pair of scalar registers; inactive lanes are 0 in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from cdna_simulator.assembly import Instruction, Operand
from cdna_simulator.formats import F32, F64, I32, I64, U16, U32, U64, Array, from_f16
from cdna_simulator.integers import Compute
from cdna_simulator.lanes import dpp, sdwa
from cdna_simulator.operands import Reader, Step, bits32, broadcast, f16, f32, f64, lane_mask, signed, u32, u64, unknown
from cdna_simulator.waves import EXEC, VCC, Waves

_VCC: Final = Operand("s", VCC, 2)


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


FLOAT_TESTS: Final[Mapping[str, Compute]] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~_unordered(a, b),
    "u": _unordered,
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
}
INTEGER_TESTS: Final[Mapping[str, Compute]] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ne": np.not_equal, "ge": np.greater_equal,
}  # fmt: skip


# float -> (an integer of its size, bits of the mantissa, the largest exponent)
_PARTS: Final = {np.float16: (U16, 10, 31), F32: (U32, 23, 255), F64: (U64, 52, 2047)}


def _class(a: Any, wanted: Any) -> Array:
    """v_cmp_class: whether a float is one of the ten kinds that bits 0 to 9 name."""
    a = np.asarray(a)
    word: Any
    word, mantissa, top = _PARTS[a.dtype.type]
    bits = a.view(word)
    minus = (bits >> word(8 * a.itemsize - 1)).astype(bool)
    exponent, rest = (bits >> word(mantissa)) & word(top), bits & word((1 << mantissa) - 1)
    nan = (exponent == top) & (rest != 0)
    quiet = (rest >> word(mantissa - 1)).astype(bool)
    # magnitude -> bit for minus, bit for plus
    kinds = [
        (nan & ~quiet, 0, 0),
        (nan & quiet, 1, 1),
        ((exponent == top) & (rest == 0), 2, 9),
        ((exponent > 0) & (exponent < top), 3, 8),
        ((exponent == 0) & (rest != 0), 4, 7),
        ((exponent == 0) & (rest == 0), 5, 6),
    ]
    found = np.zeros(np.broadcast_shapes(bits.shape, np.shape(wanted)), bool)
    for is_kind, below, above in kinds:
        bit = np.where(minus, U32(below), U32(above))
        found |= is_kind & ((wanted >> bit) & U32(1)).astype(bool)
    return found


def _half_of_sdwa(ins: Instruction, source: int) -> Reader:
    """A float16 that SDWA picks out of a word, as float32."""
    op = ins.operands[1 + source]
    part = sdwa(ins, source, bits32(op))
    return signed(op, lambda w: from_f16(np.asarray(part(w))))


# type of the operands -> (how they are read, the integers that are compared)
_KINDS: Final[Mapping[str, tuple[Callable[[Operand], Reader], Any]]] = {
    "f16": (f16, None), "f32": (f32, None), "f64": (f64, None), "i64": (u64, I64), "u64": (u64, U64),
    "i32": (u32, I32), "u32": (u32, U32), "i16": (u32, np.int16), "u16": (u32, np.uint16),
}  # fmt: skip


def _integers(test: Compute, kind: Any) -> Compute:
    """A test of words, or of their low halves, as integers of a type."""
    return lambda x, y: test(np.asarray(x).astype(kind), np.asarray(y).astype(kind))


def _comparison(ins: Instruction, test: str, kind: str) -> Step:
    to = ins.operands[0].index
    read, integer = _KINDS[kind]
    reads = [read(op) for op in ins.operands[1:3]]
    if test == "class":
        reads[1], compute = u32(ins.operands[2]), _class
        if kind == "f16":
            half = reads[0]
            reads[0] = lambda w: np.asarray(half(w)).astype(np.float16)
    else:
        compute = _integers(INTEGER_TESTS[test], integer) if integer else FLOAT_TESTS[test]
    if ins.encoding == "sdwa":
        if kind in {"f32", "f64"} or test == "class":
            raise unknown(ins)
        reads = [_half_of_sdwa(ins, i) if kind == "f16" else sdwa(ins, i, r) for i, r in enumerate(reads)]
    elif ins.modifiers:
        raise unknown(ins)
    first, second = reads
    writes_exec = ins.name.startswith("v_cmpx")

    def step(w: Waves) -> None:
        found = compute(first(w), second(w))
        w.put_lanes(to, found)
        if writes_exec:
            w.put_lanes(EXEC, found)

    return step


def _select(ins: Instruction) -> Step:
    """v_cndmask: the second operand where the mask is set, else the first."""
    ops = ins.operands
    mask = lane_mask(ops[3] if len(ops) > 3 else _VCC)
    floats = [f32(o) for o in ops[1:3]]
    reads: list[Reader] = [lambda w, r=r: np.asarray(r(w)).view(U32) for r in floats]  # type: ignore[misc]
    if ins.encoding == "sdwa":
        reads = [sdwa(ins, i, r) for i, r in enumerate(reads)]
    if ins.encoding == "dpp":
        first = dpp(ins, broadcast(reads[0]))

        def moved(w: Waves) -> None:
            value, enable = first(w)
            w.put(ops[0].index, np.where(mask(w), reads[1](w), value), enable)

        return moved
    return lambda w: w.put(ops[0].index, np.where(mask(w), reads[1](w), reads[0](w)))


# name -> (sign of each operand and of the carry in, or None without one)
SUMS: Final[Mapping[str, tuple[int, int, int | None]]] = {
    "v_add_co_u32": (1, 1, None),
    "v_sub_co_u32": (1, -1, None),
    "v_subrev_co_u32": (-1, 1, None),
    "v_addc_co_u32": (1, 1, 1),
    "v_subb_co_u32": (1, -1, -1),
    "v_subbrev_co_u32": (-1, 1, -1),
}


def _sum(ins: Instruction) -> Step:
    sign_a, sign_b, carry = SUMS[ins.name]
    to, out, *ops = ins.operands
    a, b = u32(ops[0]), u32(ops[1])
    carried = None if carry is None else lane_mask(ops[2])
    if ins.encoding == "sdwa" and ins.modifiers.get("dst_sel") == "DWORD":
        a, b = (sdwa(ins, i, read, first=2) for i, read in enumerate((a, b)))
    elif ins.encoding in {"dpp", "sdwa"} or ins.modifiers:
        raise unknown(ins)

    def step(w: Waves) -> None:
        total = np.asarray(a(w)).astype(I64) * sign_a + np.asarray(b(w)).astype(I64) * sign_b
        if carried is not None:
            total = total + carry * carried(w)
        w.put(to.index, (total & 0xFFFFFFFF).astype(U32))
        w.put_lanes(out.index, (total < 0) | (total > 0xFFFFFFFF))

    return step


def _multiply_wide(ins: Instruction) -> Step:
    """v_mad_u64_u32 and v_mad_i64_i32: a 64-bit product and sum; the carry out is written."""
    to, out, *ops = ins.operands
    signed = ins.name == "v_mad_i64_i32"
    a, b, c = u32(ops[0]), u32(ops[1]), u64(ops[2])

    def step(w: Waves) -> None:
        x, y = np.asarray(a(w)), np.asarray(b(w))
        plus = np.asarray(c(w))
        if signed:
            product = x.view(I32).astype(I64) * y.view(I32).astype(I64)
            total = (product + plus.view(I64)).view(U64)
            beyond = (product < 0) ^ (plus.view(I64) < 0) ^ (total < plus)  # bit 64 of the sum of sign-extended words
        else:
            total = x.astype(U64) * y.astype(U64) + plus
            beyond = total < plus
        w.put64(to.index, np.broadcast_to(total, (w.W, 64)))
        w.put_lanes(out.index, beyond)

    return step


_NAMED: Final[Mapping[str, Callable[[Instruction], Step]]] = {
    "v_cndmask_b32": _select,
    "v_mad_u64_u32": _multiply_wide,
    "v_mad_i64_i32": _multiply_wide,
    **dict.fromkeys(SUMS, _sum),
}


def bind(ins: Instruction) -> Step | None:
    """The function that executes an instruction of this module; None for any other."""
    if ins.name in _NAMED:
        return _NAMED[ins.name](ins)
    found = re.fullmatch(r"v_cmpx?_(\w+)_(f(?:16|32|64)|[iu](?:16|32|64))", ins.name)
    known = {"class": ("f16", "f32", "f64"), **dict.fromkeys(FLOAT_TESTS, ("f32", "f16", "f64"))}
    if found and (found[2] in known.get(found[1], ()) or (found[2][0] != "f" and found[1] in INTEGER_TESTS)):
        return _comparison(ins, found[1], found[2])
    return None
