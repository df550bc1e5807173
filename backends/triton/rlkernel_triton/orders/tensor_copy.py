"""Hopper's copy engine: a box of a matrix to shared memory (PTX ISA, "cp.async.bulk.tensor", "Tensor swizzling modes").

A copy ends before the next instruction begins, so that barriers in memory have nothing to count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from rlkernel_triton.orders.errors import DataDependentError, UnknownPtxError
from rlkernel_triton.orders.expressions import U64, Array
from rlkernel_triton.orders.machine import Machine, Step, Value
from rlkernel_triton.orders.memory import Region
from rlkernel_triton.orders.ptx import Instruction

_WIDTHS: Final = {1: 32, 2: 64, 3: 128}  # Triton's name of a swizzle -> bytes of a row of a tile


class Box(NamedTuple):
    """What a descriptor is of."""

    region: Region
    first: int  # offset of the matrix in it
    shape: tuple[int, int]
    strides: tuple[int, int]  # in elements
    rows: int  # of a box
    columns: int
    width: int  # bytes of a row of the swizzled tile


def box_of(descriptor: Any, region: Region, about: Mapping[str, Any]) -> Box:
    """The box of a descriptor of Triton's, by what its compiler says of it.

    Raises:
        UnknownPtxError: it is not of a matrix of 16 bits in a swizzled tile.
    """
    x, (rows, columns) = descriptor.base, about["block_size"]
    width = _WIDTHS.get(about["swizzle"], 0)
    if len(descriptor.shape) != 2 or about["elem_size"] != 2 or 2 * columns != width:
        raise UnknownPtxError("a descriptor of anything but a swizzled tile of 16 bits is not modeled")
    shape, strides = tuple(descriptor.shape), tuple(descriptor.strides)
    return Box(region, x.data_ptr() - region.base, shape, strides, rows, columns, width)


def copy_box(ins: Instruction) -> Step:
    """cp.async.bulk.tensor.2d of global to shared memory; zeros outside of the matrix."""
    if not {"tensor", "2d", "global"} <= set(ins.parts) or ins.parts[4] not in {"shared__cta", "shared__cluster"}:
        raise UnknownPtxError("this copy is not modeled")
    to, source = ins.operands[:2]

    def step(m: Machine) -> None:
        threads = m.lanes(ins)
        if not len(threads):
            return
        places = m.address(to, threads)
        handles = _known(m, m.registers[source.name], threads)
        columns, rows = (_known(m, m.read(op, 32), threads).astype(np.int32).astype(np.int64) for op in source.parts)
        for thread, place, handle, row, column in zip(threads, places, handles, rows, columns, strict=True):
            if int(handle) not in m.boxes:
                raise UnknownPtxError("a descriptor that is no argument is not modeled")
            _copied(m, m.boxes[int(handle)], int(thread), int(place), int(row), int(column))

    return step


def _known(m: Machine, value: Value, threads: Array) -> Array:
    if value.hashes is not None and value.hashes[threads].any():
        raise DataDependentError("what it copies depends on data")
    found: Array = np.broadcast_to(value.bits, (m.T,))[threads]
    return found


def _copied(m: Machine, box: Box, thread: int, place: int, row: int, column: int) -> None:
    r, c = (x.ravel() for x in np.meshgrid(np.arange(box.rows), np.arange(box.columns), indexing="ij"))
    at = place + r * box.width + 2 * c
    at = at ^ ((at >> 7) & (box.width // 16 - 1)) << 4
    i, j = row + r, column + c
    inside = (i >= 0) & (i < box.shape[0]) & (j >= 0) & (j < box.shape[1])
    bits, hashes = np.zeros(len(r), np.uint16), np.zeros((len(r), 1), U64)
    if inside.any():
        source = box.first + 2 * (i[inside] * box.strides[0] + j[inside] * box.strides[1])
        got, found = box.region.load(source, 2)
        bits[inside] = got
        if found is not None:
            hashes[inside] = found
    shared, offset = m.region("shared", at, np.full(len(at), thread))
    shared.store(offset, 2, bits, hashes)
