"""quantize@1, dequantize@1, prepack@1: a weight in a packed format, and the way back.

    w' = (q - z) * s          q the code, s and z the scale and zero-point of its group (integers and small floats)
    w' = table[q] * a         a the largest absolute value of its block (nf4, fp4)
    w' = (d c) q - (e m)      c and m integers of a sub-block, d and e of a super-block (the k-quants of GGUF)

The formats are the rows of `rlkernel_core.quant.FORMATS`; each codec's docstring there gives the storage, the rule for
scales, and the order of operations. Dequantizing is exact: every backend gives the same bits. Quantizing gives the
same scales, and the same codes except where w / s is within 2^-20 of the border between two; where s is a power of two
the quotient is exact, and so is the code.

Legend: Nout rows (outputs), K columns (inputs) of the weight.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.quant.spec import FORMATS, QuantSpec, option_feature, spec_of
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.form import CAPTURABLE, DETERMINISTIC, Clause, Feature, OpCall, OpSpec, Tolerance

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Options of a spec that dequantizing and prepacking depend on; quantizing depends on its rules as well.
STORED: Final = ("element", "scale_dtype", "double_quant", "act_order")
QUANTIZED: Final = (*STORED, "scale_rule", "rounding")
_DTYPES: Final = ("torch.float32", "torch.bfloat16", "torch.float16")


@dataclass(slots=True, eq=False)
class QuantizeCall(OpCall[QuantTensor]):
    """Quantize a weight, or quantize it again into the storage of an earlier one.

    Args:
        weight: [Nout, K] bf16, fp16, fp32 or float64 (rounded to fp32 first); any strides; never written to. K need
            not be a multiple of the group: the last group of a row is short.
        format: a name of `rlkernel_core.quant.FORMATS`, or `QuantSpec.named(name, option=value)`.
        dtype: what `dequantize` gives by default: fp32, bf16 or fp16; the weight's own (fp32 for float64) unless said.
        out: write into this weight, made by `quantize` or `prepack` with the same spec and shape, and return it. Its
            layout stays, and so does the address of every tensor in it: recorded graphs see the new values.

    Returns:
        QuantTensor in the canonical layout (with `out`: `out` itself). A group of zeros stays zero. A group that
        holds an inf or NaN, or whose scale overflows its dtype, dequantizes to NaN, all of it and no other.

    Raises:
        UnknownNameError: no such format.
        ArgumentError: wrong rank or dtype, an option the format does not offer, an `out` of another spec or shape;
            on backends without gradients (all so far) a weight that requires one, unless under torch.no_grad().
        LayoutError: `out` has a layout of another backend.
    """

    weight: Tensor
    format: str | QuantSpec
    _: KW_ONLY
    dtype: torch.dtype | None = None
    out: QuantTensor | None = None


@dataclass(slots=True, eq=False)
class DequantizeCall(OpCall["Tensor"]):
    """The weight [Nout, K] that `w` stands for.

    Args:
        w: any quantized weight whose layout the implementation knows.
        dtype: fp32, bf16 or fp16; `w.dtype` unless said. The fp32 value is rounded to it once; beyond the range of
            fp16 that is inf.

    Raises:
        ArgumentTypeError: `w` is no QuantTensor, or dtype is none of those.
        LayoutError: `w` has a layout of another backend.
    """

    w: QuantTensor
    _: KW_ONLY
    dtype: torch.dtype | None = None


@dataclass(slots=True, eq=False)
class PrepackCall(OpCall[QuantTensor]):
    """The same weight, arranged as an implementation of qmatmul reads it fastest; no bit is lost.

    Args:
        w: a quantized weight.
        layout: a layout id; None for the one the implementation prefers, "canonical" to undo an earlier prepack.

    Returns:
        QuantTensor bound to its layout: implementations that do not know it refuse it. It shares with `w` the parts
        that the layout leaves as they are, scales for example; it is `w` itself where `w` has that layout.

    Raises:
        ArgumentTypeError: `w` is no QuantTensor.
        ArgumentError: the layout cannot hold a weight of this shape.
        LayoutError: the layout of `w`, or the one asked for, belongs to another backend.
    """

    w: QuantTensor
    _: KW_ONLY
    layout: str | None = None


def quant_tensor(name: str, w: object) -> QuantTensor:
    """`w` is a quantized weight."""
    if not isinstance(w, QuantTensor):
        raise ArgumentTypeError(
            name, checks.describe(w), "must be a QuantTensor", f'Pass quantize({name}, "int4_g128") or another format.'
        )
    return w


def check_quantize(call: QuantizeCall) -> QuantSpec:
    """Metadata checks shared by all implementations of quantize@1; the spec that `format` stands for."""
    weight, dtype = call.weight, call.dtype
    spec = spec_of(call.format)
    checks.tensor("weight", weight, ndim=2)
    if weight.is_floating_point() and weight.element_size() < 2:
        raise ArgumentTypeError(
            "weight", checks.describe(weight), "is quantized already", "Pass bf16, fp16, fp32 or float64."
        )
    checks.tensor("weight", weight, kind="floating")
    if 0 in weight.shape:
        raise ArgumentError("weight", checks.describe(weight), "has no elements", "Pass [Nout >= 1, K >= 1].")
    check_dtype(dtype)
    if call.out is None:
        return spec
    target = quant_tensor("out", call.out)
    if target.spec != spec:
        raise ArgumentError("out", repr(target), f"must be of format {spec}", "Pass format=out.spec.")
    checks.shape("weight", weight, target.shape, "out")
    if weight.device != target.device:
        raise ArgumentError(
            "out", repr(target), f"must be on the device of weight, {weight.device}", "Move one of them."
        )
    if dtype is not None and dtype != target.dtype:
        raise ArgumentError("dtype", dtype, f"is that of out, {target.dtype}, where out is given", "Leave it out.")
    return spec


def check_dtype(dtype: object) -> None:
    """A dtype that a weight can be dequantized to."""
    if dtype is not None and str(dtype) not in _DTYPES:
        raise ArgumentTypeError(
            "dtype",
            repr(dtype),
            "must be torch.float32, bfloat16 or float16",
            "fp32 holds the value exactly; cast further.",
        )


def check_dequantize(call: DequantizeCall) -> None:
    """Metadata checks shared by all implementations of dequantize@1; layouts are each implementation's own."""
    quant_tensor("w", call.w)
    check_dtype(call.dtype)


