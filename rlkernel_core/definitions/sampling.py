"""Sampling, one row at a time in numpy and float64: an oracle, not a kernel.

Philox4x32-10 after Salmon et al., SC 2011 (known answers from Random123); the steps are those of
rlkernel_core/spec/sampling.py, written down a second time with other tools (lexsort, loops over the order).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

EMPTY, NAN, POSINF, PARAM = 1, 2, 4, 8
MASK = np.uint64(0xFFFFFFFF)


def philox4x32(counter, key):
    """counter: four words or arrays of words, key: a 64-bit number -> [4, ...] words."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) & MASK for c in counter)
    k0, k1 = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        shift = np.uint64(32)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & MASK, (p0 >> shift) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & MASK, (k1 + np.uint64(0xBB67AE85)) & MASK
    return np.stack([c0, c1, c2, c3])


def words(seed, step, V, stream=0):
    """[V] words of the ids 0 .. V - 1."""
    seed, step = int(seed) % 2**64, int(step) % 2**64
    block = np.arange((V + 3) // 4, dtype=np.uint64)
    same = [np.full_like(block, w) for w in (step & 0xFFFFFFFF, step >> 32, stream)]
    return philox4x32((block, *same), seed).T.reshape(-1)[:V]


def uniform(w):
    return (np.asarray(w).astype(np.float64) + 0.5) * 2.0**-32


def gumbel(w):
    return -np.log(-np.log1p(-uniform(w)))


@dataclass
class Row:
    """What a row was asked for."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    step: int = 0
    allowed: np.ndarray | None = None  # [V] bool
    bias: dict[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    in_prompt: np.ndarray | None = None  # [V] bool
    out_count: np.ndarray | None = None  # [V]
    filter_order: str = "topk_topp"
    tie: str = "lowest_id"
    stream: int = 0


@dataclass
class Drawn:
    """What the oracle says about a row."""

    status: int
    token: int = -1
    logprob: float = -math.inf
    log_kept_mass: float = -math.inf
    kept: np.ndarray = field(default_factory=lambda: np.zeros(0, int))  # ids, best first
    raw_logprob: float = math.nan
    tempered: float = math.nan
    entropy: float = math.nan
    x: np.ndarray | None = None  # edited logits
    edge: float = math.inf  # distance of the nucleus from ending elsewhere, in mass
    floor: float = math.inf  # distance of min-p from keeping another set, in nats
    gap: float = math.inf  # distance of the two best noised scores
    log_p: np.ndarray | None = None  # [V] processed law
    log_tempered: np.ndarray | None = None  # [V] tempered law
    log_raw: np.ndarray | None = None  # [V] raw law

    def sure(self, mass, nats):
        """No rounding within these bounds keeps another set."""
        return self.edge > mass and self.floor > nats


def edited(logits, row, dtype):
    """Steps 1 to 5; every operation rounds to dtype."""
    x = np.asarray(logits, dtype).copy()
    status = NAN if np.isnan(x).any() else 0
    x[np.isnan(x)] = -np.inf
    if row.allowed is not None:
        x[~row.allowed] = -np.inf
    for token, value in row.bias.items():
        x[token] = -np.inf if np.isneginf(x[token]) or value == -np.inf else x[token] + dtype(value)
    count = np.zeros(x.size, int) if row.out_count is None else row.out_count
    seen = count > 0 if row.in_prompt is None else (count > 0) | row.in_prompt
    r, f, p = dtype(row.repetition), dtype(row.frequency), dtype(row.presence)
    x = np.where(seen, np.where(x > 0, x / r, x * r), x).astype(dtype)
    return ((x - f * count.astype(dtype)) - p * (count > 0).astype(dtype)).astype(dtype), status


def nucleus(w, count, p):
    """How many of the first `count` weights stand before the mass p is reached, and how close that was."""
    before = np.concatenate([[0.0], np.cumsum(w[:count])[:-1]]) / w[:count].sum()
    return max(1, int((before < p).sum())), float(np.abs(before - p)[1:].min(initial=math.inf))


def kept_count(x_sorted, y, w, row):
    """How many tokens of the order the filters keep, and how close nucleus and min-p were to ending elsewhere."""
    edge, floor = math.inf, math.inf

    def ties(n, left):
        return n if row.tie == "lowest_id" else min(left, int((x_sorted >= x_sorted[n - 1]).sum()))

    def min_p(left):
        nonlocal floor
        if not row.min_p > 0:
            return left
        floor = float(np.abs(y[1:left] - np.log(row.min_p)).min(initial=math.inf))
        return ties(max(1, int((y[:left] >= np.log(row.min_p)).sum())), left)

    def top_k(left):
        return ties(min(left, row.top_k), left) if row.top_k > 0 else left

    def top_p(left):
        nonlocal edge
        if not row.top_p < 1:
            return left
        n, edge = nucleus(w, left, row.top_p)
        return ties(n, left)

    V = len(w)
    if row.filter_order == "joint":
        n = min(min_p(V), top_k(V), top_p(V))
    elif row.filter_order == "topp_topk":
        n = top_k(top_p(min_p(V)))
    else:
        n = top_p(top_k(min_p(V)))
    return n, edge, floor


def sample_row(logits, row, dtype=np.float32):
    """The contract for one row."""
    raw = np.asarray(logits, np.float64)
    x, status = edited(logits, row, dtype)
    x = x.astype(np.float64)
    if not (row.temperature >= 0 and math.isfinite(row.temperature)):
        return Drawn(status | PARAM)
    if not (x > -np.inf).any():
        return Drawn(status | EMPTY)
    edited_x = x
    if np.isposinf(x).any():
        status |= POSINF
        x = np.where(np.isposinf(x), 0.0, -np.inf)
    order = np.lexsort((np.arange(x.size), -x))[: int((x > -np.inf).sum())]
    greedy = row.temperature == 0
    T = 1.0 if greedy else float(row.temperature)
    y = (x - x.max()) / T
    w = np.exp(y[order])
    n, edge, floor = (1, math.inf, math.inf) if greedy else kept_count(x[order], y[order], w, row)
    kept = order[:n]
    score = y[kept] + gumbel(words(row.seed, row.step, x.size, row.stream))[kept]
    winner = int(np.lexsort((kept, -score))[0])
    gap = math.inf if n == 1 else float(np.sort(score)[-1] - np.sort(score)[-2])
    token = int(kept[winner])
    log_p, log_raw = np.full(x.size, -np.inf), log_softmax(np.where(np.isnan(raw), -np.inf, raw))
    log_p[kept] = 0.0 if greedy else y[kept] - np.log(w[:n].sum())
    log_tempered = y - np.log(w.sum())
    terms = np.exp(log_p[kept]) * log_p[kept]
    return Drawn(
        status,
        token,
        float(log_p[token]),
        0.0 if greedy else float(np.log(w[:n].sum()) - np.log(w.sum())),
        kept,
        float(log_raw[token]),
        float(log_tempered[token]),
        0.0 if greedy else float(-terms[np.exp(log_p[kept]) > 0].sum()),
        edited_x,
        edge,
        floor,
        gap,
        log_p,
        log_tempered,
        log_raw,
    )


def log_softmax(x):
    """The law of logits without NaN; uniform over +inf where there is one."""
    x = np.where(np.isposinf(x), 0.0, -np.inf) if np.isposinf(x).any() else x
    y = x - x.max()
    return y - np.log(np.exp(y).sum())
