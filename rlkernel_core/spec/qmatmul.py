"""qmatmul@1: x times a quantized weight, with what follows it in a model, rounded once.

    h = x w'^T + s (x A^T) B^T + bias
    y = act(h) + residual

w' is the fp32 value that `dequantize(w, dtype=torch.float32)` gives. Everything up to y is accumulated in fp32 or
better (float64 for float64 x) and y is rounded to the dtype of x once; a pair activation takes the first half of the
rows of w as the gate and the second as the value, so `y = silu(h_gate) * h_value + residual` for swiglu.

Whether a kernel may round w' to the dtype of x first is `weight_rounding`. "any", the default, leaves it to the
implementation: tensor cores want a rounded weight where M is large, and a scale applied after the sum where M is
small. "none" and "dtype" pin it, for a trainer and a rollout engine that have to agree: "dtype" is the product with
`dequantize(w, dtype=x.dtype)`.

A format with `act` quantizes x as well (`rlkernel_core.quant.activations`): int8_w8a8 always, fp8, mx and nvfp4 where
the spec says so. LoRA sees x as it came. The integer product is exact and has no w' to round:
h = fl32(fl32(acc * s_x) * s_w) + ...

Grouped (mixture of experts): with `ends` [E] the rows of w are those of E experts, one after the other, and the rows
of x are sorted by expert. Rows ends[e - 1] .. ends[e] - 1 of x (from 0 for the first) are multiplied with the rows
e Nout / E .. (e + 1) Nout / E - 1 of w, as torch's grouped_mm counts them. An expert may be empty; rows from the last
end on belong to none and give 0, whatever they hold. `ends` is read on the device, so it may change between replays.

Several low-rank additions in one call: A [G, r, K] and B [G, Nout / E, r]; a row has s (x A_g^T) B_g^T of the g that it
belongs to. With `ends` every expert has its own, G = E. Without, `lora_ends` [G] cuts the rows of x, sorted by adapter,
as `ends` does; rows from its last end on have none and give the plain product.

Legend: M tokens (any leading shape) · K inputs · Nout rows of w · E experts, 1 where there is no `ends` · r LoRA rank ·
G low-rank additions · R = Nout / E, or half of it for a pair.
Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.quant.tensor import QuantTensor
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
from rlkernel_core.spec.quantize import STORED, format_features, quant_tensor

if TYPE_CHECKING:
    from torch import Tensor

# name -> what it computes; pairs take two halves of h.
ACTIVATIONS: Final[Mapping[str, str]] = {
    "relu": "max(h, 0)",
    "silu": "h * sigmoid(h)",
    "gelu": "h * Phi(h), Phi by erf",
    "gelu_tanh": "h * Phi(h), Phi by tanh (arXiv 1606.08415)",
    "swiglu": "silu(h_gate) * h_value (arXiv 2002.05202)",
    "geglu_tanh": "gelu_tanh(h_gate) * h_value (arXiv 2002.05202)",
}
PAIRS: Final = frozenset({"swiglu", "geglu_tanh"})
WEIGHT_ROUNDINGS: Final = ("any", "none", "dtype")
_MATMUL: Final = (*STORED, "act")


@dataclass(frozen=True)
class LoRA:
    """A low-rank addition s (x A^T) B^T, in the shapes that torch.nn.Linear and PEFT keep.

    A and B may be written to between calls, inside a captured graph included: they are read at every call. qmatmul
    takes a stack of several, where `ends` or `lora_ends` says which rows of x each is for. They share one rank and one
    scale: pad a smaller rank with zeros, and multiply another scale into its B.
    """

    A: Tensor  # [r, K], or [G, r, K]
    B: Tensor  # [Nout, r], or [G, Nout / E, r]
    scale: float = 1.0  # alpha / r, or alpha / sqrt(r)

    @property
    def requires_grad(self) -> bool:
        """A gradient is asked for A or B."""
        return bool(self.A.requires_grad or self.B.requires_grad)


@dataclass(slots=True, eq=False)
class QmatmulCall(OpCall["Tensor"]):
    """`act(x w'^T + lora + bias) + residual`, rounded once to the dtype of x.

    Args:
        x: [..., K] bf16, fp16, fp32 (float64 on backends that claim it); any strides; never written to.
        w: quantized weight [Nout, K], canonical or in a layout of the implementation that runs.
        bias: [Nout] floating.
        lora: low-rank addition; its A, B and scale. With `ends` one for each expert: A [E, r, K], B [E, Nout / E, r].
        activation: a name of `ACTIVATIONS`; pairs halve the width, gate rows (of each expert) first.
        residual: [..., R] floating, added after the activation.
        weight_rounding: "any", "none" (fp32 w'), "dtype" (w' rounded to the dtype of x).
        ends: [E] int32, ascending, at most M: where the rows of x of each of E experts end; x is [M, K] then. An end
            below the one before it counts as that one, one beyond M as M.
        lora_ends: [G] int32, counted as `ends`: where the rows of x of each of G adapters end, with A [G, r, K] and
            B [G, Nout, r]; x is [M, K] then. Rows from the last end on have no adapter. Not together with `ends`.

    Returns:
        [..., R] of the dtype of x. Values beyond fp16's range are inf. A NaN or inf in a row of x, a group of w or a
        row of B reaches the outputs that depend on it and no other.

    Gradients reach x, bias, residual, lora.A and lora.B, never w. They use w' as the forward pass does; where x was
    quantized, the gradient passes through the rounding as if it were not there.

    Raises:
        ArgumentError: sizes, ranks, dtypes or devices that do not match; an odd Nout / E with a pair activation; an E
            that does not divide Nout; `lora_ends` with `ends`, or without `lora`.
        LayoutError: `w` is packed for another implementation.
    """

    x: Tensor
    w: QuantTensor
    _: KW_ONLY
    bias: Tensor | None = None
    lora: LoRA | None = None
    activation: str | None = None
    residual: Tensor | None = None
    weight_rounding: str = "any"
    ends: Tensor | None = None
    lora_ends: Tensor | None = None


def check(call: QmatmulCall) -> None:
    """Metadata checks shared by all implementations of qmatmul@1; layouts are each implementation's own."""
    x, bias, lora, activation, residual, ends = call.x, call.bias, call.lora, call.activation, call.residual, call.ends
    weight = quant_tensor("w", call.w)
    outputs, inputs = weight.shape
    checks.tensor("x", x, kind="floating")
    if x.dim() < 1 or x.shape[-1] != inputs:
        raise ArgumentError("x", checks.describe(x), f"needs a last dimension K = {inputs}, as w", "Pass [..., K].")
    _on_device("w", weight.device, x)
    checks.choice("weight_rounding", call.weight_rounding, WEIGHT_ROUNDINGS)
    if activation is not None:
        checks.choice("activation", activation, ACTIVATIONS)
    width = outputs if ends is None else _check_ends(ends, x, outputs)
    if activation in PAIRS and width % 2:
        raise ArgumentError(
            "activation", activation, f"halves the rows of w, which are {width}", "Stack gate and value rows."
        )
    if bias is not None:
        checks.tensor("bias", bias, ndim=1, kind="floating")
        checks.shape("bias", bias, (outputs,), "the rows of w")
        _on_device("bias", bias.device, x)
    if residual is not None:
        checks.tensor("residual", residual, kind="floating")
        width = width // 2 if activation in PAIRS else width
        checks.shape("residual", residual, (*x.shape[:-1], width), "the result")
        _on_device("residual", residual.device, x)
    groups = _check_groups(call)
    if lora is not None:
        rows = outputs if ends is None else outputs // ends.shape[0]
        check_lora(lora, (rows, inputs), x, "x", groups)


