"""Instructions of PTX that move data and compute nothing: registers, memory, lanes (PTX ISA, chapter 9.7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkernel_triton.orders import expressions as e
from rlkernel_triton.orders.arithmetic import hash_of, result, width_of
from rlkernel_triton.orders.errors import DataDependentError, UnknownPtxError
from rlkernel_triton.orders.expressions import U64, Array
from rlkernel_triton.orders.machine import KINDS, Machine, Step, Value
from rlkernel_triton.orders.ptx import Instruction, Operand


def full(m: Machine, value: Value, n: int) -> tuple[Array, Array]:
    """A value as [T] bits and [T, n] hashes."""
    none = np.zeros((m.T, n), U64)
    return np.broadcast_to(value.bits, (m.T,)), none if value.hashes is None else np.broadcast_to(
        value.hashes, none.shape
    )


def set_predicate(m: Machine, *, to: Operand, where: int | None) -> None:
    """A predicate that is true in one lane of a warp, or in all."""
    m.write(to, Value(np.ones(m.T, bool) if where is None else m.lane == where))


def move(ins: Instruction) -> Step:
    """mov: a register, or several that are one."""
    to, source = ins.operands
    if to.kind != "vector" and source.kind != "vector":
        width = 1 if ins.kind == "pred" else width_of(ins.kind)

        def plain(m: Machine) -> None:
            value = m.read(source, width)
            m.write(to, Value(value.bits != 0) if width == 1 and value.hashes is None else value, m.active(ins))

        return plain
    width = width_of(ins.kind)
    if source.kind == "vector":
        part = width // len(source.parts)

        def pack(m: Machine) -> None:
            values = [m.read(op, part) for op in source.parts]
            bits: Any = KINDS[width](0)
            for i, v in enumerate(values):
                bits = bits | np.asarray(v.bits).astype(KINDS[width]) << KINDS[width](i * part)
            hashes = None
            if any(v.hashes is not None for v in values):
                hashes = np.concatenate([full(m, v, part // 16)[1] for v in values], axis=-1)
            m.write(to, Value(bits, hashes), m.active(ins))

        return pack
    part = width // len(to.parts)

    def unpack(m: Machine) -> None:
        value = m.read(source, width)
        for i, op in enumerate(to.parts):
            if op.name != "_":
                bits = (np.asarray(value.bits) >> KINDS[width](i * part)).astype(KINDS[part])
                n = part // 16
                hashes = None if value.hashes is None else value.hashes[..., i * n : (i + 1) * n]
                m.write(op, Value(bits, hashes), m.active(ins))

    return unpack


def permute(ins: Instruction) -> Step:
    """prmt: bytes of two registers by a known selector."""
    to, *sources, selector = ins.operands
    if ins.parts != ("b32",):
        raise UnknownPtxError("this mode of prmt is not modeled")

    def step(m: Machine) -> None:
        a, b, s = (m.read(op, 32) for op in (*sources, selector))
        if s.hashes is not None and s.hashes.any():
            raise DataDependentError("which bytes it takes depends on data")
        both = np.asarray(a.bits).astype(np.uint64) | np.asarray(b.bits).astype(np.uint64) << U64(32)
        picks = [(np.asarray(s.bits) >> np.uint32(4 * i)) & np.uint32(0xF) for i in range(4)]
        out: Any = np.uint32(0)
        for i, pick in enumerate(picks):
            byte = (both >> ((pick & np.uint32(7)).astype(np.uint64) * U64(8))) & U64(0xFF)
            sign = np.where(byte & U64(0x80), U64(0xFF), U64(0))
            out = out | np.where(pick & np.uint32(8), sign, byte).astype(np.uint32) << np.uint32(8 * i)
        if a.hashes is None and b.hashes is None:
            m.write(to, Value(out), m.active(ins))
            return
        held = np.concatenate([full(m, v, 2)[1] for v in (a, b)], axis=-1)  # [T, 4]
        hashes = np.zeros((m.T, 2), U64)
        for i in range(2):
            low, high = (np.broadcast_to(p, (m.T,)) for p in picks[2 * i : 2 * i + 2])
            pieces = [np.take_along_axis(held, ((p & 7) // 2).astype(np.int64)[:, None], 1)[:, 0] for p in (low, high)]
            aligned = (low % 2 == 0) & (high == low + 1) & (high < 8)
            if ((pieces[0] != 0) | (pieces[1] != 0))[~aligned & m.mask].any():
                raise UnknownPtxError("single bytes of data are moved")
            hashes[:, i] = np.where(aligned, pieces[0], U64(0))
        m.write(to, Value(out, hashes), m.active(ins))

    return step


def shuffle(ins: Instruction) -> Step:
    """shfl: from another lane of the warp."""
    mode = ins.parts[1]
    to, source, by, clamp = ins.operands[:4]
    if mode not in {"bfly", "idx", "down", "up"} or clamp.value not in {0, 31}:
        raise UnknownPtxError("this shuffle is not modeled")

    def step(m: Machine) -> None:
        value = m.read(source, 32)
        by_lanes = m.read(by, 32)
        if by_lanes.hashes is not None and by_lanes.hashes.any():
            raise DataDependentError("the lane that it reads depends on data")
        k = np.asarray(by_lanes.bits).astype(np.int64)
        lane = {"bfly": m.lane ^ k, "idx": k + 0 * m.lane, "down": m.lane + k, "up": m.lane - k}[mode]
        there = (lane >= 0) & (lane < 32)
        place = m.warp_start + np.where(there, lane, m.lane)
        bits, hashes = full(m, value, 2)
        moved = Value(bits[place], None if value.hashes is None else hashes[place])
        if to.kind == "pair":
            m.write(to.parts[0], moved, m.active(ins))
            m.write(to.parts[1], Value(there), m.active(ins))
        else:
            m.write(to, moved, m.active(ins))

    return step


def reduction(ins: Instruction) -> Step:
    """redux: of integers over a warp, in whatever order."""
    operate: Any = {"max": np.max, "min": np.min, "add": np.sum}.get(ins.parts[1])
    kind = {"s32": np.int32, "u32": np.uint32}.get(ins.kind)
    if operate is None or kind is None:
        raise UnknownPtxError("this reduction is not modeled")

    def step(m: Machine) -> None:
        value = m.read(ins.operands[1], 32)
        bits, held = full(m, value, 2)
        over = Value(np.repeat(operate(bits.view(kind).reshape(-1, 32), axis=1).astype(kind), 32).view(np.uint32))
        if held.any():
            lanes = np.sort(hash_of(Value(bits, held), "u32").reshape(-1, 32), axis=1)
            unknown = np.repeat(held.any(axis=1).reshape(-1, 32).any(axis=1), 32)
            over = result(over.bits, np.repeat(e.row(f"redux.{ins.parts[1]}", lanes), 32), unknown, 32)
        m.write(ins.operands[0], over, m.active(ins))

    return step


def _space(ins: Instruction) -> str:
    for space in ("global", "shared", "param"):
        if any(p == space or p.startswith(f"{space}__cta") for p in ins.parts):
            return space
    raise UnknownPtxError("this kind of memory is not modeled")


def _parts(op: Operand) -> tuple[Operand, ...]:
    return op.parts if op.kind == "vector" else (op,)


def load(ins: Instruction) -> Step:
    """ld."""
    to, place = ins.operands[:2]
    if _space(ins) == "param":

        def parameter(m: Machine) -> None:
            value = m.parameters[place.name]
            width = m.kernel.widths[to.name]
            bits: Any = np.asarray(value.bits)
            if ins.kind.startswith("s") and bits.dtype.itemsize * 8 < width:
                bits = bits.view(f"i{bits.dtype.itemsize}").astype(f"i{width // 8}")
            elif bits.dtype.itemsize * 8 < width and ins.kind[1:] != str(width):
                bits = bits.astype(KINDS[width])
            m.write(to, Value(bits.astype(KINDS[width]) if bits.dtype != KINDS[width] else bits, value.hashes))

        return parameter
    size = width_of(ins.kind) // 8
    space = _space(ins)

    def step(m: Machine) -> None:
        threads = m.lanes(ins)
        if not len(threads):
            return
        at = m.address(place, threads)
        region, offset = m.region(space, at, threads)
        enable = m.active(ins)
        for i, op in enumerate(_parts(to)):
            got, hashes = region.load(offset + i * size, size)
            width = m.kernel.widths[op.name] if op.name != "_" else 32
            if ins.kind.startswith("s"):
                got = got.view(f"i{size}").astype(f"i{width // 8}").view(KINDS[width])
            put_loaded(m, op, threads, got, hashes, width, enable)

    return step


def put_loaded(
    m: Machine, op: Operand, threads: Array, got: Array, hashes: Array | None, width: int, enable: Array | None
) -> None:
    """Write what was loaded for some threads."""
    bits: Array = np.zeros(m.T, KINDS[width])
    bits[threads] = got
    all_hashes = None
    if hashes is not None:
        all_hashes = np.zeros((m.T, width // 16), U64)
        all_hashes[threads, : hashes.shape[1]] = hashes
    m.write(op, Value(bits, all_hashes), enable)


def store(ins: Instruction) -> Step:
    """st."""
    place, source = ins.operands[:2]
    size, space = width_of(ins.kind) // 8, _space(ins)

    def step(m: Machine) -> None:
        threads = m.lanes(ins)
        if not len(threads):
            return
        at = m.address(place, threads)
        region, offset = m.region(space, at, threads)
        for i, op in enumerate(_parts(source)):
            value = m.read(op, max(16, 8 * size))
            bits, hashes = full(m, value, max(1, np.asarray(value.bits).dtype.itemsize // 2))
            some = None if value.hashes is None else hashes[threads][:, : max(1, size // 2)]
            region.store(offset + i * size, size, bits[threads].astype(f"u{size}"), some)

    return step


def copy(ins: Instruction) -> Step:
    """cp.async: global memory to shared memory, zeros beyond what is read."""
    if ins.parts[1] in {"commit_group", "wait_group", "wait_all"}:
        return lambda _: None
    if not {"shared", "global"} <= {p.removesuffix("__cta") for p in ins.parts}:
        raise UnknownPtxError("this copy is not modeled")
    to, source, size = ins.operands[:3]
    read = ins.operands[3] if len(ins.operands) > 3 else None

    def step(m: Machine) -> None:
        threads = m.lanes(ins)
        if not len(threads):
            return
        n = size.value
        there = np.full(len(threads), n)
        if read is not None:
            there = np.broadcast_to(m.read(read, 32).bits, (m.T,))[threads].astype(np.int64)
        shared, to_at = m.region("shared", m.address(to, threads), threads)
        for word in range(0, n, 4):
            some = there >= word + 4
            bits = np.zeros(len(threads), np.uint32)
            hashes = None
            if some.any():
                at = m.address(source, threads[some]) + word
                region, offset = m.region("global", at, threads[some])
                got, found = region.load(offset, 4)
                bits[some] = got
                if found is not None:
                    hashes = np.zeros((len(threads), 2), U64)
                    hashes[some] = found
            shared.store(to_at + word, 4, bits, hashes)

    return step


def atomic(ins: Instruction) -> Step:
    """red: of known integers in global memory."""
    operate = {"or": np.bitwise_or, "and": np.bitwise_and, "add": np.add}
    name = next((p for p in ins.parts if p in operate), "")
    if not name or ins.kind not in {"b32", "u32", "s32"}:
        raise UnknownPtxError("this atomic is not modeled: its order is that of arrival")
    place, source = ins.operands

    def step(m: Machine) -> None:
        threads = m.lanes(ins)
        if not len(threads):
            return
        value = m.read(source, 32)
        if value.hashes is not None and value.hashes[threads].any():
            raise UnknownPtxError("data is added in the order of arrival")
        region, offset = m.region("global", m.address(place, threads), threads)
        bits, _ = full(m, value, 2)
        for i, thread in zip(offset, threads, strict=True):
            held, hashes = region.load(np.array([i]), 4)
            region.store(np.array([i]), 4, operate[name](held, bits[thread]), hashes)

    return step


_ROW = 8  # 16-bit elements of a row of a matrix


def _matrix_places(m: Machine, op: Operand, threads: Array) -> tuple[Array, Array]:
    """Offsets in shared memory [T] that each thread names, and whose warps run."""
    at = np.zeros(m.T, np.int64)
    _, offset = m.region("shared", m.address(op, threads), threads)
    at[threads] = offset
    return at, threads


def _element(m: Machine, at: Array, i: int, j: int, transposed: bool) -> Array:
    """Offsets [T] of the j-th of two elements of matrix i that a lane holds; `at`: of the rows that lanes name."""
    lane: Array = m.lane
    row, place = (2 * (lane % 4) + j, 2 * (lane // 4)) if transposed else (lane // 4, 4 * (lane % 4) + 2 * j)
    found: Array = at[m.warp_start + 8 * i + row] + place
    return found


def load_matrix(ins: Instruction) -> Step:
    """ldmatrix: 8 x 8 matrices of 16 bits from shared memory, a row from the address of a lane each."""
    if "m8n8" not in ins.parts or ins.kind != "b16":
        raise UnknownPtxError("this shape is not modeled")
    transposed = "trans" in ins.parts

    def step(m: Machine) -> None:
        at, threads = _matrix_places(m, ins.operands[1], m.lanes(ins))
        for i, op in enumerate(_parts(ins.operands[0])):
            got = [m.shared.load(_element(m, at, i, j, transposed)[threads], 2) for j in (0, 1)]
            bits = got[0][0].astype(np.uint32) | got[1][0].astype(np.uint32) << np.uint32(16)
            hashes = None
            if any(h is not None for _, h in got):
                none = np.zeros((len(threads), 1), U64)
                hashes = np.concatenate([none if h is None else h for _, h in got], axis=1)
            put_loaded(m, op, threads, bits, hashes, 32, m.active(ins))

    return step


def store_matrix(ins: Instruction) -> Step:
    """stmatrix: the inverse of ldmatrix."""
    if "m8n8" not in ins.parts or ins.kind != "b16":
        raise UnknownPtxError("this shape is not modeled")
    transposed = "trans" in ins.parts

    def step(m: Machine) -> None:
        at, threads = _matrix_places(m, ins.operands[0], m.lanes(ins))
        for i, op in enumerate(_parts(ins.operands[1])):
            value = m.read(op, 32)
            bits, hashes = full(m, value, 2)
            for j in (0, 1):
                half = (bits >> np.uint32(16 * j)).astype(np.uint16)
                some = None if value.hashes is None else hashes[threads, j : j + 1]
                m.shared.store(_element(m, at, i, j, transposed)[threads], 2, half[threads], some)

    return step
