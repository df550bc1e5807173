"""The CUDA driver, by ctypes: capabilities, modules and launches. Nothing but libcuda is needed.

Opens the library when a `Driver` is made; imports neither torch nor Triton.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from rlkernel_core.errors import RLKernelError

LIBRARY: Final = "libcuda.so.1"
_MAX_DYNAMIC_SHARED: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_WITHOUT_ASKING: Final = 48 << 10  # bytes of shared memory that a kernel may use without that attribute
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6  # CU_JIT_ERROR_LOG_BUFFER…
_LOG: Final = 8192
# What codes of the driver mean for a bundle, and what to do. cuda.h, enum CUresult.
_MEANING: Final = {
    209: "it is no machine code for this GPU",
    218: "the PTX is refused",
    222: "this driver reads no PTX as new as this; update it",
}
_WIDTHS: Final[dict[str, Any]] = {
    "u1": ctypes.c_int8, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64, "fp32": ctypes.c_float,
}  # fmt: skip


class DriverError(RLKernelError):
    """The driver refuses; the message says what, with its code, and what would change it."""


class Driver:
    """libcuda.

    Raises:
        DriverError: there is none.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._cuda: Any = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(
                f"{library}, the CUDA driver, is not found ({error}). Install NVIDIA's driver; in a container start it "
                "with --gpus all, on Jetson with --runtime nvidia"
            ) from error
        self._check(self._cuda.cuInit(0), "starting the driver")

    def version(self) -> tuple[int, int]:
        """CUDA version of the driver: (12, 6)."""
        found = ctypes.c_int()
        self._check(self._cuda.cuDriverGetVersion(ctypes.byref(found)), "asking the driver's version")
        return found.value // 1000, found.value % 1000 // 10

    def capability(self, device: int) -> tuple[int, int]:
        """Compute capability of a device: (8, 7)."""
        handle, found = self._device(device), ctypes.c_int()
        pair = []
        for attribute in (_MAJOR, _MINOR):
            result = self._cuda.cuDeviceGetAttribute(ctypes.byref(found), attribute, handle)
            self._check(result, f"asking the capability of device {device}")
            pair.append(found.value)
        return pair[0], pair[1]

    def enter(self, device: int) -> None:
        """See to it that the calling thread has the device's primary context, which torch uses."""
        context = ctypes.c_void_p()
        self._check(self._cuda.cuCtxGetCurrent(ctypes.byref(context)), "asking for the context")
        if not context.value:
            result = self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device(device))
            self._check(result, f"taking the context of device {device}")
            self._check(self._cuda.cuCtxSetCurrent(context), f"entering the context of device {device}")

    def load(self, code: bytes, entry: str, shared: int) -> Any:
        """A kernel of a cubin or of PTX on the current device; `shared` bytes of dynamic shared memory a program.

        Raises:
            DriverError: the code is refused, or has no such entry.
        """
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(_LOG)
        options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG)
        image = ctypes.create_string_buffer(code)  # with a zero behind it, which PTX wants
        result = self._cuda.cuModuleLoadDataEx(ctypes.byref(module), image, 2, options, values)
        self._check(result, f"loading {entry}", log.value.decode(errors="replace"))
        result = self._cuda.cuModuleGetFunction(ctypes.byref(kernel), module, entry.encode())
        self._check(result, f"finding {entry} in its module")
        if shared > _WITHOUT_ASKING:
            result = self._cuda.cuFuncSetAttribute(kernel, _MAX_DYNAMIC_SHARED, shared)
            self._check(result, f"{shared} bytes of shared memory for {entry}")
        return kernel

    def launch(
        self,
        kernel: Any,
        grid: Sequence[int],
        threads: int,
        shared: int,
        stream: int,
        kinds: Sequence[str],
        values: Sequence[Any],
    ) -> None:
        """Launch a loaded kernel. `values` by `kinds`: pointers as numbers, "i32", "fp32" and so on."""
        held = [_WIDTHS.get(kind, ctypes.c_uint64)(value) for kind, value in zip(kinds, values, strict=True)]
        places = (ctypes.c_void_p * len(held))(*[ctypes.addressof(h) for h in held])
        x, y, z = (*grid, 1, 1)[:3]
        result = self._cuda.cuLaunchKernel(
            kernel, x, y, z, threads, 1, 1, shared, ctypes.c_void_p(stream), places, None
        )
        if result:
            self._check(result, f"launching {threads} threads with {shared} bytes of shared memory")

    def _device(self, device: int) -> Any:
        handle = ctypes.c_int()
        self._check(self._cuda.cuDeviceGet(ctypes.byref(handle), device), f"asking for device {device}")
        return handle

    def _check(self, result: int, what: str, log: str = "") -> None:
        if result:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(result, ctypes.byref(text))
            said = (text.value or b"unknown").decode()
            more = "".join(f": {part}" for part in (_MEANING.get(result, ""), log.strip()) if part)
            raise DriverError(f"{what}: CUDA error {result}, {said}{more}")
