"""Random numbers that belong to a token of a request: Philox4x32-10 as `rlkernel_core.spec.sampling` defines it.

Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

TWO_32: tl.constexpr = tl.constexpr(2.0**-32)


@triton.jit
def exponential(words):
    """-ln(1 - u) with u = (word + 1/2) / 2^32, to a few ulp: log1p through the logarithm of a rounded 1 - u."""
    low = words < 0x80000000
    u = (words.to(tl.float32) + 0.5) * TWO_32
    far = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * TWO_32
    f = 1.0 - u
    near = -(tl.log(f) - ((f - 1.0) + u) / f)
    return tl.where(low, near, -tl.log(far))


@triton.jit
def _words(seed, step, block, stream):
    """Four random words of blocks of four ids."""
    zero = block * 0
    low = zero + (step & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((step >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, block, low, high, zero + stream.to(tl.uint32))


@triton.jit
def gumbel(seed, step, ids, stream):
    """fp32 noise of any ids [n] (int64) of one request."""
    a, b, c, d = _words(seed, step, (ids >> 2).to(tl.uint32), stream)
    j = ids & 3
    word = tl.where(j == 0, a, tl.where(j == 1, b, tl.where(j == 2, c, d)))
    return -tl.log(exponential(word))


@triton.jit
def gumbel_from(seed, step, first, stream, COUNT: tl.constexpr):
    """fp32 noise of the ids [first, first + COUNT), first a multiple of 4: every word of a block is used."""
    block = (first >> 2) + tl.arange(0, COUNT // 4)
    a, b, c, d = _words(seed, step, block.to(tl.uint32), stream)
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return -tl.log(exponential(word))
