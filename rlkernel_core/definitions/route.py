"""float64 definition of route and its gradient, token by token."""

from __future__ import annotations

import numpy as np


def best(logits, k):
    """The k largest of each row, best first, ties to the smaller id."""
    return np.array([sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:k] for row in logits], np.int64)


def softmax(x):
    """Of a vector."""
    e = np.exp(x - x.max())
    return e / e.sum()


def gates(logits, ids, *, renormalize=False):
    """Gates [T, k] of ids: 0 at -1, and NaN at others that are no expert."""
    out = np.where((ids < -1) | (ids >= logits.shape[1]), np.nan, 0.0)
    for t, row in enumerate(ids):
        known = (row >= 0) & (row < logits.shape[1])
        if known.any():
            chosen = row[known]
            out[t, known] = softmax(logits[t, chosen]) if renormalize else softmax(logits[t])[chosen]
    return out


def gates_gradient(logits, ids, g, *, renormalize=False):
    """Gradient of sum(g gates) with respect to logits, and the sum of the sizes of g gates of each token."""
    p = np.nan_to_num(gates(logits, ids, renormalize=renormalize))
    out = np.zeros(logits.shape)
    for t, row in enumerate(ids):
        known = (row >= 0) & (row < logits.shape[1])
        np.add.at(out[t], row[known], (g * p)[t, known])
        total = (g * p)[t].sum()
        if renormalize:
            np.add.at(out[t], row[known], -total * p[t, known])
        else:
            out[t] -= total * softmax(logits[t])
    return out, np.abs(g * p).sum(1)


def order(ids, experts):
    """Numbers of pairs by expert, and where those of each end."""
    flat = ids.reshape(-1)
    expert = np.where((flat >= 0) & (flat < experts), flat, experts)
    return np.array(sorted(range(len(flat)), key=lambda i: (expert[i], i)), np.int64), np.cumsum(
        np.bincount(expert, minlength=experts + 1)[:experts]
    )
