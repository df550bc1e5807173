"""policy_loss@1 from its formulas, token by token in float64; slow on purpose.

Written from the papers cited in rlkernel_core/spec/policy_kinds.py, not from any implementation. What a formula holds
fixed (stop-gradient) is computed from the real part of the log-probabilities, so that an imaginary step of one of them
gives the gradient that the formula means, without cancellation (Squire and Trapp, SIAM Review 1998).
"""

import cmath
import math
from dataclasses import dataclass, field

import numpy as np


def _clip(x, lo, hi):
    return lo if x.real < lo else hi if x.real > hi else x


def _least(x, y):
    return x if x.real <= y.real else y


def _exp(x):
    return cmath.exp(x) if isinstance(x, complex) else math.exp(x)


def _sum(values):
    values = list(values)
    if any(isinstance(x, complex) for x in values):
        return complex(math.fsum(x.real for x in values), math.fsum(x.imag for x in values))
    return math.fsum(values)


def _k3(x):
    x = _clip(x, -20, 20)
    return math.expm1(x) - x


def _mean(values):
    return _sum(values) / max(len(values), 1)


def kl_value(q, name, clamp):
    """KL estimate at q; straight-through ones have the value at the real part of q and the derivative of k2."""
    if name.endswith("+"):
        q0 = q.real
        return 0.5 * q * q - 0.5 * q0 * q0 + kl_value(q0, name[:-1], clamp)
    if name == "k1":
        return q
    if name == "abs":
        return float(np.sign(q.real)) * q
    if name == "k2":
        return q * q / 2
    if name == "k3":
        return _exp(-q) - 1 + q
    x = _clip(-q, -clamp[0], clamp[0])
    return _clip(_exp(x) - x - 1, -math.inf, clamp[1])


def omegas(tokens, B, aggregate, denominator=None, horizon=None, count_empty=False):
    """Weight of each token; `tokens` is the list of token positions of each sequence."""
    n = sum(len(t) for t in tokens)
    S = B if count_empty else sum(1 for t in tokens if t)
    weights = {}
    for i, positions in enumerate(tokens):
        for t in positions:
            if aggregate == "token_sum":
                weights[i, t] = 1.0
            elif aggregate == "token_mean":
                weights[i, t] = 1 / (denominator or n)
            elif aggregate == "seq_mean_token_sum":
                weights[i, t] = 1 / (denominator or S)
            elif aggregate == "seq_mean_token_mean":
                weights[i, t] = 1 / (denominator or S) / len(positions)
            else:
                weights[i, t] = 1 / (denominator or S) / horizon
    return weights


@dataclass
class Rollout:
    """What a rollout's log-probabilities do to a batch."""

    tokens: list  # positions that stay, per sequence
    weight: dict = field(default_factory=dict)  # (i, t) -> w
    outside: dict = field(default_factory=dict)  # (i, t) -> w was out of its bounds
    delta: dict = field(default_factory=dict)
    missing: dict = field(default_factory=dict)


def _rejected(rejection, delta, tokens):
    """Positions that a rejection leaves in, per sequence."""

    def fine(x):
        x = math.exp(x) if rejection.statistic == "k1" else x
        return (rejection.low is None or x >= rejection.low) and (rejection.high is None or x <= rejection.high)

    kept = []
    for i, positions in enumerate(tokens):
        x = {t: _clip(delta[i, t], -20, 20) for t in positions}
        stat = {t: {"k1": v, "k2": v * v / 2, "k3": math.exp(v) - 1 - v}[rejection.statistic] for t, v in x.items()}
        if rejection.level == "token":
            kept.append([t for t in positions if fine(stat[t])])
        elif rejection.level == "any":
            kept.append(positions if all(fine(v) for v in stat.values()) else [])
        else:
            total = _sum(stat.values())
            total = total / max(len(stat), 1) if rejection.level == "geometric" else total
            kept.append(positions if fine(total) else [])
    return kept


