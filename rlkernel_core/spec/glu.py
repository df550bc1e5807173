"""glu@1: a gated linear unit without its products: the activation of one half of a row times the other half.

    y = round(act(gate) up),   gate = x[..., :D], up = x[..., D:]

    silu       g sigmoid(g)                                  SwiGLU (Shazeer, arXiv:2002.05202): Llama, Qwen
    gelu       g Phi(g), Phi by erf (Hendrycks and Gimpel, arXiv:1606.08415)
    gelu_tanh  g Phi(g), Phi(g) = (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) / 2: Gemma

The arithmetic is fp32 (float64 where x is), with one rounding to the dtype of x at the end. transformers rounds
act(gate) first, which is one rounding more. Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

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

ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh")


@dataclass(slots=True, eq=False)
class GluCall(OpCall["Tensor"]):
    """The activation of the first half of each row, times its second half.

    Args:
        x: [..., 2 D] floating, gate and up side by side.
        activation: "silu", "gelu" or "gelu_tanh", see above.

    Returns:
        [..., D] of the dtype of x.

    Raises:
        ArgumentError: an x of no dimension, of an odd width or of another dtype; an unknown activation.
    """

    x: Tensor
    _: KW_ONLY
    activation: str


def check(call: GluCall) -> None:
    """Metadata checks shared by all implementations."""
    x = checks.tensor("x", call.x, kind="floating")
    if x.dim() < 1 or x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ArgumentError("x", checks.describe(x), "needs an even last dimension 2 D", "Pass [gate | up].")
    checks.choice("activation", call.activation, ACTIVATIONS)


SPEC = OpSpec(
    name="glu",
    record=GluCall,
    summary="an activation of half a row times the other half: SwiGLU, GEGLU",
    primary="x",
    differentiable=("x",),
    carrying=("",),
    check=check,
    sizes=lambda call: {"rows": call.x.numel() // call.x.shape[-1]},
    one_of=("activation",),
    features=(
        GRAD,
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        *(Feature(f"activation:{name}", f"the activation {name}") for name in ACTIVATIONS),
    ),
    clauses=(
        Clause("GL-01", "matches float64", "y is within tolerance of float64", "accuracy"),
        Clause(
            "GL-02",
            "one rounding",
            "y lies between the roundings of both ends of the interval that fp32 arithmetic may leave",
            "accuracy",
        ),
        Clause("GL-03", "linear in up", "twice up gives twice y, bit for bit", "law"),
        Clause("GL-04", "elements are apart", "NaN in a gate or in an up reaches one element of y", "law"),
        Clause("GL-05", "gradient", "of x matches float64, and is finite for any finite x", "gradient", "grad"),
        Clause("GL-06", "no rows", "give empty results", "accuracy"),
        Clause("GL-07", "bad arguments", "wrong sizes, dtypes and names raise ArgumentError", "refusal"),
        Clause("GL-08", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("GL-09", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("GL-10", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("GL-11", "capture", CAPTURABLE.text, "capture", "capturable"),
    ),
    tolerances=(
        Tolerance("y", "float32", 1e-6, 2e-6, "times |up|; an exponential, a division and three products"),
        Tolerance("y", "bfloat16", 1e-6, 4e-3, "as fp32, rounded once to bf16: 2^-8"),
        Tolerance("y", "float16", 1e-6, 5e-4, "as fp32, rounded once to fp16: 2^-11"),
        Tolerance("y", "float64", 1e-14, 1e-13, "float64 throughout"),
        Tolerance("grad", "float32", 4e-6, 2e-6, "times |g| max(1, |up|): terms of other signs meet near a minimum"),
        Tolerance("grad", "bfloat16", 4e-6, 4e-3, "as fp32, rounded once to bf16: 2^-8"),
        Tolerance("grad", "float16", 4e-6, 5e-4, "as fp32, rounded once to fp16: 2^-11"),
        Tolerance("grad", "float64", 1e-13, 1e-13, "float64 throughout"),
    ),
)
