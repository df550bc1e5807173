"""Device code of attention@1 that says where things are: a block's sequence, its rows, its keys; and scores.

Rows of packed sequences are cut into blocks of STEP rows of one sequence each, without the host: sequence b has the
blocks from cu[b] // STEP + b on, which are as many as it needs at least, and N // STEP + B + 1 serve N rows. Rows from
cu[B] on are the blocks of one sequence more, which has no keys.

Offsets are held to what there is: one that is out of its range, or does not ascend, reads no other memory.

Legend: B sequences · m queries, n keys of a sequence · E heads of queries that read one head of keys · EACH of them in
a block, whose rows are tokens times these heads · P pages of a sequence at most · N pages · G keys of a page.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import INTERPRETED, LOG2E, tanh
from rlkernel_triton.common.language import tl, triton

PROBES: tl.constexpr = tl.constexpr(128)  # offsets that are read at a time


@triton.jit
def sequence_of(block, cu, B, STEP: tl.constexpr):
    """The sequence of a block, 0 to B: the last whose first block is not behind it, by a search of width PROBES."""
    low = block * 0
    width = B + 1
    probe = tl.arange(0, PROBES)
    while width > 1:
        stride = tl.cdiv(width, PROBES)
        at = probe * stride
        there = at < width
        begins = tl.load(cu + low + at, mask=there, other=0) // STEP + low + at
        begun = tl.sum((there & (begins <= block)).to(tl.int32))
        passed = tl.maximum(begun - 1, 0) * stride
        low += passed
        width = tl.minimum(stride, width - passed)
    return low


@triton.jit
def rows_between(sequence, cu, B, most, end):
    """First row of a sequence, int64, and how many it has; those of sequence B go up to `end`."""
    most = most + tl.zeros((), tl.int64)
    first = tl.minimum(tl.maximum(tl.load(cu + sequence).to(tl.int64), 0), most)
    last = tl.load(cu + sequence + 1, mask=sequence < B, other=0).to(tl.int64)
    last = tl.where(sequence < B, tl.minimum(last, most), end)
    return first, tl.maximum(last - first, 0).to(tl.int32)


@triton.jit
def rows_of_block(block, cu, B, rows, STEP: tl.constexpr):
    """(sequence, its first row, how many rows it has, the first of them that the block has)."""
    sequence = sequence_of(block, cu, B, STEP)
    first, count = rows_between(sequence, cu, B, rows, rows)
    begins = (first // STEP).to(tl.int32) + sequence
    return sequence, first, count, (block - begins) * STEP


@triton.jit
def keys_of(sequence, cu_k, B, S, PAGED: tl.constexpr):
    """First row of a sequence's keys, int64, and how many keys it has. cu_k: with pages how many keys, [B]."""
    if PAGED:
        used = tl.load(cu_k + sequence, mask=sequence < B, other=0).to(tl.int64)
        return tl.zeros((), tl.int64), tl.minimum(tl.maximum(used, 0), S).to(tl.int32)
    return rows_between(sequence, cu_k, B, S, 0)


