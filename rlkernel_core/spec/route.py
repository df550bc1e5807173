"""route@1: which experts each token goes to, with which gates, and the order of rows that grouped_linear takes.

    p[t]     = softmax(logits[t])                    over all experts, in fp32 (float64 where logits are)
    ids[t]   = the top_k experts of the largest logits, best first, ties to the smaller id
    gates[t] = p[t, ids[t]];  with `renormalize` softmax(logits[t, ids[t]]), which is p[t, ids[t]] divided by their sum

Experts are chosen by logits, not by rounded probabilities: the choice is exact, and the same on every device. With
`replay` the ids are those of an earlier call (routing replay: arXiv:2507.18071, arXiv:2510.11370), and the gates still
follow the logits. A mixture of experts whose trainer chooses other experts than its rollout did has other
log-probabilities, by far more than rounding.

The pairs of token t and choice j have the numbers t top_k + j. `order` lists them by expert, pairs of one expert by
number, and `ends` says where those of each expert end:

    rows = x[order // top_k];  y = grouped_linear(rows, weight, ends)

In `replay`, -1 is no expert, as padding has: its gate is 0. Any other id outside 0 .. E - 1 is a mistake and shows: its
gate is NaN. Neither has a gradient or counts for a sum, and both stand behind the last end, where grouped_linear gives
0.

Legend: T tokens · E experts. Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.spec.form import (
    BATCH_INVARIANT,
    CAPTURABLE,
    DETERMINISTIC,
    GRAD,
    Clause,
    Feature,
    OpCall,
    OpSpec,
    Tolerance,
)

if TYPE_CHECKING:
    from torch import Tensor

MOST_PAIRS: Final = 2**31 - 1  # ends are int32


@dataclass(frozen=True)
class RouteResult:
    """What route returns."""

    gates: Tensor  # [T, top_k] fp32, or float64
    ids: Tensor  # [T, top_k] int64
    order: Tensor  # [T top_k] int64: numbers of pairs, by expert
    ends: Tensor  # [E] int32: where the pairs of each expert end in `order`


@dataclass(slots=True, eq=False)
class RouteCall(OpCall[RouteResult]):
    """Experts, gates and order of tokens.

    A row with NaN or +inf, or of -inf alone, has gates of NaN, with `renormalize` where such a logit is chosen; its ids
    are then experts, each at most once. -inf beside finite logits has the gate 0.

    Args:
        logits: [T, E] floating, E >= 1.
        top_k: experts of a token, 1 <= top_k <= E.
        replay: [T, top_k] integer, ids to take in place of the best ones.
        renormalize: gates of a token sum to 1.

    Raises:
        ArgumentError: sizes, dtypes or devices that do not match, a top_k that is not 1 to E, or 2^31 pairs or more.
    """

    logits: Tensor
    _: KW_ONLY
    top_k: int
    replay: Tensor | None = None
    renormalize: bool = False


def check(call: RouteCall) -> None:
    """Metadata checks shared by all implementations."""
    logits, k = checks.tensor("logits", call.logits, ndim=2, kind="floating"), call.top_k
    T, E = logits.shape
    if E < 1:
        raise ArgumentError("logits", checks.describe(logits), "needs an expert E >= 1", "Pass [T, E].")
    checks.integer("top_k", k, at_least=1, at_most=int(E))
    if T * k > MOST_PAIRS:
        raise ArgumentError("top_k", k, f"makes 2^31 pairs or more with {T} tokens", "Route fewer tokens in a call.")
    of = "[T, top_k], tokens of logits"
    checks.aligned("replay", call.replay, (T, k), of, kind="integer", beside=logits, where="logits")
    if not isinstance(call.renormalize, bool):
        raise ArgumentTypeError("renormalize", call.renormalize, "must be a bool", "Pass True or False.")


_SOURCE: Final = "of a probability: an exponential of IEEE operations, a sum over experts and a division"

SPEC = OpSpec(
    name="route",
    record=RouteCall,
    summary="the experts of each token, their gates, and the order of rows for grouped_linear; ids may be replayed",
    primary="logits",
    differentiable=("logits",),
    carrying=("gates",),
    check=check,
    sizes=lambda call: {"rows": call.logits.shape[0]},
    features=(
        GRAD,
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        Feature("replay", "ids of an earlier call, used again"),
        Feature("renormalize", "gates of a token sum to 1"),
    ),
    clauses=(
        Clause("RT-01", "matches float64", "gates are within tolerance of float64 at the ids", "accuracy"),
        Clause(
            "RT-02", "the best", "ids are those of the top_k largest logits, best first, ties to the smaller", "law"
        ),
        Clause(
            "RT-03",
            "renormalized",
            "gates are the softmax of the chosen logits, whatever the others are",
            "accuracy",
            "renormalize",
        ),
        Clause(
            "RT-04", "replay", "of the ids of a call gives its bits; other ids are taken as they are", "law", "replay"
        ),
        Clause(
            "RT-05",
            "no expert",
            "a replayed -1 has the gate 0, another id outside 0 .. E - 1 the gate NaN; neither has a gradient, and "
            "both stand behind the last end",
            "law",
            "replay",
        ),
        Clause("RT-06", "order", "has each pair once, by expert and then by number, and ends count them", "law"),
        Clause("RT-07", "rows are apart", "NaN and infinities in one row change no other row", "law"),
        Clause("RT-08", "extreme logits", "of any finite size give finite gates and gradients; -inf the gate 0", "law"),
        Clause("RT-09", "gradient", "of logits matches float64", "gradient", "grad"),
        Clause("RT-10", "no tokens", "give empty results, and ends of 0", "accuracy"),
        Clause("RT-11", "bad arguments", "wrong sizes, dtypes and numbers raise ArgumentError", "refusal"),
        Clause("RT-12", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("RT-13", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("RT-14", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("RT-15", "capture", CAPTURABLE.text, "capture", "capturable"),
    ),
    tolerances=(
        Tolerance("gates", "float32", 1e-7, 4e-6, _SOURCE),
        Tolerance("gates", "bfloat16", 1e-7, 4e-6, "as fp32: logits are exact in it, gates are not rounded to 16 bits"),
        Tolerance("gates", "float16", 1e-7, 4e-6, "as fp32: logits are exact in it, gates are not rounded to 16 bits"),
        Tolerance("gates", "float64", 1e-15, 1e-13, "float64 throughout"),
        Tolerance("grad", "float32", 4e-6, 4e-6, "times the sum of |g gate|: terms of other signs meet"),
        Tolerance("grad", "bfloat16", 4e-6, 4e-3, "as fp32, rounded once to bf16: 2^-8"),
        Tolerance("grad", "float16", 4e-6, 5e-4, "as fp32, rounded once to fp16: 2^-11"),
        Tolerance("grad", "float64", 1e-14, 1e-13, "float64 throughout"),
    ),
)
