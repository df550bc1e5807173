"""Launches of kernels that may begin while the one before them ends: programmatic dependent launch (PDL).

Such a kernel waits (`griddepcontrol.wait`) before it reads or writes what others write or read.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from rlkernel_cuda.common import driver

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


_OVERLAPPED: Final = _Attribute(_PROGRAMMATIC, 0, (1,))


class OverlappedLaunch(driver.Launch):
    """As `driver.Launch`; may begin while the kernel before it ends."""

    def launched(self, places: Any, stream: ctypes.c_void_p) -> int:
        """What the driver answers."""
        blocks, threads, shared = self.grid
        config = _Config((blocks, 1, 1), (threads, 1, 1), shared, stream, ctypes.pointer(_OVERLAPPED), 1)
        result: int = self.library.cuLaunchKernelEx(ctypes.byref(config), self.kernel, places, None)
        return result
