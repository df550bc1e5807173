"""Products of the formats of blocks, and of experts in any format.

Weights of 4-bit codes in tiles are decoded in registers; other formats of blocks take a kernel that decodes canonical
blocks, and above the largest class of M the weight is dequantised in pieces and torch multiplies. What has no kernel of
its own for experts is dequantised, some experts at a time, and multiplied from memory.

Legend: M tokens · N rows of an expert · K inputs · E experts, 1 where there is no `ends`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Plan, piece_of, plain_launcher_for
from rlkernel_triton.quant import block_kernels, blocks, choice, expert_kernels, product, storage
from rlkernel_triton.quant.activations import quantize_activation
from rlkernel_triton.quant.product import MOST_RANK, PIECE, After
from rlkernel_triton.quant.splitk_counters import scratch


class Cut(NamedTuple):
    """One way to cut a product of tiles."""

    BM: int
    BN: int
    stages: int
    warps: int


# Rows of x up to a class -> cut, as measured on an H200 (benchmarks/notes/quant-formats.md): of an expert, on average;
# of a weight alone, which is dequantised above, where 128 rows a tile make a tile for every multiprocessor, and where
# not. 128 rows of folded weights want 8 warps: see choice.
OF_EXPERTS: Final = {4: Cut(16, 64, 4, 4), 16: Cut(32, 128, 4, 8), 64: Cut(64, 64, 3, 4), 128: Cut(128, 128, 3, 8)}
_FEW: Final = {16: Cut(16, 64, 4, 4), 32: Cut(32, 128, 4, 8)}
WIDE: Final = {**_FEW, 64: Cut(64, 128, 3, 8), 256: Cut(128, 128, 3, 8)}
NARROW: Final = {**_FEW, 64: Cut(64, 64, 3, 4), 256: Cut(128, 64, 3, 4)}
_PROGRAMS: Final = 7  # a multiprocessor, at most, where K is split; few registers and little memory fit so many
LARGE: Final = 1 << 14  # elements of a tile from which a step is short
_DENSE_EXPERTS: Final = 2 * PIECE  # bytes of experts that are dequantised at once


def multiplied(
    x: Tensor,
    w: QuantTensor,
    after: After,
    rounding: str,
    ends: Tensor | None,
    dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> Tensor:  # [M, K] -> [M, R]
    """act(x w'^T + lora + bias) + residual of contiguous x, of a dtype, that of x unless said."""
    if ends is None and not blocks.reads(w.spec):
        return product.product(x, w, after, rounding, dtype, plan)
    N = w.shape[0] // (1 if ends is None else ends.shape[0])
    make = torch.empty if ends is None else torch.zeros
    y = make(x.shape[0], N // 2 if after.pair else N, dtype=dtype or x.dtype, device=x.device)
    if x.shape[0] == 0:
        return y
    with torch.cuda.device_of(x):
        if after.lora is not None and after.lora.A.shape[0] > MOST_RANK:
            h = multiplied(x, w, After(), rounding, None, torch.float32)
            h.addmm_(product.inner(x, after.lora.A).float(), after.lora.B.float().t(), alpha=after.lora.scale)
            product.finish(x, h, replace(after, lora=None), y)
        elif in_tiles(x, w, rounding, N, after):
            by_tiles(x, w, after, rounding, ends, y)
        elif ends is None and many(x, rounding):
            product.by_pieces(x, w, after, y)
        elif blocks.reads(w.spec):
            by_blocks(x, w, after, rounding, ends, y)
        else:
            by_experts(x, w, after, rounding, ends, y)  # type: ignore[arg-type]  # other formats come with ends
    return y


def many(x: Tensor, rounding: str) -> bool:
    """So many rows that a weight is better dequantised; that rounds it."""
    half = x.dtype != torch.float32
    return half and rounding != "none" and choice.class_of(x.shape[0], product.machine(x.device).kind) is None


def in_tiles(x: Tensor, w: QuantTensor, rounding: str, N: int, after: After) -> bool:
    """The kernel of tiles takes this product."""
    if x.dtype == torch.float32 or (N // 2 if after.pair else N) % 32:
        return False
    if w.layout == blocks.F4:  # a product of code and scale is exact but for mxfp4 in float16
        return rounding != "none" or x.dtype == torch.bfloat16 or w.spec.format == "nvfp4"
    return w.layout == storage.W4 and w.spec.element == "int4" and rounding != "none"


def by_tiles(x: Tensor, w: QuantTensor, after: After, rounding: str, ends: Tensor | None, y: Tensor) -> None:
    """Codes in tiles, decoded in registers."""
    experts = 1 if ends is None else ends.shape[0]
    rows = triton.cdiv(x.shape[0], experts)
    if ends is None and rows > max(WIDE) and rounding != "none":
        product.by_pieces(x, w, after, y)
        return
    on = product.machine(x.device)
    alone = WIDE if y.shape[1] // 128 >= on.multiprocessors else NARROW
    cut = cut_of(rows, on.kind, OF_EXPERTS if ends is not None else alone)
    if after.pair and cut.BM * cut.BN >= LARGE:  # two sums
        cut = cut._replace(BN=64, warps=4)
    if y.shape[1] % cut.BN:
        cut = cut._replace(BN=64 if y.shape[1] % 64 == 0 else 32, warps=4)
    launch(x, w, after, rounding, ends, y, cut)


def cut_of(rows: int, kind: str, cuts: Mapping[int, Cut]) -> Cut:
    """The cut for so many rows, on a kind of GPU; others than that which was measured have less memory."""
    cut = next((c for limit, c in cuts.items() if rows <= limit), cuts[max(cuts)])
    return cut if kind == "sm90" else cut._replace(stages=2)


def launch(
    x: Tensor, w: QuantTensor, after: After, rounding: str, ends: Tensor | None, y: Tensor, cut: Cut, parts: int = 0
) -> None:
    """The product of tiles, cut in one way; `parts` of K, 0 for as many as fill the GPU."""
    spec, M, (rows, K) = w.spec, x.shape[0], w.shape
    experts = 1 if ends is None else ends.shape[0]
    m_tiles = triton.cdiv(M, cut.BM) if ends is None else M // cut.BM + min(M, experts)
    step = min(spec.group or 128, 128) if spec.element == "int4" else 128 if K % 128 == 0 else 64
    if cut.BM * cut.BN >= LARGE:
        step = min(step, 64)
    on, tiles = product.machine(x.device), m_tiles * (y.shape[1] // cut.BN)
    programs = _PROGRAMS if cut.BM == 16 and on.kind == "sm90" else choice.PROGRAMS
    parts = parts or (choice.parts_of(tiles, K // step, on.multiprocessors, programs) if ends is None else 1)
    partial, counters = x, x
    if parts > 1:
        halves = 2 if after.pair else 1
        counters, partial = scratch(tiles, parts * tiles * halves * cut.BM * cut.BN, x.device)
    factored = spec.format == "nvfp4" and rounding == "dtype"
    exact = x.dtype == torch.bfloat16 or (spec.element == "int4" and x.dtype == torch.float16)
    scale = w.parts["scale"].contiguous()
    if spec.element != "int4":
        scale = scale.view(torch.int32)
    run = plain_launcher_for(x.device).bind(
        expert_kernels.tile_product, num_warps=cut.warps, num_stages=cut.stages, **after.arguments(x),
        x_row=x.stride(0), M=M, N=rows // experts, K=K, rows=rows, E=experts, m_tiles=m_tiles,
        FORMAT=expert_kernels.INT4.value if spec.element == "int4" else blocks.KINDS[spec.format].value, BM=cut.BM,
        BN=cut.BN, BK=step, PARTS=parts, STAGES=cut.stages, GROUP=spec.group, SYMMETRIC=spec.symmetric,
        FACTORED=factored, EB=0 if ends is None else triton.next_power_of_2(experts), PERMUTED=on.sync,
        ASM=on.ptx and exact and not factored,
    )  # fmt: skip
    run(
        (tiles * parts, 1, 1), x, w.parts["codes"].contiguous(), scale, w.parts.get("zero", scale),
        w.parts.get("global_scale", scale), x if ends is None else ends.contiguous(), y, partial, counters,
    )  # fmt: skip


def by_blocks(x: Tensor, w: QuantTensor, after: After, rounding: str, ends: Tensor | None, y: Tensor) -> None:
    """Canonical blocks, decoded beside the product."""
    w = blocks.packed(w, CANONICAL)
    form = blocks.form(w.spec)
    experts = 1 if ends is None else ends.shape[0]
    _canonical(
        x, blocks.arguments(w), after, ends, y, N=w.shape[0] // experts, K=w.shape[1], first_expert=0, E=experts,
        FORMAT=form["FORMAT"], MANTISSA=form["MANTISSA"], FLOAT_BIAS=form["BIAS"],
        WIDE=x.dtype == torch.float32 or rounding == "none",
    )  # fmt: skip


def by_experts(x: Tensor, w: QuantTensor, after: After, rounding: str, ends: Tensor, y: Tensor) -> None:
    """Some experts at a time, dequantised and multiplied from memory."""
    kind = x.dtype if x.dtype != torch.float32 and (rounding == "dtype" or w.spec.act == "none") else torch.float32
    kind = torch.float32 if rounding == "none" else kind
    if w.spec.act != "none":
        x = quantize_activation(x, w.spec).value()
    N = w.shape[0] // ends.shape[0]
    for first, some, dense in dense_experts(w, ends.shape[0], kind):
        dense_product(x, dense, after, ends, y, first=first, experts=some, N=N)


def dense_experts(w: QuantTensor, experts: int, kind: torch.dtype) -> Any:
    """(first expert, how many, their rows [n N, K]) for all, a bounded number of bytes at a time."""
    N, K = w.shape[0] // experts, w.shape[1]
    most = max(1, piece_of(_DENSE_EXPERTS) // (N * K * kind.itemsize))
    aligned = 16 // _common(N, 16)  # tiles are read from multiples of 16 rows
    most = max(aligned, most // aligned * aligned)
    for first in range(0, experts, most):
        last = min(first + most, experts)
        yield first, last - first, storage.dequantised(w, kind, (first * N, last * N))


def _common(a: int, b: int) -> int:
    return a if b == 0 else _common(b, a % b)


def dense_product(
    x: Tensor, dense: Tensor, after: After, ends: Tensor, y: Tensor, *, first: int, experts: int, N: int
) -> None:
    """Rows of x times the dense rows of their experts, those of experts from `first` on."""
    _canonical(
        x, (dense,) * 7, after, ends, y, N=N, K=dense.shape[1], first_expert=first, E=experts,
        FORMAT=block_kernels.DENSE.value, MANTISSA=0, FLOAT_BIAS=0, WIDE=torch.float32 in (x.dtype, dense.dtype),
    )  # fmt: skip


def _canonical(
    x: Tensor, parts: tuple[Tensor, ...], after: After, ends: Tensor | None, y: Tensor, *, WIDE: bool, **fixed: Any
) -> None:
    M = x.shape[0]
    rows = M if ends is None else triton.cdiv(M, ends.shape[0])
    BM = next((b for b in (16, 32, 64) if b >= rows), 64)
    m_tiles = triton.cdiv(M, BM) if ends is None else M // BM + min(M, ends.shape[0])
    run = plain_launcher_for(x.device).bind(
        block_kernels.block_product, num_stages=2, **after.arguments(x), **fixed, x_row=x.stride(0), M=M,
        m_tiles=m_tiles, BM=BM, BN=64, BK=32 if WIDE else 64, STAGES=2, WIDE=WIDE,
        EB=0 if ends is None else triton.next_power_of_2(ends.shape[0]),
    )  # fmt: skip
    grid = (m_tiles * triton.cdiv(y.shape[1], 64), 1, 1)
    run(grid, x, *parts, x if ends is None else ends.contiguous(), y)