def rollout(old, roll, mask, correction, rejection):
    """Correction weights and the mask after rejection; NaN in roll means equal to old."""
    B, T = old.shape
    out = Rollout([[t for t in range(T) if mask[i, t]] for i in range(B)])
    for i, t in [(row, t) for row in range(B) for t in out.tokens[row]]:
        out.missing[i, t] = math.isnan(roll[i, t])
        out.delta[i, t] = 0.0 if out.missing[i, t] else float(old[i, t] - roll[i, t])
    if rejection is not None:
        out.tokens = _rejected(rejection, out.delta, out.tokens)
    if correction is None:
        return out
    tokens, low, high = out.tokens, correction.low or -math.inf, correction.high or math.inf
    for i in range(B):
        every = [out.delta[i, u] for u in tokens[i]]
        for t in tokens[i]:
            exponent = {"token": out.delta[i, t], "sequence": _sum(every), "geometric": _mean(every)}[correction.level]
            raw = math.exp(_clip(exponent, -20, 20))
            out.outside[i, t] = not low <= raw <= high
            dropped = out.outside[i, t] and correction.mode == "mask"
            out.weight[i, t] = 0.0 if dropped else raw if correction.mode == "mask" else _clip(raw, low, high)
    if correction.normalize:
        if correction.level == "token":
            mean = _mean(list(out.weight.values()))
        else:
            mean = _mean([out.weight[i, y[0]] for i, y in enumerate(tokens) if y])
        out.weight = {k: w / (mean or 1.0) for k, w in out.weight.items()}
    return out


@dataclass
class Token:
    """One token of the loss: its parts, and what the statistics need."""

    policy: complex  # l, before w and omega
    w: float
    omega: float
    rho: float  # the ratio as the kind uses it
    d: float
    low: bool = False
    high: bool = False
    dual: bool = False
    kl: complex = 0.0  # the estimate
    kl_term: complex = 0.0  # times the ratio where asked for
    omega_entropy: float = 0.0
    entropy: complex = 0.0
    delta: float = 0.0
    missing: bool = False
    outside: bool = False


@dataclass
class Loss:
    """The loss, token by token."""

    tokens: dict  # (i, t) -> Token
    kl_coef: float
    entropy_coef: float
    offered: int  # tokens before rejection

    def parts(self):
        """Every term of the sum."""
        for x in self.tokens.values():
            yield x.omega * x.w * x.policy
            yield x.omega * self.kl_coef * x.kl_term
            yield -x.omega_entropy * self.entropy_coef * x.entropy

    @property
    def value(self):
        """The scalar."""
        return _sum(self.parts())

    @property
    def size(self):
        """The sum of the absolute values of the terms: what rounding is relative to."""
        return math.fsum(abs(x) for x in self.parts())


