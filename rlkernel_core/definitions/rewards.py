"""float64 definitions around an advantage: whitening moments, group filters, reward shaping; loops on purpose.

Dynamic sampling and the overlong penalty: arXiv:2503.14476; KL estimators: J. Schulman, "Approximating KL divergence"
(2020), as functions of d = log p - log p_ref.
"""

from __future__ import annotations

import numpy as np

from rlkernel_core.definitions.advantage import factor


def moments(x, times, ddof=1):
    """Count, mean and variance of values that count `times` times."""
    x, times = np.asarray(x, np.float64).reshape(-1), np.asarray(times, np.float64).reshape(-1)
    x, times = x[times > 0], times[times > 0]
    n = times.sum()
    if not n:
        return 0.0, 0.0, 0.0
    mean = (times * x).sum() / n
    return n, mean, (times * (x - mean) ** 2).sum() / (n - ddof) if n > ddof else 0.0


def rstd(var, eps, mode="std_add"):
    """The factor; 0 where it would be infinite."""
    with np.errstate(divide="ignore"):
        f = factor(np.float64(var), eps, mode)
    return f if np.isfinite(f) else 0.0


def passes(x, rule, *, threshold=0.0, low=0.0, high=1.0, ddof=1):
    """Whether the valid rewards of one group pass, and how far they are from the other answer."""
    if rule == "distinct":
        return len(set(x.tolist())) > 1, np.inf
    if rule == "mean":
        if not len(x):
            return low < 0.0 < high, min(abs(low), abs(high))  # a group without members has the mean 0
        return low < x.mean() < high, min(abs(x.mean() - low), abs(x.mean() - high))
    std = np.sqrt(moments(x, np.ones(len(x)), ddof)[2]) if len(x) and np.ptp(x) else 0.0
    return std > threshold, abs(std - threshold)


def group_filter(rewards, ids, rule, *, valid=None, least=1, combine="any", **numbers):
    """keep, group_keep, distance to the nearest threshold; per sequence."""
    R = rewards[:, None] if rewards.ndim == 1 else rewards
    member = np.isfinite(R) & (np.ones(len(R), bool) if valid is None else valid)[:, None]
    keep, group_keep, near = np.zeros(len(R), bool), np.zeros(len(R), bool), np.full(len(R), np.inf)
    for g in np.unique(ids):
        at = ids == g
        votes = []
        for k in range(R.shape[1]):
            x = R[at & member[:, k], k]
            ok, distance = passes(x, rule, **numbers)
            votes.append(ok and len(x) >= least)
            near[at] = np.minimum(near[at], distance if len(x) else np.inf)
        group_keep[at] = any(votes) if combine == "any" else all(votes)
    keep = group_keep & member.any(1)
    return keep, group_keep, near


def kl(d, kind, input_clamp=None, clamp=None):
    d = np.clip(d, -input_clamp, input_clamp) if input_clamp else d
    out = {"k1": d, "abs": np.abs(d), "k2": d * d / 2, "k3": np.expm1(-d) + d}[kind]
    return np.clip(out, -clamp, clamp) if clamp else out


def overlong(lengths, limit, buffer, factor=1.0, cap=True):
    penalty = np.minimum(0.0, -(lengths - (limit - buffer)) / buffer * factor)
    return np.maximum(penalty, -factor) if cap else penalty


def per_sequence(x, *, clip=None, normalize=False, center=True, ddof=1, eps=1e-8, penalty=0.0):
    """Clip, normalize, overlong, in this order; a reward that is not finite is in no moment."""
    x = np.where(np.isfinite(x), np.clip(x, *clip), x) if clip else x
    if normalize:
        _, mean, var = moments(x, np.isfinite(x), ddof)
        x = (x - mean * center) * rstd(var, eps)
    return x + penalty


def at_last(x, m):
    """Rewards per sequence on the last valid token of each row."""
    out = np.zeros(m.shape)
    for i, row in enumerate(m):
        if row.any():
            out[i, np.flatnonzero(row)[-1]] = x[i]
    return out
