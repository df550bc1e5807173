"""Kernels of linear@1: products whose sums are cut into eight chunks, and the addition of chunk sums from memory.

The order of a sum over K is a function of K alone. K is cut into CHUNKS chunks of ceil(K / 128) 16 columns, the last of
which may be short or empty; `common.chunked_sums` says how they are summed. Bias and residual are added after them, and
there is one rounding. A program that owns all chunks of a tile (`SPLIT` False) and programs that own one each, whose
sums `add_chunks` adds, so give the same bits: many rows and few rows differ in who adds, not in what. Tiles of
different sizes agree too: the certificates of `rlkernel_triton.orders` show it.

Bytes, with operands of s bytes: s K (M + C) read, s M C written, and with SPLIT 4 n M C written and read for n chunks.

Legend: M rows · C columns of the result · K columns that are summed over · BM, BN, BK a tile's rows, columns and steps.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import stored_as
from rlkernel_triton.common.chunked_sums import chunked_sums, chunked_sums_tma
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.linear_tile import tile_swizzle
from rlkernel_triton.common.sampling_rows import pdl_trigger, pdl_wait


@triton.jit
def rounded(y, bias, residual, m, c, at, here, C, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """y [BM, BN] fp32 with bias and residual added to it, in this order."""
    if HAS_BIAS:
        y += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
    return y


@triton.jit  # that M is a multiple of 16 is what lets loads of a transposed operand be wide; it changes no sum
def chunked_product(
    a,  # [M, K], a_stride from row to row, a_step from column to column
    b,  # [K, C], b_step from row to row, b_stride from column to column
    bias,  # [C], read where HAS_BIAS
    residual,  # [M, C] contiguous, read where HAS_RESIDUAL
    out,  # [M, C] contiguous; with SPLIT chunk sums [n, M, C] fp32
    M, C, K, a_stride, a_step, b_stride, b_step,
    chunk,  # columns of a chunk
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,  # a program owns one chunk
    WHOLE: tl.constexpr,  # chunks are whole steps, and K is whole chunks
    OPERAND: tl.constexpr, USE_PDL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of a @ b, with bias and residual and rounded; with SPLIT one chunk of its sums."""
    blocks, tiles = tl.cdiv(M, BM), tl.cdiv(C, BN)
    steps = tl.cdiv(chunk, BK)  # of a chunk
    place, part = tl.program_id(0), 0
    first, last = 0, tl.cdiv(K, chunk) * steps
    if SPLIT:
        part = place // (blocks * tiles)
        place = place % (blocks * tiles)
        first, last = part * steps, (part + 1) * steps
    block, tile = tile_swizzle(place, blocks, tiles, GROUP)
    m = block * BM + tl.arange(0, BM)
    c = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK).to(tl.int64)
    inside, there = (m < M)[:, None], (c < C)[None, :]
    a0 = a + m.to(tl.int64)[:, None] * a_stride + k[None, :] * a_step
    b0 = b + k[:, None] * b_step + c.to(tl.int64)[None, :] * b_stride
    total = chunked_sums(
        a0, b0, inside, there, first, last, K, chunk, a_step, b_step, WHOLE, SPLIT, OPERAND, BM, BN, BK
    )
    at = m.to(tl.int64)[:, None] * C + c[None, :]
    if SPLIT:
        pdl_trigger(USE_PDL)
        tl.store(out + part.to(tl.int64) * M * C + at, total, mask=inside & there)
    else:
        y = rounded(total, bias, residual, m, c, at, inside & there, C, HAS_BIAS, HAS_RESIDUAL)
        tl.store(out + at, stored_as(y, out.dtype.element_ty), mask=inside & there)


@triton.jit(do_not_specialize=["M"])
def chunked_product_tma(
    a,  # descriptor of a [M, K], blocks [BM, BK]
    b,  # descriptor of b^T [C, K], blocks [BN, BK]
    bias,  # [C], read where HAS_BIAS
    residual,  # [M, C] contiguous, read where HAS_RESIDUAL
    out,  # [M, C] contiguous
    M, C, K, chunk,  # whole steps, and K whole chunks
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, NESTED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of `chunked_product` without SPLIT; the copy engine brings the operands."""
    block, tile = tile_swizzle(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(C, BN), GROUP)
    total = chunked_sums_tma(a, b, block * BM, tile * BN, 0, K, chunk, True, NESTED, BM, BN, BK)
    m = block * BM + tl.arange(0, BM)
    c = tile * BN + tl.arange(0, BN)
    here = (m < M)[:, None] & (c < C)[None, :]
    at = m.to(tl.int64)[:, None] * C + c[None, :]
    y = rounded(total, bias, residual, m, c, at, here, C, HAS_BIAS, HAS_RESIDUAL)
    tl.store(out + at, stored_as(y, out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["M"])
def add_chunks(
    parts,  # [N_PARTS, M, C] fp32
    bias,  # [C], read where HAS_BIAS
    residual,  # [M, C] contiguous, read where HAS_RESIDUAL
    out,  # [M, C] contiguous
    M, C,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, N_PARTS: tl.constexpr, USE_PDL: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """W columns of a row: chunk sums added in their order, then what follows the sum in `chunked_product`."""
    m = tl.program_id(0) + tl.arange(0, 1)
    c = tl.program_id(1) * W + tl.arange(0, W)
    at = m.to(tl.int64)[:, None] * C + c[None, :]
    here = (c < C)[None, :]
    pdl_wait(USE_PDL)
    plane = M.to(tl.int64) * C
    total = tl.zeros([1, W], tl.float32)
    for i in tl.static_range(N_PARTS):
        total += tl.load(parts + i * plane + at, mask=here, other=0.0)
    y = rounded(total, bias, residual, m, c, at, here, C, HAS_BIAS, HAS_RESIDUAL)
    tl.store(out + at, stored_as(y, out.dtype.element_ty), mask=here)
