"""float64 definition of attention (Vaswani et al., arXiv:1706.03762) and its gradients, one query at a time.

Sequences are lists of arrays here: q [m, Hq, D], k and v [n, Hk, D]. Beside each number stands how far rounded operands
may move it, in three parts: `size`, the sum of the sizes of its terms, which a relative error of each term multiplies;
`bent`, the same times the sum |q| |k| of the products, which the error of a score multiplies; and `weighed`, the sum of
the sizes of what probabilities or their gradients are multiplied with, which the least step of their dtype multiplies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Reached(NamedTuple):
    """Values, and the three parts of what an error may be relative to."""

    value: np.ndarray
    size: np.ndarray
    bent: np.ndarray
    weighed: np.ndarray


def sees(n, m, causal=True, window=None):
    """Whether query i of m sees key j of n, [m, n]."""
    at, key = np.arange(n - m, n)[:, None], np.arange(n)[None, :]
    seen = (key <= at) if causal else np.full((m, n), True)
    return seen & (True if window is None else at - key < window)


def attention(q, k, v, scale, causal=True, window=None, softcap=None, sinks=None):
    """`out` [m, Hq, D] and `lse` [m, Hq] of one sequence, each `Reached`."""
    p, lse, reach = _probabilities(q, k, scale, causal, window, softcap, sinks)
    v = np.repeat(v, q.shape[1] // v.shape[1], 1)
    out, size = (np.einsum("hij,jhd->ihd", p, x) for x in (v, np.abs(v)))
    weighed = np.einsum("ij,jhd->ihd", sees(len(k), len(q), causal, window), np.abs(v))
    values = Reached(out, size, 2 * size * reach[..., None], weighed)
    return values, Reached(lse, np.ones_like(lse), reach, np.zeros_like(lse))


def attention_gradients(q, k, v, scale, causal, window, softcap, sinks, g, g_lse):
    """Gradients of sum(g out) + sum(g_lse lse) with respect to q, k, v and sinks, each `Reached`."""
    p, _, reach = _probabilities(q, k, scale, causal, window, softcap, sinks)
    each = q.shape[1] // k.shape[1]
    wide_k, wide_v = np.repeat(k, each, 1), np.repeat(v, each, 1)
    out = np.einsum("hij,jhd->ihd", p, wide_v)
    of_p, size_p = (np.einsum("ihd,jhd->hij", a, b) for a, b in ((g, wide_v), (np.abs(g), np.abs(wide_v))))
    own = ((g * out).sum(-1) - g_lse).T  # [Hq, m]
    size_own = (np.abs(g * out).sum(-1) + np.abs(g_lse)).T
    d_s, size_s = p * (of_p - own[..., None]), p * (size_p + size_own[..., None])
    slope = _slope(q, wide_k, scale, softcap)
    d_s, size_s = d_s * slope * scale, size_s * scale
    bends = 2 * size_s * reach.T[..., None]
    seen = np.broadcast_to(sees(len(k), len(q), causal, window), p.shape)
    steps = seen * max(scale, 1.0)  # whether scores are scaled before their gradients are rounded, or after
    d_q = [np.einsum("hij,jhd->ihd", a, b) for a, b in _terms(d_s, size_s, bends, steps, wide_k)]
    d_k = [_grouped(np.einsum("hij,ihd->jhd", a, b), each) for a, b in _terms(d_s, size_s, bends, steps, q)]
    bends = 2 * p * reach.T[..., None]
    d_v = [_grouped(np.einsum("hij,ihd->jhd", a, b), each) for a, b in _terms(p, p, bends, seen, g)]
    found = [Reached(*d_q), Reached(*d_k), Reached(*d_v)]
    if sinks is None:
        return (*found, None)
    share = _share_of_sinks(q, k, scale, causal, window, softcap, sinks)  # [m, Hq]
    size = (share * size_own.T).sum(0)
    bent = (2 * share * size_own.T * reach).sum(0)
    return (*found, Reached(-(share * own.T).sum(0), size, bent, np.zeros_like(size)))


def _terms(value, size, bends, steps, x):
    """A sum of products four times: of values, of sizes, of what errors of scores bend, of least steps."""
    return (value, x), *((weight, np.abs(x)) for weight in (size, bends, steps))


def _grouped(x, each):
    """[n, Hq, D] added over the query heads that read one head of keys."""
    return x.reshape(x.shape[0], x.shape[1] // each, each, x.shape[2]).sum(2)


def _scores(q, k, scale, softcap):
    wide = np.repeat(k, q.shape[1] // k.shape[1], 1)
    s = np.einsum("ihd,jhd->hij", q, wide) * scale
    return s if softcap is None else softcap * np.tanh(s / softcap)


def _slope(q, wide_k, scale, softcap):
    if softcap is None:
        return 1.0
    return 1 - np.tanh(np.einsum("ihd,jhd->hij", q, wide_k) * scale / softcap) ** 2


def _probabilities(q, k, scale, causal, window, softcap, sinks):
    """P [Hq, m, n] of each key, lse [m, Hq], and the largest sum |q| |k| scale of a query's products, [m, Hq]."""
    seen = sees(len(k), len(q), causal, window)
    s = np.where(seen, _scores(q, k, scale, softcap), -np.inf)
    lse = np.logaddexp.reduce(s, -1) if len(k) else np.full(s.shape[:2], -np.inf)
    if sinks is not None:
        lse = np.logaddexp(lse, sinks[:, None])
    with np.errstate(invalid="ignore"):
        p = np.where(seen & np.isfinite(lse)[..., None], np.exp(s - lse[..., None]), 0.0)
    wide = np.repeat(k, q.shape[1] // k.shape[1], 1)
    sizes = np.where(seen, np.einsum("ihd,jhd->hij", np.abs(q), np.abs(wide)) * scale, 0.0)
    return p, lse.T, sizes.max(-1, initial=0.0).T


def _share_of_sinks(q, k, scale, causal, window, softcap, sinks):
    _, lse, _ = _probabilities(q, k, scale, causal, window, softcap, sinks)
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(lse), np.exp(sinks - lse), 0.0)
