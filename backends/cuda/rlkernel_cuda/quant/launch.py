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


class Wide(NamedTuple):
    """One way to cut a product of many tokens; see wide.cu."""

    tokens: int  # of a tile: 16, 32, 64, 128, 256
    steps: int  # 1 or 2 times 64 of depth a stage
    stages: int
    split: bool  # the depth of a tile may be shared by blocks

    @property
    def shared(self) -> int:
        """Bytes of a block, beside what is declared."""
        return self.stages * self.steps * (self.tokens * 128 + 4096) + 2 * min(self.tokens, 64) * 144

    def flags(self, w: QuantTensor) -> dict[str, int]:
        """Macros of a build."""
        return {
            "BM": self.tokens, "STEPS": self.steps, "STAGES": self.stages, "SPLIT": self.split,
            "FINE": w.spec.group == 32, **_format(w),
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


def wide(x: Tensor, w: QuantTensor, bias: Tensor | None, y: Tensor, cut: Wide) -> None:
    """Store x w' + bias for x [M, K] in y [M, N]; w' is rounded to the dtype of x."""
    (N, K), M = w.shape, x.shape[0]
    kernel = _kernel(WIDE, "wide", cut, w, x.device.index)
    tiles = N // ROWS * -(-M // cut.tokens)
    blocks = torch.cuda.get_device_properties(x.device).multi_processor_count
    partial, counters = x, x
    if cut.split:
        blocks = min(blocks, tiles * (K // 128))
        partial = torch.empty(2 * blocks * ROWS * cut.tokens, dtype=torch.float32, device=x.device)
        counters = tickets(tiles, x.device)
    shift = 31 if not w.spec.group else w.spec.group.bit_length() - 1
    arguments: list[Any] = [
        driver.described(x, cut.tokens, 64), w.parts["codes"], w.parts["scale"], _zero(w), _address(bias), y, partial,
        counters, *map(ctypes.c_int, (shift, M, N, K)),
    ]  # fmt: skip
    driver.launch(kernel, min(blocks, tiles * (K // 128) if cut.split else tiles), 384, cut.shared, arguments)