def _check_ends(ends: Any, x: Tensor, outputs: int) -> int:
    """Rows of w that an expert has."""
    _check_rows("ends", ends, x)
    experts = int(ends.shape[0])
    if experts < 1 or outputs % experts:
        text = f"needs as many experts as the {outputs} rows of w can be cut into"
        raise ArgumentError("ends", checks.describe(ends), text, "Pass one end an expert.")
    return outputs // experts


def _check_groups(call: QmatmulCall) -> int | None:
    """How many low-rank additions there have to be; G, and None for one that all rows share."""
    ends, apart = call.ends, call.lora_ends
    if apart is None:
        return None if ends is None else int(ends.shape[0])
    _check_rows("lora_ends", apart, call.x)
    if call.lora is None:
        raise ArgumentError("lora_ends", checks.describe(apart), "needs a lora", "Pass LoRA(A [G, r, K], B, scale).")
    if ends is not None:
        text = "cannot go with ends, by which every expert has an adapter of its own"
        raise ArgumentError("lora_ends", checks.describe(apart), text, "Leave it out.")
    groups = int(apart.shape[0])
    stacked = call.lora.A if isinstance(call.lora, LoRA) else None
    if groups < 1 or (getattr(stacked, "ndim", 0) == 3 and stacked.shape[0] != groups):
        text = "needs an end for each of at least one adapter, which lora.A [G, r, K] stacks"
        raise ArgumentError("lora_ends", checks.describe(apart), text, "Pass one end an adapter.")
    return groups


