"""Launches of kernels that may begin while the one before them ends: programmatic edges, where they are captured.

Such a kernel waits (`griddepcontrol.wait`) before it reads or writes what others write or read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

from rlkernel_cuda import driver

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


def launch(kernel: ctypes.c_void_p, blocks: int, threads: int, shared: int, arguments: Sequence[Any]) -> None:
    """As `driver.launch`, early."""
    array, _held = driver.placed(arguments)
    stream = torch.cuda.current_stream().cuda_stream
    config = _Config((blocks, 1, 1), (threads, 1, 1), shared, stream, ctypes.pointer(_EARLY), 1)
    result = driver.library().cuLaunchKernelEx(ctypes.byref(config), kernel, array, None)
    if result:
        driver.check(result, "launching a kernel of rlkernel-cuda")
