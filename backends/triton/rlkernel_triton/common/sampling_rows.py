"""What kernels that sample read of a row: its parameters, its logits under the bitmask, and their order as integers.

The order of tokens is (logit descending, id ascending). `order_key` maps fp32 to int32 so that integers compare as the
floats do; `rank_key` packs a value and an id into an int64, and the larger one comes first.
Imports Triton.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import MAX_FLOAT
from rlkernel_triton.common.language import tl, triton

MAX_INT32: tl.constexpr = tl.constexpr(0x7FFFFFFF)
MIN_KEY: tl.constexpr = tl.constexpr(-0x80000000)  # an `order_key` value below that of -inf
NO_KEY: tl.constexpr = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # comes after every token
# In a count of tokens that can be drawn, beside it:
HELD_NAN: tl.constexpr = tl.constexpr(1 << 30)  # there is NaN
HELD_INFINITY: tl.constexpr = tl.constexpr(1 << 29)  # it counts tokens of +inf


@triton.jit
def pdl_wait(USE_PDL: tl.constexpr):
    """Where this kernel may begin before the one ahead of it ends (programmatic dependent launch): wait."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_trigger(USE_PDL: tl.constexpr):
    """From here on the kernel behind this one may begin, which waits itself."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def parameter(given, entry, EACH: tl.constexpr):
    """A parameter of the row at `entry`. EACH: -1 it is a number, 0 one entry for all, 1 one per row or slot."""
    if EACH < 0:
        value = given
    else:
        value = tl.load(given + entry * EACH)
    return value


@triton.jit
def slot_of(row, slot, last_slot, HAS_SLOT: tl.constexpr):
    """(where the row's parameters stand, whether it is padding, whether its slot is none of theirs)."""
    if HAS_SLOT:
        at = tl.load(slot + row).to(tl.int64)
        entry, padding, foreign = tl.minimum(tl.maximum(at, 0), last_slot), at < 0, at > last_slot
    else:
        entry, padding, foreign = row, row < 0, row < 0
    return entry, padding, foreign


@triton.jit
def row_request(
    row, slot, last_slot, temperature, spoiled, HAS_SLOT: tl.constexpr, HAS_SPOILED: tl.constexpr, T_EACH: tl.constexpr
):
    """(entry of the parameters, padding, without meaning, greedy, T or 1, whether the logits held NaN)."""
    entry, padding, foreign = slot_of(row, slot, last_slot, HAS_SLOT)
    T = parameter(temperature, entry, T_EACH).to(tl.float32)
    sound = (T >= 0.0) & (T < float("inf"))
    bad = foreign | (sound == 0)
    nan = row.to(tl.int32) * 0
    if HAS_SPOILED:
        flags = tl.load(spoiled + row)
        bad = bad | ((flags & 2) != 0)
        nan = flags & 1
    greedy = (T == 0.0) & (bad == 0)
    return entry, padding, bad, greedy, tl.where(greedy | bad, 1.0, T), nan


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
def rounded_product(a, b):
    """Their product, rounded before anything is added to it.

    Builds of one kernel may differ in whether they fuse the two, and an argument that says off must change no bit.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def to_fixed(x, MAX_SUM: tl.constexpr):
    """int64 of x >= 0 in units so small that a sum up to MAX_SUM, a power of two, just fits: exact in any order."""
    return (x * (4611686018427387904.0 / MAX_SUM)).to(tl.int64)


@triton.jit
def from_fixed(n, MAX_SUM: tl.constexpr):
    """The fp32 of a sum of `to_fixed`."""
    return n.to(tl.float32) * (MAX_SUM / 4611686018427387904.0)


@triton.jit
def draw_floor(top):
    """Tokens above it can be drawn: all but -inf, and beside +inf the +inf alone."""
    return tl.where(top < float("inf"), -float("inf"), MAX_FLOAT)


@triton.jit
def softmax_weight(v, there, top, T):
    """exp((v - top) / T) of the tokens that can be drawn; 1 at the best."""
    return tl.where(there, tl.exp(tl.where(v == top, 0.0, (v - top) / T)), 0.0)


@triton.jit
def order_key(v):
    """int32 that compare as fp32 do; -0 and 0 are the same."""
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order_key(key):
    """The fp32 of an int32 of `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rank_key(value, ids):
    """int64 of ids by a value: the larger value comes first, then the lower id."""
    return (order_key(value).to(tl.int64) << 32) | (ids ^ MAX_INT32)


@triton.jit
def key_id(key):
    """The id within an int64 of `rank_key`."""
    return (key & MAX_INT32) ^ MAX_INT32


@triton.jit
def key_value(key):
    """The fp32 within an int64 of `rank_key`."""
    return from_order_key((key >> 32).to(tl.int32))
