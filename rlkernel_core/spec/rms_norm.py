"""rms_norm@1: rows divided by their root mean square, with the residual added before (Zhang and Sennrich, 2019).

    s = round(x + residual)             s = x without a residual
    r = 1 / sqrt(mean(s^2) + eps)       over the last dimension (arXiv:1910.07467, equation 4, with eps in the root)
    y = round((s r) (offset + weight))

The arithmetic is fp32 (float64 where x is), and each `round` is one rounding to the dtype of x: the residual stream is
stored in that dtype, and what is normalized is what is stored, so that a trainer which keeps s and one which adds again
see one number. eps and offset are rounded to fp32 before they are used, weight is not rounded.

Models differ in offset and roundings. transformers 4.57: Gemma has offset = 1 and rounds once, as here; Llama and Qwen
round s r to the dtype of x and then its product with the weight: two roundings, as vLLM's kernel; FlashInfer's rounds
once, and normalizes the sum before it is rounded.

Legend: D width of a row, whatever stands before it counts rows. Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

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


@dataclass(frozen=True)
class RmsNormResult:
    """What rms_norm returns, of the dtype of x."""

    y: Tensor  # [..., D]
    residual: Tensor | None = None  # [..., D] the sum s that was normalized; None where no residual was given


@dataclass(slots=True, eq=False)
class RmsNormCall(OpCall[RmsNormResult]):
    """Divide rows by their root mean square and multiply them with `offset + weight`.

    A row of zeros with eps = 0 gives NaN, and squares beyond fp32 (|x| > 1e19) give rows of 0.

    Args:
        x: [..., D] floating, D >= 1.
        weight: [D] of the dtype of x, or fp32.
        eps: added to the mean square; at least 0.
        residual: as x, of its dtype; added to x before, and the sum is returned too.
        offset: added to the weight: 0 for Llama and Qwen, 1 for Gemma, whose weights are stored around 0.

    Raises:
        ArgumentError: wrong sizes or dtypes, an x of no dimension or of D = 0, eps < 0, or a number that is not finite.
    """

    x: Tensor
    weight: Tensor
    _: KW_ONLY
    eps: float
    residual: Tensor | None = None
    offset: float = 0.0


def check(call: RmsNormCall) -> None:
    """Metadata checks shared by all implementations."""
    x, weight, residual = call.x, call.weight, call.residual
    checks.tensor("x", x, kind="floating")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ArgumentError("x", checks.describe(x), "needs a last dimension D >= 1", "Pass [..., D].")
    checks.tensor("weight", weight, ndim=1, kind="floating")
    checks.aligned("weight", weight, x.shape[-1:], "the last dimension of x", kind="floating", beside=x, where="x")
    if weight.dtype != x.dtype and str(weight.dtype) != "torch.float32":
        fix = "Pass weight.to(x.dtype) or weight.float()."
        raise ArgumentTypeError("weight", checks.describe(weight), f"must be {_name(x)} as x, or float32", fix)
    checks.number("eps", call.eps, at_least=0.0)
    checks.aligned("residual", residual, x.shape, "x", kind="floating", beside=x, where="x")
    if residual is not None and residual.dtype != x.dtype:
        fix = "Pass residual.to(x.dtype)."
        raise ArgumentTypeError("residual", checks.describe(residual), f"must be {_name(x)} as x", fix)
    checks.number("offset", call.offset)


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


SPEC = OpSpec(
    name="rms_norm",
    record=RmsNormCall,
    summary="rows over their root mean square, times a weight; with the residual added before",
    primary="x",
    differentiable=("x", "weight", "residual"),
    carrying=("y", "residual"),
    check=check,
    sizes=lambda call: {"rows": call.x.numel() // call.x.shape[-1]},
    features=(
        GRAD,
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        Feature("residual", "a residual that is added before, whose sum with x is returned"),
    ),
    clauses=(
        Clause("RN-01", "matches float64", "y is within tolerance of float64 on the stored s", "accuracy"),
        Clause(
            "RN-02",
            "one rounding",
            "y lies between the roundings of both ends of the interval that fp32 arithmetic may leave",
            "accuracy",
        ),
        Clause(
            "RN-03",
            "the residual",
            "the sum has the bits of an fp32 addition rounded once, and y those of a call on that sum",
            "law",
            "residual",
        ),
        Clause("RN-04", "the offset", "offset and weight give the bits of their fp32 sum as the weight", "law"),
        Clause("RN-05", "rows are apart", "NaN and infinities in one row reach no other", "law"),
        Clause("RN-06", "gradient", "of x, weight and residual, matches float64", "gradient", "grad"),
        Clause("RN-07", "no rows", "give empty results, and a gradient of 0 for the weight", "accuracy"),
        Clause("RN-08", "bad arguments", "wrong sizes, dtypes and numbers raise ArgumentError", "refusal"),
        Clause("RN-09", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("RN-10", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("RN-11", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("RN-12", "capture", CAPTURABLE.text, "capture", "capturable"),
    ),
    tolerances=(
        Tolerance("y", "float32", 1e-37, 2e-6, "32 additions of squares, a division, a root and three products"),
        Tolerance("y", "bfloat16", 1e-37, 4e-3, "as fp32, rounded once to bf16: 2^-8"),
        Tolerance("y", "float16", 6e-8, 5e-4, "as fp32, rounded once to fp16: 2^-11"),
        Tolerance("y", "float64", 1e-300, 1e-14, "float64 throughout"),
        Tolerance("grad", "float32", 4e-6, 2e-6, "times the sum of the sizes of its terms, which may cancel"),
        Tolerance("grad", "bfloat16", 4e-6, 4e-3, "as fp32, rounded once to bf16: 2^-8"),
        Tolerance("grad", "float16", 4e-6, 5e-4, "as fp32, rounded once to fp16: 2^-11"),
        Tolerance("grad", "float64", 1e-13, 1e-13, "float64 throughout"),
    ),
)
