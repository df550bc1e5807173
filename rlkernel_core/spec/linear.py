"""linear@1: rows times a weight, bias and residual added before the one rounding; a row's bits are its own.

    y = round(x weight^T + bias + residual)

The arithmetic is fp32 (float64 where x is): products of 16-bit numbers are exact in it, sums are not, and there is one
rounding to the dtype of x at the end. transformers rounds x weight^T + bias and then its sum with the residual, and a
BLAS chooses the order of its sums by the number of rows; both change bits.

The order of sums is an implementation's own, and a manifest may name it (`sums`). It must not depend on M: a row alone,
in a batch and at either side of a tile's border has the same bits, and so has its gradient. The gradients of weight and
bias are sums over rows: they depend on the batch.

With `split` the weight is one of equal shares, one a rank of `group`. The dimension that is split is cut into `CHUNKS`
chunks, of which a rank owns whole ones. Sums over it are added chunk by chunk, in the order of the chunks, whoever owns
them: 1, 2, 4 and 8 ranks give the same bits. An all-reduce would add in an order that depends on the number of ranks,
and in the dtype of y. What travels are fp32 sums of chunks: 4 CHUNKS M N bytes to each rank.

Legend: M rows, whatever stands before the last dimension · N outputs · K inputs · R ranks. Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

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
    from torch.distributed import ProcessGroup

CHUNKS: Final = 8  # of the dimension that is split: as many ranks at most
GRAIN: Final = 16  # what the size of a chunk is a multiple of: the depth of a matrix instruction


@dataclass(slots=True, eq=False)
class LinearCall(OpCall["Tensor"]):
    """`x weight^T + bias + residual`, rounded once to the dtype of x.

    Args:
        x: [..., K] floating, K >= 1.
        weight: [N, K] of the dtype of x, N >= 1, as torch.nn.Linear keeps it; any strides.
        bias: [N] of the dtype of x.
        residual: [..., N] of the dtype of x.
        group: process group of 1, 2, 4 or 8 ranks over which the weight is split, equal shares in rank order. N and K
            above are those of this rank's share; the split one times R is a multiple of 128.
        split: "none"; "column": this rank has N of the outputs, x is whole, and the gradient of x is summed over the
            ranks; "row": this rank has K of the inputs, and y is summed over the ranks, then bias and residual, which
            are whole, are added once. The other results belong to the share. Without `group` the share is all, in the
            order of sums of any number of ranks.

    Returns:
        [..., N] of the dtype of x. Values beyond fp16's range are inf. NaN and infinities in a row of x, in a row of
        weight, in an element of bias or of residual reach the results that depend on them and no other.

    Raises:
        ArgumentError: sizes, dtypes or devices that do not match, an x of no dimension, K = 0 or N = 0, a group without
            `split`, or shares that are no whole chunks.
    """

    x: Tensor
    weight: Tensor
    _: KW_ONLY
    bias: Tensor | None = None
    residual: Tensor | None = None
    group: ProcessGroup | None = None
    split: Literal["none", "row", "column"] = "none"


def check(call: LinearCall) -> None:
    """Metadata checks shared by all implementations."""
    x, weight = call.x, call.weight
    checks.tensor("x", x, kind="floating")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ArgumentError("x", checks.describe(x), "needs a last dimension K >= 1", "Pass [..., K].")
    checks.tensor("weight", weight, ndim=2, kind="floating")
    if weight.shape[0] < 1:
        raise ArgumentError("weight", checks.describe(weight), "needs a row N >= 1", "Pass [N, K].")
    N = weight.shape[0]
    checks.aligned("weight", weight, (N, x.shape[-1]), "[N, K], K the last dimension of x", **_beside(x))
    checks.aligned("bias", call.bias, (N,), "the rows of weight", **_beside(x))
    checks.aligned("residual", call.residual, (*x.shape[:-1], N), "the result", **_beside(x))
    for name, given in (("weight", weight), ("bias", call.bias), ("residual", call.residual)):
        if given is not None and given.dtype != x.dtype:
            text = f"must be {str(x.dtype).removeprefix('torch.')} as x"
            raise ArgumentTypeError(name, checks.describe(given), text, f"Pass {name}.to(x.dtype).")
    _check_split(call)


def _check_split(call: LinearCall) -> None:
    checks.choice("split", call.split, ("none", "row", "column"))
    checks.process_group("group", call.group)
    if call.split == "none":
        if call.group is not None:
            remedy = 'Pass split="row" or split="column", or no group.'
            raise ArgumentError("split", repr(call.split), "splits nothing over the ranks of `group`", remedy)
        return
    R = 1 if call.group is None else call.group.size()
    if CHUNKS % R:
        raise ArgumentError(
            "group", f"{R} ranks", f"must have a number of ranks that divides {CHUNKS}", "Pass 1, 2, 4, 8."
        )
    name, at = ("K", 1) if call.split == "row" else ("N", 0)
    if (share := int(call.weight.shape[at])) * R % (CHUNKS * GRAIN):
        text = f"has {name} = {share} of {share * R}, which is no multiple of {CHUNKS * GRAIN}: {CHUNKS} whole chunks"
        raise ArgumentError(
            "weight", checks.describe(call.weight), text, 'Fill it up with zeros, or pass split="none".'
        )


def _beside(x: Tensor) -> dict[str, Any]:
    return {"kind": "floating", "beside": x, "where": "x"}


_BOUND = (
    "qmatmul's accumulation_bound: rtol is one rounding of y; atol times the sum of the sizes of its terms, times "
    "(1 + terms / 512), is fp32 summation"
)

SPEC = OpSpec(
    name="linear",
    record=LinearCall,
    summary="rows times a weight, with bias and residual, rounded once; a row's bits do not depend on the batch",
    primary="x",
    differentiable=("x", "weight", "bias", "residual"),
    carrying=("",),
    check=check,
    sizes=lambda call: {"rows": call.x.numel() // call.x.shape[-1]},
    needed=lambda call: {"group": call.split != "none"},
    features=(
        GRAD,
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        Feature("bias", "a bias per output, added before the rounding"),
        Feature("residual", "a residual per element, added before the rounding"),
        Feature("group", "the weight is split over a process group, by inputs or outputs"),
    ),
    clauses=(
        Clause("LN-01", "matches float64", "y is within qmatmul's accumulation_bound of float64", "accuracy"),
        Clause(
            "LN-02",
            "one rounding",
            "y lies between the roundings of both ends of the interval that fp32 sums may leave",
            "accuracy",
        ),
        Clause("LN-03", "any size", "M, N and K no multiple of anything: every product counts once", "accuracy"),
        Clause("LN-04", "bias", "is added to its column of every row; of zeros it changes no bit", "law", "bias"),
        Clause("LN-05", "residual", "is added to its element; of zeros it changes no bit", "law", "residual"),
        Clause("LN-06", "rows are apart", "NaN and infinities in one row reach no other", "law"),
        Clause("LN-07", "outputs are apart", "NaN and infinities in one row of weight reach its column alone", "law"),
        Clause("LN-08", "gradient", "of x, weight, bias and residual, matches float64", "gradient", "grad"),
        Clause("LN-09", "no rows", "give empty results, and gradients of 0 for weight and bias", "accuracy"),
        Clause("LN-10", "bad arguments", "wrong sizes and dtypes raise ArgumentError", "refusal"),
        Clause("LN-11", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("LN-12", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("LN-13", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("LN-14", "capture", CAPTURABLE.text, "capture", "capturable"),
        Clause(
            "LN-15", "shares", "ranks that hold shares give the whole call's results, within its bounds", "law", "group"
        ),
        Clause(
            "LN-16",
            "any number of ranks",
            "1, 2 and 4 ranks, and one without a group, give the same bits for results and gradients",
            "invariance",
            "group",
        ),
    ),
    tolerances=tuple(
        Tolerance(output, dtype, SUMMATION["float64" if dtype == "float64" else "float32"], unit, _BOUND)
        for output in ("y", "grad")
        for dtype, unit in UNITS.items()
    ),
)
