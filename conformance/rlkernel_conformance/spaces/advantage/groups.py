"""What the definition says of the kinds of advantage@1 that compare a sequence with its group, in float64.

Legend: B sequences · T time · N packed tokens · K rewards of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rlkernel_conformance.spaces.advantage.tokens import (
    ROUNDING,
    Estimate,
    Given,
    Tokens,
    groups_of,
    sequence_lengths,
)
from rlkernel_core.definitions import advantage as definition

LEAST: Final = 2.0**-140  # of fp32, a few steps of its smallest numbers
UNSQUARED: Final = 2.0**-62  # below it squares are no numbers of fp32
NEAR: Final = 1e-5  # a std this close to a threshold, but not at it, is on either side of it by rounding


def factor(var: float, eps: float, mode: str) -> float:
    """As the definition; 0 where it would be infinite."""
    if var == 0.0 and (eps == 0.0 or mode == "threshold"):
        return 0.0
    return float(definition.factor(var, eps, mode))


@dataclass
class ByGroup:
    """What is found group by group, all [B]."""

    values: Any
    size: Any  # what a rounding error of 1 does to the value
    exact: Any
    undecided: Any
    count: Any
    mean: Any
    std: Any
    span: Any  # largest distance of two members

    @classmethod
    def empty(cls, B: int) -> ByGroup:
        """Of B sequences."""
        z = np.zeros(B)
        return cls(z, z.copy(), z > 0, z > 0, z.copy(), z.copy(), z.copy(), z.copy())


def by_group(
    n: Given, kind: str, x: Any, ok: Any, groups: Sequence[Any], *, lengths: Any, batch: float | None
) -> ByGroup:
    """A kind over groups of rewards x [B], finite where `ok`."""
    out = ByGroup.empty(len(x))
    member = ok if n["in_stats"] is None else ok & n["in_stats"]
    x = np.where(ok, x, 0.0)
    for ix in groups:
        of = ix[member[ix]]
        first = x[of[0]] if len(of) else 0.0
        y = x[ix] - first
        inner = y[member[ix]]
        moved, var = definition.mean_var(inner, n["ddof"])
        span = np.ptp(inner) if len(of) else 0.0
        out.count[ix], out.mean[ix], out.std[ix], out.span[ix] = len(of), first + moved, np.sqrt(var), span
        if len(of) < 2:
            one = 1.0 if n["scale"] == "none" or kind == "maxrl" else factor(1.0, n["eps"], n["eps_mode"])
            raw = n["singleton"] == "raw" and kind != "passk" and len(of) > 0
            out.values[ix], out.exact[ix] = one * x[ix] if raw else 0.0, not raw
            out.undecided[ix] = n["singleton"] == "any"  # no group is as small, or anything will do
            continue
        dev = _deviation(n, kind, y, member[ix], moved, None if lengths is None else lengths[ix])
        if kind == "maxrl":
            below = first + moved + n["eps"]
            out.values[ix] = dev / below if below else 0.0
            out.size[ix] = 1 / abs(below) if below else 0.0
        else:
            alone = n["leave_one_out"] and batch is None
            for some in [[at] for at in range(len(ix))] if alone else [np.arange(len(ix))]:
                i, spread, blurred = ix[some], var if batch is None else batch, 0.0
                if alone:
                    spread, blurred = _of_others(inner, y[some[0]], member[i[0]], n["ddof"])
                f, low, close = _scaling(n, spread)
                size = np.abs(dev[some] * f)
                out.values[i] = dev[some] * f
                # The variance of the others is what the sum of all squares leaves, in which theirs may be lost.
                out.size[i] = abs(f) * (1.0 + size) + blurred * size / ROUNDING
                out.undecided[i] = close
                out.exact[i] |= low and n["low_std"] == "zero"
        constant = span == 0 and n["constant"] == "zero"
        out.exact[ix] |= constant & (y == 0)
    return out


def _deviation(n: Given, kind: str, y: Any, member: Any, moved: float, lengths: Any) -> Any:
    """Of each of a group, from what its kind compares it with."""
    count = member.sum()
    dev = y - moved
    if kind == "passk":
        at = np.flatnonzero(member)
        best, second, *_ = at[np.argsort(-y[at], kind="stable")]
        won = np.zeros_like(y)
        won[best] = y[best] - y[second]
        return won
    if kind == "rloo" or n["leave_one_out"]:
        return np.where(member, dev * (count / (count - 1)), dev)
    if kind == "opo":
        tokens = np.where(member, lengths, 0.0)
        return y - (tokens * y).sum() / tokens.sum() if tokens.sum() else dev
    return dev


def _of_others(inner: Any, y: float, member: bool, ddof: int) -> tuple[float, float]:
    """Variance of the members without y, and the share of it that rounding may take."""
    others = inner
    if member:
        others = np.delete(inner, np.flatnonzero(inner == y)[0])
    if len(others) < 2 or np.ptp(others) == 0 or len(others) <= ddof:
        return 0.0, 0.0
    _, var = definition.mean_var(others, ddof)
    whole = ((inner - inner.mean()) ** 2).sum() / (len(others) - ddof)
    return var, ROUNDING * whole / var


def _scaling(n: Given, var: float) -> tuple[float, bool, bool]:
    """What a deviation is multiplied by, whether the std is low, and whether rounding decides that."""
    if n["scale"] == "none":
        return 1.0, False, False
    std = float(np.sqrt(var))
    edges = [n["min_std"]] + [n["eps"]] * (n["eps_mode"] == "threshold")
    close = any(0 < abs(std - edge) <= NEAR * edge for edge in edges)
    guarded = n["constant"] == "zero" or n["min_std"] > 0 or n["low_std"] == "center"
    low = guarded and std <= n["min_std"]
    if low:
        return float(n["low_std"] == "center"), True, close
    return factor(var, n["eps"], n["eps_mode"]), False, close


def over_groups(n: Given, tokens: Tokens | None, *, by_token: bool) -> Estimate:
    """One number per sequence."""
    x, blur = n["rewards"].astype(np.float64), 0.0
    if by_token and tokens is not None:
        rows = np.where(tokens.valid, tokens.rows(x), 0.0)
        with np.errstate(invalid="ignore"):  # infinities of both signs
            x = rows.sum(1)
        blur = _blur(np.where(np.isfinite(rows), rows, 0.0))
    B, kind = len(x), n["kind"]
    if kind == "remax":
        a = x - n["baseline"]
        bad = ~np.isfinite(a)
        scale = np.maximum(1.0, np.abs(np.where(bad, 0.0, x)) + np.abs(np.where(bad, 0.0, a)))
        return Estimate(np.where(bad, 0.0, a), scale, bad, bad, np.zeros(B, bool))
    columns = x.T if kind == "gdpo" else x[None]
    weights = np.ones(len(columns)) if n["reward_weights"] is None else n["reward_weights"].astype(np.float64)
    groups = groups_of(n["group"], B)
    lengths = sequence_lengths(n, tokens, by_token=by_token)
    total, raw, invalid, undecided = np.zeros(B), np.zeros(B), np.ones(B, bool), np.zeros(B, bool)
    scale, exact, stats = np.ones(B), np.ones(B, bool), []
    for column, weight in zip(columns, weights, strict=True):
        ok = _ok(column, n["valid_range"])
        found = by_group(n, kind, column, ok, groups, lengths=lengths, batch=_batch(n, column, ok))
        made = np.where(ok, found.values, 0.0)
        if kind == "gpg":
            member = ok if n["in_stats"] is None else ok & n["in_stats"]
            share = np.count_nonzero(column[member]) / max(1, member.sum())
            made = made / (share or 1.0)
        total, invalid = total + weight * made, invalid & ~ok
        size = np.where(ok, np.abs(made) + found.size * blur / 1e-5 + found.size * ROUNDING * found.span / 1e-5, 0.0)
        scale = scale + abs(weight) * size
        raw = raw + weight * np.where(np.isfinite(column), column, 0.0)
        exact, undecided = exact & (found.exact | ~ok), undecided | found.undecided
        stats.append(found)
    if kind == "gigpo":
        ok = _ok(x, n["valid_range"]) & np.isfinite(n["step_rewards"])
        of_state = {**n, "singleton": "any" if n["singleton"] == "any" else "zero"}
        column = n["step_rewards"].astype(np.float64)
        steps = by_group(
            of_state, "grpo", column, ok, groups_of(n["group"], B, n["anchor"].astype(np.int64)),
            lengths=None, batch=_batch(n, column, ok),
        )  # fmt: skip
        made = n["step_weight"] * np.where(ok, steps.values, 0.0)
        total, exact, undecided = total + made, exact & (steps.exact | ~ok), undecided | steps.undecided
        scale = scale + np.abs(made) + np.where(ok, steps.size * ROUNDING * steps.span / 1e-5, 0.0)
    exact = exact & (blur == 0.0)
    raw = raw if n["invalid"] == "raw" else np.zeros(B)
    return Estimate(total, scale, invalid, exact, undecided, raw=raw, stats=_group_stats(stats, blur, kind))


def _blur(rows: Any) -> float:
    """Largest rounding error of a sum of a row's rewards; 0 for 64ths, of which sums are exact in any order."""
    most = np.abs(rows).sum(1).max(initial=0.0)
    exact = most * 64 < 2**24 and np.array_equal(rows * 64, np.rint(rows * 64))
    return 0.0 if exact else float(ROUNDING * most)


