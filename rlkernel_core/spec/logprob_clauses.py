"""The numbered clauses of logprob@1: what the conformance suite attacks.

Imports no torch.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.spec.form import BATCH_INVARIANT, DETERMINISTIC, Clause

CLAUSES: Final = (
    Clause(
        "LP-01",
        "matches float64",
        "log p, and lse where claimed, are within tolerance of the float64 definition",
        "accuracy",
    ),
    Clause(
        "LP-02",
        "confident rows keep precision",
        "where p_id is near 1, log p has relative error <= 1e-4 and is never positive",
        "accuracy",
    ),
    Clause("LP-03", "any vocabulary size", "V is no multiple of anything: every column counts once", "accuracy"),
    Clause(
        "LP-04",
        "shift invariance",
        "adding a constant to a row changes log p and entropy within tolerance only, "
        "for rows far below and far above 0",
        "invariance",
    ),
    Clause("LP-05", "probabilities sum to one", "exp(log p) over all ids of a row sums to 1", "accuracy"),
    Clause("LP-06", "vocabulary permutation", "permuting the vocabulary permutes ids and nothing else", "invariance"),
    Clause(
        "LP-07",
        "minus infinity",
        "-inf logits have probability 0, with a softcap too, and add 0 to the entropy and its gradient",
        "accuracy",
    ),
    Clause(
        "LP-08",
        "temperature once",
        "temperature t on logits equals temperature 1 on logits / t, for log p and entropy alike",
        "law",
    ),
    Clause(
        "LP-09",
        "temperature per row",
        "a tensor of temperatures equals one call per row",
        "law",
        "per_row_temperature",
    ),
    Clause("LP-10", "softcap before temperature", "z = c tanh(logits / c) / T", "law", "softcap"),
    Clause(
        "LP-11",
        "mask selects",
        "a masked row gives 0 and gradient 0 though it holds NaN, inf or ids out of range",
        "law",
        "mask",
    ),
    Clause("LP-12", "entropy", "entropy matches float64, lies in [0, log V]", "accuracy", "entropy"),
    Clause("LP-13", "gradient", "the gradient of log p, lse and entropy matches float64", "gradient", "grad"),
    Clause(
        "LP-14",
        "gradient of a row sums to zero",
        "d log p / d logits sums to 0 over the vocabulary",
        "gradient",
        "grad",
    ),
    Clause(
        "LP-15",
        "top-n",
        "the n best ids by (logit descending, id ascending), with their log p",
        "accuracy",
        "top_logprobs",
    ),
    Clause(
        "LP-16",
        "support",
        "log p renormalized over the kept ids; log p + log_kept_mass is the tempered log p",
        "law",
        "support",
    ),
    Clause(
        "LP-17",
        "out-of-range ids",
        "an unmasked id or kept id out of range gives NaN, gradient 0 and a flag, never 0, and disturbs no "
        "other row; validate=True raises ArgumentError",
        "refusal",
    ),
    Clause("LP-18", "any layout", "strided views and padded rows give the bits of contiguous input", "invariance"),
    Clause("LP-19", "no rows", "N = 0 gives empty results and a zero gradient", "accuracy"),
    Clause(
        "LP-20",
        "inputs untouched",
        "no argument is written to; global RNG, default dtype and device stay",
        "side_effect",
    ),
    Clause("LP-21", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
    Clause("LP-22", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
    Clause(
        "LP-23",
        "capture",
        "the call can be captured in a graph and replays with new inputs",
        "capture",
        "capturable",
    ),
    Clause(
        "LP-24",
        "bad arguments",
        "wrong rank, sizes, dtype or temperature <= 0 raise ArgumentError naming the argument; "
        "so does a temperature that requires a gradient",
        "refusal",
    ),
    Clause(
        "LP-25",
        "rows without a law",
        "NaN, +inf or all -inf logits, or a temperature that is not positive and finite, give NaN in their own row "
        "and change no bit of another",
        "law",
    ),
    Clause(
        "LP-26",
        "gradients on and off agree",
        "log p with a gradient wanted and without one are the same bits: an on-policy ratio is exactly 1",
        "invariance",
        "grad",
    ),
    Clause(
        "LP-27",
        "masked and invalid rows ignore the upstream gradient",
        "their gradient is 0 though the upstream gradient is NaN",
        "gradient",
        "grad",
    ),
    Clause(
        "LP-28",
        "several ids",
        "log p of each of K ids of a row is within tolerance of float64, with relative error <= 1e-4 where p is "
        "near 1, repeated ids alike; one id in a list has the bits of that id alone",
        "accuracy",
        "many_ids",
    ),
    Clause(
        "LP-29",
        "gradient of several ids",
        "the gradient is that of the sum over the K ids, repeated ids included, beside that of lse and entropy",
        "gradient",
        "many_ids",
    ),
    Clause(
        "LP-30",
        "absent and invalid ids of several",
        "-1 gives 0; another id out of range gives NaN and its own flag; both have gradient 0 though the upstream "
        "gradient is NaN, the other ids of their row stay, and a masked row gives 0",
        "law",
        "many_ids",
    ),
    Clause(
        "LP-31",
        "shards equal the whole",
        "logits split over ranks give the values and gradients of the whole rows within tolerance, whatever the sizes "
        "of the shards, on confident rows too; ids that lie on another rank or on none, -inf and NaN included",
        "law",
        "group",
    ),
    Clause("LP-32", "one rank is the plain call", "a group of one gives the same bits as no group", "law", "group"),
    Clause("LP-33", "ranks agree", "all ranks of a group get the same bits", "determinism", "group"),
    Clause(
        "LP-34",
        "few collectives",
        "two collectives on the way forward, three with several ids per row, and none on the way back",
        "side_effect",
        "group",
    ),
    Clause(
        "LP-35",
        "logits of 8 bits",
        "results are those of float32(logits) times the scale, one in all or one per row, subnormal codes included; a "
        "scale that is not positive and finite gives NaN in its row and changes no bit of another",
        "law",
        "logits_scale",
    ),
    Clause(
        "LP-37",
        "lists of any length",
        "log p of each entry of a list is within tolerance of float64, with relative error <= 1e-4 where p is near 1; "
        "an empty list has none, an entry beyond the last offset gives 0; with many_ids the bits are those of the same "
        "lists padded to one length",
        "accuracy",
        "ragged_ids",
    ),
    Clause(
        "LP-38",
        "gradient of lists of any length",
        "the gradient is that of the sum over each row's list, repeated ids included, beside that of lse and entropy; "
        "-1, an id out of range, which gives NaN and its own flag, entries of masked rows and those beyond the last "
        "offset have gradient 0 though the upstream gradient is NaN; validate=True refuses offsets that no lists have",
        "gradient",
        "ragged_ids",
    ),
    Clause(
        "LP-39",
        "masked by a number",
        "one finite number far below the others, down to the least of the dtype, in neighboring ids, in every other "
        "one or in all but some of a row, gives what float64 gives: results and gradients of the others are those "
        "beside -inf, and log p of a masked id is about its own logit",
        "accuracy",
    ),
)
