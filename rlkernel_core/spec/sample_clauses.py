"""What an implementation of sampling may claim, what is attacked, how close is close: the tables of sample@1.

lm_head_sample@1 and verify@1 share the features and the tolerances. Imports no torch.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.spec.form import BATCH_INVARIANT, CAPTURABLE, DETERMINISTIC, Clause, Feature, Tolerance

PHILOX: Final = Feature(
    "noise:philox4x32-10",
    "noise is the contract's function of (seed, step, id): a request draws the same token on every backend that claims "
    "it, wherever its row stands",
)
TRAINER_BITS: Final = Feature(
    "trainer_bits",
    "logprob + log_kept_mass has the bits of this backend's logprob@1 of the same logits, token and temperature, and "
    "raw_logprob those at temperature 1, wherever these are finite",
)
FEATURES: Final = (
    DETERMINISTIC,
    BATCH_INVARIANT,
    CAPTURABLE,
    PHILOX,
    Feature("per_row_parameters", "temperature, top_k, top_p or min_p as a tensor, one entry per row"),
    Feature("top_k", "exactly k kept, ties to the lowest id"),
    Feature("top_p", "nucleus on the renormalized survivors, crossing token kept"),
    Feature("min_p", "tokens below min_p times the best probability dropped"),
    Feature("penalties", "repetition, frequency and presence penalties from a sparse history"),
    Feature("allowed", "bitmask of the tokens that may be drawn"),
    Feature("banned", "ragged list of the tokens that may not be drawn"),
    Feature("filter_order:joint", "top-k and top-p both on the tempered law"),
    Feature("filter_order:topp_topk", "top-p before top-k"),
    Feature("tie:keep_all", "ties with the last kept token are kept"),
    Feature("vocab_size", "padding columns beyond the vocabulary"),
    Feature("slot", "parameters by state slot, padding rows"),
    Feature("raw_logprob", "log-probability under the law of the logits as given"),
    Feature("top_n:raw", "the n best tokens and the rank of the drawn one under the raw law"),
    Feature("top_n:processed", "the n best tokens and the rank of the drawn one under the processed law"),
    Feature("entropy", "entropy of the processed law"),
    Feature("kept_ids", "the kept ids, up to a capacity"),
    Feature("stream", "another noise stream than the target's"),
)

# Title, text and judgment of a clause that sampling operators have, whatever their noise is.
REPEATS: Final = (
    "draws repeat",
    "the same logits, seed and step in the same row of the same call draw the same token, whatever was drawn before",
    "determinism",
)
_FP32: Final = "a sum of fp32 exponentials, its logarithm and one subtraction; relative to max(1, |log p|)"

TOLERANCES: Final = (
    *(
        Tolerance(output, dtype, 2e-6, 2e-6, _FP32)
        for output in ("logprob", "log_kept_mass", "raw_logprob")
        for dtype in ("float32", "bfloat16", "float16")
    ),
    Tolerance("logprob", "float64", 1e-12, 1e-12, "float64 throughout"),
    Tolerance("log_kept_mass", "float64", 1e-12, 1e-12, "float64 throughout"),
    Tolerance("raw_logprob", "float64", 1e-12, 1e-12, "float64 throughout"),
    Tolerance("entropy", "float32", 2e-5, 2e-6, "one more weighted sum than logprob"),
    Tolerance("entropy", "float64", 1e-12, 1e-12, "float64 throughout"),
    Tolerance("top_p", "float32", 2e-6, 0.0, "mass of a token before which the nucleus may end either way"),
    Tolerance(
        "min_p", "float32", 2e-6, 2e-7, "y near ln(min_p), in nats: fp32 rounding of a difference, a quotient, a log"
    ),
    Tolerance("score", "float32", 4e-6, 0.0, "gap of the two best noised scores below which either may win"),
)

CLAUSES: Final = (
    Clause("SA-01", "token is kept", "the token is in the kept set of the float64 definition", "law"),
    Clause("SA-02", "noise", "the token is the argmax of y + g over the kept set, g as defined", "law", PHILOX.name),
    Clause("SA-03", "law", "over steps, tokens follow the processed law (chi-square, stated alpha)", "law"),
    Clause("SA-04", "rare events", "tokens 14 and 18 nats below the best keep their frequency", "law"),
    Clause("SA-05", "log-probability", "logprob is within tolerance of the float64 definition", "accuracy"),
    Clause("SA-06", "kept mass", "logprob + log_kept_mass is the tempered log-probability", "accuracy"),
    Clause("SA-07", "greedy", "T = 0 is the argmax of lowest id, logprob 0, and equals top_k = 1", "law"),
    Clause(
        "SA-08",
        "neutral values",
        "top_k <= 0 or >= V, top_p >= 1, min_p <= 0, penalties (1, 0, 0) and bias 0 change no bit of any result",
        "invariance",
    ),
    Clause("SA-09", "top-k", "kept_count = min(k, tokens left); ties go to the lowest ids", "law", "top_k"),
    Clause("SA-10", "top-p", "kept iff the mass before it is below p; the first is always kept", "law", "top_p"),
    Clause("SA-11", "min-p", "kept iff y >= ln(min_p); the first is always kept", "law", "min_p"),
    Clause("SA-12", "monotone", "a larger k or p, or a smaller min_p, keeps a superset", "law", "top_k"),
    Clause("SA-13", "joint order", "top-k and top-p on the tempered law, intersected", "law", "filter_order:joint"),
    Clause("SA-14", "top-p first", "top-p, then top-k", "law", "filter_order:topp_topk"),
    Clause("SA-15", "keep ties", "everything tied with the last kept token is kept", "law", "tie:keep_all"),
    Clause("SA-16", "parameters per row", "equals one call per row", "invariance", "per_row_parameters"),
    Clause("SA-17", "penalties", "the formulas of steps 4 and 5, bit for bit in x", "law", "penalties"),
    Clause("SA-18", "bias", "x += bias; -inf stays; repeated ids add; foreign ids are ignored", "law", "bias"),
    Clause("SA-19", "allowed", "a token whose bit is 0 is never drawn, for any noise word", "law", "allowed"),
    Clause("SA-20", "banned", "a banned token is never drawn, for any noise word", "law", "banned"),
    Clause("SA-21", "padding columns", "columns from vocab_size on change nothing", "invariance", "vocab_size"),
    Clause("SA-22", "slots", "equals the call with parameters gathered; padding rows give 0", "law", "slot"),
    Clause(
        "SA-23",
        "degenerate rows",
        "NaN, +inf, all -inf, ±3e38, denormals, equal logits: the stated result and status; ids in [0, V) or "
        "invalid_token; other rows keep their bits",
        "accuracy",
    ),
    Clause("SA-24", "parameters without meaning", "PARAM and no draw in that row only", "refusal"),
    Clause("SA-25", "raw law", "raw_logprob depends on the logits and the token alone", "accuracy", "raw_logprob"),
    Clause("SA-26", "top n raw", "the n best by (logit descending, id ascending); rank", "accuracy", "top_n:raw"),
    Clause("SA-27", "top n processed", "the same among the kept; rank", "accuracy", "top_n:processed"),
    Clause("SA-28", "entropy", "of the processed law, in [0, log kept_count]", "accuracy", "entropy"),
    Clause(
        "SA-29",
        "kept ids",
        "best first, -1 behind; logprob does not depend on the capacity; KEPT_OVERFLOW iff kept_count exceeds it; "
        "threshold and threshold_id describe the same set",
        "accuracy",
        "kept_ids",
    ),
    Clause(
        "SA-30", "streams", "streams differ; with the noise of the contract, stream s uses its word s", "law", "stream"
    ),
    Clause(
        "SA-31",
        "place independence",
        "a request draws the same token in any batch, row, slot, stride or dtype of equal values",
        "invariance",
        PHILOX.name,
    ),
    Clause("SA-32", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
    Clause("SA-33", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
    Clause("SA-34", "capture", "replays with new logits, parameters and steps as eager", "capture", "capturable"),
    Clause("SA-35", "coupling", "the unfiltered winner wins every filtered draw that keeps it", "law", PHILOX.name),
    Clause("SA-36", "inputs untouched", "no argument, global generator or default is written to", "side_effect"),
    Clause("SA-37", "no rows", "N = 0 gives empty results", "accuracy"),
    Clause(
        "SA-38",
        "bad arguments",
        "wrong rank, size, dtype, number, shared noise: ArgumentError naming it",
        "refusal",
    ),
    Clause("SA-39", *REPEATS),
    Clause(
        "SA-40",
        "one law",
        "logprob + log_kept_mass is bit for bit what this backend's logprob@1 says of the token at the temperature, "
        "raw_logprob what it says at temperature 1; both shares are <= 0",
        "invariance",
        TRAINER_BITS.name,
    ),
    Clause(
        "SA-41",
        "masked by a number",
        "one finite number far below the others, down to the least of the dtype, in neighboring ids, in every other "
        "one or in all but some of a row: token, logprob, log_kept_mass and raw_logprob are the definition's",
        "accuracy",
    ),
)
