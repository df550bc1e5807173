"""Memory that a trial and a worker share: the trial writes arguments there and reads results from it.

The trial writes while the worker's whole tree is stopped, and reads once it is stopped again: the worker cannot watch
the values change, and the trial does not see what is written later. The size is sealed: neither side can shorten the
memory that the other reads.

    memory    arguments of one call · results of one call
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.tree import flatten

_ALIGN: Final = 64  # bytes: aligned for any vector unit
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_STALE: Final = 0xA5  # fills the place of results before a call
SLACK: Final = 1 << 20  # bytes beyond what the results of the reference take


@dataclass(frozen=True)
class Place:
    """Where a strided tensor lies in the memory."""

    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Arena:
    """The memory as one process maps it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.map = mmap.mmap(descriptor, size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    @classmethod
    def new(cls, size: int) -> Arena:
        """New memory of so many bytes."""
        descriptor = os.memfd_create("judge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return cls(descriptor, size)

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last tensor on it."""
        os.close(self.descriptor)

    def view(self, place: Place) -> Tensor:
        """The tensor at a place.

        Raises:
            ValueError: it is no place in this memory.
        """
        span = span_of(place.shape, place.stride) * place.dtype.itemsize
        if place.offset < 0 or place.offset % _ALIGN or place.offset + span > self.size:
            raise ValueError(f"{span} bytes at {place.offset} do not lie in {self.size}")
        flat = self.bytes[place.offset : place.offset + span].view(place.dtype)
        return flat.as_strided(place.shape, place.stride)

    def clear(self, start: int) -> None:
        """Overwrite everything from byte `start` on."""
        self.bytes[start:].fill_(_STALE)


def places(tensors: Sequence[Tensor], start: int = 0) -> tuple[list[Place], int]:
    """A place for each tensor, with its strides, from `start` on, and where the last one ends, aligned."""
    found, at = [], start
    for x in tensors:
        found.append(Place(at, x.dtype, tuple(x.shape), tuple(x.stride())))
        at += aligned(span_of(x.shape, x.stride()) * x.element_size())
    return found, at


def put(value: Any, arena: Arena, where: Sequence[Place]) -> Any:
    """Nested arguments with their tensors replaced by those at these places, which get their values."""
    found, structure = flatten(value)
    rest = iter(where)
    replaced = [arena.view(next(rest)).copy_(x) if isinstance(x, Tensor) else x for x in found]
    return structure.build(replaced)


def aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // _ALIGN) * _ALIGN


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first of a strided tensor to its last."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
