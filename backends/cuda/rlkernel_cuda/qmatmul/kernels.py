"""The kernels of products with quantized weights: how they are cut, built and launched. Compiled by NVRTC at first use.

    w4a16_small_m  int4 and at most 16 tokens: bound by the bytes of the weight
    w8a16_small_m  8 bits and at most 16 tokens
    w4a16_wgmma    int4 and more tokens: bound by the matrix units

Each may begin while the kernel before it ends.

int4 weights lie in the layout `triton_w4` of rlkernel-triton, those of 8 bits as they are stored.

Legend: M tokens · N rows · K columns of the weight.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_cuda.common import driver
from rlkernel_cuda.qmatmul import pdl
from rlkernel_triton.quant.splitk_counters import splitk_counters

_HERE: Final = Path(__file__).parent
SCALE_SHIFT: Final = {0: 31, 1: 0, 128: 7}  # rows of a scale, all where 0, as a power of two


class W4SmallM(NamedTuple):
    """One way to cut a product; see w4a16_small_m.cu."""

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


class W8SmallM(NamedTuple):
    """One way to cut a product; see w8a16_small_m.cu."""

    tokens: int  # 8 or 16
    sets: int
    parts: int
    stages: int = 8

    @property
    def threads(self) -> int:
        """Of a block: a warp a part of each set, and one that fetches."""
        return 32 * (self.sets * self.parts + 1)


class W4Wgmma(NamedTuple):
    """One way to cut a product; see w4a16_wgmma.cu."""

    tokens: int  # of a tile: 16, 32, 64, 128, 256
    steps: int  # 1 or 2 times 64 of depth a stage
    stages: int
    split: bool  # the depth of a tile may be shared by blocks
    warpgroups: int = 2  # warpgroups that multiply, 64 rows of the weight each

    @property
    def threads(self) -> int:
        """Of a block: the warpgroups that multiply, and one that fetches."""
        return 128 * (self.warpgroups + 1)


Cut = W4SmallM | W8SmallM | W4Wgmma


def staging(cut: W4Wgmma) -> int:
    """Bytes of the results of a block, 64 tokens of each warpgroup."""
    return cut.warpgroups * min(cut.tokens, 64) * 144


def scales(cut: W4Wgmma, spec: QuantSpec) -> int:
    """Bytes of scales and zero-points of a stage, which the kernel declares."""
    deep = 64 * cut.steps
    return max(1, deep // spec.group if spec.group else 1) * (2 if spec.symmetric else 3) * 64 * cut.warpgroups


def shared(cut: Cut) -> int:
    """Bytes of a block, beside what a kernel declares."""
    if isinstance(cut, W4Wgmma):
        return cut.stages * cut.steps * (cut.tokens * 128 + 2048 * cut.warpgroups) + staging(cut)
    ring = cut.stages * cut.parts * 4 * cut.tokens * 128
    if isinstance(cut, W4SmallM):
        deep = cut.parts * cut.cluster
        return ring + (deep > 1) * -(-cut.sets * cut.joined // cut.cluster) * deep * (cut.tokens // 8) * 512
    return max(ring, (cut.parts - 1) * cut.sets * (cut.tokens // 8) * 512)


def build(cut: Cut, w: QuantTensor, dtype: torch.dtype) -> tuple[Path, tuple[str, ...], str]:
    """(source file, macros, the kernel's name) for x of a dtype."""
    spec = w.spec
    flags = {"BM": cut.tokens, "STAGES": cut.stages, "HALF": dtype == torch.float16}
    if isinstance(cut, W4Wgmma):
        flags |= {"STEPS": cut.steps, "SPLIT": cut.split, "WARPGROUPS": cut.warpgroups}
        flags |= {"GROUP_": spec.group, "ZEROS": not spec.symmetric}
        source, name = _HERE / "w4a16_wgmma.cu", "w4a16_wgmma"
    else:
        flags |= {"SETS": cut.sets, "PARTS": cut.parts, "GROUP_": spec.group}
        if isinstance(cut, W4SmallM):
            flags |= {"JOINED": cut.joined, "ZEROS": not spec.symmetric, "CLUSTER": cut.cluster, "AHEAD": cut.ahead}
            source, name = _HERE / "w4a16_small_m.cu", "w4a16_small_m"
        else:
            flags |= {"FLOAT8": spec.element != "int8", "SCALE_SHIFT": SCALE_SHIFT[spec.rows]}
            source, name = _HERE / "w8a16_small_m.cu", "w8a16_small_m"
    return source, tuple(f"-D{n}={int(v)}" for n, v in flags.items()), name


def tokens_of(M: int, K: int, cut: Cut) -> driver.Boxes:
    """Rows of x as [K / 64, M, 64], in boxes of a stage."""
    box = (64, cut.tokens, cut.steps if isinstance(cut, W4Wgmma) else 4 * cut.parts)
    return driver.Boxes(driver.BITS16, (64, M, K // 64), (2 * K, 128), box, driver.SWIZZLE_128B)


def words_of(N: int, K: int, tiles: int, steps: int) -> driver.Boxes:
    """Codes in tiles of 16 x 64 as [N / 16, K / 64, 128] words, in boxes of `tiles` by `steps` of them."""
    return driver.Boxes(driver.BITS32, (2 * K, N // 16), (8 * K,), (128 * steps, tiles))


class Product:
    """The launch of products of M tokens with weights of one kind; only `w4a16_wgmma` rounds them to the dtype of x.

    Args:
        M: tokens; at most `cut.tokens`, unless `cut` is a `W4Wgmma`.
        dtype: of x.
        w: the first weight: int4 with scales of the dtype of x, or 8 bits with scales in fp32.
        cut: from `choice`.
        device: of them all.
    """

    def __init__(self, M: int, dtype: torch.dtype, w: QuantTensor, cut: Cut, device: torch.device) -> None:
        (N, K), spec, index = w.shape, w.spec, driver.index_of(device)
        self._device, self._tokens = device, driver.Description(tokens_of(M, K, cut))
        self._words: driver.Description | None = None
        self._partial = self._tiles = 0
        self._zeros = not isinstance(cut, W8SmallM)
        numbers: list[int] = []
        if isinstance(cut, W4Wgmma):
            rows = 64 * cut.warpgroups
            tiles = N // rows * -(-M // cut.tokens)
            blocks = torch.cuda.get_device_properties(device).multi_processor_count
            blocks = min(blocks, tiles * (K // 128) if cut.split else tiles)
            if cut.split:
                self._partial, self._tiles = 2 * blocks * rows * cut.tokens, tiles
            self._words = driver.Description(words_of(N, K, rows // 16, cut.steps))
            numbers.append(spec.group.bit_length() - 1 if spec.group else 31)
        elif isinstance(cut, W4SmallM):
            blocks = -(-(N // 16) // (cut.sets * cut.joined)) * cut.cluster
        else:
            blocks = -(-(N // 16) // cut.sets)
            numbers.append(-(-K // spec.group) if spec.group else 1)
        kernel = driver.function(*build(cut, w, dtype), shared(cut), index)
        grid = driver.Blocks(blocks, cut.threads, shared(cut))
        self._launch = pdl.OverlappedLaunch(kernel, grid, index, [ctypes.c_int(n) for n in (*numbers, M, N, K)])

    def __call__(self, x: Tensor, w: QuantTensor, bias: Tensor | None, y: Tensor) -> None:
        """Store x w' + bias in y.

        Args:
            x: [M, K] contiguous, at a multiple of 16 bytes.
            w: of the kind of the first one.
            bias: [N] contiguous, of the dtype of x.
            y: [M, N] contiguous.
        """
        parts, added = w.parts, 0 if bias is None else bias.data_ptr()
        codes, scale = parts["codes"].data_ptr(), parts["scale"]
        zero = (parts.get("zero", scale).data_ptr(),) if self._zeros else ()
        maps, out = [self._tokens.at(x.data_ptr())], y.data_ptr()
        if self._words is None:
            self._launch(maps, (codes, scale.data_ptr(), *zero, added, out))
            return
        maps.append(self._words.at(codes))
        partial = counters = x
        if self._partial:
            partial = torch.empty(self._partial, dtype=torch.float32, device=self._device)
            counters = splitk_counters(self._tiles, self._device)
        self._launch(maps, (scale.data_ptr(), *zero, added, out, partial.data_ptr(), counters.data_ptr()))


def product(x: Tensor, w: QuantTensor, bias: Tensor | None, y: Tensor, cut: Cut) -> None:
    """One product, for code that makes no plan; see `Product`."""
    Product(x.shape[0], x.dtype, w, cut, x.device)(x, w, bias, y)
