"""The kernels of products with quantised weights: how they are cut, built and launched. Compiled by NVRTC at first use.

    narrow    int4 and at most 16 tokens: bound by the bytes of the weight
    narrow8   8 bits and at most 16 tokens
    wide      int4 and more tokens: bound by the matrix units

Each may begin while the kernel before it ends.

int4 weights lie in the layout `triton_w4` of rlkernel-triton, those of 8 bits as they are stored.

Legend: M tokens · N rows · K columns of the weight.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_cuda import driver
from rlkernel_cuda.quant import early
from rlkernel_triton.quant.tickets import tickets

_HERE: Final = Path(__file__).parent
_BASE: Final = (_HERE.parent / "pair.cuh", _HERE / "fragments.cuh")
SCALE_SHIFT: Final = {0: 31, 1: 0, 128: 7}  # rows of a scale, all where 0, as a power of two


class Narrow(NamedTuple):
    """One way to cut a product; see narrow.cu."""

    tokens: int  # 8 or 16
    sets: int
    parts: int  # of a block
    joined: int = 1
    stages: int = 8  # even, or as many as there are pieces
    cluster: int = 1  # blocks, each with its parts of the depth
    ahead: int = 8  # loads in flight of a tile, a multiple of 4

    @property
    def threads(self) -> int:
        """Of a block: a warp a part of each set."""
        return 32 * self.sets * self.parts


class Narrow8(NamedTuple):
    """One way to cut a product; see narrow8.cu."""

    tokens: int  # 8 or 16
    sets: int
    parts: int
    stages: int = 8

    @property
    def threads(self) -> int:
        """Of a block: a warp a part of each set, and one that fetches."""
        return 32 * (self.sets * self.parts + 1)


class Wide(NamedTuple):
    """One way to cut a product; see wide.cu."""

    tokens: int  # of a tile: 16, 32, 64, 128, 256
    steps: int  # 1 or 2 times 64 of depth a stage
    stages: int
    split: bool  # the depth of a tile may be shared by blocks
    teams: int = 2  # warpgroups that multiply, 64 rows of the weight each

    @property
    def threads(self) -> int:
        """Of a block: the warpgroups that multiply, and one that fetches."""
        return 128 * (self.teams + 1)


Cut = Narrow | Narrow8 | Wide


def staging(cut: Wide) -> int:
    """Bytes of the results of a block, 64 tokens of each warpgroup."""
    return cut.teams * min(cut.tokens, 64) * 144


def scales(cut: Wide, spec: QuantSpec) -> int:
    """Bytes of scales and zero-points of a stage, which the kernel declares."""
    deep = 64 * cut.steps
    return max(1, deep // spec.group if spec.group else 1) * (2 if spec.symmetric else 3) * 64 * cut.teams


def shared(cut: Cut) -> int:
    """Bytes of a block, beside what a kernel declares."""
    if isinstance(cut, Wide):
        return cut.stages * cut.steps * (cut.tokens * 128 + 2048 * cut.teams) + staging(cut)
    ring = cut.stages * cut.parts * 4 * cut.tokens * 128
    if isinstance(cut, Narrow):
        deep = cut.parts * cut.cluster
        return ring + (deep > 1) * -(-cut.sets * cut.joined // cut.cluster) * deep * (cut.tokens // 8) * 512
    return max(ring, (cut.parts - 1) * cut.sets * (cut.tokens // 8) * 512)


def build(cut: Cut, w: QuantTensor, dtype: torch.dtype) -> tuple[tuple[Path, ...], tuple[str, ...], str]:
    """(source files, macros, the kernel's name) for x of a dtype."""
    spec = w.spec
    flags = {"BM": cut.tokens, "STAGES": cut.stages, "HALF": dtype == torch.float16, "GROUP": 1, "LAG": 1}
    if isinstance(cut, Wide):
        flags |= {"STEPS": cut.steps, "SPLIT": cut.split, "TEAMS": cut.teams}
        flags |= {"GROUP_": spec.group, "ZEROS": not spec.symmetric}
        files, name = (*_BASE, _HERE / "wgmma.cuh", _HERE / "wide.cu"), "wide"
    else:
        flags |= {"SETS": cut.sets, "PARTS": cut.parts, "GROUP_": spec.group}
        if isinstance(cut, Narrow):
            flags |= {"JOINED": cut.joined, "ZEROS": not spec.symmetric, "CLUSTER": cut.cluster, "AHEAD": cut.ahead}
            files, name = (*_BASE, _HERE / "narrow.cu"), "narrow"
        else:
            flags |= {"FLOAT8": spec.element != "int8", "SCALE_SHIFT": SCALE_SHIFT[spec.rows]}
            files, name = (*_BASE, _HERE / "narrow8.cu"), "narrow8"
    return files, tuple(f"-D{n}={int(v)}" for n, v in flags.items()), name


def _tokens(x: Tensor, cut: Cut) -> Any:
    """Rows of x as [K / 64, M, 64], in boxes of a stage."""
    M, K = x.shape
    box = (64, cut.tokens, cut.steps if isinstance(cut, Wide) else 4 * cut.parts)
    return driver.boxes(x.data_ptr(), driver.BITS16, (64, M, K // 64), (2 * K, 128), box, driver.SWIZZLE_128B)


def _words(address: int, N: int, K: int, tiles: int, steps: int) -> Any:
    """Codes in tiles of 16 x 64 as [N / 16, K / 64, 128] words, in boxes of `tiles` by `steps` of them."""
    return driver.boxes(address, driver.BITS32, (2 * K, N // 16), (8 * K,), (128 * steps, tiles))


def product(x: Tensor, w: QuantTensor, bias: Tensor | None, y: Tensor, cut: Cut) -> None:
    """Store x w' + bias for contiguous x [M, K] in y [M, N]; `wide` rounds w' to the dtype of x, the others do not.

    Args:
        x: at multiples of 16 bytes; at most `cut.tokens` rows, unless `cut` is a `Wide`.
        w: int4 with scales of the dtype of x, or 8 bits with scales in fp32.
        bias: [N] of the dtype of x.
        y: result.
        cut: from `choice`.
    """
    (N, K), M, spec = w.shape, x.shape[0], w.spec
    bytes_ = shared(cut)
    kernel = driver.function(*build(cut, w, x.dtype), bytes_, x.device.index)
    added = ctypes.c_void_p(0 if bias is None else bias.data_ptr())
    codes, scale = w.parts["codes"], w.parts["scale"]
    zero = w.parts.get("zero", scale)
    given: list[Any]
    if isinstance(cut, Wide):
        rows = 64 * cut.teams
        tiles = N // rows * -(-M // cut.tokens)
        blocks = torch.cuda.get_device_properties(x.device).multi_processor_count
        blocks = min(blocks, tiles * (K // 128) if cut.split else tiles)
        partial, counters = x, x
        if cut.split:
            size = 2 * blocks * rows * cut.tokens
            partial = torch.empty(size, dtype=torch.float32, device=x.device)
            counters = tickets(tiles, x.device)
        shift = spec.group.bit_length() - 1 if spec.group else 31
        given = [_tokens(x, cut), _words(codes.data_ptr(), N, K, rows // 16, cut.steps), scale]
        given += [zero, added, y, partial, counters, ctypes.c_int(shift)]
    elif isinstance(cut, Narrow):
        blocks = -(-(N // 16) // (cut.sets * cut.joined)) * cut.cluster
        given = [_tokens(x, cut), codes, scale, zero, added, y]
    else:
        blocks = -(-(N // 16) // cut.sets)
        groups = ctypes.c_int(-(-K // spec.group) if spec.group else 1)
        given = [_tokens(x, cut), codes, scale, added, y, groups]
    early.launch(kernel, blocks, cut.threads, bytes_, [*given, *map(ctypes.c_int, (M, N, K))])
