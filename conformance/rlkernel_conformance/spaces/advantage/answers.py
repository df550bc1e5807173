"""What the definition says of a call of advantage@1 with any of its options, in float64.

Beside each value stands how far a result may be from it; where rounding decides, that is infinite.

Legend: B sequences · T time · N packed tokens · K rewards of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlkernel_conformance.spaces.advantage.groups import factor, over_groups
from rlkernel_conformance.spaces.advantage.steps import over_steps, token_baseline
from rlkernel_conformance.spaces.advantage.tokens import Given, Tokens, sequence_lengths
from rlkernel_core.spec.advantage_kinds import KINDS

Results = Mapping[str, tuple[Any, Any]]  # by name of the result: its value and the largest error


def answer(n: Given, shape: tuple[int, ...] | None, tolerance: tuple[float, float], *, by_token: bool) -> Results:
    """Of a call whose token-level tensors have a shape (None: it has none), within a tolerance of the spec."""
    tokens = None if shape is None else Tokens.of(n, shape)
    per_sequence = KINDS[n["kind"]].family == "group" or (n["kind"] == "remax" and not by_token)
    if per_sequence:
        made = over_groups(n, tokens, by_token=by_token)
    elif tokens is None:
        raise ValueError("a kind over tokens without tokens")
    else:
        made = (token_baseline if n["kind"] == "otb" else over_steps)(n, tokens, by_token=by_token)
    atol, rtol = tolerance
    error = np.where(made.exact, 0.0, atol * made.scale + rtol * np.abs(made.values))
    undecided = made.undecided if per_sequence else made.undecided[:, None]
    error = np.where(undecided, np.inf, error)
    results: dict[str, tuple[Any, Any]] = {"stats.invalid": (made.invalid, 0.0)}
    results |= {f"stats.{name}": x for name, x in made.stats.items()}
    a = made.values
    B = len(made.invalid)
    chosen, counted = (np.ones(B, bool) if n[x] is None else n[x] for x in ("in_loss", "in_stats"))
    if n["whiten"] != "none":
        who, times = chosen & counted & ~made.invalid, None
        if not per_sequence and tokens is not None:
            who = tokens.valid & who[:, None]
        elif n["whiten_level"] != "sequence":
            times = sequence_lengths(n, tokens, by_token=by_token)
        whole = _moments(n, a, error, who, times, tolerance)
        results |= whole.results
        if n["whiten"] == "global":
            a, error = whole.applied(a, error, tolerance)
    keep = chosen & ~made.invalid
    if per_sequence:
        raw = np.where(chosen & made.invalid, made.raw, 0.0)
        a, error = np.where(keep, a, raw), np.where(keep, error, rtol * np.abs(raw))
    elif tokens is not None:
        keep = keep[:, None] & (tokens.valid if n["masked_out"] == "zero" else np.ones_like(tokens.valid))
        a, error = np.where(keep, a, 0.0), np.where(keep, error, 0.0)
    if n["weights"] is not None:
        w = n["weights"] if per_sequence else n["weights"][:, None]
        a, error = w * a, np.where(w == 0, 0.0, np.where(w == 0, 1.0, w) * error)
    if tokens is not None and (n["output"] == "token" or not per_sequence):
        if per_sequence:
            a, error = (np.where(tokens.valid, x[:, None], 0.0) for x in (a, error))
        a, error = tokens.tokens(a), tokens.tokens(error)
    results["advantages"] = a, error
    if made.returns is not None and tokens is not None:
        carried = n["masked_out"] == "carry" and n["values"] is not None
        off = 4 * atol * made.scale + rtol * np.abs(made.returns)
        off = off if n["masked_out"] == "carry" else np.where(tokens.valid & ~made.invalid[:, None], off, 0.0)
        results["returns"] = tokens.tokens(made.returns, n["values"] if carried else 0.0), tokens.tokens(off)
    return results


@dataclass(frozen=True)
class Moments:
    """Of a batch of advantages, whose own largest error is `error`."""

    shift: float
    moved: float
    rstd: float
    error: float
    undecided: bool
    constant: bool
    results: Mapping[str, tuple[Any, Any]]

    def applied(self, a: Any, error: Any, tolerance: tuple[float, float]) -> tuple[Any, Any]:
        """Whitened, and the largest error."""
        white = ((a - self.shift) - self.moved) * self.rstd
        atol, rtol = tolerance
        open_ = self.undecided | ~np.isfinite(error)
        error = np.where(open_, 0.0, error)
        off = self.rstd * (error + self.error) + np.abs(white) * (2 * self.rstd * self.error + rtol) + atol
        off = np.where((white == 0) & self.constant & (self.error == 0), 0.0, off)
        return white, np.where(open_, np.inf, off)


def _moments(n: Given, a: Any, error: Any, who: Any, times: Any, tolerance: tuple[float, float]) -> Moments:
    """Over tokens or sequences, each counted as often as `times` says."""
    count = who.astype(np.int64) if times is None else np.where(who, times, 0)
    some = count > 0
    total, E = int(count.sum()), float(error[some].max(initial=0.0))
    if not total:
        zero = {f"stats.{x}": (0.0, 0.0) for x in ("count", "mean", "var", "rstd")}
        return Moments(0.0, 0.0, 0.0, 0.0, undecided=False, constant=True, results=zero)
    shift = float(a[some][0])
    away, w = a[some] - shift, count[some]
    moved = float((w * away).sum() / total)
    free = total - n["whiten_ddof"]
    var = float((w * (away - moved) ** 2).sum() / free) if free > 0 else 0.0
    eps, mode, std = n["whiten_eps"], n["whiten_eps_mode"], float(np.sqrt(var))
    rstd = factor(var, eps, mode)
    # An error of the advantages is one of the std; relative to a small std it decides.
    bare = mode == "threshold" or eps == 0.0
    edge = eps if mode == "threshold" else 0.0
    undecided = not np.isfinite(E) or (bare and E > 0 and abs(std - edge) <= 10 * E and not (std == edge == 0 == E))
    rtol = tolerance[1]
    E = E if np.isfinite(E) else 0.0
    spread = 2 * std * E + E * E
    results = {
        "stats.count": (total, 0.0),
        "stats.mean": (shift + moved, E + rtol * (abs(shift + moved) + abs(shift))),
        "stats.var": (var, spread + rtol * var),
        "stats.rstd": (rstd, rstd * rstd * 2 * E + rtol * rstd),
    }
    if undecided:
        results = {x: (v, 0.0 if x == "stats.count" else np.inf) for x, (v, _) in results.items()}
    constant = bool(np.ptp(away) == 0)
    return Moments(shift, moved, rstd, E, undecided=undecided, constant=constant, results=results)
