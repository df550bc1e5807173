"""The sampler's kernels: how they are built, kept, and launched with their parameters packed in one structure.

A kernel is compiled by NVRTC at first use, which takes some seconds, and kept on disk for the next process: in
$RLKERNEL_CACHE, else in $XDG_CACHE_HOME/rlkernel or ~/.cache/rlkernel. A folder that cannot be written costs the
seconds again and nothing else.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_cuda import driver

_FLOAT, _BITS = struct.Struct("f"), struct.Struct("I")
SOURCES: Final = tuple(Path(__file__).with_name(n) for n in ("device.cuh", "tile.cuh", "wide.cuh", "sample.cu"))
TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TILE: Final = 1024
TILES: Final = 256  # most tiles of a row
SHARED: Final = 52 << 10  # bytes of `Shared` in wide.cuh, which checks it; four blocks fit a multiprocessor


@dataclass(frozen=True)
class Shape:
    """How many blocks share a row, and how they fill a multiprocessor. Decides no bit of any result."""

    threads: int
    cluster: int
    per_sm: int


class Given(ctypes.Structure):
    """A parameter of the law: `Given` of tile.cuh."""

    _fields_ = (("at", ctypes.c_void_p), ("number", ctypes.c_uint64), ("each", ctypes.c_int), ("wide", ctypes.c_int))


class Params(ctypes.Structure):
    """`Params` of tile.cuh."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        *((n, ctypes.c_int) for n in ("N", "V", "tiles", "whole")),
        *((n, Given) for n in ("temperature", "top_k", "top_p", "min_p", "seed", "step")),
        ("slot", ctypes.c_void_p),
        ("slot_wide", ctypes.c_int),
        ("last_slot", ctypes.c_int),
        ("stream", ctypes.c_uint32),
        ("raw", ctypes.c_int),
        ("invalid_token", ctypes.c_int64),
        *(
            (n, ctypes.c_void_p)
            for n in (
                "token", "threshold_id", "logprob", "log_kept_mass", "threshold", "raw_logprob", "kept_count", "status",
            )
        ),
    )  # fmt: skip


def flags(shape: Shape, dtype: torch.dtype, *, plain: bool) -> tuple[str, ...]:
    """Macros of a build."""
    values = {
        "NT": shape.threads,
        "CLUSTER": shape.cluster,
        "PER_SM": shape.per_sm,
        "TYPE": TYPES[dtype],
        "PLAIN": int(plain),
        "SHARED_BYTES": SHARED,
    }
    return tuple(f"-D{n}={v}" for n, v in values.items())


def folder() -> Path:
    """Where built kernels are kept."""
    given = os.environ.get("RLKERNEL_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given) if given else Path(home) / "rlkernel"


def built(options: tuple[str, ...]) -> bytes:
    """Machine code of a build: from disk, or compiled and put there.

    Raises:
        RLKernelError: no NVRTC, or it refuses.
    """
    source = "\n".join(path.read_text() for path in SOURCES)
    told = "\n".join((source, *options, str(torch.version.cuda)))
    place = folder() / f"sample-sm90-{hashlib.sha256(told.encode()).hexdigest()[:32]}.cubin"
    try:
        return place.read_bytes()
    except OSError:
        code = driver.compiled(source, options)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(code)
        Path(file.name).replace(place)  # another process sees all of it or nothing
    except OSError:
        pass
    return code


@cache
def kernel(shape: Shape, dtype: torch.dtype, plain: bool, device: int) -> ctypes.c_void_p:
    """A build, loaded on a device, which must be the current one."""
    torch.cuda.current_stream(device)  # the context exists
    return driver.loaded(built(flags(shape, dtype, plain=plain)), "sample", SHARED)


def launch(of: ctypes.c_void_p, shape: Shape, params: Params) -> None:
    """All rows of `params`, on the current stream."""
    place: Any = (params, ctypes.addressof(params))
    driver.launch(of, params.N * shape.cluster, shape.threads, SHARED, (place,))


def given(value: float | Tensor | None, off: float, dtype: torch.dtype | None) -> tuple[Given, Tensor | None]:
    """A parameter as the kernel takes it, and the tensor that must outlive the launch.

    Args:
        value: a number, a tensor of one or of many entries, or None.
        off: the number that means None.
        dtype: float32, or None for integers, whose width the kernel minds itself.
    """
    if not isinstance(value, Tensor):
        number = off if value is None else value
        if dtype is None:
            return Given(None, int(number) & (2**64 - 1), -1, 1), None
        return Given(None, _BITS.unpack(_FLOAT.pack(number))[0], -1, 0), None
    if dtype is not None:
        value = value.to(dtype)
    elif value.dtype not in {torch.int64, torch.int32}:
        value = value.to(torch.int64)
    if value.dim() and not value.is_contiguous():
        value = value.contiguous()
    return Given(value.data_ptr(), 0, int(value.numel() != 1), int(value.dtype == torch.int64)), value
