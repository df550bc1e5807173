"""One coefficient function for every policy loss: value and exact derivatives of a token, as its formulas say.

`surrogate` gives the policy term l, dl/d(ratio) to be carried along the ratio, dl/d(logprob) with the ratio held fixed,
and where it was held at a bound; `estimate` a KL estimator and its slope. policy_loss and linear_policy_loss, forward
and backward, call these and nothing else. Formulas: rlkernel_core/spec/policy_loss.py and the sources in its KINDS.
"""

from rlkernel_triton.common.language import tl, triton

LOG_FLOOR = tl.constexpr(-18.420680743952367)  # VESPO keeps its sequence weight within [1e-8, e^20]
EXPONENT_LIMIT = tl.constexpr(20.0)


@triton.jit
def above(x, e):
    """e^x - 1 - x >= 0 without the cancellation; e is e^x."""
    series = 1.0 / 5040 + x * (1.0 / 40320)
    series = 1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x * series))
    series = x * x * (0.5 + x * (1.0 / 6 + x * series))
    return tl.where(tl.abs(x) < 0.5, series, e - 1.0 - x)


@triton.jit
def within(x, low, high):
    """The nearest number in [low, high]; NaN stays."""
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def surrogate(
    lp, old, d, rho, A, low_bound, high_bound, dual_bound, tau_pos, tau_neg, k_pos, k_neg, lam_pos, lam_neg,
    cap, beta, KIND: tl.constexpr, DUAL: tl.constexpr,
):  # fmt: skip
    """(value, through, direct, low, high, dual); d is the log-ratio within its limit, rho the ratio of the kind."""
    none = (A > 0) & (A < 0)
    zero = A * 0.0
    through, direct, low, high, dual = zero, zero, none, none, none
    if KIND == "clip":
        lower, upper = 1.0 - low_bound, 1.0 + high_bound
        low, high = (A < 0) & (rho < lower), (A > 0) & (rho > upper)
        held = tl.where(high, upper, tl.where(low, lower, rho))
        if DUAL:
            dual = (A < 0) & (rho > dual_bound)
            held = tl.where(dual, dual_bound, held)
        value = tl.where(A != 0, -held * A, 0.0)  # 0 where the ratio is infinite, too
        through = tl.where(low | high | dual, 0.0, -A)
    elif KIND == "sapo":
        tau = tl.where(A > 0, tau_pos, tau_neg)
        x = tau * (rho - 1.0)
        gate = tl.sigmoid(x)
        value = -4.0 / tau * gate * A
        through = -4.0 * gate * tl.sigmoid(-x) * A
    elif KIND == "gmpo":
        low, high = (A < 0) & (d < -low_bound), (A > 0) & (d > high_bound)
        value, through = -rho * A, -A
    elif KIND == "cispo":
        lower, upper = 1.0 - low_bound, 1.0 + high_bound
        direct = -within(rho, lower, upper) * A
        value, low, high = direct * lp, rho < lower, rho > upper
    elif KIND == "vespo":
        k, lam = tl.where(A >= 0, k_pos, k_neg), tl.where(A >= 0, lam_pos, lam_neg)
        direct = -tl.exp(lam + k * tl.log(rho) - lam * rho) * A
        value = direct * lp
    elif KIND == "reinforce":
        direct = -A
        value = direct * lp
    elif KIND == "dro":
        value, direct = -(A * lp - 0.5 * beta * d * d), -A + beta * d
    else:
        p, before = tl.exp(lp), tl.exp(old)
        if KIND == "dppo_tv":
            too_high, too_low = p - before > high_bound, p - before < -low_bound
        else:
            # KL of two coins, old against current; 1e-8 as in verl.
            kl = before * (old - lp) + (1.0 - before) * tl.log((1.0 - before + 1e-8) / (1.0 - p + 1e-8))
            too_high, too_low = (kl > high_bound) & (p > before), (kl > low_bound) & (p < before)
        high, low = (A > 0) & too_high, (A <= 0) & too_low
        held = tl.where(rho > cap, cap, rho)
        direct = tl.where(high | low, 0.0, -held * A)
        value, dual = direct * lp, (rho > cap) & ((high | low) == 0)
    return value, through, direct, low, high, dual


@triton.jit
def estimate(q, input_clamp, clamp, KL: tl.constexpr, STRAIGHT: tl.constexpr):
    """Value and slope of a KL estimator at q = logprob - ref; STRAIGHT takes the slope of k2."""
    if KL == "k1":
        value, slope = q, q * 0.0 + 1.0
    elif KL == "abs":
        value, slope = tl.abs(q), tl.where(q > 0, 1.0, tl.where(q < 0, -1.0, 0.0))
    elif KL == "k2":
        value, slope = 0.5 * q * q, q
    elif KL == "k3":
        value = above(-q, tl.exp(-q))
        slope = q - value  # 1 - e^-q
    else:
        x = within(q, -input_clamp, input_clamp)
        full = above(-x, tl.exp(-x))
        value = tl.where(full > clamp, clamp, full)
        slope = tl.where((tl.abs(q) <= input_clamp) & (full <= clamp), x - full, 0.0)
    if STRAIGHT:
        slope = q
    return value, slope
