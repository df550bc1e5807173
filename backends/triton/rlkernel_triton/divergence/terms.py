"""Terms of divergences and their derivatives, from logarithms of base 2: `rlkernel_common.divergences` for kernels.

A term and its s w belong to one mass of either side: an id, or a tail of ids. -inf stands for no mass.
"""

from __future__ import annotations

from rlkernel_triton.common.arithmetic import LN2
from rlkernel_triton.common.language import tl, triton


@triton.jit
def kl_term(a, log_a, b, log_b):
    """The term a log(a / b) - a + b, never negative. a and b are 2^log_a and 2^log_b."""
    d = (log_a - log_b) * LN2
    # a (d - 1 + e^-d): where d is small a series, as the rest would cancel; to 1e-8 of it at |d| = 0.25.
    close = 1.0 / 24 - d * (1.0 / 120 - d * (1.0 / 720 - d * (1.0 / 5040)))
    close = a * (d * d) * (0.5 - d * (1.0 / 6 - d * close))
    term = tl.where(tl.abs(d) < 0.25, close, a * (d - 1.0) + b)
    term = tl.where(d == float("inf"), float("inf"), term)  # also where a itself is below the least number
    return tl.where(log_a == float("-inf"), b, term)


@triton.jit
def times_log(a, log_a, log_b):
    """The product a log(a / b), 0 where a is none."""
    return tl.where(log_a == float("-inf"), 0.0, a * ((log_a - log_b) * LN2))


@triton.jit
def term_and_derivative(
    log_s,  # of any shape
    log_t,
    beta,
    log_beta,  # of base 2
    log_rest,  # of 1 - beta
    KIND: tl.constexpr,
):
    """(term of the divergence, its derivative with respect to the natural logarithm of s)."""
    s, t = tl.exp2(log_s), tl.exp2(log_t)
    if KIND == "forward_kl":
        return kl_term(t, log_t, s, log_s), -t
    if KIND == "reverse_kl":
        return kl_term(s, log_s, t, log_t), times_log(s, log_s, log_t)
    if KIND == "jsd":
        x, y = log_t + log_beta, log_s + log_rest
        top = tl.maximum(x, y)
        log_m = tl.where(top == float("-inf"), top, top + tl.log2(1.0 + tl.exp2(tl.minimum(x, y) - top)))
        m = tl.exp2(log_m)
        term = beta * kl_term(t, log_t, m, log_m) + (1.0 - beta) * kl_term(s, log_s, m, log_m)
        return term, (1.0 - beta) * times_log(s, log_s, log_m)
    return 0.5 * tl.abs(s - t), 0.5 * s * ((s > t).to(tl.float32) - (s < t).to(tl.float32))
