"""divergence@1 from its definition, row by row in extended precision: obvious, slow, right. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlkernel_core.spec.divergence import LEAST_TAIL, MOST_MASS

X = np.longdouble


@dataclass
class Rows:
    values: np.ndarray  # [N]
    size: np.ndarray  # [N] sum of the sizes of what the terms multiply: what an error of the value is relative to
    grad: np.ndarray  # [N, V] of sum(g values) with respect to the logits
    grad_size: np.ndarray  # [N] |g| / T times 1 and the largest factor of a probability
    slack: np.ndarray  # [N, V] how far a gradient may jump by rounding: TV where both sides are nearly equal


def log_softmax(z):
    """Of a row; NaN where it has none."""
    top = z.max()
    if not np.isfinite(top) or np.isnan(z).any():
        return np.full_like(z, np.nan)
    return z - top - np.log(np.exp(z - top).sum())


def kl(log_a, log_b):
    """Terms a log(a / b) - a + b, and a |log(a / b)|."""
    a, b = np.exp(log_a), np.exp(log_b)
    d = np.where(log_a == -np.inf, 0, log_a - np.where(log_a == -np.inf, 0, log_b))
    ad = np.where(d == np.inf, np.inf, a * np.where(np.isinf(d), 0, d))
    return ad - a + b, np.abs(ad)


def divergence_of(kind, beta, log_s, log_t):
    """Value of masses, its size, and s w: the derivatives with respect to log s."""
    s, t = np.exp(log_s), np.exp(log_t)

    def times_log(a, log_a, log_b):  # a log(a / b), 0 where a is
        return np.where(log_a == -np.inf, 0, a * (log_a - np.where(log_a == -np.inf, 0, log_b)))

    if kind == "forward_kl":
        terms, sizes = kl(log_t, log_s)
        return terms.sum(), sizes.sum(), -t
    if kind == "reverse_kl":
        terms, sizes = kl(log_s, log_t)
        return terms.sum(), sizes.sum(), times_log(s, log_s, log_t)
    if kind == "jsd":
        log_m = np.logaddexp(np.log(beta) + log_t, np.log(1 - beta) + log_s)
        of_t, of_s = kl(log_t, log_m), kl(log_s, log_m)
        value, size = ((beta * of_t[i] + (1 - beta) * of_s[i]).sum() for i in range(2))
        return value, size, (1 - beta) * times_log(s, log_s, log_m)
    return np.abs(s - t).sum() / 2, X(1), s * np.sign(s - t) / 2


def masses(log_s, teacher, ids):
    """Log masses of both sides over listed ids and the tail; the column of each, None for the tail. None: no list."""
    V = len(log_s)
    there = [k for k, j in enumerate(ids) if j != -1]
    columns = [int(ids[k]) for k in there]
    mass = np.exp(teacher[there]).sum()
    if any(not 0 <= j < V for j in columns) or len(set(columns)) < len(columns) or not mass <= MOST_MASS:
        return None
    if len(columns) == V:
        return log_s[columns], teacher[there], columns
    rest = np.exp(np.delete(log_s, columns)).sum()
    tail = max(1 - mass, X(LEAST_TAIL))
    return np.append(log_s[columns], np.log(rest)), np.append(teacher[there], np.log(tail)), [*columns, None]


def divergence(
    logits, teacher, *, kind="forward_kl", beta=None, temperature=1.0, teacher_temperature=None, ids=None, g=None
):
    """Values, and the gradient for upstream gradients `g`, [N]. `ids` and `teacher` are [N, K] where it is a list."""
    logits, teacher = (np.asarray(x, np.float64).astype(X) for x in (logits, teacher))
    N, V = logits.shape
    beta = X(0.5 if beta is None else beta)
    T, T_t = (
        np.broadcast_to(np.asarray(x, np.float64).astype(X), (N,))
        for x in (temperature, temperature if teacher_temperature is None else teacher_temperature)
    )
    g = np.zeros(N) if g is None else g
    values, sizes, grad_sizes = (np.zeros(N) for _ in range(3))
    grad, slack = np.zeros((N, V)), np.zeros((N, V))
    with np.errstate(all="ignore"):
        for i in range(N):
            good = 0 < T[i] < np.inf and 0 < T_t[i] < np.inf
            log_s = log_softmax(logits[i] / T[i]) if good else np.full(V, np.nan, X)
            if ids is None:
                found = log_s, log_softmax(teacher[i] / T_t[i]) if good else log_s, range(V)
            else:
                found = masses(log_s, teacher[i], ids[i])
            if found is None or np.isnan(found[0]).any() or np.isnan(found[1]).any():
                values[i], sizes[i], grad[i] = np.nan, 0, np.nan
                continue
            of_s, of_t, columns = found
            values[i], sizes[i], u = divergence_of(kind, beta, of_s, of_t)
            if not np.isfinite(values[i]):
                grad[i] = np.nan
                continue
            s = np.exp(of_s)
            of_mass = u - s * u.sum()
            tie = s * (np.abs(of_s - of_t) < 1e-4) if kind == "tv" else np.zeros_like(s)
            jump = tie + s * tie.sum()
            scale = X(g[i]) / T[i]
            listed = [j for j in columns if j is not None]
            share = np.where(log_s > -np.inf, np.exp(log_s - of_s[-1]), 0) if None in columns else np.zeros(V, X)
            grad[i], slack[i] = scale * of_mass[-1] * share, abs(scale) * jump[-1] * share
            grad[i, listed], slack[i, listed] = scale * of_mass[: len(listed)], abs(scale) * jump[: len(listed)]
            w = np.abs(np.where(s > 0, u / np.where(s > 0, s, 1), 0)) if kind != "forward_kl" else np.ones_like(s)
            grad_sizes[i] = abs(scale) * (1 + w[np.isfinite(w)].max(initial=0))
    return Rows(values, sizes, grad, grad_sizes, slack)
