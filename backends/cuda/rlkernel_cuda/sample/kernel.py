"""The sampler's kernels: how they are built, kept, and launched with their parameters packed in one structure.

A kernel is compiled by NVRTC at first use, which takes some seconds, and kept on disk for the next process: in
$RLKERNEL_CUDA_CACHE, else in $XDG_CACHE_HOME/rlkernel or ~/.cache/rlkernel. A folder that cannot be written costs the
seconds again and nothing else.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

from rlkernel_core.environment import path_in
from rlkernel_core.errors import FileError
from rlkernel_core.files import make_folder, read_bytes, write_bytes
from rlkernel_cuda.common import driver

SOURCE: Final = Path(__file__).with_name("sample.cu")
TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TILE: Final = 1024
TILES: Final = 256  # most tiles of a row


@dataclass(frozen=True)
class Shape:
    """How many blocks share a row, and how they fill a multiprocessor. Decides no bit of any result."""

    threads: int
    cluster: int
    per_sm: int
    finishers: int = 0  # warps that finish a row while the others read the next; 0: a block has one row
    ahead: int = 0  # whether a warp reads a tile while it works on one

    @property
    def shared(self) -> int:
        """Bytes of `Shared` in exact_search.cuh, which checks it."""
        return (80 if self.finishers else 52) << 10

    def blocks(self, rows: int, device: int) -> int:
        """How many are launched."""
        if self.finishers:
            return min(rows, self.per_sm * torch.cuda.get_device_properties(device).multi_processor_count)
        return rows * self.cluster


# `Params` of params.cuh. A parameter is (address, number, stride in entries, whether its integers have 64 bits).
_GIVEN: Final = "PQii"
PARAMS: Final = struct.Struct("Pq4i" + 6 * _GIVEN + "PiiIiq8P")
NUMBER: Final = struct.Struct("f")
WORD: Final = struct.Struct("I")


def flags(shape: Shape, dtype: torch.dtype, *, plain: bool) -> tuple[str, ...]:
    """Macros of a build."""
    values = {
        "NT": shape.threads,
        "CLUSTER": shape.cluster,
        "PER_SM": shape.per_sm,
        "FINISHERS": shape.finishers,
        "AHEAD": shape.ahead,
        "TYPE": TYPES[dtype],
        "PLAIN": int(plain),
        "SHARED_BYTES": shape.shared,
    }
    return tuple(f"-D{n}={v}" for n, v in values.items())


def folder() -> Path:
    """Where built kernels are kept."""
    given = path_in("RLKERNEL_CUDA_CACHE")
    return given or (path_in("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlkernel"


def built(options: tuple[str, ...]) -> bytes:
    """Machine code of a build: from disk, or compiled and put there.

    Raises:
        RLKernelError: no NVRTC, or it refuses.
    """
    texts = (path.read_text() for path in sorted(SOURCE.parent.glob("*.cu*")))  # the source and what it includes
    told = "\n".join((*texts, *options, str(torch.version.cuda)))
    place = folder() / f"sample-sm90-{hashlib.sha256(told.encode()).hexdigest()[:32]}.cubin"
    with suppress(FileError):
        return read_bytes(place, "")
    code = driver.compiled(SOURCE, options)
    with suppress(FileError):  # a read-only home costs a repeated compilation, nothing else
        make_folder(place.parent)
        write_bytes(place, code)  # another process sees all of it or nothing
    return code


@cache
def loaded(shape: Shape, dtype: torch.dtype, plain: bool, device: int) -> ctypes.c_void_p:
    """A build, loaded on the GPU of this index; one for all calls that need it."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # the context exists
        return driver.loaded(built(flags(shape, dtype, plain=plain)), "sample", shape.shared)


class Launch(driver.Kernel):
    """A build with the grid for some rows.

    Args:
        shape: of the build.
        dtype: of the logits.
        rows: how many there are.
        plain: no row has a filter.
        device: index of the GPU.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, rows: int, *, plain: bool, device: int) -> None:
        grid = driver.Blocks(shape.blocks(rows, device), shape.threads, shape.shared)
        super().__init__(loaded(shape, dtype, plain, device), grid, device)

    def __call__(self, params: bytes) -> None:
        """All rows, given `Params` of params.cuh, on the current stream of the GPU."""
        self.go((ctypes.c_char_p * 1)(params))
