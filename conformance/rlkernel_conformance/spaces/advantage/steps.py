"""What the definition says of the kinds of advantage@1 that are a recursion over time, in float64.

The recursions are those of rlkernel_core/definitions/advantage.py, all sequences at a time; tests hold the two against
each other.

Legend: B sequences · T time · N packed tokens · K rewards of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlkernel_conformance.spaces.advantage.tokens import Estimate, Given, Tokens, groups_of


@dataclass(frozen=True)
class Steps:
    """The steps of a recursion, rows [B, T]."""

    valid: Any
    rewards: Any
    going: Any  # 0 where the episode ends after the step
    bootstrap: Any  # [B]
    gamma: float
    masked: str

    def backwards(
        self,
        state: tuple[Any, ...],
        step: Callable[..., tuple[Any, tuple[Any, ...]]],
        *,
        kept_each: tuple[int, ...] = (),
    ) -> Any:
        """`step(t, seen, *state)` from right to left: what is kept at valid steps, and the state behind them."""
        kept, seen = [], np.zeros(len(self.valid), bool)
        for t in range(self.valid.shape[1] - 1, -1, -1):
            m = self.valid[:, t]
            out, new = step(t, seen, *state)
            passed = self._passed(seen, *state)
            state = tuple(np.where(m, a, b) for a, b in zip(new, passed, strict=True))
            kept.append(np.where(m, out, 0.0))
            seen = seen | m
        return np.stack(kept[::-1], -1) if kept else np.zeros((*kept_each, len(self.valid), 0))

    def _passed(self, seen: Any, *state: Any) -> tuple[Any, ...]:
        """The state that a masked position lets through: all of it, what a step leaves, nothing."""
        if self.masked == "skip":
            return state
        if self.masked == "reset":
            return tuple(np.where(seen, 0.0, x) for x in state)
        if len(state) == 1:
            return (np.where(seen, self.gamma * state[0], state[0]),)
        v, target, lam = state  # of lambda-returns: a step without reward and value
        blended = (1 - lam) * v + lam * target
        return np.where(seen, 0.0, v), np.where(seen, self.gamma * blended, target), lam

    def discounted(self) -> Any:
        """G_t = r_t + gamma G_{t+1}."""

        def step(t: int, _: Any, after: Any) -> Any:
            g = self.rewards[:, t] + self.gamma * self.going[:, t] * after
            return g, (g,)

        return self.backwards((self.bootstrap,), step)

    def lambda_returns(self, values: Any, lam: Any) -> Any:
        """GAE's targets: R_t = r_t + gamma ((1 - lam') v' + lam' R')."""

        def step(t: int, seen: Any, v: Any, target: Any, then: Any) -> Any:
            blended = np.where(seen, (1 - then) * v + then * target, self.bootstrap)
            now = self.rewards[:, t] + self.gamma * self.going[:, t] * blended
            return now, (values[:, t], now, lam[:, t])

        constant = lam[:, 0] if lam.shape[1] else self.bootstrap
        return self.backwards((self.bootstrap, self.bootstrap, constant), step)

    def vtrace(self, values: Any, rho: Any, trace: Any) -> tuple[Any, Any]:
        """Targets vs and advantages."""

        def step(t: int, _: Any, v: Any, vs: Any, excess: Any) -> Any:
            on, r = self.gamma * self.going[:, t], self.rewards[:, t]
            excess = rho[:, t] * (r + on * v - values[:, t]) + on * trace[:, t] * excess
            a, now = rho[:, t] * (r + on * vs - values[:, t]), values[:, t] + excess
            return np.stack([a, now]), (values[:, t], now, excess)

        a, targets = self.backwards((self.bootstrap, self.bootstrap, 0 * self.bootstrap), step, kept_each=(2,))
        return a, targets

    def retrace(self, values: Any, q: Any, trace: Any) -> Any:
        """Q_t = r_t + gamma (v' + c' (Q' - q'))."""

        def step(t: int, _: Any, after: Any) -> Any:
            target = self.rewards[:, t] + self.gamma * self.going[:, t] * after
            return target, (values[:, t] + trace[:, t] * (target - q[:, t]),)

        return self.backwards((self.bootstrap,), step)


