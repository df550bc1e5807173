"""grouped_linear@1: rows that are sorted by expert, each times the weight of its own; a row's bits are those of linear.

    y[t] = round(x[t] weight[e]^T + bias[e]), e the expert of row t

Rows ends[e - 1] .. ends[e] - 1 of x (from 0 for the first) are those of expert e. Rows from the last end on belong to
none: they give 0, whatever they hold. `ends` is read on the device, so it may change between replays of a graph, and
the host never waits for it.

Arithmetic, rounding and the order of sums are those of linear@1: a row has the bits that linear of the same
implementation gives it with the weight of its expert, and so has its gradient. How many rows an expert has, and which
others there are, changes no bit. transformers calls torch._grouped_mm, or one BLAS product an expert; a BLAS chooses
the order of its sums by the number of rows, which differs between rollout and training.

The gradients of weight[e] and bias[e] are sums over the rows of e alone; an expert without rows has zeros.

Legend: T rows · E experts · N outputs · K inputs. Imports no torch.
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
from rlkernel_core.spec.qmatmul import SUMMATION, UNITS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class GroupedLinearCall(OpCall["Tensor"]):
    """`x[t] weight[e]^T + bias[e]` for each row t and its expert e, rounded once to the dtype of x.

    Args:
        x: [T, K] floating, K >= 1, rows sorted by expert.
        weight: [E, N, K] of the dtype of x, E >= 1 and N >= 1; any strides.
        ends: [E] int32, ascending, at most T: where the rows of each expert end, as qmatmul takes them. An end below
            the one before it counts as that one, one beyond T as T.
        bias: [E, N] of the dtype of x.

    Returns:
        [T, N] of the dtype of x; 0 in the rows of no expert, and so are their gradients. Values beyond fp16's range are
        inf. NaN and infinities in a row of x, in a row of weight[e] or in an element of bias reach the results that
        depend on them and no other.

    Raises:
        ArgumentError: sizes, dtypes or devices that do not match, or K, E or N that is 0.
    """

    x: Tensor
    weight: Tensor
    ends: Tensor
    _: KW_ONLY
    bias: Tensor | None = None


def check(call: GroupedLinearCall) -> None:
    """Metadata checks shared by all implementations."""
    x, weight, ends = call.x, call.weight, call.ends
    checks.tensor("x", x, ndim=2, kind="floating")
    if x.shape[1] < 1:
        raise ArgumentError("x", checks.describe(x), "needs a last dimension K >= 1", "Pass [T, K].")
    checks.tensor("weight", weight, ndim=3, kind="floating")
    E, N, _ = weight.shape
    if E < 1 or N < 1:
        text = "needs an expert E >= 1 and a row N >= 1"
        raise ArgumentError("weight", checks.describe(weight), text, "Pass [E, N, K].")
    where = "[E, N, K], K the last dimension of x"
    checks.aligned("weight", weight, (E, N, x.shape[1]), where, kind="floating", beside=x, where="x")
    checks.shape("ends", checks.tensor("ends", ends, ndim=1, kind="integer"), (E,), "the experts of weight")
    checks.same_device("ends", ends, x, "x")
    if str(ends.dtype) != "torch.int32":
        raise ArgumentTypeError("ends", checks.describe(ends), "must be int32", "Pass counts.cumsum(0).int().")
    checks.aligned("bias", call.bias, (E, N), "the rows of weight", kind="floating", beside=x, where="x")
    for name, given in (("weight", weight), ("bias", call.bias)):
        if given is not None and given.dtype != x.dtype:
            text = f"must be {str(x.dtype).removeprefix('torch.')} as x"
            raise ArgumentTypeError(name, checks.describe(given), text, f"Pass {name}.to(x.dtype).")


_BOUND = (
    "qmatmul's accumulation_bound, as for linear: rtol is one rounding of y; atol times the sum of the sizes of its "
    "terms, times (1 + terms / 512), is fp32 summation"
)

SPEC = OpSpec(
    name="grouped_linear",
    record=GroupedLinearCall,
    summary="rows sorted by expert, each times the weight of its expert, in the bits of linear",
    primary="x",
    differentiable=("x", "weight", "bias"),
    carrying=("",),
    check=check,
    sizes=lambda call: {"rows": call.x.shape[0]},
    features=(
        GRAD,
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        Feature("bias", "a bias per expert and output, added before the rounding"),
    ),
    clauses=(
        Clause(
            "GN-01", "matches float64", "rows are within qmatmul's accumulation_bound of their expert's", "accuracy"
        ),
        Clause(
            "GN-02",
            "one rounding",
            "y lies between the roundings of both ends of the interval that fp32 sums may leave",
            "accuracy",
        ),
        Clause(
            "GN-03", "any size", "rows of experts, N and K no multiple of anything: products count once", "accuracy"
        ),
        Clause(
            "GN-04", "bias", "is added to its column of its expert's rows; of zeros it changes no bit", "law", "bias"
        ),
        Clause("GN-05", "rows are apart", "NaN and infinities in one row reach no other", "law"),
        Clause(
            "GN-06", "experts are apart", "NaN and infinities in one row of a weight reach its expert's column", "law"
        ),
        Clause("GN-07", "rows of no expert", "give 0 and have the gradient 0, whatever they hold", "law"),
        Clause("GN-08", "wild ends", "ends that fall or exceed T count as the one before, and as T", "law"),
        Clause("GN-09", "gradient", "of x, weight and bias, matches float64", "gradient", "grad"),
        Clause(
            "GN-10",
            "gradients of experts are apart",
            "NaN in one expert's rows reaches no other's gradients; an expert without rows has zeros",
            "gradient",
            "grad",
        ),
        Clause("GN-11", "no rows", "give empty results, and gradients of 0 for weight and bias", "accuracy"),
        Clause("GN-12", "bad arguments", "wrong sizes and dtypes raise ArgumentError", "refusal"),
        Clause("GN-13", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("GN-14", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("GN-15", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause(
            "GN-16",
            "the bits of linear",
            "a row and its gradient have the bits that linear of this backend gives with the weight of its expert",
            "invariance",
            "batch_invariant",
        ),
        Clause("GN-17", "capture", CAPTURABLE.text, "capture", "capturable"),
    ),
    tolerances=tuple(
        Tolerance(output, dtype, SUMMATION["float64" if dtype == "float64" else "float32"], unit, _BOUND)
        for output in ("y", "grad")
        for dtype, unit in UNITS.items()
    ),
)