@triton.jit
def pages_at(begin, n, table, G: tl.constexpr, KEYS: tl.constexpr):
    """Pages of a tile's keys, -1 beyond the keys: [KEYS], or [1] where one page has them all."""
    key = begin + tl.arange(0, 1 if G % KEYS == 0 else KEYS)
    return tl.load(table + key // G, mask=key < n, other=-1)


@triton.jit
def is_page(page, N):
    """Whether there is a page."""
    return (page >= 0) & (page < N)


@triton.jit
def all_pages_are(begin, end, table, N, G: tl.constexpr):
    """Whether the pages of keys `begin` to `end` are among the N."""
    wrong = begin * 0
    for at in range(begin // G, tl.cdiv(end, G), PROBES):
        entry = at + tl.arange(0, PROBES)
        page = tl.load(table + entry, mask=entry < tl.cdiv(end, G), other=0)
        wrong += tl.sum((~is_page(page, N)).to(tl.int32))
    return wrong == 0


@triton.jit
def tile_of_keys(
    k, v,  # of a head
    begin,  # first key, within the sequence
    n,
    first,  # row of the sequence's first key
    page,  # of `pages_at`
    N, k_page, k_token, v_page, v_token,
    PAGED: tl.constexpr, G: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Positions of a tile's keys, where keys and values are, and whether they are anywhere; each [KEYS]."""
    lane = tl.arange(0, KEYS)
    key = begin + lane
    known = key < n
    if PAGED:
        real = is_page(page, N)
        known = known & real
        page = tl.where(real, page, 0).to(tl.int64)
        row = (key % G).to(tl.int64)
        k0 = k + (page * k_page + row * k_token)
        v0 = v + (page * v_page + row * v_token)
    else:
        # 64 bits for where the tile is, 32 for where a key is in it: registers are what this loop lacks.
        k0 = k + (first + begin) * k_token + lane * k_token
        v0 = v + (first + begin) * v_token + lane * v_token
    return key, k0, v0, known


@triton.jit
def columns(D: tl.constexpr, W: tl.constexpr):
    """Columns of a head, [1, W], and whether it has them."""
    d = tl.arange(0, W)[None, :]
    if D == W:
        wide = tl.full([1, W], 1, tl.int1)
    else:
        wide = d < D
    return d, wide


@triton.jit
def plus_product(x, y, acc):
    """Sums of products of rows of x and columns of y beside `acc`, in fp32."""
    if INTERPRETED:  # whose fp32 sums depend on where in a tile a row stands; those of float64 round to one number
        return (acc.to(tl.float64) + tl.dot(x.to(tl.float64), y.to(tl.float64))).to(tl.float32)
    return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def product(
    a,  # [M, 1] pointers to rows
    a_there,  # [M, 1]
    b,  # [N, 1] pointers to rows
    b_there,  # [N, 1]
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, OPERAND: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """Rows of a times rows of b, [M, N], SLICE columns at a time: where not all have room in registers."""
    s = tl.zeros([M, N], tl.float32)
    for begin in range(0, W, SLICE):
        d = begin + tl.arange(0, SLICE)[None, :]
        x = tl.load(a + d, mask=a_there & (d < D), other=0.0).to(OPERAND)
        y = tl.load(b + d, mask=b_there & (d < D), other=0.0).to(OPERAND)
        s = plus_product(x, y.T, s)
    return s


@triton.jit
def seen_by(
    at,  # positions of queries, [M, 1] or [1, M]
    key,  # positions of keys, [1, KEYS] or [KEYS, 1]
    n, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Whether a query sees a key."""
    if CAUSAL:
        seen = key <= at  # positions of rows beyond the queries are beyond the keys: nobody asks them
    else:
        seen = key < n
    if WINDOW:
        seen = seen & (key > at - window)
    return seen


@triton.jit
def spread(at, last, n, window, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The keys that queries at positions `at` to `last` see among them: from where, in whole tiles, and up to where.

    And up to where, in whole tiles, each of them sees all.
    """
    low = n * 0
    high = n
    full = n
    if CAUSAL:
        high = tl.minimum(tl.maximum(last + 1, 0), n)
        full = tl.minimum(tl.maximum(at + 1, 0), n)
    full = full // KEYS * KEYS
    if WINDOW:
        low = tl.maximum(at - window + 1, 0) // KEYS * KEYS
        full = low
    return low, full, high


@triton.jit
def scored(
    x,  # products
    scale,  # of products, with log2(e) where they are not capped
    softcap,
    HAS_CAP: tl.constexpr,
):
    """Numbers and the factor that makes them exponents of 2, and how the cap bends these: 1 where there is none."""
    slope = 1.0
    factor = scale
    if HAS_CAP:
        bent = tanh(x * scale / softcap)
        x = softcap * bent * LOG2E
        slope = 1.0 - bent * bent
        factor = 1.0
    return x, factor, slope
