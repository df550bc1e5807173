"""Hashes of expressions beside the registers and the memory of simulated waves, in planes.

A plane holds 16 bits of the hash of each 16 bits of data, where the data lies: four planes hold the hash. So whatever
moves 16 bits moves a plane too, and is run once for the data and once for each plane.

Legend: W waves; 64 lanes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cdna_simulator import Region
from rlkernel_triton.orders import expressions as e
from rlkernel_triton.orders.errors import NoCertificateError
from rlkernel_triton.orders.expressions import U64, Array
from rlkernel_triton.orders.memory import GlobalMemory

PLANES: Final = 4
_SHIFTS: Final = tuple(U64(16 * k) for k in range(PLANES))


def to_planes(pieces: Array) -> Array:
    """[4, ...] words of planes of two pieces, [..., 2]."""
    parts = [(pieces >> s) & U64(0xFFFF) for s in _SHIFTS]
    return np.stack([p[..., 0] | p[..., 1] << U64(16) for p in parts]).astype(np.uint32)


def to_pieces(planes: Array) -> Array:
    """The reverse: [..., 2] of [4, ...]."""
    wide = planes.astype(U64)
    halves = [
        sum((((word >> shift) & U64(0xFFFF)) << s for word, s in zip(wide, _SHIFTS, strict=True)), U64(0))
        for shift in (U64(0), U64(16))
    ]
    return np.stack(halves, axis=-1)


class PlaneMemory:
    """One plane of global memory, with the methods that waves call of `cdna_simulator.GlobalMemory`."""

    def __init__(self, memory: GlobalMemory, plane: int) -> None:
        self._memory, self._plane = memory, plane

    def read(self, addresses: Array, size: int) -> Array:
        """[k, size] bytes of the plane; 0 beyond the tensors of the call, such as of arguments."""
        out = np.zeros((len(addresses), size), np.uint8)
        for region, which, at in self._memory.spread(addresses):
            if region.hashes is None:
                continue
            words = region.hashes.view(np.uint16)[self._plane :: PLANES]
            if size == 1:
                if region.hashes[at // 2].any():
                    raise NoCertificateError("a single byte of data is loaded; floats of 8 bits have no certificate")
                continue
            out[which] = words[(at // 2)[:, None] + np.arange(size // 2)].view(np.uint8)
        return out

    def write(self, addresses: Array, data: Array) -> None:
        """Store [k, size] bytes of the plane."""
        for region, which, at in self._memory.spread(addresses):
            if region.hashes is None:
                if not data.any():
                    continue
                region.hashes = np.zeros(len(region.data) // 2 + 1, U64)
            if data.shape[1] == 1:
                if data.any():
                    raise NoCertificateError("a byte of data is stored; floats of 8 bits have no certificate")
                region.hashes[at // 2] = 0
                continue
            words = region.hashes.view(np.uint16)[self._plane :: PLANES]
            words[(at // 2)[:, None] + np.arange(data.shape[1] // 2)] = np.ascontiguousarray(data[which]).view(
                np.uint16
            )

    def update(self, addresses: Array, operate: Any, kind: Any) -> Array:
        """An atomic of known bits leaves planes as they are."""
        del operate
        return np.zeros(len(addresses), kind)


class Hashes:
    """The planes of some waves' registers and LDS, and hashes of what comparisons of data say of each lane."""

    def __init__(self, waves: Any, memory: GlobalMemory) -> None:
        self.W = waves.W
        self._vector: dict[int, Array] = {}  # register -> [4, W, 64]; absent: all bits are known
        self.scalar = np.zeros((PLANES, self.W, 128), np.uint32)
        self.scc_unknown = False
        self.masks: dict[int, Array] = {}  # first scalar register -> [W, 64] hashes, 0 where the bit is known
        self.memory = [PlaneMemory(memory, k) for k in range(PLANES)]
        self.lds = [Region(np.zeros(len(waves.lds.data), np.uint8)) for _ in range(PLANES)]

    def any_of(self, kind: str, index: int, count: int, mask: Array | None = None) -> bool:
        """Whether some bit of registers is not known, in any lane or in those of a mask [W, 64]."""
        if kind == "v":
            held = [self._vector[r] for r in range(index, index + count) if r in self._vector]
            return bool(held) if mask is None else any(x[:, mask].any() for x in held)
        return bool(self.scalar[:, :, index : index + count].any())

    def planes(self, index: int) -> Array:
        """[4, W, 64] of a vector register."""
        found = self._vector.get(index)
        return np.zeros((PLANES, self.W, 64), np.uint32) if found is None else found

    def put(self, index: int, planes: Array) -> None:
        """Set those of a vector register."""
        if planes.any():
            self._vector[index] = planes
        else:
            self._vector.pop(index, None)

    def known(self, index: int, where: Array) -> None:
        """A vector register's bits are known in some lanes, [W, 64]."""
        if index in self._vector:
            self.put(index, np.where(where, np.uint32(0), self._vector[index]))

    def pieces(self, kind: str, index: int) -> Array:
        """[W, 64 or 1, 2] pieces of a register."""
        if kind == "v":
            return to_pieces(self.planes(index))
        return to_pieces(self.scalar[:, :, index : index + 1])


def word(pieces: Array, bits: Array) -> Array:
    """The hash of 32 bits: of their expression, or of their value where they are known."""
    return np.where(pieces.any(axis=-1), e.whole(pieces), e.constant(bits, 32))
