"""The policy terms and KL estimators of the policy losses: value and exact derivative, token by token.

Every derivative is written out, so that forward and backward, plain and fused operators run the same numbers.
`through` is dl/d(ratio), to be carried to the log-probabilities along the ratio; `direct` is dl/d(logprob) with the
ratio held fixed. Formulas: rlkernel_core/spec/policy_loss.py and the sources in its KINDS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rlkernel_core.spec.policy_loss import LossConfig

_LOG_FLOOR: Final = math.log(1e-8)  # VESPO keeps its sequence weight within [1e-8, e^20]


@dataclass(frozen=True)
class Point:
    """Where the loss is evaluated; all per token, 0 or 1 where masked."""

    logprob: Tensor
    old: Tensor
    log_ratio: Tensor  # d, within the limit
    ratio: Tensor  # rho as the kind uses it
    advantages: Tensor


@dataclass(frozen=True)
class Term:
    """A term of the loss per token, with its derivative and where it was held at a bound."""

    value: Tensor
    through: Tensor | None = None  # dl / d ratio
    direct: Tensor | None = None  # dl / d logprob
    low: Tensor | None = None  # bool
    high: Tensor | None = None
    dual: Tensor | None = None


def _choose(where: Tensor, a: float, b: float, *, like: Tensor) -> Tensor:
    """One of two numbers per token, in the dtype of `like` (two plain numbers would meet in the default dtype)."""
    return torch.where(where, like.new_full((), a), like.new_full((), b))


def _clip(at: Point, config: LossConfig) -> Term:
    rho, a = at.ratio, at.advantages
    lower, upper = 1.0 - config.clip[0], 1.0 + config.clip[1]
    low, high = (a < 0) & (rho < lower), (a > 0) & (rho > upper)
    held = torch.where(high, upper, torch.where(low, lower, rho))
    dual = None
    stopped = low | high
    if config.dual_clip is not None:
        dual = (a < 0) & (rho > config.dual_clip)
        held, stopped = torch.where(dual, config.dual_clip, held), stopped | dual
    # A = 0 gives 0 even where the ratio is infinite.
    value = torch.where(a != 0, -held * a, 0.0)
    return Term(value, through=torch.where(stopped, 0.0, -a), low=low, high=high, dual=dual)


def _sapo(at: Point, config: LossConfig) -> Term:
    tau = _choose(at.advantages > 0, *config.tau, like=at.ratio)
    x = tau * (at.ratio - 1)
    gate = torch.sigmoid(x)
    return Term(-4 / tau * gate * at.advantages, through=-4 * gate * torch.sigmoid(-x) * at.advantages)


def _gmpo(at: Point, config: LossConfig) -> Term:
    # The clip itself is inside the ratio (gmpo_clip).
    a, d = at.advantages, at.log_ratio
    low, high = (a < 0) & (d < -config.clip[0]), (a > 0) & (d > config.clip[1])
    return Term(-at.ratio * a, through=-a, low=low, high=high)


def _cispo(at: Point, config: LossConfig) -> Term:
    lower, upper = 1.0 - config.clip[0], 1.0 + config.clip[1]
    direct = -at.ratio.clamp(lower, upper) * at.advantages
    return Term(direct * at.logprob, direct=direct, low=at.ratio < lower, high=at.ratio > upper)


def _vespo(at: Point, config: LossConfig) -> Term:
    # The ratio of this kind is the sequence weight v, token corrections included.
    gate = config.gamma
    positive = at.advantages >= 0
    k = _choose(positive, gate.k_pos, gate.k_neg, like=at.ratio)
    lam = _choose(positive, gate.lambda_pos, gate.lambda_neg, like=at.ratio)
    direct = -torch.exp(lam + k * at.ratio.log() - lam * at.ratio) * at.advantages
    return Term(direct * at.logprob, direct=direct)


def _reinforce(at: Point, config: LossConfig) -> Term:  # noqa: ARG001 one signature for all
    return Term(-at.advantages * at.logprob, direct=-at.advantages)


def _dppo(at: Point, config: LossConfig) -> Term:
    p, old = at.logprob.exp(), at.old.exp()
    low_bound, high_bound = config.clip
    if config.surrogate == "dppo_tv":
        too_high, too_low = p - old > high_bound, p - old < -low_bound
    else:
        # KL of two coins, old against current; 1e-8 as in verl.
        kl = old * (at.old - at.logprob) + (1 - old) * torch.log((1 - old + 1e-8) / (1 - p + 1e-8))
        too_high, too_low = (kl > high_bound) & (p > old), (kl > low_bound) & (p < old)
    positive = at.advantages > 0
    high, low = positive & too_high, ~positive & too_low
    direct = torch.where(high | low, 0.0, -at.ratio.clamp(max=config.ratio_cap) * at.advantages)
    dual = (at.ratio > config.ratio_cap) & ~(high | low)
    return Term(direct * at.logprob, direct=direct, low=low, high=high, dual=dual)


def _dro(at: Point, config: LossConfig) -> Term:
    d, a, beta = at.log_ratio, at.advantages, config.dro_beta
    return Term(-(a * at.logprob - 0.5 * beta * d * d), direct=-a + beta * d)


SURROGATES: Final[Mapping[str, Callable[[Point, LossConfig], Term]]] = {
    "clip": _clip,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "cispo": _cispo,
    "vespo": _vespo,
    "reinforce": _reinforce,
    "dppo_tv": _dppo,
    "dppo_kl": _dppo,
    "dro": _dro,
}


def gmpo_clip(log_ratio: Tensor, advantages: Tensor, clip: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """GMPO's clipped log-ratio and where it is not clipped: bounded on the side that helps the advantage's sign."""
    high, low = (advantages > 0) & (log_ratio > clip[1]), (advantages < 0) & (log_ratio < -clip[0])
    neutral = advantages == 0
    clipped = torch.where(high, clip[1], torch.where(low, -clip[0], torch.where(neutral, 0.0, log_ratio)))
    return clipped, ~(high | low | neutral)


def vespo_weight(log_ratio: Tensor) -> Tensor:
    """VESPO's sequence weight from the summed log-ratio."""
    return log_ratio.clamp(_LOG_FLOOR, 20.0).exp()


def log_correction(weight: Tensor) -> Tensor:
    """Log of a token correction as it enters VESPO; a masked-out token weighs 1e-8."""
    return weight.log().clamp(_LOG_FLOOR, 20.0)


def kl_estimate(q: Tensor, name: str, clamp: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Value and derivative of a KL estimator at q = logprob - ref; "+" takes the derivative of k2."""
    base = name.removesuffix("+")
    if base == "k1":
        value, derivative = q, torch.ones_like(q)
    elif base == "abs":
        value, derivative = q.abs(), q.sign()
    elif base == "k2":
        value, derivative = 0.5 * q * q, q
    elif base == "k3":
        value, derivative = torch.expm1(-q) + q, -torch.expm1(-q)
    else:
        x = q.clamp(-clamp[0], clamp[0])
        full = torch.expm1(-x) + x
        value = full.clamp(max=clamp[1])
        derivative = torch.where((q.abs() <= clamp[0]) & (full <= clamp[1]), -torch.expm1(-x), 0.0)
    return value, q if name.endswith("+") else derivative