def _following(valid: Any, x: Any) -> Any:
    """X at the next valid position, rows [B, T]; 0 where there is none."""
    found, after = np.zeros_like(x), np.zeros(len(x), x.dtype)
    for t in range(x.shape[1] - 1, -1, -1):
        found[:, t] = after
        after = np.where(valid[:, t], x[:, t], after)
    return found


def _last(valid: Any) -> Any:
    """The last valid position, rows [B, T]."""
    return valid & (valid[:, ::-1].cumsum(1)[:, ::-1] == 1)


def _turns(valid: Any, ids: Any) -> tuple[Any, Any]:
    """Whether a turn begins at a position, and where that of each position began; rows [B, T]."""
    begins, heads = np.zeros_like(valid), np.zeros(valid.shape, np.int64)
    head, open_, now = np.zeros(len(valid), np.int64), np.zeros(len(valid), bool), np.zeros(len(valid), ids.dtype)
    for t in range(valid.shape[1]):
        m = valid[:, t]
        begins[:, t] = m & ~(open_ & (now == ids[:, t]))
        head = np.where(begins[:, t], t, head)
        heads[:, t], open_, now = head, open_ | m, np.where(m, ids[:, t], now)
    return begins, heads


def over_steps(n: Given, tokens: Tokens, *, by_token: bool) -> Estimate:
    """A recursion over the valid tokens."""
    kind, valid = n["kind"], tokens.valid
    (B, T), gamma = valid.shape, n["gamma"]
    rows = {x: tokens.rows(n[x]).astype(np.float64) for x in ("values", "q_values", "ratio") if n[x] is not None}
    if by_token:
        rows["rewards"] = tokens.rows(n["rewards"]).astype(np.float64)
    else:
        rows["rewards"] = np.where(_last(valid), n["rewards"][:, None].astype(np.float64), 0.0)
    if "ratio" in rows:
        ratio = rows.pop("ratio")
        rows["rho"], rows["trace"] = (
            np.minimum(ratio, np.inf if n[c] is None else n[c]) for c in ("ratio_clip", "trace_clip")
        )
    for name in ("lam", "lam_value"):
        if np.ndim(n[name]) and np.shape(n[name]) == tokens.shape:
            rows[name] = tokens.rows(n[name])
        elif n[name] is not None:
            rows[name] = np.broadcast_to(np.reshape(np.float64(n[name]), (-1, 1)), valid.shape)
    checked = [x for name, x in rows.items() if not name.startswith("lam") or np.ndim(n[name]) > 0]
    invalid = np.any([(valid & ~np.isfinite(x)).any(1) for x in checked], axis=0)
    ends = {x: np.zeros(B) if n[x] is None else n[x].astype(np.float64) for x in ("bootstrap", "baseline")}
    for x in (*ends.values(), *([] if by_token else [n["rewards"]])):
        invalid = invalid | ~np.isfinite(x)
    valid = valid & ~invalid[:, None]
    keep = valid | (np.zeros_like(valid) if n["masked_time"] == "skip" else np.ones_like(valid))
    rows = {x: np.where(keep if x.startswith("lam") else valid, y, 0.0) for x, y in rows.items()}
    ends = {x: np.where(invalid, 0.0, y) for x, y in ends.items()}
    done = np.zeros((B, T), bool) if n["dones"] is None else tokens.rows(n["dones"]) & valid
    done = _following(valid, done) if n["done_index"] == "before" else done
    begins, heads = valid, np.broadcast_to(np.arange(T), (B, T))
    if n["turns"] is not None:
        begins, heads = _turns(valid, tokens.rows(n["turns"]))
        whole = np.zeros((2, B, T))
        for t in range(T):
            whole[:, np.arange(B), heads[:, t]] += np.where(valid[:, t], [rows["rewards"][:, t], done[:, t]], 0.0)
        rows["rewards"], done = whole[0], whole[1] > 0
    steps = Steps(begins, rows["rewards"], 1.0 - done, ends["bootstrap"], gamma, n["masked_time"])
    a, targets = _kind(kind, n, steps, rows)
    a = a - ends["baseline"][:, None]
    sizes = [np.abs(np.where(begins, x, 0.0)) for x in (a, targets, rows.get("values", 0.0), rows["rewards"])]
    most = np.maximum(np.max([x.max(1, initial=0.0) for x in sizes], axis=0), np.abs(ends["bootstrap"]))
    most = np.maximum(most, np.abs(ends["baseline"]))
    a, targets = (np.where(valid, np.take_along_axis(x, heads, 1), 0.0) for x in (a, targets))
    numbers = [n[x] for x in ("lam", "lam_value") if n[x] is not None]
    decay = gamma * max(1.0 if np.ndim(x) else x for x in numbers)
    horizon = min(T, 1 / (1 - decay)) if decay < 1 else T
    scale = np.maximum(1.0, most)[:, None] * np.sqrt(max(1.0, horizon)) * np.ones((B, T))
    if "rho" in rows and kind == "vtrace":
        scale = scale * np.maximum(1.0, rows["rho"].max(1, initial=1.0))[:, None]
    if n["masked_out"] == "carry":
        a = np.where(valid, a, _following(valid, a))
        carried = a + tokens.rows(n["values"]) if n["values"] is not None else _following(valid, targets)
        targets = np.where(tokens.valid, targets, carried)
    none = np.zeros(B, bool)
    return Estimate(a, scale, invalid, np.zeros((B, T), bool), none, targets)


