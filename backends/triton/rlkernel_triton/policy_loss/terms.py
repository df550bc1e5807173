"""One coefficient function for every policy loss: value and exact derivatives of a token, as its formulas say.

`surrogate` gives the policy term l, dl/d(ratio), dl/d(logprob) with the ratio held fixed, and where it was held at a
bound; `kl_estimate` a KL estimator and its derivative. policy_loss and linear_policy_loss, forward and backward, call
these and nothing else. Formulas: rlkernel_core/spec/policy_loss.py and the sources in its KINDS.
"""

from rlkernel_triton.common.language import tl, triton

LOG_FLOOR = tl.constexpr(-18.420680743952367)  # VESPO keeps its sequence weight within [1e-8, e^20]
EXPONENT_LIMIT = tl.constexpr(20.0)


@triton.jit
def expm1_minus_x(x, e):
    """e^x - 1 - x >= 0 without the cancellation; e is e^x."""
    series = 1.0 / 5040 + x * (1.0 / 40320)
    series = 1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x * series))
    series = x * x * (0.5 + x * (1.0 / 6 + x * series))
    return tl.where(tl.abs(x) < 0.5, series, e - 1.0 - x)


@triton.jit
def clamp(x, low, high):
    """The nearest number in [low, high]; NaN stays."""
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def surrogate(
    logp, old, log_ratio, rho, A, low_bound, high_bound, dual_bound, tau_pos, tau_neg, k_pos, k_neg, lam_pos, lam_neg,
    cap, beta, KIND: tl.constexpr, DUAL: tl.constexpr,
):  # fmt: skip
    """(value, d_ratio, d_logprob, low, high, dual); log_ratio lies within its limit, rho is the ratio of the kind."""
    none = (A > 0) & (A < 0)
    zero = A * 0.0
    d_ratio, d_logprob, low, high, dual = zero, zero, none, none, none
    if KIND == "clip":
        lower, upper = 1.0 - low_bound, 1.0 + high_bound
        low, high = (A < 0) & (rho < lower), (A > 0) & (rho > upper)
        held = tl.where(high, upper, tl.where(low, lower, rho))
        if DUAL:
            dual = (A < 0) & (rho > dual_bound)
            held = tl.where(dual, dual_bound, held)
        value = tl.where(A != 0, -held * A, 0.0)  # 0 where the ratio is infinite, too
        d_ratio = tl.where(low | high | dual, 0.0, -A)
    elif KIND == "sapo":
        tau = tl.where(A > 0, tau_pos, tau_neg)
        x = tau * (rho - 1.0)
        gate = tl.sigmoid(x)
        value = -4.0 / tau * gate * A
        d_ratio = -4.0 * gate * tl.sigmoid(-x) * A
    elif KIND == "gmpo":
        low, high = (A < 0) & (log_ratio < -low_bound), (A > 0) & (log_ratio > high_bound)
        value, d_ratio = -rho * A, -A
    elif KIND == "cispo":
        lower, upper = 1.0 - low_bound, 1.0 + high_bound
        d_logprob = -clamp(rho, lower, upper) * A
        value, low, high = d_logprob * logp, rho < lower, rho > upper
    elif KIND == "vespo":
        k, lam = tl.where(A >= 0, k_pos, k_neg), tl.where(A >= 0, lam_pos, lam_neg)
        d_logprob = -tl.exp(lam + k * tl.log(rho) - lam * rho) * A
        value = d_logprob * logp
    elif KIND == "reinforce":
        d_logprob = -A
        value = d_logprob * logp
    elif KIND == "dro":
        value, d_logprob = -(A * logp - 0.5 * beta * log_ratio * log_ratio), -A + beta * log_ratio
    else:
        p, before = tl.exp(logp), tl.exp(old)
        if KIND == "dppo_tv":
            too_high, too_low = p - before > high_bound, p - before < -low_bound
        else:
            # KL of two coins, old against current; 1e-8 as in verl.
            kl = before * (old - logp) + (1.0 - before) * tl.log((1.0 - before + 1e-8) / (1.0 - p + 1e-8))
            too_high, too_low = (kl > high_bound) & (p > before), (kl > low_bound) & (p < before)
        high, low = (A > 0) & too_high, (A <= 0) & too_low
        held = tl.where(rho > cap, cap, rho)
        d_logprob = tl.where(high | low, 0.0, -held * A)
        value, dual = d_logprob * logp, (rho > cap) & ((high | low) == 0)
    return value, d_ratio, d_logprob, low, high, dual


@triton.jit
def kl_estimate(q, max_q, max_kl, KL: tl.constexpr, STRAIGHT_THROUGH: tl.constexpr):
    """Value and derivative of a KL estimator at q = logprob - ref; STRAIGHT_THROUGH takes the derivative of k2."""
    if KL == "k1":
        value, dkl = q, q * 0.0 + 1.0
    elif KL == "abs":
        value, dkl = tl.abs(q), tl.where(q > 0, 1.0, tl.where(q < 0, -1.0, 0.0))
    elif KL == "k2":
        value, dkl = 0.5 * q * q, q
    elif KL == "k3":
        value = expm1_minus_x(-q, tl.exp(-q))
        dkl = q - value  # 1 - e^-q
    else:
        x = clamp(q, -max_q, max_q)
        full = expm1_minus_x(-x, tl.exp(-x))
        value = tl.where(full > max_kl, max_kl, full)
        dkl = tl.where((tl.abs(q) <= max_q) & (full <= max_kl), x - full, 0.0)
    if STRAIGHT_THROUGH:
        dkl = q
    return value, dkl
