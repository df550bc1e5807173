"""The matmuls of the backward pass: dX = dz W and dW = dz' X, fp32 accumulators, one rounding.

By cuBLAS, or by product.cu, whose clusters fetch each tile of the second operand once for two blocks, which skips rows
beyond a count on the device, and whose sums do not depend on how the depth is cut into pieces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_cuda.common import driver, tiles
from rlkernel_cuda.common.tiles import Tile
from rlkernel_cuda.linear_logprob.plan import SPLIT_BELOW

# Where one sum is made at once: results of so many numbers, or sums of so many terms. Below, cuBLAS is ahead by 5 % of
# forward and backward (slices of 16384 x 2048 x 151936), and level at 8192 x 4096 x 128256.
LARGE: Final = 1 << 26
DEEP: Final = 1 << 16
SOURCE: Final = Path(__file__).with_name("product.cu")


ByPairs = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int], None]


class Products:
    """Products of calls of one shape: each kind is decided and its launch bound the first time it is made."""

    def __init__(self) -> None:
        self._known: dict[Any, ByPairs | None] = {}  # None: cuBLAS

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        earlier: Tensor | None = None,
        transposed: bool = False,
        count: Tensor | None = None,
        first: int = 0,
    ) -> None:
        """Store a b + earlier in out, or a' b + earlier.

        Args:
            a: [M, K], or [K, M] where transposed, bf16.
            b: [K, N] bf16.
            out: [M, N]: fp32 keeps the accumulators, bf16 rounds them.
            earlier: [M, N] fp32, overwritten where out is not fp32; may be `out`.
            transposed: whether a lies with its depth first.
            count: int32 on the device: rows of M (of K where transposed) that count, less `first`; the others are zeros
                in a, or their results are never read.
            first: place of the first of them.
        """
        key = (a.shape, b.shape, out.dtype, earlier is None, transposed, count is None)
        try:
            by_pairs = self._known[key]
        except KeyError:
            by_pairs = self._known[key] = _decided(a, b, out, earlier, count, transposed=transposed)
        if by_pairs is None:
            _by_cublas(a.t() if transposed else a, b, out, earlier)
        else:
            by_pairs(a, b, out, earlier, count, first)


def product(a: Tensor, b: Tensor, out: Tensor, **options: Any) -> None:
    """One product, for code that makes no plan; `options` as in `Products`."""
    Products()(a, b, out, **options)


def _decided(
    a: Tensor, b: Tensor, out: Tensor, earlier: Tensor | None, count: Tensor | None, *, transposed: bool
) -> ByPairs | None:
    # Sums that go on from an earlier one wait for it at every tile: there cuBLAS is ahead, unless rows can be skipped.
    alone = earlier is None and (out.numel() >= LARGE or b.shape[0] >= DEEP)
    if tiles.PRODUCT is not None and (alone or count is not None) and _fits(a, b, out):
        return by_pairs(tiles.PRODUCT, a, b, out, earlier, count, transposed=transposed)
    return None


def _fits(*operands: Tensor) -> bool:
    """Whether TMA can read them and rows of results can be stored 16 bytes at a time."""
    return all(
        x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 for x in operands
    ) and operands[1].shape[1] % 8 == 0  # fmt: skip


def _by_cublas(a: Tensor, b: Tensor, out: Tensor, earlier: Tensor | None) -> None:
    if earlier is not None:
        torch.addmm(earlier, a, b, out_dtype=torch.float32, out=earlier)
        if out is not earlier:
            out.copy_(earlier)
    elif out.dtype == torch.float32:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif out.numel() < SPLIT_BELOW:  # cuBLAS may split a small product's sums, and would round each part
        out.copy_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        torch.mm(a, b, out=out)


def by_pairs(
    tile: Tile, a: Tensor, b: Tensor, out: Tensor, earlier: Tensor | None, count: Tensor | None, *, transposed: bool
) -> ByPairs:
    """The launch of product.cu for operands such as these."""
    (K, M) = a.shape if transposed else (a.shape[1], a.shape[0])
    rows = tile.consumers * tile.rows
    shared = tile.stages * (rows + tile.cols) * tile.depth * 2
    flags = {
        "TRANSPOSED": transposed,
        "ADD": earlier is not None,
        "ROUND": out.dtype == torch.bfloat16,
        "COUNTED": count is not None,
        **driver.shape(tile),
    }
    options = tuple(f"-D{n}={int(v)}" for n, v in flags.items())
    index = driver.index_of(a.device)
    kernel = driver.function(SOURCE, options, "product", shared, index)
    of_a = driver.Matrix(*((tile.depth, tile.depth) if transposed else (rows, tile.depth)))
    of_b = driver.Matrix(tile.depth, tile.depth)
    blocks = torch.cuda.get_device_properties(a.device).multi_processor_count // 2 * 2
    pitch = (out if earlier is None else earlier).stride(0)
    numbers = [ctypes.c_int(n) for n in (M, b.shape[1], K, pitch, out.stride(0))]
    launch = driver.Launch(kernel, driver.Blocks(blocks, 384, shared), index, numbers)

    def run(a: Tensor, b: Tensor, out: Tensor, earlier: Tensor | None, count: Tensor | None, first: int) -> None:
        from_ = out if earlier is None else earlier
        counted = out if count is None else count
        launch((of_a.of(a), of_b.of(b)), (from_.data_ptr(), out.data_ptr(), counted.data_ptr(), first))

    return run
