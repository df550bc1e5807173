"""LDS: the memory that the waves of one workgroup share.

Semantics: CDNA3 ISA, chapter "Local data share".
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from rlkernel_rocm.simulator.assembly import Instruction, Operand
from rlkernel_rocm.simulator.faults import OutOfBoundsError
from rlkernel_rocm.simulator.formats import I64, U16, U32, Array
from rlkernel_rocm.simulator.operands import Step, full, u32, unknown
from rlkernel_rocm.simulator.team import Team
from rlkernel_rocm.simulator.transfer import WIDTHS, Lanes, Width, put_loaded, taken


def at(t: Team, lanes: Lanes, addresses: Array, size: int) -> Array:
    """Addresses within the workgroup as places in the team's LDS."""
    if len(addresses) and (addresses.min() < 0 or addresses.max() + size > t.lds_bytes):
        raise OutOfBoundsError(f"{size} bytes at {int(addresses.max())} of {t.lds_bytes} bytes of LDS")
    return addresses + t.lds_base[lanes[0], 0]


def _place(op: Operand, offset: int) -> Callable[[Team, int], tuple[Lanes, Array]]:
    read = full(u32(op))

    def place(t: Team, size: int) -> tuple[Lanes, Array]:
        lanes = np.nonzero(t.mask)
        return lanes, at(t, lanes, read(t)[lanes].astype(I64) + offset, size)

    return place


def _pair(ins: Instruction, found: re.Match[str]) -> Step:
    """ds_read2 and ds_write2: two elements whose offsets count in elements, or in 64 of them."""
    size = int(found[3]) // 8
    unit = size * (64 if found[2] else 1)
    offsets = [ins.number(f"offset{i}") * unit for i in range(2)]
    reads = found[1] == "read"
    places = [_place(ins.operands[1 if reads else 0], o) for o in offsets]

    def load(t: Team) -> None:
        got = []
        for place in places:
            lanes, here = place(t, size)
            if not len(here):
                return
            got.append(t.lds.read(here, size))
        put_loaded(t, ins.operands[0], lanes, np.concatenate(got, axis=1), Width(2 * size))

    def store(t: Team) -> None:
        for i, place in enumerate(places):
            lanes, here = place(t, size)
            if len(here):
                t.lds.write(here, taken(t, ins.operands[1 + i], lanes, Width(size)))

    return load if reads else store


def _transposed(ins: Instruction) -> Step:
    """ds_read_b64_tr_b16 (gfx950): sixteen lanes read four halves each and exchange them, transposed."""
    place = _place(ins.operands[1], ins.number("offset"))
    lane = np.arange(16)

    def step(t: Team) -> None:
        if not t.whole:
            raise unknown(ins)
        _, here = place(t, 8)
        rows = t.lds.read(here, 8).view(U16).reshape(-1, 4, 16, 4)  # [W, group, lane, element]
        out = np.stack([rows[:, :, 4 * j + lane // 4, lane % 4] for j in range(4)], axis=-1)
        got = np.ascontiguousarray(out).view(U32).reshape(-1, 64, 2)
        t.put(ins.operands[0].index, got[..., 0])
        t.put(ins.operands[0].index + 1, got[..., 1])

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

    def step(t: Team) -> None:
        lanes, here = place(t, width.size)
        if not len(here):
            return
        if reads:
            put_loaded(t, ins.operands[0], lanes, t.lds.read(here, width.size), width)
        else:
            t.lds.write(here, taken(t, ins.operands[1], lanes, width))

    return step
