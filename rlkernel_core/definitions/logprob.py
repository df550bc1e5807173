"""logprob@1 from its definition, row by row in extended precision: obvious, slow, right. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

X = np.longdouble


@dataclass
class Row:
    logprob: np.ndarray
    lse: np.ndarray
    entropy: np.ndarray
    log_kept_mass: np.ndarray | None
    grad: np.ndarray  # [N, V] of sum(g . results) with respect to the logits


def logsumexp(z):
    z = z[z > -np.inf]
    return z.max() + np.log(np.exp(z - z.max()).sum()) if z.size else X(-np.inf)


def minus_softplus(x):
    """-log(1 + e^x)."""
    return -np.log1p(np.exp(x)) if x < 0 else -x - np.log1p(np.exp(-x))


def logprob(logits, ids, *, temperature=1.0, softcap=None, kept=None, g=None):
    """Values and gradient. `kept`: list of id lists; `g`: upstream by name of the result, [N] each.

    Of ids [N, K], as `g["logprob"]` then is, log p is [N, K], and the gradient that of a sum over k. Of a list of ids
    for each row both are [M], one row behind the other.
    """
    if isinstance(ids, list):
        return of_lists(logits, ids, {"temperature": temperature, "softcap": softcap}, g)
    if np.ndim(ids) == 2:
        options = {"temperature": temperature, "softcap": softcap, "kept": kept}
        return of_several(logits, np.asarray(ids), options, g)
    logits = np.asarray(logits, np.float64).astype(X)
    N, V = logits.shape
    T = np.broadcast_to(np.asarray(temperature, np.float64).astype(X), (N,))
    values, lses, entropies, masses, grad = [], [], [], [], np.zeros((N, V), X)
    for i in range(N):
        x, t = logits[i], int(ids[i])
        y = x.copy()
        if softcap is not None:
            y = np.where(x == -np.inf, x, softcap * np.tanh(x / X(softcap)))
        z = y / T[i]
        shifted = z - z.max()
        p = np.exp(shifted) / np.exp(shifted).sum()
        lse = logsumexp(z)
        finite = z > -np.inf
        H = -(p[finite] * (z[finite] - lse)).sum()
        keep = np.ones(V, bool)
        if kept is not None:
            keep[:] = False
            keep[list(kept[i])] = True
            keep[t] = True
        others = keep.copy()
        others[t] = False
        values.append(minus_softplus(logsumexp(z[others]) - z[t]))
        lses.append(lse)
        entropies.append(H)
        masses.append(minus_softplus(logsumexp(z[~keep]) - logsumexp(z[keep])))
        if g is None:
            continue
        up = {name: X(g[name][i]) if name in g else X(0) for name in ("logprob", "lse", "entropy", "log_kept_mass")}
        q = np.exp(np.where(keep, z - logsumexp(z[keep]), -np.inf))
        log_p = np.where(finite, z - lse, 0)
        towards = -q
        towards[t] = q[others].sum()  # 1 - q_t without cancelling
        dz = up["logprob"] * towards + up["log_kept_mass"] * (q - p) + up["lse"] * p - up["entropy"] * p * (log_p + H)
        dy = dz / T[i]
        grad[i] = dy if softcap is None else dy * (1 - np.tanh(x / X(softcap)) ** 2)
    mass = None if kept is None else np.array(masses, np.float64)
    as64 = [np.array(v, np.float64) for v in (values, lses, entropies)]
    return Row(*as64, mass, grad.astype(np.float64))


def of_several(logits, ids, options, g):
    """One id of each row after the other; gradients of the other results count once."""
    ups = [None] * ids.shape[1]
    if g is not None:
        ups = [{"logprob": x} for x in np.asarray(g["logprob"]).T] if "logprob" in g else [{} for _ in ups]
        ups[0] |= {name: x for name, x in g.items() if name != "logprob"}
    every = [logprob(logits, one, **options, g=up) for one, up in zip(ids.T, ups, strict=True)]
    first = every[0]
    values = np.stack([row.logprob for row in every], 1)
    return Row(values, first.lse, first.entropy, first.log_kept_mass, sum(row.grad for row in every))


def of_lists(logits, ids, options, g):
    """Lists filled up to one length with any id, whose results are left out and whose gradient is 0."""
    lengths = [len(row) for row in ids]
    there = np.arange(max([1, *lengths])) < np.array(lengths, int)[:, None]
    every = np.zeros(there.shape, int)
    every[there] = [i for row in ids for i in row]
    if g is not None and "logprob" in g:
        of_each = np.zeros(there.shape)
        of_each[there] = g["logprob"]
        g = {**g, "logprob": of_each}
    row = logprob(logits, every, **options, g=g)
    return Row(row.logprob[there], row.lse, row.entropy, None, row.grad)
