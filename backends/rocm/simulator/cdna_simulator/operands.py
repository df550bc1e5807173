"""How an instruction reads its operands: for each operand a function from waves to its value.

Values broadcast: [W, 64] from a vector register, [W, 1] from a scalar one, a number from a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cdna_simulator.assembly import Instruction, Operand
from cdna_simulator.errors import UnknownInstructionError
from cdna_simulator.formats import F32, F64, U32, U64, Array, from_f16
from cdna_simulator.waves import Waves, bits

_DECIMALS = {0x3E22F983: 0.15915494309189532}  # as float32 -> the one decimal that float32 does not hold
Reader = Callable[[Waves], Any]
Step = Callable[[Waves], Any]  # executes one instruction; what it returns steers (see machine.py)


def unknown(ins: Instruction) -> UnknownInstructionError:
    """The error for an instruction that is not modeled."""
    return UnknownInstructionError(f"`{ins.text}` is not modeled; add {ins.name!r} to a table of cdna_simulator")


def signed(op: Operand, read: Reader) -> Reader:
    """A float with the operand's bars and sign."""
    if op.negate and op.absolute:
        return lambda w: -np.abs(read(w))
    if op.negate:
        return lambda w: -read(w)
    return (lambda w: np.abs(read(w))) if op.absolute else read


def u32(op: Operand, word: int = 0) -> Reader:
    """32 bits: word 0 or 1 of an operand without a sign or bars, which mean nothing to integers."""
    if op.negate or op.absolute:
        raise UnknownInstructionError(f"a sign or bars at an operand that is read as bits: {op}")
    return bits32(op, word)


def bits32(op: Operand, word: int = 0) -> Reader:
    """32 bits: word 0 or 1 of the operand, its sign and bars left to the caller."""
    index = op.index + word
    if op.kind == "v":
        return lambda w: w.v[index]
    if op.kind == "s":
        return lambda w: w.s[:, index : index + 1]
    if op.kind == "k":
        low = op.floating and word
        value = U32(0 if low else (op.value >> (32 * word)) & 0xFFFFFFFF)
        return lambda _: value
    if op.kind == "scc":
        return lambda w: w.scc.astype(U32)
    raise UnknownInstructionError(f"operand {op} has no 32-bit value")


def f32(op: Operand, word: int = 0) -> Reader:
    """A float32."""
    read = bits32(op, word)
    return signed(op, lambda w: read(w).view(F32))


def f64(op: Operand) -> Reader:
    """A float64: a pair of registers, a decimal, a small integer's bits, or a high word."""
    if op.kind == "k":
        inline = op.value <= 64 or op.value >= 2**64 - 16
        word = U64(op.value if inline else (op.value & 0xFFFFFFFF) << 32)
        number = _DECIMALS.get(op.value, float(U32(op.value).view(F32))) if op.floating else float(word.view(F64))
        return signed(op, lambda _: F64(number))
    read = u64(replace(op, negate=False, absolute=False))
    return signed(op, lambda w: read(w).view(F64))


def f16(op: Operand, shift: int = 0) -> Reader:
    """The float16 in the low or (16) the high half, as float32; a decimal constant stands for itself."""
    read = bits32(op)
    if op.floating:
        return signed(op, lambda w: read(w).view(F32))
    return signed(op, lambda w: from_f16(np.asarray(read(w)) >> U32(shift)))


def u64(op: Operand) -> Reader:
    """64 bits: a pair of registers, or a constant (a decimal fills the low word)."""
    index = op.index
    if op.kind == "s" and op.count > 1 and index % 2 == 0:
        return lambda w: w.s[:, index : index + 2].view(U64)
    if op.kind == "k":
        value = U64(op.value)
        return lambda _: value
    low = u32(op)
    if op.count < 2:
        return lambda w: low(w).astype(U64)
    high = u32(op, 1)
    return lambda w: low(w).astype(U64) | (high(w).astype(U64) << U64(32))


def lane_mask(op: Operand) -> Reader:
    """A pair of scalar registers as a mask of lanes."""
    if op.kind == "k":
        value = bool(op.value)
        return lambda w: np.full((w.W, 64), value)
    index = op.index
    return lambda w: bits(w.s[:, index : index + 2])


def broadcast(read: Reader) -> Reader:
    """Broadcast to [W, 64]; numpy takes its time to find that there is nothing to do."""

    def whole(w: Waves) -> Array:
        x: Array = read(w)
        return x if x.shape == (w.W, 64) else np.broadcast_to(x, (w.W, 64))

    return whole
