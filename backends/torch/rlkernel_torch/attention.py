"""attention@1 in plain torch: tiles of queries times tiles of keys, by positions alone, with an online softmax in fp32.

Libraries choose the order of their sums by shape, so every product has one shape: `BLOCK` tiles of queries, each of
`QUERIES` rows of one sequence and all heads that read the same keys, times `KEYS` keys. What a tile lacks is filled up.
No value is read off a device: a tile finds its sequence by the offsets, and tiles of keys are visited up to the most
that a sequence can have. That is the price of plain torch: it is for checks and small models, and `max_k` lowers it.

Legend: T queries · S keys · B sequences · n tiles · Hk heads of keys, each read by E heads of queries · D width ·
z = BLOCK Hk matrices of a product · r = QUERIES E rows of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkernel_common.fixed_sums import lane_sum, row_sum
from rlkernel_common.precision import full_precision
from rlkernel_common.row_statistics import accumulator
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.attention import AttentionCall, AttentionResult, most_keys, scale_of

BLOCK, QUERIES, KEYS = 8, 16, 64
GRAIN = 16  # a head's width is filled up to a multiple: BLAS shows a row's place beyond its vectors


def attention(call: AttentionCall) -> AttentionResult:
    """See `rlkernel_core.spec.attention.AttentionCall`."""
    if gradient_wanted("attention", call):
        return AttentionPair(call)(call)
    with torch.no_grad():
        return _forward(call)


class AttentionPair(Pair[AttentionCall, AttentionResult]):
    """The weighted values, and the gradients from probabilities that are computed again."""

    op = "attention"

    def __init__(self, call: AttentionCall) -> None:
        """Keep the numbers of calls of this shape."""
        super().__init__(call)
        self._options = {n: getattr(call, n) for n in ("causal", "window", "softcap", "scale", "max_k")}

    def forward(self, call: AttentionCall) -> tuple[AttentionResult, Saved]:
        """The result; the arguments and both results are saved."""
        result = _forward(call)
        return result, self.saved_like(call, result, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """With own = sum(g out) - g_lse and d = p (g v^T - own): d k, d^T q, p^T g, and of a sink -p_sink own."""
        q, k, v, cu_q, cu_k, table, used, sinks, out, lse = saved
        if q is None or k is None or v is None or cu_q is None or out is None or lse is None:
            raise RLKernelError("attention: its backward pass got less than its forward pass saved")
        call = AttentionCall(
            q, k, v, cu_q=cu_q, cu_k=cu_k, page_table=table, seqused_k=used, sinks=sinks, **self._options
        )
        g, g_lse = grads
        state = accumulator(q)
        up = torch.zeros_like(out) if g is None else g
        own = lane_sum(up.to(state) * out.to(state)) - (0.0 if g_lse is None else g_lse)
        of_q, of_k, of_v, of_sinks = self.wanted
        rows = _Rows(q, up, lse, own)
        d_q = _gradient_of_queries(call, rows) if of_q else None
        d_k, d_v = _gradients_of_keys(call, rows) if of_k or of_v else (None, None)
        d_sinks = None
        if of_sinks and sinks is not None:
            share = torch.where(lse.isneginf(), 0.0, torch.exp(sinks.to(state) - lse))
            d_sinks = -row_sum(share * own).to(sinks.dtype)
        return d_q, d_k if of_k else None, d_v if of_v else None, d_sinks

    @classmethod
    def saved_like(cls, call: AttentionCall, result: AttentionResult, wanted: tuple[bool, ...]) -> Saved:
        """The call's tensors and the results, as they are."""
        del wanted
        places = call.cu_q, call.cu_k, call.page_table, call.seqused_k
        return call.q, call.k, call.v, *places, call.sinks, result.out, result.lse


class _Tiles(NamedTuple):
    """Rows of sequences in tiles of one height, filled up to whole blocks; a tile beyond the last has no rows."""

    sequence: Tensor  # [n]; B for rows that belong to none
    local: Tensor  # [n, height] of a row, within its sequence
    row: Tensor  # [n, height] in the packed rows, 0 where there is none
    there: Tensor  # [n, height]
    of_row: Tensor  # [rows]: where among n height tiles each row stands

    def blocks(self) -> Iterator[slice]:
        """The tiles, a block at a time."""
        return (slice(first, first + BLOCK) for first in range(0, self.sequence.shape[0], BLOCK))


