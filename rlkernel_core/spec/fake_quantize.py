"""fake_quantize@1: the weight that a rollout engine multiplies with, in the trainer's dtype, with a gradient.

    w' = dequantize(quantize(w))
    straight-through   dw = dw'                                                    (Bengio et al., arXiv:1308.3432)
    clipped            dw = 0 where w < low or w > high, dw' elsewhere          (LSQ, arXiv:1902.08153, equation 5)

low and high are the least and the largest value that the codes which `quantize` writes stand for, with the scale of
the element's group (`rlkernel_core.quant.ends`). A group that is NaN has neither, and its gradient is the upstream one.
A group whose scale underflows to 0 has both 0.

The bits of w' are those of the two operators of the same backend, one after the other; no code is stored. Only the
scale of an element's group sees other elements, and no gradient goes through it. Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from rlkernel_core import checks
from rlkernel_core.quant.spec import QuantSpec, spec_of
from rlkernel_core.spec.form import CAPTURABLE, DETERMINISTIC, GRAD, Clause, Feature, OpCall, OpSpec, Tolerance
from rlkernel_core.spec.quantize import QUANTIZED, QuantizeCall, check_quantize, format_features

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(slots=True, eq=False)
class FakeQuantizeCall(OpCall["Tensor"]):
    """A weight rounded to a format and back.

    Args:
        weight: [Nout, K] bf16, fp16, fp32 or float64 (rounded to fp32 first); any strides; never written to. Where the
            rollout engine quantizes bf16 weights, pass the bf16 weight, not its fp32 master: codes of the two differ.
        format: a name of `rlkernel_core.quant.FORMATS`, or `QuantSpec.named(name, option=value)`.
        dtype: fp32, bf16 or fp16; the weight's own (fp32 for float64) unless said. The value is rounded to it once.
        clipped: the gradient is zero where the weight lies beyond the values of its group's codes; it is the upstream
            gradient everywhere otherwise.

    Returns:
        [Nout, K], contiguous. A group of zeros stays zero; a group that holds an inf or NaN, or whose scale overflows
        its dtype, is NaN, all of it and no other. The gradient has the dtype of the weight.

    Raises:
        UnknownNameError: no such format.
        ArgumentError: wrong rank or dtype, no elements, or an option that the format does not offer.
    """

    weight: Tensor
    format: str | QuantSpec
    _: KW_ONLY
    dtype: torch.dtype | None = None
    clipped: bool = False


def check(call: FakeQuantizeCall) -> None:
    """Metadata checks shared by all implementations."""
    check_quantize(QuantizeCall(call.weight, call.format, dtype=call.dtype))
    checks.flags(clipped=call.clipped)


SPEC = OpSpec(
    name="fake_quantize",
    record=FakeQuantizeCall,
    summary="a weight rounded to a 4- or 8-bit format and back, with a straight-through gradient",
    primary="weight",
    differentiable=("weight",),
    carrying=("",),
    check=check,
    needed=lambda call: dict.fromkeys(spec_of(call.format).features(*QUANTIZED), True),
    one_of=("format",),
    features=(
        GRAD,
        DETERMINISTIC,
        CAPTURABLE,
        *format_features(*QUANTIZED),
        Feature("clipped", "a gradient of zero where the weight lies beyond what its group's codes stand for"),
    ),
    clauses=(
        Clause(
            "FQ-01",
            "there and back",
            "the bits of dequantize(quantize(weight, format), dtype=dtype) by the same backend, where it has both",
            "law",
        ),
        Clause(
            "FQ-02",
            "nearest",
            "every value is that of the nearest code, by the scales of the definition; of either code where w / s is "
            "within 2^-20 relative of the border between two",
            "accuracy",
        ),
        Clause("FQ-03", "dtype", "the weight's own unless said, else fp32; one rounding from fp32", "accuracy"),
        Clause(
            "FQ-04",
            "straight through",
            "the gradient is the upstream one, bit for bit, rounded once to the dtype of the weight",
            "gradient",
            "grad",
        ),
        Clause(
            "FQ-05",
            "clipped",
            "the gradient is zero where the weight lies beyond the values of its group's codes, and there alone",
            "gradient",
            "clipped",
        ),
        Clause("FQ-06", "not finite", "an inf or NaN makes its own group NaN, and changes no bit of any other", "law"),
        Clause("FQ-07", "any layout", "strided weights and gradients give the bits of contiguous ones", "invariance"),
        Clause(
            "FQ-08", "inputs untouched", "neither the weight nor the upstream gradient is written to", "side_effect"
        ),
        Clause("FQ-09", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("FQ-10", "capture", CAPTURABLE.text, "capture", "capturable"),
        Clause(
            "FQ-11",
            "bad arguments",
            "unknown formats get suggestions; wrong rank, dtype and flag raise errors naming the argument",
            "refusal",
        ),
    ),
    tolerances=(
        Tolerance("y", "any", 0.0, 0.0, "the order of operations is fixed: equality of bits"),
        Tolerance("codes", "any", 0.0, 2.0**-20, "relative distance of w / s from a border, as quantize@1 has it"),
    ),
)
