"""acme_relu2@1: the squared ReLU of So et al., Primer (arXiv:2109.08668), as Nemotron's MLP has it.

    y = round(max(x, 0)^2)

The arithmetic is fp32, with one rounding to the dtype of x at the end. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.form import BATCH_INVARIANT, DETERMINISTIC, GRAD, Clause, OpCall, OpSpec, Tolerance

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class Relu2Call(OpCall["Tensor"]):
    """The square of what is positive, 0 elsewhere.

    Args:
        x: [..., D] floating.

    Returns:
        [..., D] of the dtype of x. NaN stays NaN.

    Raises:
        ArgumentError: an x of no dimension or of another kind of dtype.
    """

    x: Tensor


def check(call: Relu2Call) -> None:
    """Metadata checks shared by all implementations."""
    x = checks.tensor("x", call.x, kind="floating")
    if x.dim() < 1:
        raise ArgumentError("x", checks.describe(x), "needs a dimension", "Pass [..., D].")


SPEC = OpSpec(
    name="acme_relu2",
    record=Relu2Call,
    summary="the squared ReLU",
    primary="x",
    differentiable=("x",),
    carrying=("",),
    check=check,
    sizes=lambda call: {"rows": call.x.numel() // max(1, call.x.shape[-1])},
    features=(GRAD, DETERMINISTIC, BATCH_INVARIANT),
    clauses=(
        Clause("ACME-01", "matches float64", "y is within tolerance of float64", "accuracy"),
        Clause("ACME-02", "gradient", "is 2 max(x, 0) g, and 0 at 0", "gradient", "grad"),
        Clause("ACME-03", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("ACME-04", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
    ),
    tolerances=(
        Tolerance("y", "float32", 1e-30, 2.0**-23, "one rounding of a product"),
        Tolerance("y", "bfloat16", 1e-30, 2.0**-8, "as fp32, rounded once to bf16"),
        Tolerance("y", "float16", 2.0**-24, 2.0**-10, "as fp32, rounded once to fp16, whose least step is 2^-24"),
        Tolerance("grad", "float32", 1e-30, 2.0**-22, "two roundings"),
        Tolerance("grad", "bfloat16", 1e-30, 2.0**-7, "as fp32, rounded once to bf16"),
        Tolerance("grad", "float16", 2.0**-24, 2.0**-9, "as fp32, rounded once to fp16"),
    ),
)
