"""Kernels of the gradients of attention@1: what a query owns, gradients of queries, gradients of keys and values.

    p = 2^(s - lse)     ds = p (g v^T - own) slope     dq = scale ds k     dk = scale ds^T q     dv = p^T g

with own = sum(g out) - g_lse. A program sums in registers, in the order of positions: a block of queries over tiles of
keys, a tile of keys over blocks of queries. So no number is added by two programs, and the gradients of a sequence have
the same bits whatever stands beside it.

Legend as in `kernels`; ROWS rows of a block, tokens times EACH heads · STEP tokens of a block.
"""

from __future__ import annotations

from rlkernel_triton.attention.places import (
    all_pages_are,
    columns,
    is_page,
    keys_of,
    pages_at,
    plus_product,
    product,
    rows_between,
    rows_of_block,
    scored,
    seen_by,
    spread,
    tile_of_keys,
)
from rlkernel_triton.common.arithmetic import LOG2E, stored_as, tree_sum
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.softmax import finite_or_zero


@triton.jit
def own_sums(
    g, out,  # [M, D] contiguous
    g_lse,  # [M] with HAS_LSE
    own,  # [M] fp32
    M,
    HAS_LSE: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """sum(g out) - g_lse of each query and head, as a tree."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d, wide = columns(D, W)
    here = (row < M)[:, None] & wide
    at = row[:, None] * D + d
    x = tl.load(g + at, mask=here, other=0.0).to(tl.float32) * tl.load(out + at, mask=here, other=0.0).to(tl.float32)
    y = tree_sum(x)
    if HAS_LSE:
        y -= tl.load(g_lse + row, mask=row < M, other=0.0).to(tl.float32)
    tl.store(own + row, y, mask=row < M)


@triton.jit
def shares(
    x, dp,  # products of queries and keys, of upstream gradients and values
    log, own,  # of the queries, broadcast to these
    scale, softcap,
    HAS_CAP: tl.constexpr,
):  # fmt: skip
    """P, and the gradients of products over `scale`, of queries that see their keys."""
    s, factor, slope = scored(x, scale, softcap, HAS_CAP)
    p = tl.exp2(s * factor - log)
    return p, p * (dp - own) * slope


@triton.jit(do_not_specialize=["T", "S", "B", "P", "N", "Hq", "window"])
def query_gradients(
    q, k, v, g, lse, own, cu_q, cu_k, table,  # as `attend` takes them; g [T, Hq, D] contiguous, lse and own [T, Hq]
    d_q,  # [T, Hq, D] contiguous
    T, S, B, P, N, Hq, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head,
    scale, factor, softcap, window,  # factor: the scale of products
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PAGED: tl.constexpr,
    G: tl.constexpr, E: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr, W: tl.constexpr, OPERAND: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """A block of queries over its keys."""
    STEP: tl.constexpr = ROWS // EACH
    PARTS: tl.constexpr = (E + EACH - 1) // EACH
    heads = Hq // E * PARTS
    block = T // STEP + B - tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    sequence, start, m, local = rows_of_block(block, cu_q, B, T, STEP)
    if local >= m:
        return
    first, n = keys_of(sequence, cu_k, B, S, PAGED)
    row = tl.arange(0, ROWS)
    token = local + row // EACH
    of_group = head % PARTS * EACH + row % EACH
    h = head // PARTS * E + of_group
    there = (token < m) & (row < STEP * EACH) & (of_group < E)
    at = n - m + token
    low, full, high = spread(n - m + local, n - m + tl.minimum(local + STEP, m) - 1, n, window, KEYS, CAUSAL, WINDOW)
    d, wide = columns(D, W)
    at_row = (start + token) * Hq + h
    q0 = q + ((start + token) * q_token + h.to(tl.int64) * q_head)[:, None]
    g0 = g + at_row[:, None] * D
    if not SLICE:
        x = tl.load(q0 + d, mask=there[:, None] & wide, other=0.0).to(OPERAND)
        up = tl.load(g0 + d, mask=there[:, None] & wide, other=0.0).to(OPERAND)
    log = finite_or_zero(tl.load(lse + at_row, mask=there, other=0.0)) * LOG2E
    mine = tl.load(own + at_row, mask=there, other=0.0)
    k0 = k + (head // PARTS).to(tl.int64) * k_head
    v0 = v + (head // PARTS).to(tl.int64) * v_head
    table0 = table + sequence.to(tl.int64) * P
    acc = tl.zeros([ROWS, W], tl.float32)
    page = low
    if PAGED:
        page = pages_at(low, n, table0, G, KEYS)
        full = tl.where(all_pages_are(low, high, table0, N, G), full, low)
    for begin in range(low, high, KEYS):
        key, at_k, at_v, known = tile_of_keys(
            k0, v0, begin, n, first, page, N, k_page, k_token, v_page, v_token, PAGED, G, KEYS
        )
        if PAGED:
            page = pages_at(begin + KEYS, n, table0, G, KEYS)
        y = tl.load(at_k[:, None] + d, mask=known[:, None] & wide, other=0.0).to(OPERAND)
        if SLICE:
            s = product(q0, there[:, None], at_k[:, None], known[:, None], ROWS, KEYS, D, W, OPERAND, SLICE)
            dp = product(g0, there[:, None], at_v[:, None], known[:, None], ROWS, KEYS, D, W, OPERAND, SLICE)
        else:
            z = tl.load(at_v[:, None] + d, mask=known[:, None] & wide, other=0.0).to(OPERAND)
            s = plus_product(x, y.T, tl.zeros([ROWS, KEYS], tl.float32))
            dp = plus_product(up, z.T, tl.zeros([ROWS, KEYS], tl.float32))
        _, ds = shares(s, dp, log[:, None], mine[:, None], scale, softcap, HAS_CAP)
        if begin >= full:  # 0 where a query does not see a key, whatever that holds
            if PAGED:
                ds = tl.where(is_page(pages_at(begin, n, table0, G, KEYS), N)[None, :], ds, float("nan"))
            ds = tl.where(seen_by(at[:, None], key[None, :], n, window, CAUSAL, WINDOW), ds, 0.0)
        acc = plus_product(stored_as(ds, k.dtype.element_ty).to(OPERAND), y, acc)
    tl.store(
        d_q + at_row[:, None] * D + d, stored_as(acc * factor, d_q.dtype.element_ty),
        mask=there[:, None] & wide,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "S", "B", "Hq", "window"])
def key_gradients(
    q, k, v, g, lse, own, cu_q, cu_k,  # as `query_gradients` takes them
    d_k, d_v,  # [S, Hk, D] contiguous
    T, S, B, Hq, q_token, q_head, k_token, k_head, v_token, v_head, scale, factor, softcap, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    E: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr, W: tl.constexpr, OPERAND: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """A tile of keys over the blocks of queries that see one of them, and over the heads that read these."""
    STEP: tl.constexpr = ROWS // EACH
    PARTS: tl.constexpr = (E + EACH - 1) // EACH
    heads = Hq // E
    head = tl.program_id(0) % heads
    sequence, first, n, local = rows_of_block(tl.program_id(0) // heads, cu_k, B, S, KEYS)
    if local >= n:
        return
    start, m = rows_between(sequence, cu_q, B, T, 0)
    key = local + tl.arange(0, KEYS)
    held = key < n
    low, high = m * 0, m  # the queries that may see one of the keys
    if CAUSAL:
        low = tl.maximum(local + m - n, 0)
    if WINDOW:
        high = tl.minimum(tl.minimum(local + KEYS, n) - 1 + window + m - n, m)
    d, wide = columns(D, W)
    inside = held[:, None] & wide
    at_key = first + key
    k0 = k + (at_key * k_token + head.to(tl.int64) * k_head)[:, None]
    v0 = v + (at_key * v_token + head.to(tl.int64) * v_head)[:, None]
    if not SLICE:
        y = tl.load(k0 + d, mask=inside, other=0.0).to(OPERAND)
        z = tl.load(v0 + d, mask=inside, other=0.0).to(OPERAND)
    of_k = tl.zeros([KEYS, W], tl.float32)
    of_v = tl.zeros([KEYS, W], tl.float32)
    row = tl.arange(0, ROWS)
    for step in range(low // STEP * PARTS, tl.cdiv(high, STEP) * PARTS):
        token = step // PARTS * STEP + row // EACH
        of_group = step % PARTS * EACH + row % EACH
        h = head * E + of_group
        there = (token < m) & (row < STEP * EACH) & (of_group < E)
        at_row = (start + token) * Hq + h
        q0 = q + ((start + token) * q_token + h.to(tl.int64) * q_head)[:, None]
        g0 = g + at_row[:, None] * D
        x = tl.load(q0 + d, mask=there[:, None] & wide, other=0.0).to(OPERAND)
        up = tl.load(g0 + d, mask=there[:, None] & wide, other=0.0).to(OPERAND)
        log = finite_or_zero(tl.load(lse + at_row, mask=there, other=0.0)) * LOG2E
        mine = tl.load(own + at_row, mask=there, other=0.0)
        at = n - m + token
        seen = seen_by(at[None, :], key[:, None], n, window, CAUSAL, WINDOW) & there[None, :]
        if SLICE:
            s = product(k0, held[:, None], q0, there[:, None], KEYS, ROWS, D, W, OPERAND, SLICE)
            dp = product(v0, held[:, None], g0, there[:, None], KEYS, ROWS, D, W, OPERAND, SLICE)
        else:
            s = plus_product(y, x.T, tl.zeros([KEYS, ROWS], tl.float32))
            dp = plus_product(z, up.T, tl.zeros([KEYS, ROWS], tl.float32))
        p, ds = shares(s, dp, log[None, :], mine[None, :], scale, softcap, HAS_CAP)
        p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)  # whatever a key holds that a query does not see
        of_v = plus_product(stored_as(p, v.dtype.element_ty).to(OPERAND), up, of_v)
        of_k = plus_product(stored_as(ds, k.dtype.element_ty).to(OPERAND), x, of_k)
    at_out = (at_key * heads + head)[:, None] * D + d
    tl.store(d_k + at_out, stored_as(of_k * factor, d_k.dtype.element_ty), mask=inside)
    tl.store(d_v + at_out, stored_as(of_v, d_v.dtype.element_ty), mask=inside)
