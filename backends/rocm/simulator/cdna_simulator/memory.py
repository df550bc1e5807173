"""Memory in which every access is held against what the launch was given: global memory and LDS.

A `Region` is a range of bytes that waves gather from and scatter to; `GlobalMemory` is several, at addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cdna_simulator.errors import OutOfBoundsError
from cdna_simulator.formats import I64, U8, U16, U32, Array

_UNITS = ((4, U32), (2, U16), (1, U8))


class Region:
    """Bytes, of which those in [low, high) may be touched."""

    def __init__(self, data: Array, base: int = 0, low: int = 0, high: int | None = None) -> None:
        self.data, self.base = data, base  # uint8 [n]; address of data[0]
        self.low, self.high = base + low, base + (len(data) if high is None else high)
        self._views = [(n, data[: len(data) // n * n].view(kind)) for n, kind in _UNITS if base % n == 0]

    def read(self, addresses: Array, size: int) -> Array:
        """[k, size] bytes at [k] addresses."""
        unit, view, index = self._place(addresses, size)
        found = view[index[:, None] + np.arange(size // unit)] if size > unit else view[index][:, None]
        return found.view(U8)

    def write(self, addresses: Array, data: Array) -> None:
        """Store [k, size] bytes at [k] addresses; of two at one address the last stays."""
        unit, view, index = self._place(addresses, data.shape[1])
        kind = view.dtype
        view[index[:, None] + np.arange(data.shape[1] // unit)] = np.ascontiguousarray(data).view(kind)

    def _place(self, addresses: Array, size: int) -> tuple[int, Array, Array]:
        if addresses.min() < self.low or addresses.max() + size > self.high:
            bad = addresses[(addresses < self.low) | (addresses + size > self.high)][0]
            raise OutOfBoundsError(
                f"{size} bytes at {int(bad) - self.low:+d} of a region of {self.high - self.low} bytes"
            )
        offset = addresses - self.base
        together = int(np.bitwise_or.reduce(offset)) | size
        unit, view = next((n, v) for n, v in self._views if together % n == 0)
        return unit, view, offset // unit


class GlobalMemory:
    """The regions of memory that a launch may touch."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._low = np.empty(0, I64)
        self._high = np.empty(0, I64)

    def add(self, region: Region) -> None:
        """Allow a region; the same one may come twice, others may touch and may not overlap."""
        if region.low == region.high or any(region is b for b in self._regions):
            return
        self._regions = sorted([*self._regions, region], key=lambda b: b.low)
        self._low = np.array([b.low for b in self._regions], I64)
        self._high = np.array([b.high for b in self._regions], I64)

    def read(self, addresses: Array, size: int) -> Array:
        """[k, size] bytes at [k] addresses."""
        out = np.empty((len(addresses), size), U8)
        for region, which in self._spread(addresses, size):
            out[which] = region.read(addresses[which], size)
        return out

    def write(self, addresses: Array, data: Array) -> None:
        """Store [k, size] bytes at [k] addresses."""
        for region, which in self._spread(addresses, data.shape[1]):
            region.write(addresses[which], data[which])

    def update(self, addresses: Array, operate: Callable[[int, Any], Any], kind: Any) -> Array:
        """One read-modify-write after another, in the order of the addresses; returns what was there.

        Args:
            addresses: [k].
            operate: (position, value there) -> value to be there.
            kind: numpy type of the value.
        """
        size = np.dtype(kind).itemsize
        old = np.empty(len(addresses), kind)
        for i in range(len(addresses)):
            at = addresses[i : i + 1]
            old[i] = self.read(at, size).view(kind)[0, 0]
            self.write(at, np.array([[operate(i, old[i])]], kind).view(U8))
        return old

    def _spread(self, addresses: Array, size: int) -> list[tuple[Region, Any]]:
        """Banks and which of the addresses lie in each."""
        if not len(addresses):
            return []
        place = np.searchsorted(self._low, addresses, side="right") - 1
        outside = (place < 0) | (addresses + size > self._high[place])
        if outside.any():
            raise OutOfBoundsError(self._outside(int(addresses[outside][0]), size))
        first = int(place[0])
        if (place == first).all():
            return [(self._regions[first], slice(None))]
        return [(self._regions[i], place == i) for i in np.unique(place)]

    def _outside(self, address: int, size: int) -> str:
        near = min(self._regions, key=lambda b: min(abs(address - b.low), abs(address - b.high)), default=None)
        if near is None:
            return f"{size} bytes at {address:#x}, and the launch was given no memory"
        return (
            f"{size} bytes at {address:#x}, which is byte {address - near.low} of the nearest argument, "
            f"{near.high - near.low} bytes long"
        )
