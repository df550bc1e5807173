"""What an implementation of advantage@1 may claim, what is attacked, and how close is close.

Imports no torch.
"""

from __future__ import annotations

from typing import Any, Final

from rlkernel_core import checks
from rlkernel_core.spec.advantage_kinds import EPS_MODES, KINDS
from rlkernel_core.spec.form import BATCH_INVARIANT, CAPTURABLE, DETERMINISTIC, Clause, Feature, Tolerance

FEATURES: Final = (
    DETERMINISTIC,
    Feature(
        "batch_invariant",
        "without whitening, batch scale and gpg, a sequence together with its group gets bitwise the same "
        "advantages whatever else is in the batch, and in whatever layout",
    ),
    CAPTURABLE,
    *(Feature(f"kind:{name}", kind.text) for name, kind in KINDS.items()),
    Feature("mask", "a token mask, with masked tokens inside a sequence"),
    Feature("lengths", "padded rows by length"),
    Feature("packed", "cu_seqlens"),
    Feature("group_ids", "groups by arbitrary ids, not by size"),
    Feature("lam_tensor", "lambda per sequence or per token"),
    Feature("lam_value", "another lambda for the returns"),
    Feature("length_adaptive", "lambda from the number of valid tokens"),
    Feature("bootstrap", "value after the last valid token"),
    Feature("dones", "episodes that end inside a row"),
    Feature("turns", "a turn as one time step"),
    Feature("sequence_masks", "in_stats, in_loss and valid_range"),
    Feature("weights", "a weight per sequence"),
    Feature("leave_one_out", "statistics over the other members"),
    Feature("scale:batch", "std of the rewards of the whole batch"),
    Feature("peer", "what only a peer does: constant, invalid, singleton, masked_time, masked_out, low_std, min_std"),
    Feature("singleton_zero", "a group with fewer than two members gets 0"),
    Feature("singleton_error", "a group of one raises; synchronizes with the host"),
    Feature("ddof", "another ddof of the std of groups than 1"),
    *(Feature(f"eps_mode:{mode}", f"eps in the factor of groups as {mode} has it") for mode in EPS_MODES[1:]),
    Feature("whiten_ddof", "another ddof of the whitening than 1"),
    *(
        Feature(f"whiten_eps_mode:{mode}", f"eps in the factor of the whitening as {mode} has it")
        for mode in EPS_MODES
        if mode != "var_add"
    ),
    Feature("stats", "statistics of groups and of the whitening are returned, and which rewards are invalid"),
    Feature("whiten", "whitening over the batch, applied or deferred"),
    Feature("process_group", "moments merged across ranks"),
    Feature("token_output", "per-token result of a kind over groups"),
)


def needed(call: Any) -> dict[str, object]:
    """Feature -> whether a call needs it, where the name of an argument does not say so."""
    kind = KINDS.get(call.kind)
    whiten = kind.whiten if kind and call.whiten == "auto" else call.whiten
    return {
        "packed": call.cu_seqlens is not None,
        "group_ids": checks.is_tensor(call.group),
        "lam_tensor": checks.is_tensor(call.lam) or checks.is_tensor(call.lam_value),
        "sequence_masks": any(getattr(call, n) is not None for n in ("in_stats", "in_loss", "valid_range")),
        "peer": any(getattr(call, n) != plain for n, plain in _PLAIN.items()) or call.singleton == "raw",
        "singleton_zero": call.singleton == "zero" and kind and "singleton" in kind.takes,
        "singleton_error": call.singleton == "error",
        "stats": whiten == "defer",
        "whiten": whiten != "none",
        "token_output": call.output == "token",
    }


_PLAIN: Final = {
    "constant": "zero",
    "invalid": "zero",
    "masked_time": "skip",
    "masked_out": "zero",
    "low_std": "zero",
    "min_std": 0.0,
}