def evaluate(
    lp,
    old,
    adv,
    mask,
    *,
    surrogate,
    level="token",
    own=False,
    clip=(math.inf, math.inf),
    dual_clip=None,
    limit=math.inf,
    tau=None,
    gamma=None,
    ratio_cap=math.inf,
    dro_beta=0.0,
    aggregate="token_mean",
    denominator=None,
    horizon=None,
    count_empty=False,
    ref=None,
    kl="k3",
    kl_coef=0.0,
    kl_clamp=(20.0, 10.0),
    kl_importance=False,
    entropy=None,
    entropy_coef=0.0,
    entropy_aggregate=None,
    entropy_denominator=None,
    roll=None,
    correction=None,
    rejection=None,
):
    """The loss at lp [B, T], with everything under a stop-gradient taken from the real part of lp."""
    lp = np.asarray(lp)
    fz = lp.real.astype(np.float64)
    B, T = lp.shape
    before = fz if old is None else np.asarray(old, np.float64)
    adv = np.asarray(adv, np.float64)
    A = np.broadcast_to(adv[:, None], (B, T)) if adv.ndim == 1 else adv
    rolled = Rollout([[t for t in range(T) if mask[i, t]] for i in range(B)])
    offered = sum(len(y) for y in rolled.tokens)
    if roll is not None:
        rolled = rollout(before, np.asarray(roll, np.float64), mask, correction, rejection)
    tokens, weight = rolled.tokens, rolled.weight
    omega = omegas(tokens, B, aggregate, denominator, horizon or T, count_empty)
    omega_h = omega
    if entropy_aggregate is not None:
        omega_h = omegas(tokens, B, entropy_aggregate, entropy_denominator, horizon or T, count_empty)

    def lim(x):
        return _clip(x, -limit, limit)

    found = Loss({}, kl_coef, entropy_coef, offered)
    for i in range(B):
        y = tokens[i]
        x = {t: lp[i, t].item() for t in y}
        d = {t: x[t] - float(before[i, t]) for t in y}
        d0 = {t: float(fz[i, t] - before[i, t]) for t in y}
        for t in y:
            a, w = float(A[i, t]), weight.get((i, t), 1.0)
            r, r0 = _exp(lim(d[t])), math.exp(lim(d0[t]))
            if level == "sequence" and surrogate not in ("gmpo", "vespo"):
                s, s0 = _exp(lim(_mean(list(d.values())))), math.exp(lim(_mean(list(d0.values()))))
                inside = abs(_mean(list(d0.values()))) <= limit
                rho, rho0 = (s0 * _exp(x[t] - float(fz[i, t])) if inside else s0, s0) if own else (s, s0)
            else:
                rho, rho0 = r, r0
            low = high = dual = False
            if surrogate == "clip":
                value = -_least(rho * a, _clip(rho, 1 - clip[0], 1 + clip[1]) * a)
                low, high = a < 0 and rho0 < 1 - clip[0], a > 0 and rho0 > 1 + clip[1]
                if dual_clip is not None and a < 0:
                    dual = rho0 > dual_clip
                    value = _least(value, -dual_clip * a)
            elif surrogate == "cispo":
                value = -_clip(rho0, 1 - clip[0], 1 + clip[1]) * a * x[t]
                low, high = rho0 < 1 - clip[0], rho0 > 1 + clip[1]
            elif surrogate == "sapo":
                k = tau[0] if a > 0 else tau[1]
                value = -4 / k / (1 + _exp(-k * (rho - 1))) * a
            elif surrogate == "gmpo":
                parts = []
                for u in y:
                    sign = float(np.sign(A[i, u]))
                    v = lim(d[u])
                    parts.append(sign * _least(sign * v, sign * _clip(v, -clip[0], clip[1])))
                value = -_exp(_mean(parts)) * a
                rho0 = math.exp(_mean(parts).real)
                low, high = a < 0 and lim(d0[t]) < -clip[0], a > 0 and lim(d0[t]) > clip[1]
            elif surrogate == "vespo":
                log_v = math.fsum(lim(d0[u]) for u in y)
                if correction is not None:
                    log_v += math.fsum(_clip(math.log(max(weight[i, u], 1e-300)), math.log(1e-8), 20) for u in y)
                log_v = _clip(log_v, math.log(1e-8), 20)
                k, lam = (gamma.k_pos, gamma.lambda_pos) if a >= 0 else (gamma.k_neg, gamma.lambda_neg)
                value, w = -math.exp(lam + k * log_v - lam * math.exp(log_v)) * a * x[t], 1.0
                rho0 = math.exp(log_v)
            elif surrogate == "reinforce":
                value = -a * x[t]
            elif surrogate in ("dppo_tv", "dppo_kl"):
                p, o = math.exp(fz[i, t]), math.exp(before[i, t])
                if surrogate == "dppo_tv":
                    low, high = a <= 0 and p - o < -clip[0], a > 0 and p - o > clip[1]
                else:
                    k = o * (before[i, t] - fz[i, t]) + (1 - o) * math.log((1 - o + 1e-8) / (1 - p + 1e-8))
                    low, high = a <= 0 and k > clip[0] and p < o, a > 0 and k > clip[1] and p > o
                value = -a * min(r0, ratio_cap) * x[t] * (not (low or high))
                dual = r0 > ratio_cap and not (low or high)
            else:
                value = -(a * x[t] - dro_beta / 2 * d[t] ** 2)
            one = Token(value, w, omega[i, t], rho0, d0[t], low, high, dual)
            one.delta, one.missing = rolled.delta.get((i, t), 0.0), rolled.missing.get((i, t), False)
            one.outside = rolled.outside.get((i, t), False)
            if ref is not None:
                one.kl = kl_value(x[t] - float(ref[i, t]), kl, kl_clamp)
                own_ratio = surrogate in ("clip", "cispo", "sapo")
                one.kl_term = ((rho if own_ratio else r) if kl_importance else 1.0) * one.kl
            if entropy is not None:
                one.omega_entropy, one.entropy = omega_h[i, t], entropy[i, t].item()
            found.tokens[i, t] = one
    return found


