"""What a row's kernel reads: its parameters, its logits after the bitmask, and their order as integers.

The order of tokens is (logit descending, id ascending). `ordered` maps fp32 to int32 so that integers compare as the
floats do; `ranked` packs a value and an id into an int64, and the larger one comes first.
Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.language import tl, triton

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
MOST: tl.constexpr = tl.constexpr(0x7FFFFFFF)
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
LOWEST: tl.constexpr = tl.constexpr(-0x80000000)  # an `ordered` value below that of -inf
NOTHING: tl.constexpr = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # comes after every token


@triton.jit
def waited(EDGE: tl.constexpr):
    """With an EDGE, where this program begins before the kernel ahead of it ends: wait until it has ended."""
    if EDGE:
        tl.extra.cuda.gdc_wait()


@triton.jit
def followed(EDGE: tl.constexpr):
    """With an EDGE: from here on the kernel behind this one may begin, which waits itself."""
    if EDGE:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def parameter(given, place, EACH: tl.constexpr):
    """A parameter of the row at `place`. EACH: -1 it is a number, 0 one entry for all, 1 one per row or slot."""
    if EACH < 0:
        value = given
    else:
        value = tl.load(given + place * EACH)
    return value


@triton.jit
def place_of(row, slot, last_slot, HAS_SLOT: tl.constexpr):
    """(where the row's parameters stand, whether it is padding, whether its slot is none of theirs)."""
    if HAS_SLOT:
        at = tl.load(slot + row).to(tl.int64)
        place, padding, foreign = tl.minimum(tl.maximum(at, 0), last_slot), at < 0, at > last_slot
    else:
        place, padding, foreign = row, row < 0, row < 0
    return place, padding, foreign


@triton.jit
def logits_at(x, ids, inside, column_stride, allowed, HAS_ALLOWED: tl.constexpr, UNIT: tl.constexpr):
    """fp32 logits of ids of the row at x; -inf outside and where the bitmask says no. NaN stays. UNIT: stride 1."""
    if UNIT:
        at = x + ids
    else:
        at = x + ids.to(tl.int64) * column_stride
    v = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
    if HAS_ALLOWED:
        word = tl.load(allowed + (ids >> 5), mask=inside, other=0)
        v = tl.where((((word >> (ids & 31).to(tl.int32)) & 1) != 0) | (v != v), v, -float("inf"))
    return v


@triton.jit
def times(a, b):
    """Their product, rounded before anything is added to it.

    Builds of one kernel may differ in whether they fuse the two, and an argument that says off must change no bit.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def in_pairs(x):
    """[L] of [L, W]: neighbours are added until one is left, so that no layout decides in which order.

    A bitmask, or where in memory a row starts, may give the values of a build another layout.
    """
    for _ in tl.static_range(16):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def in_units(x, LARGEST_SUM: tl.constexpr):
    """int64 of x >= 0 in units so small that a sum up to LARGEST_SUM, a power of two, just fits: exact in any order."""
    return (x * (4611686018427387904.0 / LARGEST_SUM)).to(tl.int64)


@triton.jit
def of_units(n, LARGEST_SUM: tl.constexpr):
    """The fp32 of a sum of `in_units`."""
    return n.to(tl.float32) * (LARGEST_SUM / 4611686018427387904.0)


@triton.jit
def floor_of(top):
    """Tokens above it can be drawn: all but -inf, and beside +inf the +inf alone."""
    return tl.where(top < float("inf"), -float("inf"), LARGEST)


@triton.jit
def weight(v, there, top, T):
    """exp((v - top) / T) of the tokens that can be drawn; 1 at the best."""
    return tl.where(there, tl.exp(tl.where(v == top, 0.0, (v - top) / T)), 0.0)


@triton.jit
def ordered(v):
    """int32 that compare as fp32 do; -0 and 0 are the same."""
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The fp32 of an int32 of `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def ranked(value, ids):
    """int64 of ids by a value: the larger value comes first, then the lower id."""
    return (ordered(value).to(tl.int64) << 32) | (ids ^ MOST)


@triton.jit
def id_of(key):
    """The id within an int64 of `ranked`."""
    return (key & MOST) ^ MOST


@triton.jit
def value_of(key):
    """The fp32 within an int64 of `ranked`."""
    return unordered((key >> 32).to(tl.int32))