def _check_rows(name: str, ends: Any, x: Tensor) -> None:
    """Checks of where groups of rows of x end."""
    checks.tensor(name, ends, ndim=1)
    if str(ends.dtype) != "torch.int32":
        raise ArgumentTypeError(name, checks.describe(ends), "must be int32", "Pass counts.cumsum(0).int().")
    if x.dim() != 2:
        raise ArgumentError("x", checks.describe(x), f"must be [M, K] with {name}", "Pass x.flatten(0, -2).")
    _on_device(name, ends.device, x)


def check_lora(lora: object, shape: Sequence[int], x: Tensor, name: str, groups: int | None = None) -> None:
    """Checks of a low-rank addition to a weight [outputs, inputs] of `shape`, beside the input x, which has a name.

    Where there are groups of rows of x, it is a stack: A [groups, r, inputs] and B [groups, outputs, r].
    """
    if not isinstance(lora, LoRA):
        raise ArgumentTypeError("lora", checks.describe(lora), "must be a LoRA", "Pass LoRA(A, B, scale).")
    many, text = ((), "") if groups is None else ((groups,), "groups, ")
    checks.tensor("lora.A", lora.A, ndim=2 + len(many), kind="floating")
    checks.tensor("lora.B", lora.B, ndim=2 + len(many), kind="floating")
    checks.number("lora.scale", lora.scale)
    (outputs, inputs), rank = shape, lora.A.shape[-2]
    checks.shape("lora.A", lora.A, (*many, rank, inputs), f"[{text}r, inputs] of the weight")
    checks.shape("lora.B", lora.B, (*many, outputs, rank), f"[{text}outputs, r] of the weight and lora.A")
    checks.same_device("lora.A", lora.A, x, name)
    checks.same_device("lora.B", lora.B, x, name)


def _on_device(name: str, device: Any, x: Tensor) -> None:
    if device != x.device:
        raise ArgumentError(name, device, f"must be on the device of x, {x.device}", "Move one of them.")


