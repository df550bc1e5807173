"""What FlashAttention leaves to do: rows that it does not write, pages that it does not judge, lse by tokens.

Legend: T queries · B sequences · n keys of a sequence, m queries · P pages of a sequence at most, N pages, G keys of a
page · Hq heads of width D.
"""

from __future__ import annotations

import triton
import triton.language as tl

ENTRIES: tl.constexpr = tl.constexpr(128)  # of the page table, read at a time
COLUMNS: tl.constexpr = tl.constexpr(256)  # of a row of out, written at a time


@triton.jit
def sequence_of(row, cu_q, B, STEPS: tl.constexpr):
    """The last sequence that begins at or before a row, B for rows of none: bisection, 2^STEPS > B."""
    low = row * 0
    high = low + B + 1
    for _ in range(STEPS):
        middle = (low + high) // 2
        begun = tl.load(cu_q + middle, mask=middle <= B, other=0) <= row
        inside = high - low > 1
        low = tl.where(inside & begun, middle, low)
        high = tl.where(inside & ~begun, middle, high)
    return low


@triton.jit
def first_bad_page(sequence, pages, table, P, N):
    """The first entry of a sequence's `pages` that is none of the N pages; `pages` where all are."""
    found = pages
    for begin in range(0, tl.max(pages), ENTRIES):
        entry = begin + tl.arange(0, ENTRIES)[None, :]
        there = entry < pages[:, None]
        page = tl.load(table + sequence.to(tl.int64)[:, None] * P + entry, mask=there, other=0)
        bad = there & ((page < 0) | (page >= N))
        found = tl.minimum(found, tl.min(tl.where(bad, entry, pages[:, None]), 1))
    return found


@triton.jit(do_not_specialize=["T", "B", "P", "N", "most"])
def finish(
    out,  # [T, Hq, D]: written where no key is seen, and where NaN is due
    by_head,  # [Hq, T] fp32: lse as FlashAttention has it
    cu_q,  # [B + 1]
    cu_k,  # [B + 1]; with PAGED how many keys, [B]
    table,  # [B, P] with PAGED
    lse,  # [T, Hq] fp32
    T, B, P, N,
    most,  # keys: queries of a sequence that has more give NaN
    CAUSAL: tl.constexpr, PAGED: tl.constexpr, G: tl.constexpr, Hq: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr,  # Hq up to a power of 2
    STEPS: tl.constexpr,  # of the search for a sequence
    ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS queries of all heads. Grid: T over ROWS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < T
    sequence = sequence_of(row, cu_q, B, STEPS)
    real = there & (sequence < B)
    first = tl.load(cu_q + sequence, mask=real, other=0)
    m = tl.load(cu_q + sequence + 1, mask=real, other=0) - first
    if PAGED:
        n = tl.load(cu_k + sequence, mask=real, other=0)
    else:
        n = tl.load(cu_k + sequence + 1, mask=real, other=0) - tl.load(cu_k + sequence, mask=real, other=0)
    at = n - m + row - first
    blind = n <= 0  # rows of no sequence among them
    if CAUSAL:
        blind = blind | (at < 0)
    lost = n > most
    if PAGED:
        pages = tl.cdiv(n, G)
        bad = first_bad_page(sequence, pages, table, P, N)
        seen = bad < pages
        if CAUSAL:
            seen = seen & (bad * G <= at)
        lost = lost | seen
    head = tl.arange(0, HEADS)[None, :]
    whole = there[:, None] & (head < Hq)
    x = tl.load(by_head + head.to(tl.int64) * T + row[:, None], mask=whole, other=0.0)
    x = tl.where(blind[:, None], float("-inf"), x)
    x = tl.where(lost[:, None], float("nan"), x)
    tl.store(lse + row.to(tl.int64)[:, None] * Hq + head, x, mask=whole)
    written = there & (blind | lost)
    if tl.max(written.to(tl.int32)) > 0:
        y = tl.where(lost, float("nan"), 0.0)[:, None] + tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, Hq * D, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)[None, :]
            place = out + row.to(tl.int64)[:, None] * (Hq * D) + column
            tl.store(place, y.to(out.dtype.element_ty), mask=written[:, None] & (column < Hq * D))
