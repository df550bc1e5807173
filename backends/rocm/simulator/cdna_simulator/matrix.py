"""Matrix instructions: a wave multiplies two small matrices that its lanes hold together.

Layout (CDNA3 ISA, "Matrix fused-multiply-add"; AMD's matrix instruction calculator): for M x M results and depth K,
lane l holds row l % M of A (and column l % M of B), elements l // M * k onwards of K, where k = K M / 64; a result
register holds rows in blocks of four, one block a group of M lanes. Sums are taken in float64 and rounded once, which
hardware does not: it rounds more often, and in another order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from cdna_simulator.assembly import Instruction, Operand
from cdna_simulator.convert import small_float
from cdna_simulator.formats import BF6, F32, F64, FP6, I32, U32, Array, from_bf16, from_f16, unpack, values
from cdna_simulator.operands import Step, u32, unknown
from cdna_simulator.waves import LANES, Waves

_NAME: Final = re.compile(
    r"v_mfma_(scale_)?(f32|i32)_(16|32)x(16|32)x(\d+)_?(f32|f16|bf16|i8|f8f6f4|[bf][pf]8_[bf][pf]8)(_1k)?"
)
# Codes of cbsz and blgp in the f8f6f4 instructions.
_F8F6F4: Final = ("fp8", "bf8", "fp6", "bf6", "fp4")
_WIDTHS: Final = {"f32": 32, "f16": 16, "bf16": 16, "i8": 8, "fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4}


def _elements(words: Array, kind: str, arch: str) -> Array:
    """Values of packed words [..., n], float64."""
    raw = unpack(words, _WIDTHS[kind])
    if kind == "f32":
        return raw.view(F32).astype(F64)
    if kind in {"f16", "bf16"}:
        return (from_f16 if kind == "f16" else from_bf16)(raw.astype(U32)).astype(F64)
    if kind == "i8":
        return raw.view(np.int8).astype(F64)
    form = {"fp6": FP6, "bf6": BF6}.get(kind) or small_float(kind, arch)
    return values(form)[raw].astype(F64)


def _rows(M: int) -> tuple[Array, Array]:
    """Row of each lane in each result register [M M / 64, 64], and its column [64]."""
    register = np.arange(M * M // 64)[:, None]
    if M == 16:
        return 4 * (LANES // 16) + register, LANES % 16
    return 8 * (register // 4) + 4 * (LANES // 32) + register % 4, LANES % 32


def _matrix(op: Operand, kind: str, M: int, K: int) -> Callable[[Waves], Array]:
    """Reader of one operand: [W, M, K] float64."""
    groups = 64 // M
    deep = K // groups
    registers = deep * _WIDTHS[kind] // 32
    reads = [u32(op, r) for r in range(registers)]

    def read(w: Waves) -> Array:
        held = np.stack([np.broadcast_to(r(w), (w.W, 64)) for r in reads], axis=-1)  # [W, 64, registers]
        x = _elements(held, kind, w.arch).reshape(w.W, groups, M, deep)
        return x.transpose(0, 2, 1, 3).reshape(w.W, M, K)

    return read


def _scale(ins: Instruction, position: int, M: int, K: int) -> Callable[[Waves], Array]:
    """Reader of the powers of two of one operand, one for every 32 elements of a row: [W, M, K]."""
    byte = ins.bits("op_sel", 2, 0)[position] + 2 * ins.bits("op_sel_hi", 2, 0)[position]
    held = u32(ins.operands[4 + position])
    groups = 64 // M

    def read(w: Waves) -> Array:
        e = (np.broadcast_to(held(w), (w.W, 64)) >> U32(8 * byte)) & U32(255)
        s = np.where(e == 255, np.nan, np.ldexp(1.0, e.astype(np.int64) - 127))
        return np.repeat(s.reshape(w.W, groups, M).transpose(0, 2, 1), K // groups, axis=2)

    return read


def _kinds(ins: Instruction, types: str) -> tuple[str, str]:
    if types == "f8f6f4":
        codes = (ins.number("cbsz"), ins.number("blgp"))
        if max(codes) >= len(_F8F6F4):
            raise unknown(ins)
        return _F8F6F4[codes[0]], _F8F6F4[codes[1]]
    if set(ins.modifiers) & {"cbsz", "blgp", "abid"}:
        raise unknown(ins)
    first, _, second = types.partition("_")
    return first, second or first


def bind(ins: Instruction) -> Step | None:
    """The function that executes a matrix instruction; None for any other."""
    if not ins.name.startswith("v_mfma"):
        return None
    found = _NAME.fullmatch(ins.name)
    if found is None or found[3] != found[4]:
        raise unknown(ins)
    M, K, whole = int(found[3]), int(found[5]), found[2] == "i32"
    kinds = _kinds(ins, found[6])
    to, a_op, b_op, c_op = ins.operands[:4]
    if K // (64 // M) * _WIDTHS[kinds[0]] % 32 or a_op.count * 32 < K // (64 // M) * _WIDTHS[kinds[0]]:
        raise unknown(ins)  # several small matrices in one instruction
    a, b = _matrix(a_op, kinds[0], M, K), _matrix(b_op, kinds[1], M, K)
    scales = [_scale(ins, i, M, K) for i in range(2)] if found[1] else []
    rows, columns = _rows(M)
    added = [u32(c_op, r if c_op.count > 1 else 0) for r in range(len(rows))]
    kind: Any = I32 if whole else F32

    def step(w: Waves) -> None:
        x, y = a(w), b(w)
        if scales:
            x, y = x * scales[0](w), y * scales[1](w)
        product = x @ y.transpose(0, 2, 1)  # [W, M, M]
        plus = [np.asarray(read(w)).view(kind).astype(F64) for read in added]
        results = [(product[:, rows[r], columns] + plus[r]) for r in range(len(rows))]
        for r, value in enumerate(results):
            if whole:
                w.put_all_lanes(to.index + r, value.astype(np.int64).astype(U32))
            else:
                w.put_all_lanes(to.index + r, value.astype(F32).view(U32))

    return step