def _tiles(cu: Tensor, rows: int, height: int) -> _Tiles:
    """Tiles of rows that `cu` [B + 1] gives to sequences, and of those after the last as one sequence more."""
    bounds = torch.cat([_within(cu, rows), cu.new_full((1,), rows, dtype=torch.int64)])
    count = rows // height + cu.shape[0]
    filled = -(-count // BLOCK) * BLOCK
    first = bounds // height + torch.arange(bounds.shape[0], device=cu.device)  # the first tile of each sequence
    tile = torch.arange(filled, device=cu.device)
    sequence = (torch.searchsorted(first, tile, right=True) - 1).clamp(0, cu.shape[0] - 1)
    local = (tile - first[sequence])[:, None] * height + torch.arange(height, device=cu.device)
    row = bounds[sequence][:, None] + local
    there = row < bounds[sequence + 1][:, None]
    at = torch.arange(rows, device=cu.device)
    of = (torch.searchsorted(bounds, at, right=True) - 1).clamp(0, cu.shape[0] - 1)
    inner = at - bounds[of]
    of_row = (first[of] + inner // height) * height + inner % height
    return _Tiles(sequence, local, torch.where(there, row, 0), there, of_row)


def _within(cu: Tensor, rows: int) -> Tensor:
    """Offsets that lead to no row which is not there."""
    return cu.long().clamp(0, rows)


class _Keys(NamedTuple):
    """Where the keys of each sequence are; one entry more than sequences, for rows of none, which have no keys."""

    k: Tensor  # [rows, Hk, D]
    v: Tensor
    counts: Tensor  # [B + 1]
    queries: Tensor  # [B + 1]
    first: Tensor | None  # [B + 1] row of the first key, without pages
    table: Tensor | None  # [B + 1, P]
    page: int  # keys of a page


def _keys(call: AttentionCall) -> _Keys:
    none = call.cu_q.new_zeros(1, dtype=torch.int64)
    queries = torch.cat([_within(call.cu_q, call.q.shape[0]).diff(), none])
    if call.page_table is None or call.seqused_k is None:
        cu = _within(call.cu_q if call.cu_k is None else call.cu_k, call.k.shape[0])
        return _Keys(call.k, call.v, torch.cat([cu.diff(), none]), queries, torch.cat([cu[:-1], none]), None, 1)
    table = torch.cat([call.page_table.long(), call.page_table.new_zeros(1, call.page_table.shape[1])])
    count = torch.cat([_within(call.seqused_k, call.page_table.shape[1] * call.k.shape[1]), none])
    k, v = (x.reshape(-1, *x.shape[2:]) for x in (call.k, call.v))
    return _Keys(k, v, count, queries, None, table, call.k.shape[1])


class _Seen(NamedTuple):
    """A tile of keys, beside a block of tiles of queries."""

    k: Tensor  # [z, KEYS, D] in fp32
    v: Tensor
    seen: Tensor  # [z, r, KEYS]: whether the query sees the key


class _Block(NamedTuple):
    """A block of tiles of queries."""

    sequence: Tensor  # [BLOCK]
    at: Tensor  # [BLOCK, QUERIES] positions
    there: Tensor  # [BLOCK, QUERIES]
    heads: int  # E


def _seen(call: AttentionCall, keys: _Keys, block: _Block, start: int) -> _Seen:
    """Keys `start` and on of each tile's sequence, and who sees them."""
    key = torch.arange(start, start + KEYS, device=call.q.device)
    held = key < keys.counts[block.sequence][:, None]  # [BLOCK, KEYS]
    seen = held[:, None, :] & block.there[..., None]
    if call.causal:
        seen = seen & (key <= block.at[..., None])
    if call.window is not None:
        seen = seen & (block.at[..., None] - key < call.window)
    if keys.table is None:
        row, known = keys.first[block.sequence][:, None] + key, held  # type: ignore[index]  # one of the two is given
    else:
        page = keys.table[block.sequence[:, None], (key // keys.page).clamp(max=keys.table.shape[1] - 1)]
        known = held & (page >= 0) & (page < keys.k.shape[0] // keys.page)
        row = page * keys.page + key % keys.page
    row = torch.where(known, row, 0)

    def brought(x: Tensor) -> Tensor:
        return _filled(_gathered(x, row, known).transpose(1, 2).flatten(0, 1))

    Hk = keys.k.shape[1]
    seen = seen[:, None, :, None].expand(-1, Hk, -1, block.heads, -1).reshape(BLOCK * Hk, -1, KEYS)
    lost = (held & ~known)[:, None, :].expand(-1, Hk, -1).reshape(BLOCK * Hk, KEYS, 1)
    return _Seen(torch.where(lost, torch.nan, brought(keys.k)), brought(keys.v), seen)


def _wide(x: Tensor) -> int:
    return -(-x.shape[-1] // GRAIN) * GRAIN


def _filled(x: Tensor) -> Tensor:
    """[..., D], D filled up with zeros to a multiple of `GRAIN`."""
    return pad(x, (0, _wide(x) - x.shape[-1]))


def _gathered(x: Tensor, rows: Tensor, there: Tensor) -> Tensor:
    """Rows [BLOCK, m] of x [T, ...] in fp32, 0 where there is none: a product with 0 would let a NaN through."""
    if not x.shape[0]:
        return x.new_zeros(*rows.shape, *x.shape[1:], dtype=accumulator(x))
    some: Tensor = x[rows]
    return torch.where(there.view(*there.shape, *(1,) * (x.dim() - 1)), some.to(accumulator(x)), 0.0)


def _taken(x: Tensor, rows: Tensor, there: Tensor, Hk: int) -> Tensor:
    """Rows [BLOCK, m] of x [T, Hq, ...] as [z, m E, ...]."""
    tiles: Tensor = _gathered(x, rows, there).unflatten(2, (Hk, -1))  # [BLOCK, m, Hk, E, ...]
    return tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _scores(call: AttentionCall, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scores of rows q [z, r, D] and k [z, w, D], and the slope of the softcap where there is one."""
    s = torch.bmm(q, k.transpose(1, 2)) * scale_of(call)
    if call.softcap is None:
        return s, None
    bent = torch.tanh(s / call.softcap)
    return call.softcap * bent, 1 - bent * bent


def _query_blocks(call: AttentionCall, keys: _Keys, tiles: _Tiles) -> Iterator[tuple[slice, _Block]]:
    heads = call.q.shape[1] // keys.k.shape[1]
    for some in tiles.blocks():
        sequence = tiles.sequence[some]
        at = (keys.counts - keys.queries)[sequence][:, None] + tiles.local[some]
        yield some, _Block(sequence, at, tiles.there[some], heads)


def _untiled(call: AttentionCall, parts: list[Tensor], tiles: _Tiles) -> Tensor:
    """Results of blocks, each [z, r, ...], as rows [T, Hq, ...]."""
    Hk = call.k.shape[-2]
    n, E = len(parts) * BLOCK, parts[0].shape[1] // QUERIES
    whole = torch.cat(parts).view(n, Hk, QUERIES, E, *parts[0].shape[2:])
    rows = whole.transpose(1, 2).flatten(0, 1).flatten(1, 2)  # [n QUERIES, Hq, ...]
    return rows.index_select(0, tiles.of_row)


def _forward(call: AttentionCall) -> AttentionResult:
    q, keys, tiles = call.q, _keys(call), _tiles(call.cu_q, call.q.shape[0], QUERIES)
    Hk, state = keys.k.shape[1], accumulator(call.q)
    outs, lses = [], []
    with full_precision(q):
        for some, block in _query_blocks(call, keys, tiles):
            x = _filled(_taken(q, tiles.row[some], tiles.there[some], Hk))
            acc, (top, total) = torch.zeros_like(x), (x.new_full(x.shape[:2], f) for f in (-torch.inf, 0.0))
            for start in range(0, most_keys(call), KEYS):
                part = _seen(call, keys, block, start)
                s = torch.where(part.seen, _scores(call, x, part.k)[0], -torch.inf)
                new = torch.maximum(top, s.amax(-1))
                zero = torch.where(new.isneginf(), 0.0, new)
                p, keep = torch.exp(s - zero[..., None]), torch.exp(top - zero)
                total, top = total * keep + lane_sum(p), new
                acc = acc * keep[..., None] + torch.bmm(p, part.v)
            if call.sinks is not None:
                sink = _of_heads(call.sinks.to(state), Hk)
                new = torch.maximum(top, sink)
                zero = torch.where(new.isneginf(), 0.0, new)
                keep = torch.exp(top - zero)
                total, acc, top = total * keep + torch.exp(sink - zero), acc * keep[..., None], new
            out, lse = torch.where(total[..., None] == 0, 0.0, acc / total[..., None]), top + torch.log(total)
            if call.max_k is not None:
                lost = (keys.counts > call.max_k)[block.sequence].repeat_interleave(Hk)[:, None]
                out, lse = torch.where(lost[..., None], torch.nan, out), torch.where(lost, torch.nan, lse)
            outs.append(out[..., : q.shape[-1]])
            lses.append(lse)
        return AttentionResult(_untiled(call, outs, tiles).to(q.dtype), _untiled(call, lses, tiles))


def _of_heads(sinks: Tensor, Hk: int) -> Tensor:
    """A number a query head [Hq] as one a row, [z, r]."""
    return sinks.reshape(1, Hk, 1, -1).expand(BLOCK, -1, QUERIES, -1).reshape(BLOCK * Hk, -1)


class _Rows(NamedTuple):
    """What the backward pass knows of every query."""

    q: Tensor
    g: Tensor
    lse: Tensor
    own: Tensor  # [T, Hq]

    def taken(self, rows: Tensor, there: Tensor, Hk: int) -> _Rows:
        """Of a block."""
        q, g, lse, own = (_taken(x, rows, there, Hk) for x in self)
        return _Rows(_filled(q), _filled(g), lse, own)


def _score_gradients(call: AttentionCall, rows: _Rows, part: _Seen) -> tuple[Tensor, Tensor]:
    """P and the gradients of products, [z, r, w]."""
    s, slope = _scores(call, rows.q, part.k)
    lse = torch.where(rows.lse.isneginf(), 0.0, rows.lse)
    p = torch.where(part.seen, torch.exp(s - lse[..., None]), 0.0)
    d = p * (torch.bmm(rows.g, part.v.transpose(1, 2)) - rows.own[..., None]) * scale_of(call)
    return p, d if slope is None else d * slope


def _gradient_of_queries(call: AttentionCall, rows: _Rows) -> Tensor:
    keys, tiles = _keys(call), _tiles(call.cu_q, call.q.shape[0], QUERIES)
    found = []
    with full_precision(call.q):
        for some, block in _query_blocks(call, keys, tiles):
            mine = rows.taken(tiles.row[some], tiles.there[some], keys.k.shape[1])
            d_q = torch.zeros_like(mine.q)
            for start in range(0, most_keys(call), KEYS):
                part = _seen(call, keys, block, start)
                d_q = d_q + torch.bmm(_score_gradients(call, mine, part)[1], part.k)
            found.append(d_q[..., : call.q.shape[-1]])
        return _untiled(call, found, tiles).to(call.q.dtype)


def _gradients_of_keys(call: AttentionCall, rows: _Rows) -> tuple[Tensor, Tensor]:
    """Tiles of keys beside tiles of as many queries of their sequence, in the order of positions."""
    cu_k = call.cu_q if call.cu_k is None else call.cu_k
    keys, tiles = _keys(call), _tiles(cu_k, call.k.shape[0], KEYS)
    starts = torch.cat([_within(call.cu_q, call.q.shape[0])[:-1], call.cu_q.new_zeros(1, dtype=torch.int64)])
    Hk, D = call.k.shape[1:]
    heads = call.q.shape[1] // Hk
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    with full_precision(call.q):
        for some in tiles.blocks():
            sequence, row = tiles.sequence[some], tiles.row[some]
            key, there = tiles.local[some], tiles.there[some]
            k, v = (_filled(_gathered(x, row, there).transpose(1, 2).flatten(0, 1)) for x in (call.k, call.v))
            d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
            # Queries before the first key see none where they look back alone.
            before = (keys.counts - keys.queries)[sequence][:, None]
            for first in range(0, most_keys(call) if call.causal else call.q.shape[0], KEYS):
                index = torch.arange(first, first + KEYS, device=k.device)
                local = index - before if call.causal else index.expand(BLOCK, -1)
                mine = (local >= 0) & (local < keys.queries[sequence][:, None])  # [BLOCK, KEYS]
                at = before + local
                seen = mine[..., None] & there[:, None, :]
                if call.causal:
                    seen = seen & (key[:, None, :] <= at[..., None])
                if call.window is not None:
                    seen = seen & (at[..., None] - key[:, None, :] < call.window)
                seen = seen[:, None, :, None].expand(-1, Hk, -1, heads, -1).reshape(BLOCK * Hk, -1, KEYS)
                them = rows.taken(torch.where(mine, starts[sequence][:, None] + local, 0), mine, Hk)
                p, d = _score_gradients(call, them, _Seen(k, v, seen))
                d_v = d_v + torch.bmm(p.transpose(1, 2), them.g)
                d_k = d_k + torch.bmm(d.transpose(1, 2), them.q)
            for part, d in zip(found, (d_k, d_v), strict=True):
                part.append(d[..., :D].unflatten(0, (BLOCK, Hk)).transpose(1, 2).flatten(0, 1))
        d_k, d_v = (torch.cat(part).index_select(0, tiles.of_row).to(call.k.dtype) for part in found)
    return d_k, d_v