CLAUSES: Final = (
    Clause("AD-01", "matches float64", "every kind is within tolerance of its float64 definition", "accuracy"),
    Clause(
        "AD-02",
        "layouts agree",
        "padded with a mask, padded with lengths and packed give the same advantages",
        "invariance",
    ),
    Clause(
        "AD-03",
        "masked tokens take no time",
        "dropping the masked tokens of a row and scanning what is left gives the same valid advantages",
        "law",
        "mask",
    ),
    Clause(
        "AD-04",
        "masked positions hold anything",
        "NaN, inf and any id at masked positions change nothing; the result there is 0",
        "law",
        "mask",
    ),
    Clause(
        "AD-05",
        "limits of lambda and gamma",
        "lam = 0 is r + gamma v' - v, lam = gamma = 1 is the reward to go plus bootstrap minus v, gamma = 0 is r - v",
        "law",
        "kind:gae",
    ),
    Clause(
        "AD-06",
        "a scan may be split",
        "scanning [x | y] equals scanning y, then x bootstrapped with what y carries",
        "law",
        "bootstrap",
    ),
    Clause("AD-07", "an episode ends", "nothing after a done reaches anything before it", "law", "dones"),
    Clause(
        "AD-08",
        "lambda per token",
        "the lambda of the next state weighs its return; equal lambdas equal the scalar",
        "law",
        "lam_tensor",
    ),
    Clause("AD-09", "decoupled lambda", "returns use lam_value, advantages lam", "law", "lam_value"),
    Clause("AD-10", "turns", "a turn is one step: summed rewards, first value, one advantage", "law", "turns"),
    Clause(
        "AD-11",
        "a constant group is exactly 0",
        "members with one reward, of any size, get exactly 0",
        "accuracy",
        "kind:grpo",
    ),
    Clause("AD-12", "a group of one", "gets 0 by default, no exception, no NaN", "accuracy", "singleton_zero"),
    Clause(
        "AD-13",
        "invalid is not contagious",
        "a reward that is not finite or out of range gets 0, is flagged, and changes no other sequence",
        "law",
    ),
    Clause(
        "AD-14",
        "two masks",
        "in_stats decides who is counted, in_loss who gets an advantage, independently",
        "law",
        "sequence_masks",
    ),
    Clause(
        "AD-15",
        "equivariance",
        "permuting sequences (with ids) permutes the advantages; ids are names, not numbers",
        "invariance",
        "group_ids",
    ),
    Clause(
        "AD-16",
        "large offsets",
        "adding 1e5 to the rewards of a group changes its advantages by rounding of the inputs only",
        "invariance",
        "kind:grpo",
    ),
    Clause(
        "AD-17", "whitening", "valid entries have mean 0 and variance 1; a constant batch is exactly 0", "law", "whiten"
    ),
    Clause(
        "AD-18",
        "ranks",
        "k ranks give what one rank with all data gives, within tolerance; an empty rank takes part",
        "law",
        "process_group",
    ),
    Clause("AD-19", "dtypes", "bf16, fp16 and integer inputs give the fp32 result of their values", "accuracy"),
    Clause("AD-20", "constants of the loss", "results require no grad, whatever the inputs do", "gradient"),
    Clause("AD-21", "inputs untouched", "no argument is written to; no global state changes", "side_effect"),
    Clause("AD-22", "nothing to do", "B = 0, T = 0 and fully masked rows give empty or zero results", "accuracy"),
    Clause(
        "AD-23",
        "bad arguments",
        "wrong shapes, dtypes, choices, and arguments without effect raise ArgumentError naming the argument",
        "refusal",
    ),
    Clause("AD-24", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
    Clause("AD-25", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
    Clause("AD-26", "capture", CAPTURABLE.text, "capture", "capturable"),
    Clause(
        "AD-27",
        "more than 2^31 tokens",
        "offsets are 64-bit: the last row of a batch of 2^31 tokens is right",
        "accuracy",
    ),
)

TOLERANCES: Final = (
    Tolerance(
        "advantages",
        "float32",
        1e-5,
        2e-5,
        "times max(1, |v|) sqrt(min(T, h)), h = 1/(1 - gamma lam); gamma lam itself is rounded: 2^-25 h |R| more",
    ),
    Tolerance("advantages", "bfloat16", 1e-5, 2e-5, "inputs are exact in fp32; the arithmetic is the fp32 one"),
    Tolerance("advantages", "float16", 1e-5, 2e-5, "inputs are exact in fp32; the arithmetic is the fp32 one"),
    Tolerance("advantages", "float64", 1e-10, 1e-10, "float64 throughout; groups divide by std + eps"),
    Tolerance("returns", "float32", 1e-5, 2e-5, "as advantages"),
    Tolerance("returns", "float64", 1e-10, 1e-10, "as advantages"),
)
