"""What quantize, dequantize and prepack refuse, and how they say so."""

from __future__ import annotations

import pytest
import torch

from rlkernel_core.errors import ArgumentError, ArgumentTypeError, UnknownNameError
from rlkernel_core.quant import QuantSpec
from rlkernel_torch.direct import dequantize, prepack, quantize


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("format", "options", "error", "message"),
    [
        ("nf5", {}, UnknownNameError, "did you mean 'nf4'"),
        ("mxfp6", {}, UnknownNameError, "unknown format 'mxfp6'"),
        (4, {}, ArgumentTypeError, "must be the name of a format"),
        ("nf4", {"doublequant": True}, UnknownNameError, "did you mean 'double_quant'"),
        ("nf4", {"double_quant": 2}, ArgumentError, "choose from|Choose from False, True"),
        ("int4_g128", {"scale_dtype": "float64"}, ArgumentError, "Choose from 'bfloat16'"),
        ("fp8_tensor", {"act": "block128_fp8"}, ArgumentError, "Choose from 'none', 'token_fp8'"),
    ],
)
def test_unknown_formats_and_options_get_suggestions(format, options, error, message) -> None:  # noqa: A002
    with pytest.raises(error, match=message):
        quantize(normal(2, 2), QuantSpec.named(format, **options) if options else format)


def test_a_spec_that_contradicts_its_format_is_refused() -> None:
    made_up = QuantSpec("int4_g128", "int4", group=48, scale_dtype="bfloat16", scale_rule="absmax/7.5")
    with pytest.raises(ArgumentError, match="int4_g128 fixes group"):
        quantize(normal(2, 2), made_up)


def test_bad_arguments_are_named() -> None:
    weight = normal(4, 8)
    w = quantize(weight, "nf4")
    for call, message in (
        (lambda: quantize([1.0], "nf4"), "weight: must be a torch.Tensor"),
        (lambda: quantize(weight[0], "nf4"), "weight: must have 2 dim"),
        (lambda: quantize(weight.int(), "nf4"), "weight: must be a floating"),
        (lambda: quantize(weight.to(torch.float8_e4m3fn), "nf4"), "weight: is quantised already"),
        (lambda: quantize(weight[:0], "nf4"), "weight: has no elements"),
        (lambda: quantize(weight[:, :0], "nf4"), "weight: has no elements"),
        (lambda: quantize(weight, "nf4", dtype=torch.float64), "dtype: must be"),
        (lambda: quantize(weight, "int8_channel", out=w), "out: must be of format int8_channel"),
        (lambda: quantize(weight[:2], "nf4", out=w), "weight: must have the shape of out"),
        (lambda: quantize(weight, "nf4", out=weight), "out: must be a QuantTensor"),
        (lambda: quantize(weight, "nf4", dtype=torch.bfloat16, out=w), "dtype: is that of out"),
        (lambda: quantize(weight.to("meta"), "nf4", out=w), "out: must be on the device of weight"),
        (lambda: quantize(weight.clone().requires_grad_(), "nf4"), "weight: cannot be differentiated"),
        (lambda: dequantize(weight), "w: must be a QuantTensor"),
        (lambda: dequantize(w, dtype=torch.float64), "dtype: must be"),
        (lambda: prepack(w, layout=3), "layout: must be a layout id"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
    with pytest.raises(ArgumentTypeError):
        dequantize(weight)
