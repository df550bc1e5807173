"""The matmuls of the backward pass: dX = dz W and dW = dz' X, fp32 accumulators, one rounding.

By cuBLAS, or by product.cu, whose clusters fetch each tile of the second operand once for two blocks, which skips rows
beyond a count on the device, and whose sums do not depend on how the depth is cut into pieces.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rlkernel_cuda import driver, variants
from rlkernel_cuda.plan import SPLIT_BELOW
from rlkernel_cuda.variants import Tile

# Where one sum is made at once: results of so many numbers, or sums of so many terms. Below, cuBLAS is ahead by 5 % of
# forward and backward (slices of 16384 x 2048 x 151936), and level at 8192 x 4096 x 128256.
LARGE: Final = 1 << 26
DEEP: Final = 1 << 16
SOURCES: Final = tuple(Path(__file__).with_name(name) for name in ("pair.cuh", "product.cu"))


def product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    since: Tensor | None = None,
    transposed: bool = False,
    count: Tensor | None = None,
    first: int = 0,
) -> None:
    """Store a b + since in out, or a' b + since.

    Args:
        a: [M, K], or [K, M] where transposed, bf16.
        b: [K, N] bf16.
        out: [M, N]: fp32 keeps the accumulators, bf16 rounds them.
        since: [M, N] fp32, overwritten where out is not fp32; may be `out`.
        transposed: whether a lies with its depth first.
        count: int32 on the device: rows of M (of K where transposed) that count, less `first`; the others are zeros in
            a, or their results are never read.
        first: place of the first of them.
    """
    # Sums that go on from an earlier one wait for it at every tile: there cuBLAS is ahead, unless rows can be skipped.
    alone = since is None and (out.numel() >= LARGE or b.shape[0] >= DEEP)
    if variants.PRODUCT is not None and (alone or count is not None) and _fits(a, b, out):
        _by_pairs(variants.PRODUCT, a, b, out, since, count, first, transposed=transposed)
    else:
        _by_cublas(a.t() if transposed else a, b, out, since)


def _fits(*operands: Tensor) -> bool:
    """Whether TMA can read them and rows of results can be stored 16 bytes at a time."""
    return all(
        x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 for x in operands
    ) and operands[1].shape[1] % 8 == 0  # fmt: skip


def _by_cublas(a: Tensor, b: Tensor, out: Tensor, since: Tensor | None) -> None:
    if since is not None:
        torch.addmm(since, a, b, out_dtype=torch.float32, out=since)
        if out is not since:
            out.copy_(since)
    elif out.dtype == torch.float32:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif out.numel() < SPLIT_BELOW:  # cuBLAS may split a small product's sums, and would round each part
        out.copy_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        torch.mm(a, b, out=out)


def _by_pairs(
    tile: Tile, a: Tensor, b: Tensor, out: Tensor, since: Tensor | None, count: Tensor | None, first: int, *,
    transposed: bool,
) -> None:  # fmt: skip
    (K, M) = a.shape if transposed else (a.shape[1], a.shape[0])
    rows = tile.consumers * tile.rows
    shared = tile.stages * (rows + tile.cols) * tile.depth * 2
    flags = {
        "TRANSPOSED": transposed,
        "ADD": since is not None,
        "ROUND": out.dtype == torch.bfloat16,
        "COUNTED": count is not None,
        **driver.shape(tile),
    }
    options = tuple(f"-D{n}={int(v)}" for n, v in flags.items())
    kernel = driver.function(SOURCES, options, "product", shared, a.device.index)
    box = (tile.depth, tile.depth) if transposed else (rows, tile.depth)
    since = out if since is None else since
    number = ctypes.c_int
    arguments = [
        driver.described(a, *box), driver.described(b, tile.depth, tile.depth), since, out,
        out if count is None else count, number(first), number(M), number(b.shape[1]), number(K),
        number(since.stride(0)), number(out.stride(0)),
    ]  # fmt: skip
    blocks = torch.cuda.get_device_properties(a.device).multi_processor_count
    driver.launch(kernel, blocks // 2 * 2, 384, shared, arguments)
