"""CUDA C++ at run time: compiled by NVRTC, loaded and launched through the driver, tensors described for TMA.

Triton cannot launch what needs a cluster with multicast, and torch offers no public way to launch a kernel. Both
libraries come with torch and the driver; nothing is looked for before a kernel is needed.
Imports torch; opens no library until it is called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_cuda.variants import Tile

SHARED: Final = 227 << 10  # bytes that a block may use on compute capability 9.0
_MAX_DYNAMIC_SHARED: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
BITS16, BITS32 = 9, 2  # CUtensorMapDataType: bfloat16, uint32
SWIZZLE_128B: Final = 3  # CUtensorMapSwizzle
_PROMOTE_256B: Final = 3  # CUtensorMapL2promotion


class Map(ctypes.Structure):
    """A CUtensorMap: 128 bytes at a multiple of 64, which `described` sees to."""

    _fields_ = (("bytes", ctypes.c_uint8 * 192),)


@cache
def library() -> ctypes.CDLL:
    """The driver, opened once."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).partition(".")[0]
    beside = Path(torch.__file__).parents[1] / "nvidia"
    name = f"libnvrtc.so.{major}"
    for where in (name, *(str(p) for p in sorted(beside.glob(f"*/lib/{name}")))):
        try:
            return ctypes.CDLL(where)
        except OSError:
            continue
    raise RLKernelError(
        f"{name}, which compiles CUDA C++ at run time, is not found. Run: pip install nvidia-cuda-nvrtc"
        + (f"-cu{major}" if major == "12" else "")
    )


def compiled(source: str, options: Sequence[str]) -> bytes:
    """Machine code for sm_90a.

    Raises:
        RLKernelError: the compiler refuses; the message holds its log.
    """
    rtc, program = _nvrtc(), ctypes.c_void_p()
    made = rtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"head.cu", 0, None, None)
    flags = ["--gpu-architecture=sm_90a", "--std=c++17", *options]
    array = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
    failed = made or rtc.nvrtcCompileProgram(program, len(flags), array)
    size = ctypes.c_size_t()
    if failed:
        rtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        rtc.nvrtcGetProgramLog(program, log)
        raise RLKernelError(f"NVRTC refuses a kernel of rlkernel-cuda, error {failed}: {log.value.decode()[-2000:]}")
    rtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    rtc.nvrtcGetCUBIN(program, code)
    rtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def check(result: int, what: str) -> None:
    """Raise RLKernelError with the driver's own words for a result that is not 0."""
    if result:
        text = ctypes.c_char_p()
        library().cuGetErrorString(result, ctypes.byref(text))
        raise RLKernelError(f"{what}: CUDA error {result}, {(text.value or b'unknown').decode()}")


def shape(tile: Tile) -> dict[str, int]:
    """The macros that pair.cuh and the kernels after it read from a tile."""
    return {"STAGES": tile.stages, "GROUP": max(1, tile.group // tile.cluster), "LAG": tile.lag}


@cache
def function(paths: tuple[Path, ...], options: tuple[str, ...], name: str, shared: int, device: int) -> ctypes.c_void_p:
    """A kernel of some source files, loaded on a device; `device` must be the current one."""
    torch.cuda.current_stream(device)  # the context exists
    return loaded(compiled("\n".join(path.read_text() for path in paths), options), name, shared)


def loaded(code: bytes, name: str, shared: int) -> ctypes.c_void_p:
    """A kernel of some machine code, on the current device, which has a context; `shared` bytes a block."""
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    check(library().cuModuleLoadData(ctypes.byref(module), code), f"loading {name}")
    check(library().cuModuleGetFunction(ctypes.byref(kernel), module, name.encode()), f"finding {name}")
    check(library().cuFuncSetAttribute(kernel, _MAX_DYNAMIC_SHARED, shared), f"{shared} bytes of shared memory")
    return kernel


def boxes(
    address: int, kind: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int = 0
) -> Any:
    """What TMA needs to know to fetch boxes of a tensor, the contiguous dimension first; beyond its ends are zeros.

    Args:
        address: of the tensor, a multiple of 16.
        kind: CUtensorMapDataType.
        sizes: elements of each dimension.
        strides: bytes, of each dimension but the first.
        box: elements of each dimension, at most 256.
        swizzle: CUtensorMapSwizzle.
    """
    storage = Map()
    aligned = (ctypes.addressof(storage) + 63) // 64 * 64
    u64, u32, n = ctypes.c_uint64, ctypes.c_uint32, len(sizes)
    result = library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned), kind, n, ctypes.c_void_p(address), (u64 * n)(*sizes), (u64 * (n - 1))(*strides),
        (u32 * n)(*box), (u32 * n)(*[1] * n), 0, swizzle, _PROMOTE_256B, 0,
    )  # fmt: skip
    check(result, f"describing {list(sizes)} with strides of {list(strides)} bytes to TMA")
    return storage, aligned


def described(x: Tensor, rows: int, cols: int) -> Any:
    """What TMA needs to know of x, [n, m] of 16 bits, to fetch boxes of [rows, cols] swizzled by 128 bytes."""
    sizes, strides = (x.shape[1], x.shape[0]), (x.stride(0) * 2,)
    return boxes(x.data_ptr(), BITS16, sizes, strides, (cols, rows), SWIZZLE_128B)


def launch(kernel: ctypes.c_void_p, blocks: int, threads: int, shared: int, arguments: Sequence[Any]) -> None:
    """Launch on the current stream. Arguments: tensors, descriptions, ctypes numbers."""
    array, _held = placed(arguments)
    launched(kernel, blocks, threads, shared, None, array)


def placed(arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The array of the arguments' places that a launch takes, and what has to stay until it has."""
    held, places = [], []
    for value in arguments:
        if isinstance(value, tuple):
            places.append(value[1])
            continue
        number = ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else value
        held.append(number)
        places.append(ctypes.addressof(number))
    return (ctypes.c_void_p * len(places))(*places), held


def launched(
    kernel: ctypes.c_void_p, blocks: int, threads: int, shared: int, device: int | None, places: Any
) -> None:  # fmt: skip
    """Launch on the current stream of a device (None: of the current one), given an array of the arguments' places."""
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    result = library().cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared, stream, places, None)
    if result:
        check(result, "launching a kernel of rlkernel-cuda")
