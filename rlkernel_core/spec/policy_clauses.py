"""The numbered clauses of policy_loss@1: what the conformance suite attacks.

Imports no torch.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.spec.form import CAPTURABLE, DETERMINISTIC, Clause

CLAUSES: Final = (
    Clause(
        "PL-01", "matches float64", "loss, and statistics where claimed, are within tolerance of float64", "accuracy"
    ),
    Clause("PL-02", "gradient", "the gradients of logprob and entropy match float64", "gradient", "grad"),
    Clause(
        "PL-03",
        "on-policy gradient",
        "where old equals the current log-probability, the clipped kinds' gradient is -omega A at every token",
        "law",
        "grad",
    ),
    Clause("PL-04", "every kind", "each claimed kind has the value and gradient of its formula", "accuracy"),
    Clause(
        "PL-05",
        "clip bounds are two",
        "low bounds the ratio where A < 0, high where A > 0; a clipped token has policy gradient 0",
        "law",
    ),
    Clause("PL-06", "dual clip", "where A < 0 the loss is at most -c A, gradient 0 beyond", "law", "dual_clip"),
    Clause(
        "PL-07",
        "sequence ratio",
        "one ratio per sequence, the exponential of the mean log-ratio over its unmasked tokens, whose gradient "
        "reaches every token of the sequence",
        "law",
        "level:sequence",
    ),
    Clause(
        "PL-08",
        "gspo_token is gspo",
        "with one advantage per sequence and seq_mean_token_mean, gspo_token and gspo have equal loss and gradient",
        "law",
        "kind:gspo_token",
    ),
    Clause(
        "PL-09",
        "every argument has an effect",
        "changing any one argument changes loss, gradient or statistics, or is refused",
        "law",
    ),
    Clause(
        "PL-10",
        "options of other kinds are refused",
        "an option that a kind does not have raises ArgumentError; none is ignored",
        "refusal",
    ),
    Clause(
        "PL-11",
        "ranks add up",
        "with the global count as denominator, losses and gradients of any split into ranks sum to those of the whole",
        "law",
    ),
    Clause("PL-12", "local denominators", "without one, n and S count the unmasked tokens and sequences", "accuracy"),
    Clause("PL-13", "empty sequences", "a sequence without tokens counts only where count_empty says so", "law"),
    Clause(
        "PL-14",
        "nothing to learn from",
        "a batch with no unmasked token has loss 0, statistics 0, and a connected gradient of zeros",
        "gradient",
        "mask",
    ),
    Clause(
        "PL-15",
        "mask selects",
        "NaN, inf and uninitialized memory under the mask change no bit and get gradient 0",
        "law",
        "mask",
    ),
    Clause("PL-16", "packed is padded", "packed and padded forms of a batch agree within tolerance", "law", "packed"),
    Clause(
        "PL-17",
        "tail of a packed batch",
        "tokens from cu_seqlens[-1] on are as masked",
        "law",
        "packed",
    ),
    Clause("PL-18", "on-policy default", "old_logprob=None equals passing the log-probabilities", "law", "on_policy"),
    Clause(
        "PL-19", "KL estimators", "value and gradient of each estimator, clamps and straight-through included", "law"
    ),
    Clause(
        "PL-20",
        "KL with importance",
        "the KL term times the ratio, differentiated as a product; for k3 per token the gradient is r q",
        "law",
        "kl_importance",
    ),
    Clause("PL-21", "entropy bonus", "lowers the loss by coef times the aggregated entropy", "law", "entropy"),
    Clause(
        "PL-22",
        "corrections",
        "the weight multiplies the policy term only, has no gradient, and leaves denominators as they are",
        "law",
        "correction",
    ),
    Clause(
        "PL-23",
        "rejections",
        "a rejected token is as masked: in loss, KL, entropy, sequence means and local denominators",
        "law",
        "rejection",
    ),
    Clause(
        "PL-24",
        "unknown rollout log-probabilities",
        "NaN in rollout_logprob at an unmasked token counts as equal to old, and is reported",
        "law",
        "rollout",
    ),
    Clause(
        "PL-25",
        "statistics",
        "each statistic is its formula; none carries a gradient or synchronizes",
        "accuracy",
        "stats",
    ),
    Clause("PL-26", "large log-ratios", "log-ratios of +-1e4 give finite loss and gradient", "accuracy"),
    Clause(
        "PL-27",
        "any layout",
        "strided and expanded tensors give what contiguous ones give, within tolerance",
        "invariance",
    ),
    Clause(
        "PL-28",
        "sequence order",
        "permuting sequences permutes gradients and changes the loss by rounding",
        "invariance",
    ),
    Clause("PL-29", "no tokens at all", "B = 0, T = 0 and N = 0 work", "accuracy"),
    Clause(
        "PL-30",
        "inputs untouched",
        "no argument is written to; global RNG, default dtype and device stay",
        "side_effect",
    ),
    Clause(
        "PL-31",
        "constants stay constants",
        "an old, reference or rollout tensor that requires grad is refused",
        "refusal",
    ),
    Clause("PL-32", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
    Clause("PL-33", "capture", CAPTURABLE.text, "capture", "capturable"),
    Clause(
        "PL-34", "bad arguments", "wrong rank, sizes, dtype or value raise ArgumentError naming the argument", "refusal"
    ),
    Clause(
        "PL-35",
        "ranks are one batch",
        "a batch split over ranks, between sequences or as tokens anywhere, one rank without tokens, has on every rank "
        "the loss and statistics of the whole, and the mean of the ranks' gradients is its gradient",
        "law",
        "process_group",
    ),
    Clause(
        "PL-36", "ranks agree", "all ranks get the same bits for loss and statistics", "invariance", "process_group"
    ),
    Clause(
        "PL-37",
        "two collectives",
        "a call makes at most two, as many on every rank, and its backward pass none",
        "side_effect",
        "process_group",
    ),
)
