"""Kernels of attention@1: a block of queries over its keys, whole or a chunk of them, and chunks merged from memory.

The order of a query's sums is a function of the positions of its keys alone. Keys are taken in tiles of KEYS by their
position in the sequence, tiles in chunks of CHUNK keys. A chunk is an online softmax of its own, from nothing, over its
tiles in their order; chunks are merged in theirs:

    top' = max(top, top_c),  a = 2^(top - top'),  b = 2^(top_c - top')      total' = total a + total_c b, acc likewise

then comes the sink, then one division and one rounding. A tile or chunk that a query sees no key of changes no bit: its
factors are 1 and 0. So a program that walks all chunks and programs that take one each, which `merge_chunks` merges,
give one result, and so do queries in a prompt, behind a cache, alone, and in any pages.

A matrix instruction's sums may differ with the number of its rows: a block has ROWS of them always, of which a single
query fills a few. Scores are exponents of 2; the launches turn the fusing of products with additions off.

Bytes of a block of m queries of E heads over n keys, with operands of s bytes: 2 s n D read and 2 s m E D read and
written; split, 4 m E (D + 2) written and read a chunk.

Legend as in `places`; T queries · S rows of keys, or the most keys that a sequence in pages has · Hq, Hk heads · D
width of a head, W the power of two that holds it.
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
    rows_of_block,
    scored,
    seen_by,
    spread,
    tile_of_keys,
)
from rlkernel_triton.common.arithmetic import LN2, LOG2E, stored_as
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.sampling_rows import pdl_trigger, pdl_wait
from rlkernel_triton.common.softmax import finite_or_zero


@triton.jit
def merged(acc, top, total, acc_c, top_c, total_c):
    """(acc, top, total) with a chunk; acc [M, W], the rest [M]."""
    best = tl.maximum(top, top_c)
    at = finite_or_zero(best)
    a, b = tl.exp2(top - at), tl.exp2(top_c - at)
    acc_c = tl.where((total_c == 0.0)[:, None], 0.0, acc_c)
    return acc * a[:, None] + acc_c * b[:, None], best, total * a + total_c * b


@triton.jit
def finished(acc, top, total, sink, lost, HAS_SINKS: tl.constexpr):
    """Out [M, W] in fp32 and lse [M], from what all chunks make together and the sinks [M]; NaN where `lost`."""
    empty = total == 0.0
    if HAS_SINKS:
        own = sink * LOG2E
        best = tl.maximum(top, own)
        at = finite_or_zero(best)
        keep = tl.exp2(top - at)
        acc, top, total = acc * keep[:, None], best, total * keep + tl.exp2(own - at)
    y = tl.div_rn(acc, tl.broadcast_to(tl.where(total == 0.0, 1.0, total)[:, None], acc.shape))
    y = tl.where((total == 0.0)[:, None] | (y == 0.0), 0.0, y)  # a tile that is not seen may turn -0 to 0
    lse = (top + tl.log2(total)) * LN2
    lse = tl.where(empty, sink, lse)
    return tl.where(lost, float("nan"), y), tl.where(lost, float("nan"), lse)


@triton.jit(do_not_specialize=["T", "S", "B", "P", "N", "Hq", "window", "most", "chunks"])
def attend(
    q,  # [T, Hq, D], q_token and q_head from one to the next
    k, v,  # [S, Hk, D], or [N, G, Hk, D] with PAGED
    cu_q,  # [B + 1]
    cu_k,  # [B + 1]; with PAGED how many keys, [B]
    table,  # [B, P] with PAGED
    sinks,  # [Hq] with HAS_SINKS
    out,  # [T, Hq, D]; with SPLIT sums of chunks [chunks, T, Hq, D] fp32
    lse,  # [T, Hq] fp32; with SPLIT top and total of chunks, [chunks, T, Hq, 2] fp32
    spans,  # [T, 2] int32 with SPLIT: the first chunk of a query, and the end of them; -1 of one that gives NaN
    T, S, B, P, N, Hq, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head,
    scale, softcap, window,
    most,  # keys: queries of a sequence that has more give NaN
    chunks,  # with SPLIT
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PAGED: tl.constexpr,
    SPLIT: tl.constexpr,  # a program takes one of the chunks
    G: tl.constexpr, E: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr, W: tl.constexpr, OPERAND: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr, CHUNK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A block of queries times the heads that read the same keys."""
    STEP: tl.constexpr = ROWS // EACH
    PARTS: tl.constexpr = (E + EACH - 1) // EACH
    place = tl.program_id(0)
    chunk = 0
    if SPLIT:
        chunk = place % chunks
        place = place // chunks
    heads = Hq // E * PARTS
    # The last blocks of a sequence see most keys: they begin first.
    block = T // STEP + B - place // heads
    head = place % heads
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
    lost = n > most
    low, high = tl.where(lost, 0, low), tl.where(lost, 0, high)
    if SPLIT:
        if (chunk == 0) & (head == 0):
            here = there & (of_group == 0)
            tl.store(spans + (start + token) * 2, token * 0 + tl.where(lost, -1, low // CHUNK), mask=here)
            tl.store(spans + (start + token) * 2 + 1, token * 0 + tl.where(lost, -1, tl.cdiv(high, CHUNK)), mask=here)
        if (chunk < low // CHUNK) | (chunk * CHUNK >= high):
            return
        low = tl.maximum(low, chunk * CHUNK)
        high = tl.minimum(high, (chunk + 1) * CHUNK)
    d, wide = columns(D, W)
    q0 = q + ((start + token) * q_token + h.to(tl.int64) * q_head)[:, None]
    if not SLICE:
        x = tl.load(q0 + d, mask=there[:, None] & wide, other=0.0).to(OPERAND)
    k0 = k + (head // PARTS).to(tl.int64) * k_head
    v0 = v + (head // PARTS).to(tl.int64) * v_head
    table0 = table + sequence.to(tl.int64) * P
    acc = tl.zeros([ROWS, W], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    whole, best, sum_ = acc, top, total  # of the chunks that are merged
    page = low
    if PAGED:
        page = pages_at(low, n, table0, G, KEYS)
        full = tl.where(all_pages_are(low, high, table0, N, G), full, low)
    for begin in range(low, high, KEYS):
        key, at_k, at_v, known = tile_of_keys(
            k0, v0, begin, n, first, page, N, k_page, k_token, v_page, v_token, PAGED, G, KEYS
        )
        if PAGED:  # a tile ahead: where keys are is known before they are asked for
            page = pages_at(begin + KEYS, n, table0, G, KEYS)
        if SLICE:
            s = product(q0, there[:, None], at_k[:, None], known[:, None], ROWS, KEYS, D, W, OPERAND, SLICE)
        else:
            y = tl.load(at_k[:, None] + d, mask=known[:, None] & wide, other=0.0).to(OPERAND)
            s = plus_product(x, y.T, tl.zeros([ROWS, KEYS], tl.float32))
        s, factor, _ = scored(s, scale, softcap, HAS_CAP)
        if begin >= full:
            if PAGED:
                s = tl.where(is_page(pages_at(begin, n, table0, G, KEYS), N)[None, :], s, float("nan"))
            s = tl.where(seen_by(at[:, None], key[None, :], n, window, CAUSAL, WINDOW), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1) * factor)
        base = finite_or_zero(new)
        p = tl.exp2(tl.fma(s, factor + tl.zeros_like(s), tl.zeros_like(s) - base[:, None]))
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(p, 1)
        acc = acc * keep[:, None]
        top = new
        z = tl.load(at_v[:, None] + d, mask=known[:, None] & wide, other=0.0).to(OPERAND)
        acc = plus_product(stored_as(p, v.dtype.element_ty).to(OPERAND), z, acc)
        if not SPLIT:
            if (begin + KEYS) % CHUNK == 0:
                whole, best, sum_ = merged(whole, best, sum_, acc, top, total)
                acc = tl.zeros([ROWS, W], tl.float32)
                top = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
    at_row = (start + token) * Hq + h
    if SPLIT:
        pdl_trigger(USE_PDL)
        at_row += chunk.to(tl.int64) * T * Hq
        tl.store(lse + at_row * 2, top, mask=there)
        tl.store(lse + at_row * 2 + 1, total, mask=there)
        tl.store(out + at_row[:, None] * D + d, acc, mask=there[:, None] & wide)
    else:
        whole, best, sum_ = merged(whole, best, sum_, acc, top, total)
        sink = tl.full([ROWS], float("-inf"), tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks + h, mask=there, other=0.0).to(tl.float32)
        y, logs = finished(whole, best, sum_, sink, lost, HAS_SINKS)
        tl.store(out + at_row[:, None] * D + d, stored_as(y, out.dtype.element_ty), mask=there[:, None] & wide)
        tl.store(lse + at_row, logs, mask=there)


@triton.jit(do_not_specialize=["T", "Hq"])
def merge_chunks(
    parts,  # [chunks, T, Hq, D] fp32
    tops,  # [chunks, T, Hq, 2] fp32: top and total
    spans,  # [T, 2] int32
    sinks,  # [Hq] with HAS_SINKS
    out,  # [T, Hq, D]
    lse,  # [T, Hq] fp32
    T, Hq,
    HAS_SINKS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A head of a query: its chunks merged in their order, then what follows in `attend`."""
    token = (tl.program_id(0) // Hq).to(tl.int64)
    h = tl.program_id(0) % Hq + tl.arange(0, 1)
    d, wide = columns(D, W)
    plane = T.to(tl.int64) * Hq
    pdl_wait(USE_PDL)
    acc = tl.zeros([1, W], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    begin = tl.load(spans + token * 2)
    for chunk in range(begin, tl.load(spans + token * 2 + 1)):
        at = chunk * plane + token * Hq + h
        top_c, total_c = tl.load(tops + at * 2), tl.load(tops + at * 2 + 1)
        acc_c = tl.load(parts + at[:, None] * D + d, mask=wide, other=0.0)
        acc, top, total = merged(acc, top, total, acc_c, top_c, total_c)
    sink = tl.full([1], float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + h).to(tl.float32)
    y, logs = finished(acc, top, total, sink, begin < 0, HAS_SINKS)
    at = token * Hq + h
    tl.store(out + at[:, None] * D + d, stored_as(y, out.dtype.element_ty), mask=wide)
    tl.store(lse + at, logs)
