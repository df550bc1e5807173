"""Scalar instructions, as data: integer arithmetic on one value a wave, the condition bit, and EXEC.

Semantics: CDNA3 ISA, chapter "Scalar ALU operations". Values are [W, 1].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from cdna_simulator import integers as ints
from cdna_simulator.assembly import Instruction, Operand
from cdna_simulator.formats import I32, I64, U32, U64
from cdna_simulator.integers import Compute
from cdna_simulator.operands import Step, u32, u64, unknown
from cdna_simulator.waves import EXEC, Waves

Entry = tuple[Compute, bool]  # the function, and whether the condition bit becomes "the result is not zero"
_MAX: Final = U64(0xFFFFFFFF)
# s_<name>_b32 and s_<name>_b64
_LOGIC: Final[Mapping[str, Entry]] = {
    "mov": (lambda a: a, False),
    "not": (np.invert, True),
    "and": (np.bitwise_and, True),
    "or": (np.bitwise_or, True),
    "xor": (np.bitwise_xor, True),
    "andn2": (lambda a, b: a & ~b, True),
    "orn2": (lambda a, b: a | ~b, True),
    "nor": (lambda a, b: ~(a | b), True),
    "nand": (lambda a, b: ~(a & b), True),
    "xnor": (lambda a, b: ~(a ^ b), True),
    "lshl": (ints.shift_left, True),
    "lshr": (ints.shift_right, True),
}


def _packed_field(b: Any) -> tuple[Any, Any]:
    """Offset and width of a bit field, as s_bfe packs them."""
    return b & U32(31), (b >> U32(16)) & U32(127)


# 32 bits in, 32 out
PLAIN: Final[Mapping[str, Entry]] = {
    **{f"s_{name}_b32": entry for name, entry in _LOGIC.items()},
    "s_ashr_i32": (ints.shift_right_signed, True),
    "s_bfe_u32": (lambda a, b: ints.field(a, *_packed_field(b)), True),
    "s_bfe_i32": (lambda a, b: ints.signed_field(a, *_packed_field(b)), True),
    "s_bfm_b32": (lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)), False),
    "s_mul_i32": (np.multiply, False),
    "s_mul_hi_u32": (ints.high_product, False),
    "s_mul_hi_i32": (ints.high_product_signed, False),
    "s_brev_b32": (ints.bit_reversed, False),
    "s_ff1_i32_b32": (ints.first_set, False),
    "s_flbit_i32_b32": (ints.leading_zeros, False),
    "s_flbit_i32": (ints.leading_signs, False),
    "s_bcnt1_i32_b32": (ints.count, True),
    "s_sext_i32_i8": (lambda a: a.astype(np.int8).astype(I32).view(U32), False),
    "s_sext_i32_i16": (lambda a: a.astype(np.int16).astype(I32).view(U32), False),
    "s_abs_i32": (lambda a: np.abs(ints.as_signed(a)).view(U32), True),
    "s_pack_ll_b32_b16": (lambda a, b: (a & U32(0xFFFF)) | (b << U32(16)), False),
    "s_pack_lh_b32_b16": (lambda a, b: (a & U32(0xFFFF)) | (b & U32(0xFFFF0000)), False),
    "s_pack_hh_b32_b16": (lambda a, b: (a >> U32(16)) | (b & U32(0xFFFF0000)), False),
}
# 64 bits in and out; shifts take 32 bits as their second operand
WIDE: Final[Mapping[str, Entry]] = {
    **{f"s_{name}_b64": entry for name, entry in _LOGIC.items()},
    "s_ashr_i64": (ints.shift_right_signed, True),
    "s_bfe_i64": (lambda a, b: ints.signed_field(a, b & U32(63), (b >> U32(16)) & U32(127)), True),
}
_NARROW_SECOND: Final = ("s_lshl_b64", "s_lshr_b64", "s_ashr_i64", "s_bfe_i64")
# 64 bits in, 32 out
NARROWING: Final[Mapping[str, Entry]] = {
    "s_bcnt1_i32_b64": (ints.count, True),
    "s_ff1_i32_b64": (ints.first_set, False),
    "s_flbit_i32_b64": (ints.leading_zeros, False),
}
COMPARES: Final[Mapping[str, Compute]] = {
    "eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
}  # fmt: skip
# What s_<name>_saveexec_b64 makes of its operand and EXEC.
SAVE_EXEC: Final = {name: _LOGIC[name][0] for name in ("and", "or", "xor", "andn2", "orn2")}


def _half(op: Operand) -> Any:
    """The 16-bit constant of the s_…k instructions, sign-extended."""
    return U32(((op.value & 0xFFFF) ^ 0x8000) - 0x8000 & 0xFFFFFFFF)


def _carry(name: str) -> Compute | None:
    """Sums with the condition bit: (a, b, scc) -> (sum of 64 bits, new condition bit)."""

    def add(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
        total = a.astype(U64) + b.astype(U64) + c
        return total, total > _MAX

    def sub(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
        return a.astype(U64) - b.astype(U64) - c, b.astype(U64) + c > a

    def with_sign(operate: Compute) -> Compute:
        def run(a: Any, b: Any, _: Any) -> tuple[Any, Any]:
            total = operate(ints.as_signed(a).astype(I64), ints.as_signed(b).astype(I64))
            return total.view(U64), (total < -(2**31)) | (total >= 2**31)

        return run

    return {
        "s_add_u32": lambda a, b, _: add(a, b, U64(0)),
        "s_addc_u32": lambda a, b, c: add(a, b, c.astype(U64)),
        "s_sub_u32": lambda a, b, _: sub(a, b, U64(0)),
        "s_subb_u32": lambda a, b, c: sub(a, b, c.astype(U64)),
        "s_add_i32": with_sign(np.add),
        "s_sub_i32": with_sign(np.subtract),
    }.get(name)


def bind(ins: Instruction) -> Step:
    """The function that executes a scalar instruction."""
    name, ops = ins.name, ins.operands
    for table, read, wide in ((PLAIN, u32, False), (WIDE, u64, True), (NARROWING, u64, False)):
        if name in table:
            compute, sets_scc = table[name]
            sources = [read(o) for o in ops[1:]]
            if name in _NARROW_SECOND:
                sources[1] = u32(ops[2])
            return _store(ops[0], compute, sources, sets_scc=sets_scc, wide=wide)
    if name in {"s_movk_i32", "s_mulk_i32", "s_addk_i32", "s_cmovk_i32"}:
        return _with_constant(ins)
    if add := _carry(name):
        return _sum(ops[0], add, u32(ops[1]), u32(ops[2]))
    if found := re.fullmatch(r"s_cmp(k?)_(eq|lg|gt|ge|lt|le)_([iu])(32|64)", name):
        return _compare(ops, COMPARES[found[2]], constant=bool(found[1]), signed=found[3] == "i", wide=found[4] == "64")
    if found := re.fullmatch(r"s_(\w+)_saveexec_b64", name):
        return _save_exec(ops, SAVE_EXEC[found[1]])
    if found := re.fullmatch(r"s_lshl(\d)_add_u32", name):
        shift = U64(int(found[1]))

        def shifted(a: Any, b: Any, _: Any) -> tuple[Any, Any]:
            total = (a.astype(U64) << shift) + b.astype(U64)
            return total, total > _MAX

        return _sum(ops[0], shifted, u32(ops[1]), u32(ops[2]))
    if found := re.fullmatch(r"s_(min|max)_([iu])32", name):
        return _extreme(ops, np.less if found[1] == "min" else np.greater, signed=found[2] == "i")
    if found := re.fullmatch(r"s_(cselect|bitcmp0|bitcmp1|bitset0|bitset1)_b(32|64)", name):
        return _bitwise(ins, found[1], wide=found[2] == "64")
    raise unknown(ins)


def _store(to: Operand, compute: Compute, sources: list[Any], *, wide: bool, sets_scc: bool = False) -> Step:
    def step(w: Waves) -> None:
        r = compute(*[read(w) for read in sources])
        (w.put_s64 if wide else w.put_s)(to.index, r)
        if sets_scc:
            w.put_scc(r != 0)

    return step


def _sum(to: Operand, compute: Compute, a: Any, b: Any) -> Step:
    def step(w: Waves) -> None:
        total, bit = compute(a(w), b(w), w.scc)
        w.put_s(to.index, (total & _MAX).astype(U32))
        w.put_scc(bit)

    return step


def _with_constant(ins: Instruction) -> Step:
    to, k = ins.operands[0], _half(ins.operands[1])
    own = u32(to)
    if ins.name == "s_addk_i32":
        compute = _carry("s_add_i32")
        if compute is not None:
            return _sum(to, compute, own, lambda _: k)
    if ins.name == "s_mulk_i32":
        return _store(to, np.multiply, [own, lambda _: k], wide=False)
    if ins.name == "s_cmovk_i32":
        return lambda w: w.put_s(to.index, np.where(w.scc, k, own(w)))
    return lambda w: w.put_s(to.index, k)


def _compare(ops: tuple[Operand, ...], test: Compute, *, constant: bool, signed: bool, wide: bool) -> Step:
    a, b = (u64(ops[0]), u64(ops[1])) if wide else (u32(ops[0]), u32(ops[1]))
    if constant:
        k = _half(ops[1]) if signed else U32(ops[1].value & 0xFFFF)
        b = lambda _: k  # noqa: E731 a reader like those beside it
    kind = (I64 if wide else I32) if signed else (U64 if wide else U32)
    return lambda w: w.put_scc(test(a(w).view(kind), b(w).view(kind)))


def _save_exec(ops: tuple[Operand, ...], compute: Compute) -> Step:
    read = u64(ops[1])

    def step(w: Waves) -> None:
        held = w.s[:, EXEC : EXEC + 2].view(U64).copy()
        r = compute(read(w), held)
        w.put_s64(ops[0].index, held)
        w.put_s64(EXEC, r)
        w.put_scc(r != 0)

    return step


def _extreme(ops: tuple[Operand, ...], better: Compute, *, signed: bool) -> Step:
    a, b = u32(ops[1]), u32(ops[2])

    def step(w: Waves) -> None:
        x, y = a(w), b(w)
        first = better(ints.as_signed(x), ints.as_signed(y)) if signed else better(x, y)
        w.put_s(ops[0].index, np.where(first, x, y))
        w.put_scc(first)

    return step


def _bitwise(ins: Instruction, what: str, *, wide: bool) -> Step:
    ops = ins.operands
    read = u64 if wide else u32
    if what == "cselect":
        a, b = read(ops[1]), read(ops[2])
        put = Waves.put_s64 if wide else Waves.put_s
        return lambda w: put(w, ops[0].index, np.where(w.scc, a(w), b(w)))
    want = int(what[-1])
    if what.startswith("bitcmp"):
        a, b = read(ops[0]), u32(ops[1])
        return lambda w: w.put_scc(((a(w) >> (b(w) & U32(63 if wide else 31)).astype(a(w).dtype)) & 1) == want)
    if wide:
        raise unknown(ins)
    own, at = u32(ops[0]), u32(ops[1])

    def set_bit(w: Waves) -> None:
        bit = U32(1) << (at(w) & U32(31))
        w.put_s(ops[0].index, own(w) | bit if want else own(w) & ~bit)

    return set_bit
