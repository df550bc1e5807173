"""One draw again, from the logits of another machine: the same token, or one that the difference of logits explains.

With x the logits here, X the tolerance and T the temperature, the rollout's logits are taken to be some z with
|z_j - x_j| <= X for every id j, up to a shift of the whole row, which changes no law. Noise is exact. So with the
scores s = x + T g of `sample`'s draw, in units of logits:

    same        the token is the one that is drawn here
    explained   some z may keep the token, and every id that all z keep has a score of at most 2 X more
    other       no such z draws it

An honest draw from logits within X is never `other`. A token that is `explained` leads an id of better score here only
where two logits are off by 2 X together, or where an edge of a filter is as near.

What all z keep, and what some z keep, follow from how many ids certainly, and possibly, stand before one in the order
(x more than 2 X above it; x not more than 2 X below it), and from weights exp(x / T) that are each off by at most
exp(X / T). With X = 0 both are what the definition keeps, and only what `sample`'s own tolerances leave open is
explained: scores within 4e-6 nats, a mass within 2e-6 of top_p.

Bounds of stated log-probabilities follow alike: tempered within 2 X / T, raw within 2 X, processed by the kept mass.

Legend: V vocabulary · n ids with a finite logit, in the order (x descending, id ascending).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rlkernel.rollouts.record import Params
from rlkernel_core.definitions.sampling import Row, gumbel, kept_count, words

SCORE: Final = 4e-6  # nats: the sampling operators' tolerance of scores
MASS: Final = 2e-6  # of top_p
NATS: Final = 1e-5  # of log-probabilities that another operator stated, relative to max(1, |log p|)
# Standard deviation of a logit's error in tolerances: 5 of them are rarely reached by any of a million logits.
TYPICAL: Final = 0.2
# Chance that as many other tokens as are refused come from errors of that size.
ALPHA: Final = 1e-6
_MOST: Final = 600.0  # of an exponent


@dataclass(frozen=True)
class Verdict:
    """What was found of one drawn token."""

    kind: str  # "same", "explained" or "other"
    token: int  # that is drawn here; -1: none can be
    margin: float  # logits: how much better its score is than that of the stated token; inf: that cannot be drawn
    open: bool  # whether the tolerance admits another token than the one drawn here
    # That errors of typical size give another token, at most; None where an edge of a filter decides.
    chance: float | None
    expected: float  # nats, log-probability of the stated token here, under the record's law
    needed: float  # logits: the smallest tolerance that explains it; 0 where an edge of a filter does
    logprob: bool  # whether the stated log-probability is within its bounds, or none is stated
    mass: bool  # the same of the kept mass


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # a record may state any temperature
def judge(
    logits: Any,  # [V]
    stated: int,
    params: Params,
    seed: int,
    step: int,
    *,
    tolerance: float,
    law: str,
    logprob: float | None,
    mass: float | None,
) -> Verdict:
    """See the module's text.

    Args:
        logits: [V] fp32 of numpy, as computed here.
        stated: token of the record.
        params: law of the draw.
        seed: of the request.
        step: of the draw.
        tolerance: X, logits.
        law: that the stated log-probability is of.
        logprob: as stated, nats.
        mass: log of the kept mass as stated, nats.
    """
    x = np.asarray(logits[: params.vocab_size], np.float32).astype(np.float64)
    x[np.isnan(x)] = -np.inf  # as `sample` takes it
    nothing = logprob is None, mass is None
    if not np.isfinite(x.max(initial=-np.inf)):
        return Verdict("other", -1, math.inf, False, None, -math.inf, math.inf, *nothing)
    T = params.temperature
    score = x + T * gumbel(words(seed, step, x.size, params.stream)) if T > 0 else x
    reach = _Reach.of(x, params, tolerance)
    best = score[reach.kept].max()
    token = int(reach.kept[score[reach.kept] == best].min())
    if not (0 <= stated < x.size and np.isfinite(x[stated])):
        return Verdict("other", token, math.inf, False, None, -math.inf, math.inf, *nothing)
    slack = 2 * tolerance + T * SCORE
    leading = score[reach.surely].max(initial=-math.inf)
    maybe = bool((reach.maybe == stated).any())
    explained = maybe and leading - score[stated] <= slack
    kind = "same" if stated == token else "explained" if explained else "other"
    rivals = reach.maybe[reach.maybe != token]
    margin = max(0.0, float(best - score[stated])) if maybe else math.inf
    raw, tempered = _log_softmax(x, stated, 1.0), _log_softmax(x, stated, T or 1.0)
    expected = {"raw": raw, "tempered": tempered, "processed": _processed(reach, stated, token, tempered)}[law]
    if logprob is not None and mass is not None and law == "processed" and T > 0:
        law, logprob = "tempered", logprob + mass  # whose bounds are closer
    at, heat = (raw, 1.0) if law == "raw" else (tempered, T or 1.0)
    chance = _chance(best - score[rivals], token, reach, max(TYPICAL * tolerance, T * SCORE))
    needed = margin / 2 if kind == "other" or chance is not None else 0.0
    if logprob is not None and (law != "processed" or (T > 0 and not params.filtered)):
        needed = max(needed, abs(at - logprob) * heat / 2)
    return Verdict(
        kind,
        token,
        margin,
        bool((leading - score[rivals] <= slack).any()),
        chance,
        expected,
        needed,
        logprob is None or _within(logprob, *reach.bounds(at, law)),
        mass is None or _within(mass, *reach.log_mass),
    )


@dataclass(frozen=True)
class _Reach:
    """What the filters keep of a row, and what logits within the tolerance may do to it; ids in no order."""

    kept: Any  # ids that are kept here
    surely: Any  # ids that all logits within the tolerance keep
    maybe: Any  # ids that some of them keep
    log_kept: float  # nats: mass that is kept here
    log_mass: tuple[float, float]  # nats: the least and the most of it
    nats: float  # 2 X / T: most that a tempered log-probability is off
    raw: float  # 2 X: most that a raw one is off
    greedy: bool

    @classmethod
    def of(cls, x: Any, params: Params, tolerance: float) -> _Reach:
        """Of logits x [V], of which some are finite and none is larger."""
        T, raw = params.temperature, 2 * tolerance
        nats = min(raw / (T or 1.0), _MOST)
        if not params.filtered:
            ids = np.asarray([x.argmax()]) if T == 0 and tolerance == 0 else np.flatnonzero(x > -np.inf)
            return cls(ids, ids, ids, 0.0, (0.0, 0.0), nats, raw, T == 0)
        order = np.argsort(-x, kind="stable")[: int((x > -np.inf).sum())]
        y = (x[order] - x[order[0]]) / T
        w = np.exp(y)
        asked = {name: getattr(params, name) for name in ("top_k", "top_p", "min_p", "filter_order", "tie")}
        kept, *_ = kept_count(x[order], y, w, Row(**asked))
        sure, may = _kept(x[order], y, params, raw, nats)
        total = np.cumsum(w)
        here, low, high = (_share(total, n, math.exp(by)) for n, by in ((kept, 0.0), (sure, -nats), (may, nats)))
        return cls(order[:kept], order[:sure], order[:may], here, (low, high), nats, raw, False)

    def bounds(self, at: float, law: str) -> tuple[float, float]:
        """Least and most of a log-probability under `law`; `at` is the raw one, or else the tempered one, here."""
        if law == "raw":
            return at - self.raw, min(0.0, at + self.raw)
        if law == "processed" and self.greedy:
            return 0.0, 0.0
        low, high = self.log_mass if law == "processed" else (0.0, 0.0)
        return at - self.nats - high, min(0.0, at + self.nats - low)


def _log_softmax(x: Any, token: int, temperature: float) -> float:
    y = (x - x.max()) / temperature
    return float(y[token] - np.log(np.exp(y).sum()))


def _processed(reach: _Reach, stated: int, token: int, tempered: float) -> float:
    """Log-probability of a token under the law that it is drawn from here, nats."""
    if reach.greedy:
        return 0.0 if stated == token else -math.inf
    return tempered - reach.log_kept if (reach.kept == stated).any() else -math.inf


def _kept(x: Any, y: Any, params: Params, raw: float, nats: float) -> tuple[int, int]:
    """How many ids all logits within the tolerance keep, and how many some of them keep; x and y are [n], in order."""
    n, w, e = len(x), np.exp(y), math.exp(nats)
    if raw == 0 and params.tie == "lowest_id":
        least = most = np.arange(n)
    else:  # before an id stand those that are more than `raw` above it, and perhaps those not more than that below
        least = np.searchsorted(-x, -(x + raw), side="left")
        most = least if raw == 0 else np.searchsorted(-x, -(x - raw), side="right") - 1
    total = np.concatenate([[0.0], np.cumsum(w)])

    def min_p() -> tuple[int, int]:
        if not params.min_p > 0:
            return n, n
        edge, slack = math.log(params.min_p), MASS + nats
        return _first(y >= edge + slack), _first(y >= edge - slack)

    def top_k() -> tuple[int, int]:
        return (_first(most < params.top_k), _first(least < params.top_k)) if params.top_k > 0 else (n, n)

    def top_p(sure: int, may: int) -> tuple[int, int]:
        if not params.top_p < 1:
            return n, n
        ahead = total[least]  # at the least, of weights that are too large here, before others that are too small
        light = ahead / (ahead + np.maximum(total[may] - ahead, 0.0) * e)
        ahead = total[most + 1] - w  # at the most
        behind = w + np.maximum(total[sure] - total[np.minimum(most + 1, sure)], 0.0)
        heavy = ahead * e / (ahead * e + behind)
        return _first(heavy < params.top_p - MASS), _first(light < params.top_p + MASS)

    floor, count = min_p(), top_k()
    left = {"joint": (n, n), "topp_topk": floor, "topk_topp": (min(floor[0], count[0]), min(floor[1], count[1]))}
    nucleus = top_p(*left[params.filter_order])
    sure = min(floor[0], count[0], nucleus[0])
    may = min(floor[1], count[1], nucleus[1])
    # The first of the order is always kept.
    return max(sure, int(most[0] == 0)), max(may, int((least == 0).sum()) if raw else 1)


def _first(holds: Any) -> int:
    """How many entries hold before the first that does not."""
    return len(holds) if holds.all() else int(holds.argmin())


def _share(total: Any, count: int, by: float) -> float:
    """Log of the mass of the first `count` weights, each of which is `by` times as large beside the others."""
    if count == 0:
        return -math.inf
    kept = total[count - 1] * by
    return float(np.log(kept / (kept + (total[-1] - total[count - 1]))))


def _within(stated: float, low: float, high: float) -> bool:
    """Whether a number is finite and within bounds, but for rounding."""
    edge = NATS * max(1.0, abs(stated))
    return math.isfinite(stated) and low - edge <= stated <= high + edge


def _chance(lead: Any, token: int, reach: _Reach, spread: float) -> float | None:
    """Chance that independent errors of the logits, of a standard deviation, change the token, at most.

    `lead` is how much better its score is than each rival's, in logits.
    """
    if (lead < 0).any() or (len(reach.surely) < len(reach.maybe) and not (reach.surely == token).any()):
        return None
    # Each rival by itself: the difference of two errors has the standard deviation sqrt(2) spread.
    return min(1.0, sum(0.5 * math.erfc(x / (2 * spread)) for x in lead[lead < 16 * spread].tolist()))
