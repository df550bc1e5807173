"""What implementations of linear_logprob@1 are held to: its clauses and tolerances."""

from __future__ import annotations

from typing import Final

from rlkernel_core.spec.form import BATCH_INVARIANT, DETERMINISTIC, Clause, Tolerance

CLAUSES: Final = (
    Clause("LL-01", "matches float64", "log p, lse are within tolerance of the float64 definition", "accuracy"),
    Clause(
        "LL-02",
        "logits are not rounded",
        "with 16-bit operands log p is as accurate as fp32 logits make it, far below one rounding to 16 bits",
        "accuracy",
    ),
    Clause(
        "LL-03",
        "confident rows keep precision",
        "where p_id is near 1, log p has relative error <= 1e-4 given the fp32 logits, and is never positive",
        "accuracy",
    ),
    Clause("LL-04", "any vocabulary size", "V is no multiple of anything: every column counts once", "accuracy"),
    Clause(
        "LL-05",
        "memory constant in N",
        "peak memory beyond inputs, results and gradients does not grow with N, but for a few numbers per row",
        "side_effect",
        "backward:recompute",
    ),
    Clause(
        "LL-06",
        "the modes agree",
        "save, recompute and auto give the same log p and gradients within tolerance",
        "law",
        "backward:save",
    ),
    Clause(
        "LL-07",
        "the limit is kept",
        "peak extra memory stays below max_workspace_bytes; below the minimum an ArgumentError names it",
        "refusal",
        "max_workspace_bytes",
    ),
    Clause(
        "LL-08",
        "equals logprob",
        "linear_logprob(h, w, ids) equals logprob(h @ w.T, ids) for the same options",
        "law",
    ),
    Clause("LL-09", "bias, scale, cap, temperature", "z = cap((h @ w.T + bias) * logit_scale) / T", "law", "softcap"),
    Clause("LL-10", "bias", "a bias shifts logits; -inf forbids an id, with a softcap too", "law", "bias"),
    Clause("LL-11", "scale", "logit_scale s equals hidden * s", "law", "logit_scale"),
    Clause(
        "LL-12",
        "temperature per row",
        "a tensor of temperatures equals one call per row",
        "law",
        "per_row_temperature",
    ),
    Clause(
        "LL-13",
        "mask selects",
        "a masked row gives 0 and gradient 0 though hidden holds NaN and ids are out of range; dW gets nothing",
        "law",
        "mask",
    ),
    Clause("LL-14", "entropy", "entropy matches float64, lies in [0, log V]", "accuracy", "entropy"),
    Clause(
        "LL-15",
        "support",
        "log p renormalized over the kept ids; log p + log_kept_mass is the tempered log p",
        "law",
        "support",
    ),
    Clause("LL-16", "gradient", "dX, dW and dbias match float64, each with its own upstream", "gradient", "grad"),
    Clause(
        "LL-17",
        "gradients accumulate in fp32",
        "the error of dX and dW does not grow with the number of tiles",
        "gradient",
        "grad",
    ),
    Clause(
        "LL-18",
        "frozen operands",
        "an operand that requires no gradient gets none, and the others' gradients do not change",
        "gradient",
        "grad",
    ),
    Clause(
        "LL-19",
        "gradients on and off agree",
        "log p with a gradient wanted and without one are the same bits: an on-policy ratio is exactly 1",
        "invariance",
        "grad",
    ),
    Clause(
        "LL-20",
        "shards equal the whole",
        "a vocabulary split over ranks gives the results of one rank within tolerance, whatever the sizes of the "
        "shards, an id that lies on another rank included",
        "law",
        "group",
    ),
    Clause("LL-21", "one rank is the plain call", "a group of one gives the same bits as no group", "law", "group"),
    Clause(
        "LL-22",
        "ranks agree",
        "all ranks of a group get the same bits for results and dX",
        "determinism",
        "group",
    ),
    Clause(
        "LL-23",
        "out-of-range ids",
        "an unmasked id or kept id out of range gives NaN, gradient 0 and a flag, and disturbs no other row",
        "refusal",
    ),
    Clause(
        "LL-24",
        "any layout",
        "strided hidden and weight give what contiguous ones give, within tolerance; the same bits where "
        "batch_invariant is claimed",
        "invariance",
    ),
    Clause("LL-25", "no rows", "N = 0, or all rows masked, gives empty or zero results and zero gradients", "accuracy"),
    Clause(
        "LL-26",
        "inputs untouched",
        "no argument is written to; global RNG, default dtype and device stay",
        "side_effect",
    ),
    Clause("LL-27", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
    Clause("LL-28", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
    Clause(
        "LL-29",
        "capture",
        "the call can be captured in a graph and replays with new inputs",
        "capture",
        "capturable",
    ),
    Clause(
        "LL-30",
        "bad arguments",
        "wrong rank, sizes, dtype, temperature <= 0 or an unknown mode raise ArgumentError naming the argument",
        "refusal",
    ),
    Clause(
        "LL-31",
        "one bad row spoils one row",
        "NaN or inf in a row of hidden makes that row NaN and changes no bit of another row's results or of its dX",
        "law",
    ),
    Clause(
        "LL-32",
        "any number of ranks",
        "1, 2, 4 and 8 ranks with equal shards, and one without a group, give the same bits for results",
        "invariance",
        "rank_invariant",
    ),
    Clause(
        "LL-33",
        "several ids",
        "log p of each of K ids of a row is within tolerance of float64, with relative error <= 1e-4 where p is "
        "near 1, repeated ids alike; one id in a list has the bits of that id alone; shards give the same",
        "accuracy",
        "many_ids",
    ),
    Clause(
        "LL-34",
        "gradient of several ids",
        "dX, dW and dbias are those of the sum over the K ids, repeated ids included, in every mode of backward",
        "gradient",
        "many_ids",
    ),
    Clause(
        "LL-35",
        "absent and invalid ids of several",
        "-1 gives 0; another id out of range gives NaN and its own flag; both have gradient 0 though the upstream "
        "gradient is NaN, the other ids of their row stay, and a masked row gives 0",
        "law",
        "many_ids",
    ),
    Clause(
        "LL-36",
        "LoRA",
        "z has s (h A^T) B^T beside h W^T, before bias, scale, cap and temperature; adapters of any dtype are not "
        "rounded; B = 0 gives the plain results",
        "accuracy",
        "lora",
    ),
    Clause(
        "LL-37",
        "gradients of LoRA",
        "dA, dB and dX match float64, with the head trained and frozen, and each alone",
        "gradient",
        "lora",
    ),
    Clause("LL-38", "LoRA is live", "A and B written in place are seen by the next call", "law", "lora"),
    Clause(
        "LL-39",
        "quantized head",
        "results and dX are those of dequantize(weight) in fp32, not rounded to the dtype of hidden, beside LoRA too",
        "accuracy",
        "quantized",
    ),
    Clause(
        "LL-42",
        "lists of any length",
        "log p of each entry of a list is within tolerance of float64; an empty list has none, an entry beyond the "
        "last offset gives 0; with many_ids the bits are those of the same lists padded to one length",
        "accuracy",
        "ragged_ids",
    ),
    Clause(
        "LL-43",
        "gradients of lists of any length",
        "dX, dW, dbias and those of LoRA are those of the sum over each row's list beside lse and entropy; absent, "
        "invalid and masked entries and those beyond the last offset have gradient 0 though the upstream gradient is "
        "NaN",
        "gradient",
        "ragged_ids",
    ),
    Clause(
        "LL-44",
        "partial gradient",
        "with partial_grad the ranks' dX add up to the whole's, and each is that of its rank's columns; dA is the "
        "whole's, and all else has the bits of the call without it",
        "gradient",
        "partial_grad",
    ),
    Clause(
        "LL-45",
        "masked by a number",
        "a bias with one finite number far below the others, down to the least of the dtype, on neighboring ids, "
        "every other one or all but some, gives what float64 gives: results and gradients of the others are those "
        "beside -inf, and log p of a masked id is about its own logit",
        "accuracy",
        "bias",
    ),
)
TOLERANCES: Final = (
    Tolerance("logprob", "float32", 1e-4, 1e-5, "fp32 accumulation over D <= 4096, logits up to 30"),
    Tolerance("logprob", "bfloat16", 2e-4, 1e-5, "tensor cores with fp32 accumulators: 1.1e-4 measured at D = 4096"),
    Tolerance("logprob", "float16", 2e-4, 1e-5, "as bfloat16"),
    Tolerance("logprob", "float64", 1e-10, 1e-10, "float64 throughout, D <= 4096"),
    Tolerance("lse", "float32", 1e-4, 1e-5, "as logprob"),
    Tolerance("lse", "bfloat16", 2e-4, 1e-5, "as logprob"),
    Tolerance("entropy", "float32", 2e-4, 1e-5, "one more weighted sum than logprob"),
    Tolerance("entropy", "bfloat16", 2e-4, 1e-5, "1.2e-4 measured at D = 4096"),
    Tolerance("entropy", "float64", 1e-10, 1e-10, "float64 throughout, D <= 4096"),
    Tolerance("grad", "float32", 0.0, 1e-5, "relative Frobenius norm of dX and of dW; fp32 throughout"),
    Tolerance("grad", "bfloat16", 0.0, 2.5e-3, "relative Frobenius norm; bf16 dz and one rounding: 2.2e-3 measured"),
    Tolerance("grad", "float16", 0.0, 2.5e-3, "as bfloat16"),
    Tolerance("grad", "float64", 0.0, 1e-10, "relative Frobenius norm; float64 throughout"),
)