def loss(*args, **options):
    """The scalar loss."""
    return evaluate(*args, **options).value


def gradient(lp, old, adv, mask, *, of="lp", **options):
    """d loss / d lp, or d loss / d entropy, by imaginary steps."""
    lp, h = np.asarray(lp, np.float64), 1e-30
    out = np.zeros_like(lp)
    for i, t in np.argwhere(mask):
        step = np.zeros(lp.shape, complex)
        step[i, t] = 1j * h
        if of == "lp":
            value = loss(lp + step, old, adv, mask, **options)
        else:
            value = loss(lp, old, adv, mask, **{**options, "entropy": options["entropy"] + step})
        out[i, t] = value.imag / h
    return out


def statistics(*args, **options):
    """Every statistic by name, from its formula; those of inputs that were not given are left out."""
    found = evaluate(*args, **options)
    x = list(found.tokens.values())
    n, vespo = max(len(x), 1), options["surrogate"] == "vespo"

    def mean(values):
        return math.fsum(values) / n

    v = [t.rho if vespo else t.rho * t.w for t in x]
    squares = math.fsum(t * t for t in v)
    out = {
        "tokens": len(x),
        "sequences": len({i for i, _ in found.tokens}),
        "policy_loss": math.fsum(t.omega * t.w * t.policy for t in x),
        "ratio_mean": mean(t.rho for t in x),
        "ratio_min": min((t.rho for t in x), default=0.0),
        "ratio_max": max((t.rho for t in x), default=0.0),
        "clip_low": mean(t.low for t in x),
        "clip_high": mean(t.high for t in x),
        "clip_dual": mean(t.dual for t in x),
        "approx_kl_k1": mean(-t.d for t in x),
        "approx_kl_k3": mean(_k3(t.d) for t in x),
        "effective_sample_size": math.fsum(v) ** 2 / n / squares if squares else 0.0,
    }
    if options.get("entropy") is not None:
        out["entropy"] = mean(t.entropy for t in x)
    if options.get("ref") is not None:
        out["kl_ref"] = mean(t.kl for t in x)
    if options.get("roll") is not None:
        out["rollout_kl"] = mean(_k3(t.delta) for t in x)
        out["rollout_missing"] = mean(t.missing for t in x)
    if options.get("correction") is not None:
        _, _, _, mask = args
        rolled = rollout(np.asarray(args[0] if args[1] is None else args[1]), options["roll"], mask,
                         options["correction"], options.get("rejection"))  # fmt: skip
        out["correction_mean"] = mean(rolled.weight.values())
        out["correction_clipped"] = mean(rolled.outside.values())
    if options.get("rejection") is not None:
        out["rejected"] = (found.offered - len(x)) / max(found.offered, 1)
    return out
