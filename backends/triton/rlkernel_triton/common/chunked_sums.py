"""The loop of linear@1 and grouped_linear@1: a tile of products whose sums over K are cut into chunks.

A chunk is summed from 0, K ascending, in the steps of the matrix instruction (fp32 operands: one fused product and
addition after another); sums of chunks are added in fp32 in their order. Steps of any size BK give the same bits where
they use one instruction (`common.matmul_tiles`): columns beyond a chunk's end are zeros, whose products change no sum.

Chunks are added from left to right, since that holds one tile of finished sums beside the one that grows: 128 registers
of a thread at 128 x 128. A balanced tree would hold three, which Hopper's register file has no room for.

Legend: BM, BN, BK a tile's rows, columns and steps.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton


@triton.jit
def chunked_sums(
    a, b,  # pointers to a tile's columns 0 to BK - 1, [BM, BK] and [BK, BN]
    inside, there,  # [BM, 1] and [1, BN]: which rows and columns there are
    first, last,  # steps, of ceil(chunk / BK) for each chunk
    K, chunk, a_step, b_step,
    WHOLE: tl.constexpr,  # chunks are whole steps, and K is whole chunks
    ONE: tl.constexpr,  # the steps are those of one chunk
    OPERAND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """[BM, BN] fp32: sums of the steps from `first` to before `last`."""
    k = tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    acc = tl.zeros([BM, BN], tl.float32)
    steps = tl.cdiv(chunk, BK)
    for step in range(first, last):
        if WHOLE:
            start = step * tl.full([], BK, tl.int64)
            x = tl.load(a + start * a_step, mask=inside, other=0.0)
            w = tl.load(b + start * b_step, mask=there, other=0.0)
        else:
            begin = step // steps * chunk
            start = begin + step % steps * BK
            left = start + k < tl.minimum(begin + chunk, K)
            start = start.to(tl.int64)
            x = tl.load(a + start * a_step, mask=inside & left[None, :], other=0.0)
            w = tl.load(b + start * b_step, mask=left[:, None] & there, other=0.0)
        acc = tl.dot(x.to(OPERAND), w.to(OPERAND), acc, input_precision="ieee")
        if not ONE:
            # Taken once a chunk: only then does the loop wait for the matrix unit.
            if step % steps == steps - 1:
                total += acc
                acc = tl.zeros([BM, BN], tl.float32)
    if ONE:
        total = acc
    return total


@triton.jit
def chunked_sums_tma(
    a,  # descriptor of [M, K], blocks [BM, BK]
    b,  # descriptor of [C, K], blocks [BN, BK] where TURNED; else of [K, C], blocks [BK, BN]
    a_row,  # of the tile's first row
    b_row, b_column,  # of what the tile's columns are multiplied with first
    K, chunk,  # whole steps, and K whole chunks
    TURNED: tl.constexpr, NESTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same of all chunks; Hopper's copy engine brings the operands, zeros outside of them.

    NESTED writes the same steps as a loop in a loop: with 4 warps that is faster than one loop, with 8 slower.
    """
    total = tl.zeros([BM, BN], tl.float32)
    acc = tl.zeros([BM, BN], tl.float32)
    if NESTED:
        for begin in range(0, K, chunk):
            acc = tl.zeros([BM, BN], tl.float32)
            for start in range(begin, begin + chunk, BK):
                if TURNED:
                    acc = tl.dot(a.load([a_row, start]), b.load([b_row, b_column + start]).T, acc)
                else:
                    acc = tl.dot(a.load([a_row, start]), b.load([b_row + start, b_column]), acc)
            total += acc
    else:
        steps = chunk // BK
        for step in range(K // BK):
            start = step * BK
            if TURNED:
                acc = tl.dot(a.load([a_row, start]), b.load([b_row, b_column + start]).T, acc)
            else:
                acc = tl.dot(a.load([a_row, start]), b.load([b_row + start, b_column]), acc)
            if step % steps == steps - 1:
                total += acc
                acc = tl.zeros([BM, BN], tl.float32)
    return total