def accumulation_bound(
    y: Any, reach: Any, *, unit: float, inner: int, weight_rounding: str = "any", lora_reach: Any = 0.0
) -> Any:
    """How far a result may be from the exact one: the first level of tolerance; works on numbers and tensors.

    |y - y_exact| <= u |y_exact| + (c u + e (1 + K / 512)) (reach + lora_reach) + u lora_reach + t

    per element before an activation, with e = 2^-19 (2^-48 for float64), t = 2^-126 (2^-25 for fp16, whose subnormal
    numbers are that far from one another's middle), and y_exact computed in float64 from w'
    ("any", "none") or from w' rounded to the dtype of x ("dtype"), and from x as the format quantizes it. The second
    level, against the full-precision weight, adds sum_k |x_k| error_bound(w)[n, k].

    Args:
        y: the exact result.
        reach: sum_k |x_k| |w'_nk| + |bias| + |residual|.
        unit: u, the unit roundoff of the dtype of x: see `UNITS`.
        inner: K.
        weight_rounding: "any" makes c = 1, for a weight that may have been rounded to the dtype of x; else c = 0.
        lora_reach: |s| sum_r (sum_k |x_k| |A_rk|) |B_nr|; x A^T may always be rounded to the dtype of x.
    """
    rounded = unit if weight_rounding == "any" else 0.0
    summed = SUMMATION["float64" if unit <= UNITS["float64"] else "float32"] * (1.0 + inner / 512.0)
    return unit * abs(y) + (rounded + summed) * (reach + lora_reach) + unit * lora_reach + smallest_error(unit)


def smallest_error(unit: float) -> float:
    """What rounding to a dtype of this unit roundoff may change near 0; t above."""
    return 2.0**-25 if unit == UNITS["float16"] else 2.0**-126


# e above, by the dtype of accumulation: 32 units. A sum of one sign in sequence wanders by 0.23 sqrt(K) units, and six
# times that stays below 16 (1 + K / 512); equal addends round to one side (31 units at K = 286 with a BLAS) and tensor
# cores cut bits off instead of rounding, so it is doubled.
SUMMATION: Final[Mapping[str, float]] = {"float32": 2.0**-19, "float64": 2.0**-48}
UNITS: Final[Mapping[str, float]] = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}


def _needed(call: Any) -> dict[str, object]:
    many = call.lora is not None and (call.ends is not None or call.lora_ends is not None)
    return {
        "grouped": call.ends is not None,
        "grouped_lora": many,
        **dict.fromkeys(quant_tensor("w", call.w).spec.features(*_MATMUL), True),
    }


_TWO_LEVELS: Final = (
    "accumulation_bound: rtol is one rounding of y; atol times sum |x||w'| times (1 + K/512) is fp32 summation, "
    "and rtol times it once more where the weight may be rounded; against the full weight add sum |x| error_bound(w)"
)


def _sizes(call: QmatmulCall) -> dict[str, int]:
    return {"rows": math.prod(call.x.shape[:-1])}


