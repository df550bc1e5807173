"""Scalar instructions, as data: integer arithmetic on one value a wave, the condition bit, and EXEC.

Semantics: CDNA3 ISA, chapter "Scalar ALU operations". Values are [W, 1].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from cdna_simulator.assembly import Instruction, Operand
from cdna_simulator.formats import I32, I64, U8, U32, U64, Array
from cdna_simulator.operands import Step, u32, u64, unknown
from cdna_simulator.waves import EXEC, Waves

Compute = Callable[..., Any]


def _signed(x: Any) -> Any:
    return x.view(I32)


def _field(word: Any) -> tuple[Any, Any]:
    """Offset and width of a bit field, as s_bfe packs them."""
    return word & U32(31), (word >> U32(16)) & U32(127)


def _bfe_u32(a: Any, b: Any) -> Any:
    at, width = _field(b)
    return ((a >> at).astype(U64) & ((U64(1) << width.astype(U64)) - U64(1))).astype(U32)


def _bfe_i32(a: Any, b: Any) -> Any:
    _, width = _field(b)
    high = U32(32) - np.minimum(width, U32(32))
    cut = _bfe_u32(a, b).astype(U64) << high.astype(U64)
    return np.where(width == 0, U32(0), (cut.astype(U32).view(I32) >> np.minimum(high, U32(31)).astype(I32)).view(U32))


def _bfe_i64(a: Any, b: Any) -> Any:
    at, width = (b & U32(63)).astype(U64), ((b >> U32(16)) & U32(127)).astype(U64)
    high = U64(64) - np.minimum(width, U64(64))
    cut = ((a >> at) << np.minimum(high, U64(63))).view(I64) >> np.minimum(high, U64(63)).astype(I64)
    return np.where(width == 0, U64(0), cut.view(U64))


def _first_bit(x: Any) -> Any:
    """Position of the lowest set bit; -1 if there is none."""
    x = np.atleast_1d(x)
    low = x & (~x + x.dtype.type(1))
    with np.errstate(divide="ignore"):
        return np.where(x == 0, U32(0xFFFFFFFF), np.log2(low.astype(np.float64)).astype(I64).astype(U32))


def _leading(x: Any, width: int) -> Any:
    """Zeros above the highest set bit; -1 if there is none."""
    position = np.zeros(np.shape(x), U32)
    for k in range(width):
        position = np.where((x >> x.dtype.type(k)) & x.dtype.type(1) != 0, U32(width - 1 - k), position)
    return np.where(x == 0, U32(0xFFFFFFFF), position)


def _leading_sign(a: Any) -> Any:
    """Bits at the top that equal the sign; -1 if all do."""
    x = np.where(_signed(a) < 0, ~a, a)
    return _leading(np.asarray(x, U32), 32)


def _reversed(x: Any) -> Any:
    bytes_ = np.ascontiguousarray(np.atleast_2d(x))[..., None].view(U8)
    return np.packbits(np.unpackbits(bytes_, axis=-1, bitorder="little")[..., ::-1], axis=-1, bitorder="little").view(
        U32
    )[..., 0]


def _count(x: Any) -> Any:
    return np.bitwise_count(x).astype(U32)


def _wide(operate: Compute, kind: Any) -> Compute:
    """The high half of a product."""
    return lambda a, b: (operate(a.astype(kind), b.astype(kind)) >> kind(32)).astype(U32)


_mul: Final = np.multiply
# name -> (function, what the condition bit becomes: None or "nonzero"); 32 bits in, 32 out
PLAIN: Final[Mapping[str, tuple[Compute, str | None]]] = {
    "s_mov_b32": (lambda a: a, None),
    "s_not_b32": (np.invert, "nonzero"),
    "s_and_b32": (np.bitwise_and, "nonzero"),
    "s_or_b32": (np.bitwise_or, "nonzero"),
    "s_xor_b32": (np.bitwise_xor, "nonzero"),
    "s_andn2_b32": (lambda a, b: a & ~b, "nonzero"),
    "s_lshl_b32": (lambda a, b: a << (b & U32(31)), "nonzero"),
    "s_lshr_b32": (lambda a, b: a >> (b & U32(31)), "nonzero"),
    "s_ashr_i32": (lambda a, b: (_signed(a) >> (b & U32(31)).astype(I32)).view(U32), "nonzero"),
    "s_bfe_u32": (_bfe_u32, "nonzero"),
    "s_bfe_i32": (_bfe_i32, "nonzero"),
    "s_bfm_b32": (lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)), None),
    "s_mul_i32": (_mul, None),
    "s_mul_hi_u32": (_wide(_mul, U64), None),
    "s_mul_hi_i32": (lambda a, b: ((_signed(a).astype(I64) * _signed(b).astype(I64)) >> I64(32)).astype(U32), None),
    "s_brev_b32": (_reversed, None),
    "s_ff1_i32_b32": (_first_bit, None),
    "s_flbit_i32_b32": (lambda a: _leading(a, 32), None),
    "s_flbit_i32": (_leading_sign, None),
    "s_bcnt1_i32_b32": (_count, "nonzero"),
    "s_sext_i32_i8": (lambda a: a.astype(np.int8).astype(I32).view(U32), None),
    "s_sext_i32_i16": (lambda a: a.astype(np.int16).astype(I32).view(U32), None),
    "s_abs_i32": (lambda a: np.abs(_signed(a)).view(U32), "nonzero"),
    "s_pack_ll_b32_b16": (lambda a, b: (a & U32(0xFFFF)) | (b << U32(16)), None),
}
# the same for 64 bits in and out; shifts take 32 bits as their second operand
WIDE: Final[Mapping[str, tuple[Compute, str | None]]] = {
    "s_mov_b64": (lambda a: a, None),
    "s_not_b64": (np.invert, "nonzero"),
    "s_and_b64": (np.bitwise_and, "nonzero"),
    "s_or_b64": (np.bitwise_or, "nonzero"),
    "s_xor_b64": (np.bitwise_xor, "nonzero"),
    "s_andn2_b64": (lambda a, b: a & ~b, "nonzero"),
    "s_orn2_b64": (lambda a, b: a | ~b, "nonzero"),
    "s_nor_b64": (lambda a, b: ~(a | b), "nonzero"),
    "s_nand_b64": (lambda a, b: ~(a & b), "nonzero"),
    "s_xnor_b64": (lambda a, b: ~(a ^ b), "nonzero"),
    "s_lshl_b64": (lambda a, b: a << (b & U32(63)).astype(U64), "nonzero"),
    "s_lshr_b64": (lambda a, b: a >> (b & U32(63)).astype(U64), "nonzero"),
    "s_ashr_i64": (lambda a, b: (a.view(I64) >> (b & U32(63)).astype(I64)).view(U64), "nonzero"),
    "s_bfe_i64": (_bfe_i64, "nonzero"),
}
_NARROW_SECOND: Final = ("s_lshl_b64", "s_lshr_b64", "s_ashr_i64", "s_bfe_i64")
# 64 bits in, 32 out
NARROWING: Final[Mapping[str, tuple[Compute, str | None]]] = {
    "s_bcnt1_i32_b64": (_count, "nonzero"),
    "s_ff1_i32_b64": (_first_bit, None),
    "s_flbit_i32_b64": (lambda a: _leading(a, 64), None),
}
COMPARES: Final[Mapping[str, Compute]] = {
    "eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
}  # fmt: skip
# What s_<name>_saveexec_b64 makes of its operand and EXEC.
SAVE_EXEC: Final[Mapping[str, Compute]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "andn2": lambda a, e: a & ~e,
    "orn2": lambda a, e: a | ~e,
}
_FULL: Final = U64(0xFFFFFFFF)


def _half(op: Operand) -> Any:
    """The 16-bit constant of the s_…k instructions, sign-extended."""
    return U32(((op.value & 0xFFFF) ^ 0x8000) - 0x8000 & 0xFFFFFFFF)


def _carry(name: str) -> Compute | None:
    """Sums with the condition bit: (a, b, scc) -> (sum of 64 bits, new condition bit)."""

    def add(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
        total = a.astype(U64) + b.astype(U64) + c
        return total, total > _FULL

    def sub(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
        return a.astype(U64) - b.astype(U64) - c, b.astype(U64) + c > a

    def signed(operate: Compute) -> Compute:
        def run(a: Any, b: Any, _: Any) -> tuple[Any, Any]:
            total = operate(_signed(a).astype(I64), _signed(b).astype(I64))
            return total.view(U64), (total < -(2**31)) | (total >= 2**31)

        return run

    return {
        "s_add_u32": lambda a, b, _: add(a, b, U64(0)),
        "s_addc_u32": lambda a, b, c: add(a, b, c.astype(U64)),
        "s_sub_u32": lambda a, b, _: sub(a, b, U64(0)),
        "s_subb_u32": lambda a, b, c: sub(a, b, c.astype(U64)),
        "s_add_i32": signed(np.add),
        "s_sub_i32": signed(np.subtract),
    }.get(name)


def bind(ins: Instruction) -> Step:
    """The function that executes a scalar instruction."""
    name, ops = ins.name, ins.operands
    for table, read, wide in ((PLAIN, u32, False), (WIDE, u64, True), (NARROWING, u64, False)):
        if name in table:
            compute, rule = table[name]
            sources = [read(o) for o in ops[1:]]
            if name in _NARROW_SECOND:
                sources[1] = u32(ops[2])
            return _store(ops[0], compute, sources, rule, wide=wide)
    if name in {"s_movk_i32", "s_mulk_i32", "s_addk_i32", "s_cmovk_i32"}:
        return _with_constant(ins)
    if compute := _carry(name):
        return _sum(ops[0], compute, u32(ops[1]), u32(ops[2]))
    if found := re.fullmatch(r"s_cmp(k?)_(eq|lg|gt|ge|lt|le)_([iu])(32|64)", name):
        return _compare(ops, COMPARES[found[2]], constant=bool(found[1]), signed=found[3] == "i", wide=found[4] == "64")
    if found := re.fullmatch(r"s_(\w+)_saveexec_b64", name):
        return _save_exec(ops, SAVE_EXEC[found[1]])
    if found := re.fullmatch(r"s_lshl(\d)_add_u32", name):
        shift = U64(int(found[1]))

        def shifted(a: Any, b: Any, _: Any) -> tuple[Any, Any]:
            total = (a.astype(U64) << shift) + b.astype(U64)
            return total, total > _FULL

        return _sum(ops[0], shifted, u32(ops[1]), u32(ops[2]))
    if found := re.fullmatch(r"s_(min|max)_([iu])32", name):
        return _extreme(ops, np.less if found[1] == "min" else np.greater, signed=found[2] == "i")
    if found := re.fullmatch(r"s_(cselect|bitcmp0|bitcmp1|bitset0|bitset1)_b(32|64)", name):
        return _bitwise(ins, found[1], wide=found[2] == "64")
    raise unknown(ins)


def _store(to: Operand, compute: Compute, sources: list[Any], rule: str | None, *, wide: bool) -> Step:
    def step(w: Waves) -> None:
        r = compute(*[read(w) for read in sources])
        (w.put_s64 if wide else w.put_s)(to.index, r)
        if rule is not None:
            w.put_scc(r != 0)

    return step


def _sum(to: Operand, compute: Compute, a: Any, b: Any) -> Step:
    def step(w: Waves) -> None:
        total, bit = compute(a(w), b(w), w.scc)
        w.put_s(to.index, (total & _FULL).astype(U32))
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
        return _store(to, _mul, [own, lambda _: k], None, wide=False)
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
        first = better(_signed(x), _signed(y)) if signed else better(x, y)
        w.put_s(ops[0].index, np.where(first, x, y))
        w.put_scc(first)

    return step


def _bitwise(ins: Instruction, what: str, *, wide: bool) -> Step:
    ops = ins.operands
    read = u64 if wide else u32
    if what == "cselect":
        a, b = read(ops[1]), read(ops[2])
        kind = U64 if wide else U32

        def select(w: Waves) -> None:
            chosen: Array = np.where(w.scc, a(w), b(w)).astype(kind)
            (w.put_s64 if wide else w.put_s)(ops[0].index, chosen)

        return select
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
