"""Launches of kernels that may begin while the one before them ends: programmatic edges, where they are captured.

Such a kernel waits (`griddepcontrol.wait`) before it reads or writes what others write or read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError

_PROGRAMMATIC: Final = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """A CUlaunchAttribute, whose value takes 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """A CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_EARLY: Final = _Attribute(_PROGRAMMATIC, 0, (1,))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def launch(kernel: ctypes.c_void_p, blocks: int, threads: int, shared: int, arguments: Sequence[Any]) -> None:
    """As `driver.launch`, early."""
    held, places = [], []
    for value in arguments:
        if isinstance(value, tuple):
            places.append(value[1])
            continue
        held.append(ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else value)
        places.append(ctypes.addressof(held[-1]))
    array = (ctypes.c_void_p * len(places))(*places)
    stream = torch.cuda.current_stream().cuda_stream
    config = _Config((blocks, 1, 1), (threads, 1, 1), shared, stream, ctypes.pointer(_EARLY), 1)
    result = _driver().cuLaunchKernelEx(ctypes.byref(config), kernel, array, None)
    if result:
        raise RLKernelError(f"launching a kernel of rlkernel-cuda: CUDA error {result}")
