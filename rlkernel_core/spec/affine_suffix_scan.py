"""affine_suffix_scan@1: y_t = a_t y_{t+1} + b_t from the right, the primitive under every advantage over time.

    y_t = a_t y_{t'} + b_t  with t' the next valid position; y behind the last valid position is `init`
    exclusive: the y of the next valid position instead (Y_t = y_{t'}), `init` at the last one

A masked position is the identity map: y is carried through it exactly. GAE, discounted returns, lambda-returns,
V-trace and reverse cumulative sums are all of this form (Blelloch, CMU-CS-90-190, section 1.4).

Legend: B sequences · T time · N packed tokens. Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
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


@dataclass(frozen=True)
class ScanResult:
    """What affine_suffix_scan returns, fp32 (float64 for float64 inputs)."""

    y: Tensor  # [B, T] or [N], as b
    carry: Tensor  # [B] y of the first position: what a scan further left would take as its `init`


@dataclass(slots=True, eq=False)
class AffineSuffixScanCall(OpCall[ScanResult]):
    """Scan y_t = a_t y_{t+1} + b_t from the right, per sequence.

    Args:
        b: [B, T], or [N] with `cu_seqlens`; floating.
        a: a number, or a tensor of b's shape.
        mask: bool of b's shape; False positions are skipped and may hold anything. Not with `lengths`.
        lengths: [B] integer, valid positions of each row.
        cu_seqlens: [B + 1] integer bounds of packed sequences; positions outside all are masked.
        init: [B] y behind the last valid position; 0 where not given.
        exclusive: return the y of the next valid position.
        masked_out: "zero", or "carry": a masked position holds the y carried through it.

    Raises:
        ArgumentError: wrong rank, sizes or dtype; both `mask` and `lengths`; both `lengths` and `cu_seqlens`.
    """

    b: Tensor
    a: float | Tensor
    _: KW_ONLY
    mask: Tensor | None = None
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
    init: Tensor | None = None
    exclusive: bool = False
    masked_out: str = "zero"


def sequences_of(call: AffineSuffixScanCall) -> int:
    """Number of sequences of a call that has been checked."""
    return call.b.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1


def check(call: AffineSuffixScanCall) -> None:
    """Metadata checks shared by all implementations; reads no value off the device."""
    b, a, mask, lengths, cu_seqlens, init = call.b, call.a, call.mask, call.lengths, call.cu_seqlens, call.init
    checks.tensor("b", b, ndim=2 if cu_seqlens is None else 1, kind="floating")
    if checks.is_tensor(a):
        checks.aligned("a", a, b.shape, "b", kind="floating", beside=b, where="b")
    else:
        checks.number("a", a)
    checks.exclusive(lengths=lengths, cu_seqlens=cu_seqlens)
    checks.exclusive(lengths=lengths, mask=mask)
    checks.aligned("mask", mask, b.shape, "b", kind="bool", beside=b, where="b")
    sequences = b.shape[0]
    if cu_seqlens is not None:
        sequences = checks.tensor("cu_seqlens", cu_seqlens, ndim=1, kind="integer").shape[0] - 1
        if sequences < 0:
            raise ArgumentError("cu_seqlens", "an empty tensor", "needs B + 1 entries", "Pass [0] for no sequence.")
        checks.same_device("cu_seqlens", cu_seqlens, b, "b")
    checks.aligned("lengths", lengths, (sequences,), "the rows [B]", kind="integer", beside=b, where="b")
    checks.aligned("init", init, (sequences,), "the sequences [B]", kind="floating", beside=b, where="b")
    checks.flags(exclusive=call.exclusive)
    checks.choice("masked_out", call.masked_out, ("zero", "carry"))


def _needed(call: Any) -> dict[str, object]:
    return {
        "packed": call.cu_seqlens is not None,
        "carry": call.masked_out == "carry",
        "a_tensor": checks.is_tensor(call.a),
    }


SPEC = OpSpec(
    name="affine_suffix_scan",
    record=AffineSuffixScanCall,
    summary="y_t = a_t y_{t+1} + b_t from the right: the scan under GAE, returns and V-trace",
    primary="b",
    differentiable=("b", "a", "init"),
    carrying=("y", "carry"),
    check=check,
    needed=_needed,
    features=(
        GRAD,
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        Feature("mask", "a mask with masked positions inside a sequence"),
        Feature("lengths", "padded rows by length"),
        Feature("packed", "cu_seqlens"),
        Feature("init", "a value behind the last position"),
        Feature("exclusive", "the y of the next position"),
        Feature("carry", "masked positions hold what is carried through them"),
        Feature("a_tensor", "a per position"),
    ),
    clauses=(
        Clause("SC-01", "matches float64", "y is within tolerance of the recurrence in float64", "accuracy"),
        Clause("SC-02", "layouts agree", "mask, lengths and packed layouts give the same y", "invariance"),
        Clause("SC-03", "masked positions are skipped", "dropping them changes no y", "law", "mask"),
        Clause("SC-04", "masked positions hold anything", "NaN there changes nothing", "law", "mask"),
        Clause(
            "SC-05", "a scan may be split", "scanning y, then x with init = carry, is scanning [x | y]", "law", "init"
        ),
        Clause("SC-06", "a = 0 cuts", "nothing finite right of a = 0 reaches what is left of it", "law", "a_tensor"),
        Clause("SC-07", "sequences are apart", "NaN in one sequence reaches no other", "law"),
        Clause("SC-08", "gradient", "matches the adjoint scan in float64", "gradient", "grad"),
        Clause("SC-09", "no positions", "B = 0 and T = 0 give empty results and carry = init", "accuracy"),
        Clause("SC-10", "bad arguments", "wrong rank, sizes and dtypes raise ArgumentError", "refusal"),
        Clause("SC-11", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("SC-12", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("SC-13", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("SC-14", "capture", CAPTURABLE.text, "capture", "capturable"),
    ),
    tolerances=(
        Tolerance(
            "y",
            "float32",
            1e-5,
            1e-5,
            "times the largest |y| of the row; 5e-6 at a = 0.999, T = 131072: the memory 1/(1 - a) times 2^-24 at most",
        ),
        Tolerance("y", "bfloat16", 1e-5, 1e-5, "inputs are exact in fp32; the arithmetic is the fp32 one"),
        Tolerance("y", "float16", 1e-5, 1e-5, "inputs are exact in fp32; the arithmetic is the fp32 one"),
        Tolerance("y", "float64", 1e-12, 1e-12, "float64 throughout"),
        Tolerance("grad", "float32", 1e-5, 1e-5, "times the largest gradient of the row: the adjoint is such a scan"),
        Tolerance("grad", "bfloat16", 1e-5, 4e-3, "as fp32, rounded once to bf16: 2^-9"),
        Tolerance("grad", "float16", 1e-5, 1e-3, "as fp32, rounded once to fp16: 2^-12"),
        Tolerance("grad", "float64", 1e-12, 1e-12, "float64 throughout"),
    ),
)
