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
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_cuda.common.tiles import Tile

ROOT: Final = Path(__file__).parents[1]  # what includes are relative to
SHARED: Final = 227 << 10  # bytes that a block may use on compute capability 9.0
_MAX_DYNAMIC_SHARED: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
BITS16, BITS32 = 9, 2  # CUtensorMapDataType: bfloat16, uint32
SWIZZLE_128B: Final = 3  # CUtensorMapSwizzle
_PROMOTE_256B: Final = 3  # CUtensorMapL2promotion
_WORD: Final = ctypes.c_uint64  # little-endian: an integer of 32 bits lies where a word begins
_WORD_BYTES: Final = 8


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


def compiled(source: Path, options: Sequence[str]) -> bytes:
    """Machine code for sm_90a of a source file of this package, whose includes are relative to the package.

    Raises:
        RLKernelError: the compiler refuses; the message holds its log.
    """
    rtc, program = _nvrtc(), ctypes.c_void_p()
    made = rtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    flags = ["--gpu-architecture=sm_90a", "--std=c++17", f"--include-path={ROOT}", *options]
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
    """The macros that cluster_pair.cuh and the kernels that include it read from a tile."""
    return {"STAGES": tile.stages, "GROUP": max(1, tile.group // tile.cluster), "LAG": tile.lag}


@cache
def function(source: Path, options: tuple[str, ...], name: str, shared: int, device: int) -> ctypes.c_void_p:
    """A kernel of a source file, loaded on the GPU of this index; one for all calls that need it."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # the context exists
        return loaded(compiled(source, options), name, shared)


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


class Boxes(NamedTuple):
    """What TMA fetches of tensors that differ in their address alone; see `boxes`."""

    kind: int
    sizes: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int = 0


class Description:
    """The description of a tensor for TMA, made again where its address has changed: weights stay where they are."""

    def __init__(self, of: Boxes) -> None:
        self._of = of
        self._last: tuple[int, Any] = (0, None)

    def at(self, address: int) -> Any:
        """The description of the tensor at this address."""
        known, found = self._last
        if address != known:
            of = self._of
            found = boxes(address, of.kind, of.sizes, of.strides, of.box, of.swizzle)
            self._last = (address, found)
        return found


class Matrix:
    """Matrices of 16 bits that differ in their address alone, in boxes of [rows, cols] swizzled by 128 bytes."""

    def __init__(self, rows: int, cols: int) -> None:
        self._box: tuple[int, int] = (cols, rows)
        self._known: Description | None = None

    def of(self, x: Tensor) -> Any:
        """The description of x, [n, m], whose shape and strides are those of the first one."""
        if self._known is None:
            sizes, strides = (x.shape[1], x.shape[0]), (x.stride(0) * 2,)
            self._known = Description(Boxes(BITS16, sizes, strides, self._box, SWIZZLE_128B))
        return self._known.at(x.data_ptr())


class Blocks(NamedTuple):
    """The grid of a launch."""

    blocks: int
    threads: int  # of a block
    shared: int  # bytes of a block


class Kernel:
    """A loaded kernel with its grid.

    Args:
        kernel: from `function` or `loaded`.
        grid: of every launch.
        device: index of the GPU that it is loaded on.
    """

    def __init__(self, kernel: ctypes.c_void_p, grid: Blocks, device: int) -> None:
        self.kernel, self.grid, self.device, self.library = kernel, grid, device, library()

    def go(self, places: Any) -> None:
        """Launch on the current stream of the GPU, given a ctypes array of the arguments' places.

        Raises:
            RLKernelError: the driver refuses.
        """
        if current_device() != self.device:
            with torch.cuda.device(self.device):
                self.go(places)
            return
        result = self.launched(places, ctypes.c_void_p(current_stream(self.device)))
        if result:
            check(result, "launching a kernel of rlkernel-cuda")

    def launched(self, places: Any, stream: ctypes.c_void_p) -> int:
        """What the driver answers."""
        blocks, threads, shared = self.grid
        result: int = self.library.cuLaunchKernel(
            self.kernel, blocks, 1, 1, threads, 1, 1, shared, stream, places, None
        )
        return result


class Launch(Kernel):
    """A kernel with all that is the same at every call: it takes descriptions for TMA, then words, then numbers.

    Args:
        kernel: as `Kernel`.
        grid: as `Kernel`.
        device: as `Kernel`.
        numbers: ctypes numbers, the kernel's last arguments.
    """

    def __init__(self, kernel: ctypes.c_void_p, grid: Blocks, device: int, numbers: Sequence[Any]) -> None:
        super().__init__(kernel, grid, device)
        self._numbers = tuple(numbers)  # their places are passed
        self._places = tuple([ctypes.addressof(x) for x in self._numbers])

    def __call__(self, maps: Sequence[Any], words: Sequence[int]) -> None:
        """Launch on the current stream of the GPU.

        Args:
            maps: descriptions.
            words: addresses, and integers in [0, 2**31).
        """
        held = (_WORD * len(words))(*words)
        first = ctypes.addressof(held)
        places = (
            *[place for _, place in maps],
            *range(first, first + _WORD_BYTES * len(words), _WORD_BYTES),
            *self._places,
        )
        self.go((ctypes.c_void_p * len(places))(*places))


def index_of(device: torch.device) -> int:
    """Which GPU a device is."""
    return torch.cuda.current_device() if device.index is None else device.index


def current_device() -> int:
    """The index of the current GPU."""
    index: int = torch._C._cuda_getDevice()  # noqa: SLF001 what Triton's own driver calls
    return index


def current_stream(device: int) -> int:
    """The handle of the current stream of a GPU."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)  # noqa: SLF001 what Triton's own driver calls
    return stream
