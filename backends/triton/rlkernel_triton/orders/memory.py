"""Memory of which every 16 bits have a hash beside them: tensors of a call, and shared memory of blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from rlkernel_triton.orders.errors import DataDependentError, NoCertificateError
from rlkernel_triton.orders.expressions import U64, Array

_KINDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Region:
    """Bytes at addresses from `base` on."""

    def __init__(self, data: Array, base: int, keep: Any = None) -> None:
        self.base, self.high, self.data, self._keep = base, base + len(data), data, keep
        self.hashes: Array | None = None  # [bytes / 2]; None: all bits are known

    def load(self, at: Array, size: int) -> tuple[Array, Array | None]:
        """Values [k] of so many bytes at offsets [k], and their hashes [k, size / 2]."""
        value = self.data[: len(self.data) // size * size].view(_KINDS[size])[at // size]
        if self.hashes is None:
            return value, None
        if size == 1:
            if self.hashes[at // 2].any():
                raise NoCertificateError("a single byte of data is loaded; floats of 8 bits have no certificate")
            return value, None
        found = self.hashes[(at // 2)[:, None] + np.arange(size // 2)]
        return value, found if found.any() else None

    def store(self, at: Array, size: int, value: Array, hashes: Array | None) -> None:
        """Store values [k]."""
        self.data[: len(self.data) // size * size].view(_KINDS[size])[at // size] = value
        if hashes is None and self.hashes is None:
            return
        if self.hashes is None:
            self.hashes = np.zeros(len(self.data) // 2 + 1, U64)
        if size == 1:
            if hashes is not None and hashes.any():
                raise DataDependentError("a byte that depends on data is stored; floats of 8 bits have no certificate")
            self.hashes[at // 2] = 0
        else:
            self.hashes[(at // 2)[:, None] + np.arange(size // 2)] = 0 if hashes is None else hashes


class GlobalMemory:
    """The storages of the tensors that kernels were given, each once, for as long as a call lasts."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}

    def of(self, x: torch.Tensor) -> Region:
        """The region of a tensor's storage."""
        storage = x.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        found = self._regions.get(base)
        if found is None or found.high != base + size:
            data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
            found = self._regions[base] = Region(data, base, storage)  # kept, so that no other takes its place
        return found

    def hashes(self, x: torch.Tensor) -> Array:
        """Hashes of a tensor's elements [..., pieces], in its shape; 0 where bits are known."""
        region, size = self.of(x), x.element_size()
        at = torch.arange(x.untyped_storage().nbytes() // size).as_strided(x.shape, x.stride(), x.storage_offset())
        place = at.numpy() * (size // 2)
        if region.hashes is None:
            return np.zeros((*place.shape, size // 2), U64)
        return region.hashes[place[..., None] + np.arange(size // 2)]

    def name(self, x: torch.Tensor, hashes: Array) -> None:
        """Give a tensor's elements hashes [..., pieces]."""
        region, size = self.of(x), x.element_size()
        at = torch.arange(x.untyped_storage().nbytes() // size).as_strided(x.shape, x.stride(), x.storage_offset())
        region.hashes = np.zeros(len(region.data) // 2 + 1, U64) if region.hashes is None else region.hashes
        region.hashes[at.numpy()[..., None] * (size // 2) + np.arange(size // 2)] = hashes

    def spread(self, addresses: Array) -> Iterator[tuple[Region, Array, Array]]:
        """Regions, which of the addresses lie in each, and their offsets there; those in none are left out."""
        for region in self._regions.values():
            inside = (addresses >= region.base) & (addresses < region.high)
            if inside.any():
                which = np.nonzero(inside)[0]
                yield region, which, addresses[which] - region.base

    def find(self, address: Array) -> Region:
        """The region in which all addresses lie.

        Raises:
            NoCertificateError: some lie in none or in several.
        """
        low, high = int(address.min()), int(address.max())
        for region in self._regions.values():
            if region.base <= low and high < region.high:
                return region
        raise NoCertificateError(f"addresses from {low:#x} to {high:#x} lie in no tensor of the launch")
