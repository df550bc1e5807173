"""Global memory and scratch: scalar loads, and vector accesses by an address, an offset or a buffer descriptor.

Semantics: CDNA3 ISA, chapters "Scalar memory operations" and "Vector memory operations". A buffer access beyond its
descriptor's size reads 0 and writes nothing; everything else outside the launch's memory, or a lane's scratch, is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from cdna_simulator import lds
from cdna_simulator.assembly import Instruction, Operand
from cdna_simulator.errors import OutOfBoundsError
from cdna_simulator.formats import F32, F64, I32, I64, U8, U32, U64, Array
from cdna_simulator.operands import Reader, Step, broadcast, u32, u64, unknown
from cdna_simulator.transfer import WIDTHS, Lanes, put_loaded, stored_bytes
from cdna_simulator.waves import M0, Waves

Compute = Callable[..., Any]
# Active lanes, their addresses [k], and the lanes beyond the end of a buffer, which read 0; None where there are none.
Place = Callable[[Waves], tuple[Lanes, Array, Lanes | None]]
# The bits of M0 that name a place in LDS: 16, and as many as gfx950's 160 KiB need. LLVM puts such places there.
_PLACE_IN_LDS: Final = {"gfx950": 0x3FFFF}
_NOWHERE: Final = 0x7FFFFFFF  # beyond any LDS: Triton puts it in M0 of a wave whose load writes nothing
# name -> (numpy type, (old, operand) -> new)
ATOMICS: Final[Mapping[str, tuple[Any, Compute]]] = {
    "add": (U32, np.add), "sub": (U32, np.subtract), "and": (U32, np.bitwise_and), "or": (U32, np.bitwise_or),
    "xor": (U32, np.bitwise_xor), "umax": (U32, np.maximum), "umin": (U32, np.minimum), "smax": (I32, np.maximum),
    "smin": (I32, np.minimum), "swap": (U32, lambda _, new: new), "add_f32": (F32, np.add),
    "add_x2": (U64, np.add), "and_x2": (U64, np.bitwise_and), "or_x2": (U64, np.bitwise_or),
    "xor_x2": (U64, np.bitwise_xor), "umax_x2": (U64, np.maximum), "umin_x2": (U64, np.minimum),
    "smax_x2": (I64, np.maximum), "smin_x2": (I64, np.minimum), "swap_x2": (U64, lambda _, new: new),
    "add_f64": (F64, np.add), "max_f64": (F64, np.fmax), "min_f64": (F64, np.fmin),
}  # fmt: skip


def scalar_load(ins: Instruction) -> Step:
    """s_load_dword…: consecutive words into consecutive scalar registers."""
    count = int(ins.name.removeprefix("s_load_dword").lstrip("x") or 1)
    to, base, offset = ins.operands
    start = u64(base)
    constant, extra = ((offset.value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000, ins.number("offset")
    plus: Reader = (lambda _: I64(constant)) if offset.kind == "k" else u32(offset)

    def step(w: Waves) -> None:
        address = np.array(start(w)).astype(I64) + plus(w).astype(I64) + extra
        got = w.memory.read(address[w.live], 4 * count).view(U32)  # [live waves, count]
        w.s[w.live[:, 0], to.index : to.index + count] = got

    return step


def _global_place(ops: tuple[Operand, ...], offset: int) -> Place:
    """A 64-bit address a lane, or a scalar address and 32 bits a lane."""
    if len(ops) > 1 and ops[1].kind == "s":
        base, lane = u64(ops[1]), broadcast(u32(ops[0]))
        read: Reader = lambda w: base(w).astype(I64) + lane(w).astype(I64)  # noqa: E731 one of two readers
    else:
        wide = broadcast(u64(ops[0]))
        read = lambda w: wide(w).astype(I64)  # noqa: E731

    def place(w: Waves) -> tuple[Lanes, Array, None]:
        lanes = np.nonzero(w.mask)
        return lanes, read(w)[lanes] + offset, None

    return place


def _buffer_place(ins: Instruction, ops: tuple[Operand, ...], size: int) -> Place:
    """Raw buffers: the lanes within the descriptor's size, and those beyond it."""
    lane = broadcast(u32(ops[0])) if "offen" in ins.modifiers else None
    descriptor, scalar, offset = ops[1].index, u32(ops[2]), ins.number("offset")
    if "idxen" in ins.modifiers:
        raise unknown(ins)

    def place(w: Waves) -> tuple[Lanes, Array, Lanes | None]:
        words = w.s[:, descriptor : descriptor + 4].astype(I64)
        base = (words[:, 0] | (words[:, 1] & 0xFFFF) << 32)[:, None]
        at = np.asarray(scalar(w)).astype(I64) + offset
        at = at + lane(w) if lane else np.broadcast_to(at, (w.W, 64))
        within = at + size <= words[:, 2:3]
        lanes, beyond = np.nonzero(w.mask & within), w.mask & ~within
        return lanes, (base + at)[lanes], np.nonzero(beyond) if beyond.any() else None

    return place


