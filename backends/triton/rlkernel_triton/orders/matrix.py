"""Matrix instructions of PTX: an opaque sum each, of an accumulator and of a row of A times a column of B.

What hardware does inside one is not known, so its name is in the hash and its elements are in the order of k. Layouts:
PTX ISA, "Matrix fragments for mma.m16n8k16", "Register fragments for wgmma", "Matrix descriptor format".

Legend: G groups of threads (warps or warpgroups) · m, n, k of the instruction.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from rlkernel_triton.orders import expressions as e
from rlkernel_triton.orders.arithmetic import as_bits, floats, hash_of
from rlkernel_triton.orders.errors import DataDependentError, UnknownPtxError
from rlkernel_triton.orders.expressions import U64, Array
from rlkernel_triton.orders.machine import Machine, Step, Value
from rlkernel_triton.orders.movement import full
from rlkernel_triton.orders.ptx import Instruction, Operand

ORDER: Final = "matrix"  # what names of matrix instructions begin with at the level "order"
_SWIZZLE: Final = {0: 0, 1: 128, 2: 64, 3: 32}  # of a descriptor -> bytes of a row of a swizzled tile


def _halves(m: Machine, registers: tuple[Operand, ...], threads: Array, kind: str) -> tuple[Array, Array]:
    """[threads, 2 registers] floats and hashes of registers that hold two each."""
    values, hashes = [], []
    for op in registers:
        bits, pieces = full(m, m.read(op, 32), 2)
        for j in (0, 1):
            half = (bits[threads] >> np.uint32(16 * j)).astype(np.uint16)
            values.append(floats(half, kind))
            hashes.append(hash_of(Value(half, pieces[threads, j : j + 1]), kind))
    return np.stack(values, 1), np.stack(hashes, 1)


def _singles(m: Machine, registers: tuple[Operand, ...], threads: Array) -> tuple[Array, Array]:
    """[threads, registers] float32 and hashes."""
    values, hashes = [], []
    for op in registers:
        bits, pieces = full(m, m.read(op, 32), 2)
        values.append(bits[threads].view(np.float32))
        hashes.append(hash_of(Value(bits[threads], pieces[threads]), "f32"))
    return np.stack(values, 1), np.stack(hashes, 1)


def _put(m: Machine, registers: tuple[Operand, ...], threads: Array, values: Array, hashes: Array) -> None:
    for i, op in enumerate(registers):
        bits, pieces = np.zeros(m.T, np.uint32), np.zeros((m.T, 2), U64)
        bits[threads] = as_bits(values[:, i], "f32")
        pieces[threads] = e.pieces(hashes[:, i], 2)
        m.write(op, Value(bits, pieces))


def product(name: str, acc: Array, a: Array, b: Array) -> Array:
    """Hashes [G, m, n] of an accumulator [G, m, n], A [G, m, k] and B [G, n, k].

    Which of the two is A does not count for the order. Zeros times zeros change no sum: a step beyond the end of what
    is summed is none.
    """
    rows, columns = e.row("row", a)[:, :, None], e.row("row", b)[:, None, :]
    made = e.commutative if name.startswith(ORDER) else e.expression
    zero = e.constant(np.zeros((), U64), 16)
    nothing = (a == zero).all(-1)[:, :, None] & (b == zero).all(-1)[:, None, :]
    found: Array = np.where(nothing, acc, made(name, rows, columns, acc))
    return found


def multiplied(
    name: str, acc: tuple[Array, Array], a: tuple[Array, Array], b: tuple[Array, Array]
) -> tuple[Array, Array]:
    """[G, m, n] sums and hashes of an accumulator [G, m, n], A [G, m, k] and B [G, n, k]."""
    value = (acc[0] + a[0].astype(np.float64) @ b[0].astype(np.float64).swapaxes(1, 2)).astype(np.float32)
    return value, product(name, acc[1], a[1], b[1])


def mma(ins: Instruction, level: str) -> Step:
    """mma.sync.m16n8k16 of two 16-bit types into float32."""
    if (
        "m16n8k16" not in ins.parts
        or ins.parts[-4] != "f32"
        or ins.parts[-1] != "f32"
        or ins.parts[-3] not in {"bf16", "f16"}
    ):
        raise UnknownPtxError("this matrix instruction is not modeled")
    kind = ins.parts[-3]
    name = f"mma.m16n8k16.{kind}" if level == "bits" else f"{ORDER} k16"
    d, a, b, c = ins.operands
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    # element j of thread: A (row, k) of 4 registers of two, B (k, n) of 2, C (row, n) of 4
    a_row = np.stack([g + 8 * (r % 2) for r in range(4) for _ in (0, 1)], 1)
    a_k = np.stack([2 * t + j + 8 * (r // 2) for r in range(4) for j in (0, 1)], 1)
    b_k = np.stack([2 * t + j + 8 * r for r in range(2) for j in (0, 1)], 1)
    c_row = np.stack([g + 8 * (i // 2) for i in range(4)], 1)
    c_n = np.stack([2 * t + i % 2 for i in range(4)], 1)

    def step(m: Machine) -> None:
        threads = m.lanes(ins)
        G = len(threads) // 32
        A, B, C = (
            [np.zeros((G, *shape), kind) for kind in (np.float32, U64)] for shape in ((16, 16), (8, 16), (16, 8))
        )
        for out, (row, column), found in (
            (A, (a_row, a_k), _halves(m, a.parts, threads, kind)),
            (B, (g[:, None] + 0 * b_k, b_k), _halves(m, b.parts, threads, kind)),
            (C, (c_row, c_n), _singles(m, c.parts, threads)),
        ):
            for held, x in zip(out, found, strict=True):
                held[:, row, column] = x.reshape(G, 32, -1)
        values, hashes = multiplied(name, (C[0], C[1]), (A[0], A[1]), (B[0], B[1]))
        _put(m, d.parts, threads, *(x[:, c_row, c_n].reshape(G * 32, 4) for x in (values, hashes)))

    return step


def wgmma(ins: Instruction, level: str) -> Step:
    """wgmma.mma_async of two 16-bit types into float32; A from registers or, as B, from shared memory."""
    if ins.parts[0] in {"fence", "commit_group", "wait_group"}:
        return lambda _: None
    if ins.parts[-3] != "f32" or ins.parts[-1] not in {"bf16", "f16"} or ins.parts[-1] != ins.parts[-2]:
        raise UnknownPtxError("this matrix instruction is not modeled")
    shape, kind = ins.parts[-4], ins.parts[-1]
    n = int(shape[len("m64n") : shape.index("k")])
    name = f"wgmma.{shape}.{kind}" if level == "bits" else f"{ORDER} k16"
    d, a, b, scale_d, *modes = ins.operands
    if [op.value for op in modes[:2]] != [1, 1]:
        raise UnknownPtxError("a matrix instruction with a sign is not modeled")
    turned = [bool(op.value) for op in modes[2:]]
    a_turned, b_turned = (turned[0], turned[1]) if len(turned) == 2 else (False, turned[-1])
    thread = np.arange(128)
    w, g, t = thread // 32, thread % 32 // 4, thread % 4
    c_row = np.stack([16 * w + g + 8 * (i // 2 % 2) for i in range(n // 2)], 1)
    c_n = np.stack([8 * (i // 4) + 2 * t + i % 2 for i in range(n // 2)], 1)
    a_row = np.stack([16 * w + g + 8 * (r % 2) for r in range(4) for _ in (0, 1)], 1)
    a_k = np.stack([2 * t + j + 8 * (r // 2) for r in range(4) for j in (0, 1)], 1)

    def step(m: Machine) -> None:
        threads = m.lanes(ins)
        G = len(threads) // 128
        if a.kind == "vector":
            found = _halves(m, a.parts, threads, kind)
            A = [np.zeros((G, 64, 16), x.dtype) for x in found]
            for held, x in zip(A, found, strict=True):
                held[:, a_row, a_k] = x.reshape(G, 128, 8)
        else:
            A = list(_tile(m, a, threads, 64, kind, turned=a_turned))
        B = _tile(m, b, threads, n, kind, turned=b_turned)
        C = [np.zeros((G, 64, n), kind) for kind in (np.float32, U64)]
        for held, x in zip(C, _singles(m, d.parts, threads), strict=True):
            held[:, c_row, c_n] = x.reshape(G, 128, -1)
        keeps = m.read(scale_d, 1)
        if keeps.hashes is not None and keeps.hashes.any():
            raise DataDependentError("whether it adds to its accumulator depends on data")
        adds = np.broadcast_to(keeps.bits, (m.T,))[threads].reshape(G, 128)[:, 0] != 0
        zero = e.constant(np.zeros((), np.uint32), 32)
        C = [np.where(adds[:, None, None], C[0], np.float32(0)), np.where(adds[:, None, None], C[1], zero)]
        values, hashes = multiplied(name, (C[0], C[1]), (A[0], A[1]), B)
        _put(m, d.parts, threads, *(x[:, c_row, c_n].reshape(G * 128, n // 2) for x in (values, hashes)))

    return step


def _tile(m: Machine, op: Operand, threads: Array, rows: int, kind: str, *, turned: bool) -> tuple[Array, Array]:
    """[G, rows, 16] floats and hashes of a tile in shared memory; turned: neighbors in memory are neighbors in rows."""
    descriptor = m.read(op, 64)
    if descriptor.hashes is not None and descriptor.hashes.any():
        raise DataDependentError("where it reads depends on data")
    word = np.broadcast_to(descriptor.bits, (m.T,))[threads].reshape(-1, 128)[:, 0].astype(object)
    start = np.array([(int(x) & 0x3FFF) << 4 for x in word])
    leading = np.array([((int(x) >> 16) & 0x3FFF) << 4 for x in word])
    stride = np.array([((int(x) >> 32) & 0x3FFF) << 4 for x in word])
    modes = {(int(x) >> 62) & 3 for x in word}
    if len(modes) != 1 or any((int(x) >> 49) & 7 for x in word):
        raise UnknownPtxError("this layout of shared memory is not modeled")
    width = _SWIZZLE[modes.pop()]
    if not width:
        raise UnknownPtxError("a tile of shared memory without a swizzle is not modeled")
    r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    L, S = leading[:, None, None], stride[:, None, None]
    elements = width // 2
    if turned:
        at = (k % 8) * width + (r % elements) * 2 + (k // 8) * S + (r // elements) * L
    else:
        at = (r // 8) * S + (r % 8) * width + k * 2
    at = start[:, None, None] + at
    rows_of_swizzle = width // 16
    at = at ^ ((at >> 7) & (rows_of_swizzle - 1)) << 4
    first = threads.reshape(-1, 128)[:, 0]
    if at.max() >= m.shared_stride:
        raise UnknownPtxError("a tile lies beyond shared memory")
    place = (at + m.shared_base[first][:, None, None]).ravel()
    bits, hashes = m.shared.load(place, 2)
    own = hash_of(Value(bits, hashes), kind)
    shape = (len(first), rows, 16)
    return floats(bits, kind).reshape(shape), own.reshape(shape)