def check_prepack(call: PrepackCall) -> None:
    """Metadata checks shared by all implementations of prepack@1; layouts are each implementation's own."""
    layout = call.layout
    quant_tensor("w", call.w)
    if layout is not None and not isinstance(layout, str):
        raise ArgumentTypeError("layout", checks.describe(layout), "must be a layout id", 'Pass "canonical" or None.')


def format_features(*options: str) -> tuple[Feature, ...]:
    """One feature per format, and one per value of these options that some format offers beside its default."""
    formats = [Feature(f"format:{name}", row.text) for name, row in FORMATS.items()]
    found = {
        option_feature(option, value): Feature(option_feature(option, value), f"formats with {option} = {value}")
        for row in FORMATS.values()
        for option in options
        for value in row.options.get(option, ())
        if value != getattr(row.spec, option)
    }
    return (*formats, *found.values())


def _needed(call: Any) -> dict[str, object]:
    return dict.fromkeys(quant_tensor("w", call.w).spec.features(*STORED), True)


def _device(call: Any) -> Any:
    return quant_tensor("w", call.w).device


QUANTIZE = OpSpec(
    name="quantize",
    record=QuantizeCall,
    summary="a weight in a packed 4- or 8-bit format, anew or in place",
    primary="weight",
    differentiable=("weight",),
    check=check_quantize,
    needed=lambda call: dict.fromkeys(spec_of(call.format).features(*QUANTIZED), True),
    one_of=("format",),
    features=(
        DETERMINISTIC,
        CAPTURABLE,
        *format_features(*QUANTIZED),
        Feature("out", "quantize again into existing storage, in the layout it has"),
    ),
    clauses=(
        Clause("QZ-01", "scales", "scales and zero-points have the bits of the reference codec", "accuracy"),
        Clause(
            "QZ-02",
            "codes",
            "codes equal the reference's, except where w / s is within 2^-20 relative of the border between two codes; "
            "under a power of two they equal it always",
            "accuracy",
        ),
        Clause("QZ-03", "error bound", "no value is further from the weight than the codec's error_bound", "accuracy"),
        Clause(
            "QZ-04",
            "powers of two",
            "a weight times a power of two has the same codes and scales times that, away from under- and overflow",
            "law",
        ),
        Clause(
            "QZ-05", "any shape", "K and Nout no multiple of group, block or byte: every element counts", "accuracy"
        ),
        Clause("QZ-06", "zero", "a group of zeros and one whose scale underflows give zeros", "accuracy"),
        Clause(
            "QZ-07", "not finite", "an inf or NaN makes its own group NaN, and changes no bit of any other", "accuracy"
        ),
        Clause("QZ-08", "saturation", "8-bit floats saturate: no NaN or inf from finite weights", "accuracy"),
        Clause("QZ-09", "any layout", "strided weights give the bits of contiguous ones", "invariance"),
        Clause("QZ-10", "in place", "out keeps every address, and has the bits of a fresh quantization", "law", "out"),
        Clause(
            "QZ-11", "inputs untouched", "the weight is not written to; global RNG and defaults stay", "side_effect"
        ),
        Clause("QZ-12", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("QZ-13", "capture", "with out, the call can be captured and replays on new weights", "capture", "out"),
        Clause(
            "QZ-14",
            "bad arguments",
            "unknown formats get suggestions; wrong rank, dtype, option, out raise errors naming the argument",
            "refusal",
        ),
        Clause("QZ-15", "no silent detach", "a weight that requires grad is refused unless under no_grad", "refusal"),
        Clause("QZ-16", "capture without out", CAPTURABLE.text, "capture", "capturable"),
    ),
    tolerances=(
        Tolerance("codes", "any", 0.0, 2.0**-20, "relative distance of w / s from a border; a product with 1 / s"),
    ),
)

DEQUANTIZE = OpSpec(
    name="dequantize",
    record=DequantizeCall,
    summary="the weight that a quantized one stands for, bit for bit the same on every backend",
    check=check_dequantize,
    needed=_needed,
    where=_device,
    one_of=("format",),
    features=(DETERMINISTIC, CAPTURABLE, *format_features(*STORED)),
    clauses=(
        Clause("DQ-01", "bit-exact", "every code and every scale gives the bits of the reference codec", "accuracy"),
        Clause("DQ-02", "one rounding", "bf16 and fp16 results are the fp32 value rounded to nearest even", "accuracy"),
        Clause(
            "DQ-03", "extremes", "scales of 0, subnormal, the largest, inf and NaN multiply as IEEE says", "accuracy"
        ),
        Clause("DQ-04", "nibble order", "codes stand where the format says, odd counts included", "accuracy"),
        Clause("DQ-05", "layouts agree", "a prepacked weight dequantizes to the bits of the canonical one", "law"),
        Clause("DQ-06", "unknown layout", "a layout of another backend raises LayoutError", "refusal"),
        Clause("DQ-07", "inputs untouched", "w is not written to; global RNG and defaults stay", "side_effect"),
        Clause("DQ-08", "bad arguments", "no QuantTensor, other dtypes raise errors naming the argument", "refusal"),
        Clause("DQ-09", "capture", CAPTURABLE.text, "capture", "capturable"),
        Clause("DQ-10", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
    ),
    tolerances=(Tolerance("weight", "any", 0.0, 0.0, "the order of operations is fixed: equality of bits"),),
)

PREPACK = OpSpec(
    name="prepack",
    record=PrepackCall,
    summary="a quantized weight rearranged for an implementation of qmatmul, without loss",
    check=check_prepack,
    needed=_needed,
    where=_device,
    one_of=("format",),
    features=(DETERMINISTIC, *format_features(*STORED)),
    clauses=(
        Clause("PP-01", "lossless", "prepack(prepack(w), layout='canonical') has every bit of w", "law"),
        Clause("PP-02", "bound", "the result names its layout; qmatmul elsewhere raises LayoutError", "refusal"),
        Clause("PP-03", "any shape", "shapes no multiple of a tile work, or are refused with the reason", "accuracy"),
        Clause(
            "PP-04",
            "inputs untouched",
            "w is not written to, and shares no code storage with a new layout",
            "side_effect",
        ),
        Clause("PP-05", "unknown layout", "a layout id that is not the implementation's raises LayoutError", "refusal"),
        Clause("PP-06", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
    ),
    tolerances=(Tolerance("parts", "any", 0.0, 0.0, "bytes are moved, none is changed"),),
)
