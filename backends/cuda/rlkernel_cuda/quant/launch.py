"""The kernels of products with 4-bit weights: how they are cut, built and launched.

`narrow.cu` serves a few tokens and is bound by the bytes of the weight; `wide.cu` serves the others and is bound by the
matrix units. Both read weights in the layout `triton_w4` of rlkernel-triton. Compiled by NVRTC at first use.

Legend: M tokens · N rows · K columns of the weight.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_cuda import driver
from rlkernel_triton.quant.tickets import tickets

_HERE: Final = Path(__file__).parent
_SHARED: Final = (_HERE.parent / "pair.cuh", _HERE / "fragments.cuh")
NARROW: Final = (*_SHARED, _HERE / "narrow.cu")
STREAM: Final = (*_SHARED, _HERE / "stream.cu")
NARROW8: Final = (*_SHARED, _HERE / "narrow8.cu")
ENCODE: Final = (_HERE.parent / "pair.cuh", _HERE / "encode.cu")
WIDE: Final = (*_SHARED, _HERE / "wgmma.cuh", _HERE / "wide.cu")
ROWS: Final = 128  # of a tile of `wide`


class Narrow(NamedTuple):
    """One way to cut a product of at most 16 tokens; see narrow.cu."""

    tokens: int  # 8 or 16
    sets: int
    parts: int
    joined: int = 1
    stages: int = 8

    @property
    def threads(self) -> int:
        """Of a block: a warp a part of each set, and one that fetches."""
        return 32 * (self.sets * self.parts + 1)

    @property
    def shared(self) -> int:
        """Bytes of a block."""
        sums = (self.parts - 1) * self.sets * self.joined * (self.tokens // 8) * 512
        return max(self.stages * self.parts * 4 * self.tokens * 128, sums)

    def flags(self, w: QuantTensor) -> dict[str, int]:
        """Macros of a build."""
        group = w.spec.group
        return {
            "BM": self.tokens, "SETS": self.sets, "PARTS": self.parts, "JOINED": self.joined, "STAGES": self.stages,
            "GROUP_": min(group, 128), **_format(w),
        }  # fmt: skip


class Stream(NamedTuple):
    """One way to cut a product of at most 16 tokens; see stream.cu."""

    tokens: int  # 8 or 16
    sets: int
    parts: int
    joined: int = 1
    stages: int = 4

    @property
    def threads(self) -> int:
        """Of a block: a warp a part of each set, and one that fetches."""
        return 32 * (self.sets * self.parts + 1)

    def stage(self, group: int, zeros: bool) -> int:
        """Bytes of a piece."""
        tiles, groups = self.sets * self.joined, 256 // group if group else 0
        each = 4 * self.tokens * 128 + tiles * (2048 + groups * (48 if zeros else 32))
        return -(-self.parts * each // 1024) * 1024

    def flags(self, w: QuantTensor) -> dict[str, int]:
        """Macros of a build."""
        return {
            "BM": self.tokens, "SETS": self.sets, "PARTS": self.parts, "JOINED": self.joined, "STAGES": self.stages,
            "GROUP_": w.spec.group, **_format(w),
        }  # fmt: skip


class Narrow8(NamedTuple):
    """One way to cut a product of at most 16 tokens with a weight of 8 bits; see narrow8.cu."""

    tokens: int  # 8 or 16
    sets: int
    parts: int
    stages: int = 8

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.sets * self.parts + 1)

    @property
    def shared(self) -> int:
        """Bytes of a block."""
        return max(self.stages * self.parts * 4 * self.tokens * 128, self.parts * self.sets * (self.tokens // 8) * 512)

    def flags(self, w: QuantTensor, half: bool) -> dict[str, int]:
        """Macros of a build."""
        shift = {0: 31, 1: 0, 128: 7}[w.spec.rows]
        return {
            "BM": self.tokens, "SETS": self.sets, "PARTS": self.parts, "STAGES": self.stages, "GROUP_": w.spec.group,
            "FLOAT8": w.spec.element != "int8", "SCALE_SHIFT": shift, "HALF": half,
        }  # fmt: skip


class Wide(NamedTuple):
    """One way to cut a product of many tokens; see wide.cu."""

    tokens: int  # of a tile: 16, 32, 64, 128, 256
    steps: int  # 1 or 2 times 64 of depth a stage
    stages: int
    split: bool  # the depth of a tile may be shared by blocks
    cluster: int = 2  # blocks that share what they fetch of x

    @property
    def shared(self) -> int:
        """Bytes of a block, beside what is declared."""
        return self.stages * self.steps * (self.tokens * 128 + 4096) + 2 * min(self.tokens, 64) * 144

    def flags(self, w: QuantTensor) -> dict[str, int]:
        """Macros of a build."""
        return {
            "BM": self.tokens, "STEPS": self.steps, "STAGES": self.stages, "SPLIT": self.split,
            "CLUSTER": self.cluster, "FINE": w.spec.group == 32, **_format(w),
        }  # fmt: skip


def _format(w: QuantTensor) -> dict[str, int]:
    half = w.parts["scale"].dtype == torch.float16
    return {"ZEROS": not w.spec.symmetric, "HALF": half}


def options(flags: dict[str, int]) -> tuple[str, ...]:
    """Macros as the compiler takes them; two that only other kernels of pair.cuh read are given any value."""
    return tuple(f"-D{name}={int(value)}" for name, value in {**flags, "GROUP": 1, "LAG": 1}.items())


def _kernel(sources: tuple[Path, ...], name: str, cut: Narrow | Wide, w: QuantTensor, device: int) -> ctypes.c_void_p:
    return driver.function(sources, options(cut.flags(w)), name, cut.shared, device)


def _zero(w: QuantTensor) -> Tensor:
    return w.parts.get("zero", w.parts["scale"])


def _address(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if x is None else x.data_ptr())


def narrow(x: Tensor, w: QuantTensor, bias: Tensor | None, y: Tensor, cut: Narrow) -> None:
    """Store x w' + bias for x [M, K], M at most `cut.tokens`, in y [M, N]."""
    (N, K), M = w.shape, x.shape[0]
    kernel = _kernel(NARROW, "narrow", cut, w, x.device.index)
    arguments: list[Any] = [
        driver.described(x, cut.tokens, 64), w.parts["codes"], w.parts["scale"], _zero(w), _address(bias), y,
        *map(ctypes.c_int, (M, N, K)),
    ]  # fmt: skip
    blocks = -(-(N // 16) // (cut.sets * cut.joined))
    driver.launch(kernel, blocks, cut.threads, cut.shared, arguments)


def stream(x: Tensor, w: QuantTensor, bias: Tensor | None, y: Tensor, cut: Stream) -> None:
    """As `narrow`."""
    (N, K), M = w.shape, x.shape[0]
    shared = cut.stages * cut.stage(w.spec.group, not w.spec.symmetric)
    kernel = driver.function(STREAM, options(cut.flags(w)), "stream", shared, x.device.index)
    arguments: list[Any] = [
        driver.described(x, cut.tokens, 64), w.parts["codes"], w.parts["scale"], _zero(w), _address(bias), y,
        *map(ctypes.c_int, (M, N, K)),
    ]  # fmt: skip
    blocks = -(-(N // 16) // (cut.sets * cut.joined))
    driver.launch(kernel, blocks, cut.threads, shared, arguments)


def narrow8(x: Tensor, w: QuantTensor, bias: Tensor | None, y: Tensor, cut: Narrow8) -> None:
    """As `narrow`, of a canonical weight of 8 bits whose scales are fp32."""
    (N, K), M = w.shape, x.shape[0]
    flags = options(cut.flags(w, x.dtype == torch.float16))
    kernel = driver.function(NARROW8, flags, "narrow8", cut.shared, x.device.index)
    groups = -(-K // w.spec.group) if w.spec.group else 1
    arguments: list[Any] = [
        driver.described(x, cut.tokens, 64), w.parts["codes"], w.parts["scale"], _address(bias), y,
        *map(ctypes.c_int, (groups, M, N, K)),
    ]  # fmt: skip
    driver.launch(kernel, -(-(N // 16) // cut.sets), cut.threads, cut.shared, arguments)


def encode(weight: Tensor, w: QuantTensor, largest: float, least: int) -> None:
    """Quantise a bf16 weight [N, K] into the storage of a symmetric int4 weight in `triton_w4`."""
    N, K = w.shape
    flags = options({"GROUP_": w.spec.group, "LEAST": least, "STAGES": 1})
    kernel = driver.function(ENCODE, flags, "encode", 0, weight.device.index)
    arguments: list[Any] = [
        weight, w.parts["codes"], w.parts["scale"], ctypes.c_longlong(weight.stride(0) // 8), ctypes.c_float(largest),
        ctypes.c_int(N), ctypes.c_int(K),
    ]  # fmt: skip
    driver.launch(kernel, -(-(N // 16 * (K // 128)) // 8), 256, 0, arguments)


def wide(x: Tensor, w: QuantTensor, bias: Tensor | None, y: Tensor, cut: Wide) -> None:
    """Store x w' + bias for x [M, K] in y [M, N]; w' is rounded to the dtype of x."""
    (N, K), M = w.shape, x.shape[0]
    kernel = _kernel(WIDE, "wide", cut, w, x.device.index)
    tiles = -(-N // (ROWS * cut.cluster)) * -(-M // cut.tokens)  # of a cluster
    clusters = torch.cuda.get_device_properties(x.device).multi_processor_count // cut.cluster
    clusters = min(clusters, tiles * (K // 128) if cut.split else tiles)
    partial, counters = x, x
    if cut.split:
        partial = torch.empty(2 * clusters * cut.cluster * ROWS * cut.tokens, dtype=torch.float32, device=x.device)
        counters = tickets(tiles * cut.cluster, x.device)
    shift = 31 if not w.spec.group else w.spec.group.bit_length() - 1
    arguments: list[Any] = [
        driver.described(x, cut.tokens // cut.cluster, 64), w.parts["codes"], w.parts["scale"], _zero(w),
        _address(bias), y, partial, counters, *map(ctypes.c_int, (shift, M, N, K)),
    ]  # fmt: skip
    driver.launch(kernel, clusters * cut.cluster, 384, cut.shared, arguments)
