"""Device code that kernels over token-level tensors share: where a sequence lies, and loads of its tokens.

Legend: B sequences · T tokens, or N of packed sequences.
"""

from rlkernel_triton.common.language import tl, triton


@triton.jit
def sequence_bounds(row, sequences, T, ends, bounds, ENDS: tl.constexpr, PACKED: tl.constexpr):
    """First token of a sequence, how many of its tokens may count, and how many it has."""
    T = T + tl.zeros((), tl.int64)
    # Within a sequence 32 bits are enough, and half the registers of 64.
    if PACKED:
        start = tl.minimum(tl.maximum(tl.load(bounds + row).to(tl.int64), 0), T)
        width = tl.maximum(tl.minimum(tl.maximum(tl.load(bounds + row + 1).to(tl.int64), 0), T) - start, 0)
    else:
        start = row * T
        width = T
    count = width
    if ENDS:
        count = tl.minimum(tl.maximum(tl.load(ends + row).to(tl.int64), 0), width)
    return start, count.to(tl.int32), width.to(tl.int32)


@triton.jit
def load_or_zero(at, where, HERE: tl.constexpr):
    """fp32, 0 where not `where`, and where there is no such tensor."""
    if HERE:
        return tl.load(at, mask=where, other=0).to(tl.float32)
    return tl.zeros(where.shape, tl.float32)


@triton.jit
def is_finite(x):
    """Neither inf nor NaN."""
    return tl.abs(x) < float("inf")
