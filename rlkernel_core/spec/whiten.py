"""whiten@1: values to mean 0 and variance 1 over everything valid, on one rank or on all.

    y = (x - mean) * f,  var = M2 / (n - ddof),  f by eps_mode:
    std_add 1 / (sqrt(var) + eps) · var_add 1 / sqrt(var + eps) · var_clamp 1 / sqrt(max(var, eps)) ·
    threshold 1 / sqrt(var) if sqrt(var) > eps else 0

Moments are shifted two-pass (the first valid value is subtracted first), so that a constant gives exactly 0; ranks
merge by (n, mean, M2) in rank order (Chan, Golub and LeVeque 1979). Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.advantage_kinds import EPS_MODES
from rlkernel_core.spec.form import CAPTURABLE, DETERMINISTIC, Clause, Feature, OpCall, OpSpec, Tolerance

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class WhitenResult:
    """What whiten returns, fp32 (float64 for float64 inputs); nothing here requires grad."""

    y: Tensor  # [...] as x; x itself where `apply` is False
    count: Tensor  # [] how many values the moments are of
    mean: Tensor  # []
    var: Tensor  # []
    rstd: Tensor  # [] the factor f; 0 where no value counts


@dataclass(slots=True, eq=False)
class WhitenCall(OpCall[WhitenResult]):
    """Whiten `x` over its valid values. The result is a constant: x is detached.

    Args:
        x: [...], any real dtype. Valid values that are not finite are left out of the moments and give 0.
        mask: bool of x's shape; False values may be anything.
        lengths: [B] integer for x [B, T]. Not with `mask`.
        counts: shape of x, how often each value counts: whitening of per-sequence values over their tokens.
        ddof: delta degrees of freedom of the variance; with too few values the variance is 0.
        eps: see above.
        eps_mode: where eps goes, see above.
        shift_mean: False adds the mean again (scaling only).
        masked_out: "zero", or "carry": masked values are transformed too, as some peers do.
        apply: False returns the moments only and leaves (x - mean) * rstd to the caller.
        process_group: ranks to merge over with one all_gather; each takes part, also one without values.

    Raises:
        ArgumentError: wrong sizes, dtypes, numbers or choices; both `mask` and `lengths`.
    """

    x: Tensor
    _: KW_ONLY
    mask: Tensor | None = None
    lengths: Tensor | None = None
    counts: Tensor | None = None
    ddof: int = 1
    eps: float = 1e-8
    eps_mode: str = "var_add"
    shift_mean: bool = True
    masked_out: str = "zero"
    apply: bool = True
    process_group: ProcessGroup | None = None


def check(call: WhitenCall) -> None:
    """Metadata checks shared by all implementations."""
    x, mask, lengths, counts = call.x, call.mask, call.lengths, call.counts
    checks.tensor("x", x, kind="real")
    checks.flags(shift_mean=call.shift_mean, apply=call.apply)
    checks.process_group("process_group", call.process_group)
    checks.exclusive(mask=mask, lengths=lengths)
    if lengths is not None and x.dim() != 2:
        raise ArgumentError("lengths", checks.describe(lengths), "needs x [B, T]", "Pass `mask` instead.")
    checks.aligned("mask", mask, x.shape, "x", kind="bool", beside=x, where="x")
    checks.aligned("lengths", lengths, x.shape[:1], "the rows of x", kind="integer", beside=x, where="x")
    checks.aligned("counts", counts, x.shape, "x", kind="real", beside=x, where="x")
    checks.integer("ddof", call.ddof, at_least=0)
    checks.number("eps", call.eps, at_least=0.0)
    checks.choice("eps_mode", call.eps_mode, EPS_MODES)
    checks.choice("masked_out", call.masked_out, ("zero", "carry"))


SPEC = OpSpec(
    name="whiten",
    record=WhitenCall,
    summary="mean 0, variance 1 over everything valid, across ranks",
    primary="x",
    check=check,
    needed=lambda call: {"carry": call.masked_out == "carry"},
    features=(
        DETERMINISTIC,
        CAPTURABLE,
        Feature("mask", "a mask over the values"),
        Feature("lengths", "padded rows by length"),
        Feature("counts", "how often each value counts"),
        Feature("carry", "masked values are transformed too"),
        Feature("ddof", "another ddof than 1"),
        *(
            Feature(f"eps_mode:{mode}", f"eps in the factor as {mode} has it")
            for mode in EPS_MODES
            if mode != "var_add"
        ),
        Feature("process_group", "moments merged across ranks"),
    ),
    clauses=(
        Clause("WH-01", "matches float64", "y, mean, var are within tolerance of float64", "accuracy"),
        Clause("WH-02", "mean 0, variance 1", "of the valid results, with eps = 0", "law"),
        Clause("WH-03", "a constant is exactly 0", "of any value and size, in every eps_mode", "accuracy"),
        Clause("WH-04", "large offsets", "x + 1e5 gives y of the rounded inputs, no cancellation", "accuracy"),
        Clause("WH-05", "masked values hold anything", "NaN there changes nothing and gives 0", "law", "mask"),
        Clause("WH-06", "not finite is not contagious", "valid NaN gives 0 and is in no moment", "law"),
        Clause("WH-07", "ranks", "k ranks give what one gives; an empty rank takes part", "law", "process_group"),
        Clause("WH-08", "counts", "equal repeating each value", "law", "counts"),
        Clause("WH-09", "nothing valid", "gives 0, no NaN, no exception", "accuracy"),
        Clause("WH-10", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("WH-11", "bad arguments", "wrong sizes, dtypes, choices raise ArgumentError", "refusal"),
        Clause("WH-12", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("WH-13", "capture", CAPTURABLE.text, "capture", "capturable"),
    ),
    tolerances=(
        Tolerance("y", "float32", 1e-5, 1e-5, "two pairwise sums and a division"),
        Tolerance("y", "bfloat16", 1e-5, 1e-5, "inputs are exact in fp32"),
        Tolerance("y", "float16", 1e-5, 1e-5, "inputs are exact in fp32"),
        Tolerance("y", "float64", 1e-12, 1e-12, "float64 throughout"),
    ),
)