SPEC = OpSpec(
    name="qmatmul",
    record=QmatmulCall,
    summary="x times a quantized weight with LoRA, bias, activation and residual, rounded once",
    primary="x",
    one_of=("format",),
    differentiable=("x", "bias", "lora", "residual"),
    carrying=("",),
    check=check,
    sizes=_sizes,
    needed=_needed,
    features=(
        GRAD,
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        *format_features(*_MATMUL),
        Feature("lora", "a low-rank addition whose matrices are read at every call"),
        Feature("bias", "a bias per output"),
        Feature("residual", "a residual added after the activation, before the rounding"),
        Feature("grouped", "rows of x in groups, each multiplied with the rows of one expert of w"),
        Feature(
            "grouped_lora", "a low-rank addition of its own for each expert, or for each of several groups of rows"
        ),
        *(Feature(f"activation:{name}", text) for name, text in ACTIVATIONS.items()),
        Feature("weight_rounding:none", "w' is not rounded to the dtype of x"),
        Feature("weight_rounding:dtype", "w' is rounded to the dtype of x, as dequantize does"),
    ),
    clauses=(
        Clause("QM-01", "the dequantized product", "y is within accumulation_bound of float64 on w'", "accuracy"),
        Clause(
            "QM-02", "the full product", "y is within accumulation_bound + sum |x| error_bound of x W^T", "accuracy"
        ),
        Clause("QM-03", "any shape", "M, Nout and K no multiple of anything: every element counts once", "accuracy"),
        Clause("QM-04", "one at a time", "x = a row of the identity gives that column of w' (rounded)", "law"),
        Clause("QM-05", "unrounded weight", "y is within accumulation_bound with c = 0", "law", "weight_rounding:none"),
        Clause("QM-06", "rounded weight", "as QM-05 against dequantize(w, x.dtype)", "law", "weight_rounding:dtype"),
        Clause(
            "QM-07",
            "integer product",
            "int8_w8a8 is within 2 ulp of the formula on exact sums",
            "accuracy",
            "format:int8_w8a8",
        ),
        Clause(
            "QM-08",
            "per-token scales",
            "with quantized x, a row's result depends on that row alone",
            "invariance",
            "format:int8_w8a8",
        ),
        Clause("QM-09", "LoRA", "y has s (x A^T) B^T; B = 0 gives the plain product", "accuracy", "lora"),
        Clause("QM-10", "LoRA is live", "A and B written in place are seen by the next call or replay", "law", "lora"),
        Clause("QM-11", "bias", "added per output before the activation", "accuracy", "bias"),
        Clause("QM-12", "activation", "act of the unrounded h", "accuracy", "activation:silu"),
        Clause("QM-13", "pair", "gate rows first, value rows second", "accuracy", "activation:swiglu"),
        Clause("QM-14", "residual", "added after the activation; one rounding for the sum", "accuracy", "residual"),
        Clause("QM-15", "weight update", "after quantize(out=w) the same call uses the new weight", "law"),
        Clause("QM-16", "gradient", "of x, bias, lora and residual match float64; w gets none", "gradient", "grad"),
        Clause(
            "QM-17",
            "stale weight",
            "backward after an in-place update of w, A or B raises, or gives the old gradient",
            "gradient",
            "grad",
        ),
        Clause(
            "QM-18", "layouts agree", "a prepacked weight gives the result of the canonical one within QM-01", "law"
        ),
        Clause("QM-19", "unknown layout", "a layout of another backend raises LayoutError", "refusal"),
        Clause("QM-20", "strides", "strided x, bias, residual, A and B give the bits of contiguous ones", "invariance"),
        Clause("QM-21", "no rows", "M = 0 gives an empty result and zero gradients", "accuracy"),
        Clause("QM-22", "not finite", "NaN and inf reach the outputs that depend on them and no other", "accuracy"),
        Clause("QM-23", "inputs untouched", "nothing is written to; global RNG and defaults stay", "side_effect"),
        Clause("QM-24", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("QM-25", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("QM-26", "capture", "captured, replays see new x, LoRA and weights", "capture", "capturable"),
        Clause("QM-27", "bad arguments", "wrong sizes, types, names raise errors naming the argument", "refusal"),
        Clause(
            "QM-28",
            "experts",
            "each row meets the rows of w, the bias and the pair of its own expert; ragged and empty ones included",
            "accuracy",
            "grouped",
        ),
        Clause(
            "QM-29", "rows of no expert", "give 0 and get no gradient, NaN and inf in them included", "law", "grouped"
        ),
        Clause("QM-30", "wild ends", "ends that fall or exceed M count as the one before, and as M", "law", "grouped"),
        Clause("QM-31", "experts' gradients", "of x, bias and residual match float64", "gradient", "grouped"),
        Clause(
            "QM-32",
            "several LoRAs",
            "each row gets s (x A^T) B^T of its own expert or adapter; ragged and empty ones included",
            "accuracy",
            "grouped_lora",
        ),
        Clause(
            "QM-33",
            "rows of other adapters",
            "keep every bit whatever an adapter holds, NaN included; rows of none have those of the plain product",
            "law",
            "grouped_lora",
        ),
        Clause(
            "QM-34", "wild lora_ends", "that fall or exceed M count as the one before, and as M", "law", "grouped_lora"
        ),
        Clause("QM-35", "several LoRAs' gradients", "of x, A and B match float64", "gradient", "grouped_lora"),
    ),
    tolerances=tuple(
        Tolerance(output, dtype, SUMMATION["float64" if dtype == "float64" else "float32"], unit, _TWO_LEVELS)
        for output in ("y", "grad_x", "grad_bias", "grad_lora")
        for dtype, unit in UNITS.items()
    ),
)
