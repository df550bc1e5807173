"""The calls of the CUDA driver that host memory is handed over with, by ctypes: neither a compiler nor a package.

A context has to be current in the calling thread; any work of torch on the device makes one.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final, Protocol

from rlkernel_core.errors import RLKernelError

# CUdevice_attribute and flags of cuMemHostRegister, cuda.h.
INTEGRATED: Final = 18
CAN_MAP_HOST_MEMORY: Final = 19
HOST_REGISTER: Final = 99
READ_ONLY_HOST_REGISTER: Final = 113
DEVICE_MAP: Final = 2
READ_ONLY: Final = 8


class Driver(Protocol):
    """What is asked of a driver."""

    def attribute(self, which: int, device: int) -> int:
        """A property of a device."""
        ...

    def register(self, address: int, nbytes: int, flags: int) -> None:
        """Pin host memory and map it for the GPU."""
        ...

    def device_pointer(self, address: int) -> int:
        """Where the GPU sees registered memory."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        ...


class Cuda:
    """`Driver` of libcuda.

    Raises:
        RLKernelError: no driver is installed, or a call failed; the message has the call and its error.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RLKernelError(f"no CUDA driver: {error}; in a container, docker run --runtime nvidia") from error
        self._call("cuInit", c_uint(0))

    def attribute(self, which: int, device: int) -> int:
        """A property of a device."""
        handle, value = c_int(), c_int()
        self._call("cuDeviceGet", byref(handle), c_int(device))
        self._call("cuDeviceGetAttribute", byref(value), c_int(which), handle)
        return value.value

    def register(self, address: int, nbytes: int, flags: int) -> None:
        """Pin host memory and map it for the GPU."""
        self._call("cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), c_uint(flags))

    def device_pointer(self, address: int) -> int:
        """Where the GPU sees registered memory."""
        found = c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", byref(found), c_void_p(address), c_uint(0))
        return found.value

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._call("cuMemHostUnregister", c_void_p(address))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(c_int(status), byref(said))
            text = said.value.decode() if said.value else "unknown error"
            raise RLKernelError(f"{name} failed: {text} ({status})")
