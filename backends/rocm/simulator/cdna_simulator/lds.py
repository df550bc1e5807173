"""LDS: the memory that the waves of one workgroup share.

Semantics: CDNA3 ISA, chapter "Local data share".
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from cdna_simulator.assembly import Instruction, Operand
from cdna_simulator.errors import OutOfBoundsError
from cdna_simulator.formats import I64, U16, U32, Array
from cdna_simulator.operands import Step, broadcast, u32, unknown
from cdna_simulator.transfer import WIDTHS, Lanes, Width, put_loaded, stored_bytes
from cdna_simulator.waves import Waves


def at(w: Waves, lanes: Lanes, addresses: Array, size: int) -> Array:
    """Addresses within the workgroup as places in the LDS of all its waves."""
    if len(addresses) and (addresses.min() < 0 or addresses.max() + size > w.lds_bytes):
        raise OutOfBoundsError(f"{size} bytes at {int(addresses.max())} of {w.lds_bytes} bytes of LDS")
    return addresses + w.lds_base[lanes[0], 0]


def _place(op: Operand, offset: int) -> Callable[[Waves, int], tuple[Lanes, Array]]:
    read = broadcast(u32(op))

    def place(w: Waves, size: int) -> tuple[Lanes, Array]:
        lanes = np.nonzero(w.mask)
        # Addresses have 32 bits, so that a base below zero and an offset above it meet inside.
        return lanes, at(w, lanes, (read(w)[lanes].astype(I64) + offset) & 0xFFFFFFFF, size)

    return place


def _pair(ins: Instruction, found: re.Match[str]) -> Step:
    """ds_read2 and ds_write2: two elements whose offsets count in elements, or in 64 of them."""
    size = int(found[3]) // 8
    unit = size * (64 if found[2] else 1)
    offsets = [ins.number(f"offset{i}") * unit for i in range(2)]
    reads = found[1] == "read"
    places = [_place(ins.operands[1 if reads else 0], o) for o in offsets]

    def load(w: Waves) -> None:
        got = []
        for place in places:
            lanes, here = place(w, size)
            if not len(here):
                return
            got.append(w.lds.read(here, size))
        put_loaded(w, ins.operands[0], lanes, np.concatenate(got, axis=1), Width(2 * size))

    def store(w: Waves) -> None:
        for i, place in enumerate(places):
            lanes, here = place(w, size)
            if len(here):
                w.lds.write(here, stored_bytes(w, ins.operands[1 + i], lanes, Width(size)))

    return load if reads else store


def _transposed(ins: Instruction) -> Step:
    """ds_read_b64_tr_b16 (gfx950): sixteen lanes read four halves each and exchange them, transposed."""
    place = _place(ins.operands[1], ins.number("offset"))
    lane = np.arange(16)

    def step(w: Waves) -> None:
        active = np.logical_and.reduce(w.mask, axis=1)
        if bool((w.mask != active[:, None]).any()):  # no manual says what a wave reads with some lanes off
            raise unknown(ins)
        _, here = place(w, 8)
        rows = w.lds.read(here, 8).view(U16).reshape(-1, 4, 16, 4)  # [active waves, group, lane, element]
        out = np.stack([rows[:, :, 4 * j + lane // 4, lane % 4] for j in range(4)], axis=-1)
        got = np.zeros((w.W, 64, 2), U32)
        got[active] = np.ascontiguousarray(out).view(U32).reshape(-1, 64, 2)
        w.put(ins.operands[0].index, got[..., 0])
        w.put(ins.operands[0].index + 1, got[..., 1])

    return step


def bind(ins: Instruction) -> Step:
    """The function that executes a ds_ instruction."""
    if found := re.fullmatch(r"ds_(read|write)2(st64)?_b(32|64)", ins.name):
        return _pair(ins, found)
    if ins.name == "ds_read_b64_tr_b16":
        return _transposed(ins)
    found = re.fullmatch(r"ds_(read|write)_(\w+)", ins.name)
    if not found or found[2] not in WIDTHS:
        raise unknown(ins)
    width, reads = WIDTHS[found[2]], found[1] == "read"
    place = _place(ins.operands[1 if reads else 0], ins.number("offset"))

    def step(w: Waves) -> None:
        lanes, here = place(w, width.size)
        if not len(here):
            return
        if reads:
            put_loaded(w, ins.operands[0], lanes, w.lds.read(here, width.size), width)
        else:
            w.lds.write(here, stored_bytes(w, ins.operands[1], lanes, width))

    return step