def _ok(x: Any, valid_range: tuple[float, float] | None) -> Any:
    """Rewards that are valid."""
    ok = np.isfinite(x)
    return ok if valid_range is None else ok & (x >= valid_range[0]) & (x <= valid_range[1])


def _batch(n: Given, x: Any, ok: Any) -> float | None:
    """Variance of the whole batch, where the kind is scaled by it."""
    if n["scale"] != "batch":
        return None
    member = ok if n["in_stats"] is None else ok & n["in_stats"]
    inner = x[member] - (x[member][0] if member.any() else 0.0)
    return float(definition.mean_var(inner, n["ddof"])[1])


def _group_stats(found: Sequence[ByGroup], blur: float, kind: str) -> dict[str, tuple[Any, Any]]:
    """Statistics [B], or [B, K] of gdpo; with their largest errors."""

    def of(name: str) -> Any:
        x = np.stack([getattr(f, name) for f in found], -1)
        return x if kind == "gdpo" else x[:, 0]

    count, span, std = of("count"), of("span"), of("std")
    mean = np.where(count > 0, of("mean"), 0.0)
    error = blur + 4 * ROUNDING * span + LEAST
    return {
        "group_count": (count, 0.0),
        "group_mean": (mean, error + ROUNDING * np.abs(mean)),
        "group_std": (std, 4 * error + 1e-5 * std + np.where(span < UNSQUARED, span, 0.0)),
        "constant": ((count > 0) & (span == 0), np.where(span <= 8 * blur, np.inf, 0.0) if blur else 0.0),
    }