def _kind(kind: str, n: Given, steps: Steps, rows: Mapping[str, Any]) -> tuple[Any, Any]:
    """Advantages and targets at the steps."""
    values = rows.get("values", np.zeros_like(steps.rewards))
    if kind == "gae":
        lam = rows["lam"]
        if n["length_adaptive"] is not None:
            own = 1 - 1 / np.maximum(n["length_adaptive"] * steps.valid.sum(1), 1.0)
            lam = np.broadcast_to(own[:, None], lam.shape)
        targets = steps.lambda_returns(values, lam)
        return targets - values, targets if n["lam_value"] is None else steps.lambda_returns(values, rows["lam_value"])
    if kind == "vtrace":
        return steps.vtrace(values, rows["rho"], rows["trace"] * rows["lam"])
    if kind == "retrace":
        targets = steps.retrace(values, rows.get("q_values", values), rows["trace"] * rows["lam"])
        return targets - values, targets
    targets = steps.discounted()
    return targets - values, targets


def token_baseline(n: Given, tokens: Tokens, *, by_token: bool) -> Estimate:
    """otb: reward to go minus the variance-optimal baseline of the group at that time."""
    valid, (B, T) = tokens.valid, tokens.valid.shape
    r = n["rewards"] if by_token else np.where(_last(valid), n["rewards"][:, None].astype(np.float64), 0.0)
    invalid = np.any([(valid & ~np.isfinite(x)).any(1) for x in (r, n["logprob"], n["sum_pi_squared"])], axis=0)
    invalid = invalid if by_token else invalid | ~np.isfinite(n["rewards"])
    valid = valid & ~invalid[:, None]
    r, lp, squares = (np.where(valid, x, 0.0) for x in (r, n["logprob"], n["sum_pi_squared"]))
    togo = np.where(valid, r[:, ::-1].cumsum(1)[:, ::-1], 0.0)
    norm = np.cumsum(np.where(valid, 1 - 2 * np.exp(lp) + squares, 0.0), 1)
    member = ~invalid if n["in_stats"] is None else ~invalid & n["in_stats"]
    norm = np.where(valid & member[:, None], norm, 0.0)
    base, count = np.zeros((B, T)), np.zeros(B)
    for ix in groups_of(n["group"], B):
        count[ix] = member[ix].sum()
        if count[ix[0]] > 1:
            total = norm[ix].sum(0) + n["eps"]
            base[ix] = np.where(total != 0, (togo * norm)[ix].sum(0) / np.where(total != 0, total, 1.0), 0.0)
    a = np.where(valid, togo - base, 0.0)
    scale = np.ones((B, T)) * max(1.0, np.abs(r).sum(1).max(initial=0.0)) * np.sqrt(max(T, 1))
    stats = {"group_count": (count, 0.0)}
    return Estimate(a, scale, invalid, np.zeros((B, T), bool), np.zeros(B, bool), togo, stats=stats)