def _scratch(ins: Instruction) -> Step:
    """scratch_load and scratch_store: bytes that are a lane's own, at the sum of a lane's and a scalar offset."""
    found = re.fullmatch(r"scratch_(load|store)_(\w+)", ins.name)
    if not found or found[2] not in WIDTHS:
        raise unknown(ins)
    what, width = found[1], WIDTHS[found[2]]
    to, *offsets = ins.operands if what == "load" else (ins.operands[1], ins.operands[0], ins.operands[2])
    reads, constant = [broadcast(u32(op)) for op in offsets if op.kind != "none"], ins.number("offset")

    def place(w: Waves) -> tuple[Lanes, Array]:
        lanes = np.nonzero(w.mask)
        at = sum((read(w)[lanes].astype(I64) for read in reads), np.full(len(lanes[0]), constant, I64))
        if len(at) and (at.min() < 0 or at.max() + width.size > w.scratch_bytes):
            raise OutOfBoundsError(f"{width.size} bytes at {int(at.max())} of {w.scratch_bytes} bytes of scratch")
        return lanes, (lanes[0] * 64 + lanes[1]) * w.scratch_bytes + at

    def load(w: Waves) -> None:
        lanes, at = place(w)
        if len(at):
            put_loaded(w, to, lanes, w.scratch.read(at, width.size), width)

    def store(w: Waves) -> None:
        lanes, at = place(w)
        if len(at):
            w.scratch.write(at, stored_bytes(w, to, lanes, width))

    return load if what == "load" else store


def bind(ins: Instruction) -> Step:
    """The function that executes a global_, flat_, buffer_ or scratch_ instruction."""
    if ins.name.startswith("scratch_"):
        return _scratch(ins)
    found = re.fullmatch(r"(global|flat|buffer)_(load|store|atomic)_(lds_)?(\w+)", ins.name)
    if not found or (found[2] != "atomic" and found[4] not in WIDTHS):
        raise unknown(ins)
    space, what, into, of = found.groups()
    ops = ins.operands
    returns = what == "atomic" and bool({"sc0", "glc"} & set(ins.modifiers))
    to_lds = bool(into) or "lds" in ins.modifiers
    if to_lds:
        data, address = ops[0], ops
    elif space == "buffer":
        data, address = ops[0], ops[1:]
    elif returns:
        data, address = ops[2], (ops[1], *ops[3:])
    elif what == "load":
        data, address = ops[0], ops[1:]
    else:
        data, address = ops[1], (ops[0], *ops[2:])
    size = (8 if of.endswith(("_x2", "f64")) else 4) if what == "atomic" else WIDTHS[of].size
    place = _buffer_place(ins, address, size) if space == "buffer" else _global_place(address, ins.number("offset"))
    if what == "atomic":
        return _atomic(ins, of, data, ops[0] if returns else None, place)
    if to_lds:
        return _load_to_lds(ins, size, place)
    return _load(of, data, place) if what == "load" else _store(of, data, place)


def _load(of: str, data: Operand, place: Place) -> Step:
    width = WIDTHS[of]

    def step(w: Waves) -> None:
        lanes, at, beyond = place(w)
        if len(at):
            put_loaded(w, data, lanes, w.memory.read(at, width.size), width)
        if beyond is not None:
            put_loaded(w, data, beyond, np.zeros((len(beyond[0]), width.size), U8), width)

    return step


def _store(of: str, data: Operand, place: Place) -> Step:
    width = WIDTHS[of]

    def step(w: Waves) -> None:
        lanes, at, _ = place(w)
        if len(at):
            w.memory.write(at, stored_bytes(w, data, lanes, width))

    return step


def _load_to_lds(ins: Instruction, size: int, place: Place) -> Step:
    """A load that goes to LDS, at M0 and the instruction's offset, lane after lane."""
    offset = ins.number("offset")

    def put(w: Waves, lanes: Lanes, data: Array) -> None:
        kept = w.s[lanes[0], M0] != _NOWHERE
        (waves, lane), data = (lanes[0][kept], lanes[1][kept]), data[kept]
        first = w.s[waves, M0] & U32(_PLACE_IN_LDS.get(w.arch, 0xFFFF))
        here = first.astype(I64) + offset + lane * size
        if len(here):
            w.lds.write(lds.at(w, (waves, lane), here, size), data)

    def step(w: Waves) -> None:
        lanes, at, beyond = place(w)
        if len(at):
            put(w, lanes, w.memory.read(at, size))
        if beyond is not None:
            put(w, beyond, np.zeros((len(beyond[0]), size), U8))

    return step


def _atomic(ins: Instruction, of: str, data: Operand, to: Operand | None, place: Place) -> Step:
    """Read-modify-writes, one lane after another."""
    if of in {"cmpswap", "cmpswap_x2"}:
        n = 2 if of.endswith("_x2") else 1
        kind: Any = U64 if n == 2 else U32
    elif of in ATOMICS:
        kind, compute = ATOMICS[of]
        n = np.dtype(kind).itemsize // 4
    else:
        raise unknown(ins)

    def given(w: Waves, first: int, lanes: Lanes) -> Array:
        held = [w.v[data.index + first + r][lanes] for r in range(n)]
        return np.stack(held, axis=1).view(kind)[:, 0]

    def step(w: Waves) -> None:
        lanes, at, _ = place(w)
        if not len(at):
            return
        new = given(w, 0, lanes)
        if of.startswith("cmpswap"):
            expected = given(w, n, lanes)
            old = w.memory.update(at, lambda i, x: new[i] if x == expected[i] else x, kind)
        else:
            old = w.memory.update(at, lambda i, x: compute(x, new[i]), kind)
        if to is not None:
            back = old[:, None].view(U32)
            for r in range(n):
                w.v[to.index + r][lanes] = back[:, r]

    return step
