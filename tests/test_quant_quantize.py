"""Quantising: scales by rule, nearest codes, bounds on the error, what zeros, infinities and odd shapes give."""

from __future__ import annotations

import pytest
import torch

from rlkernel_core.quant import FORMATS, QuantSpec, QuantTensor
from rlkernel_core.quant.nf4 import TABLE, _nearest_by_cell, nearest
from rlkernel_torch.direct import dequantize, prepack, quantize

SPECS = [
    *FORMATS,
    QuantSpec.named("int4_g64", scale_rule="absmax/7"),
    QuantSpec.named("int4_g32_asym", scale_dtype="float32"),
    QuantSpec.named("int8_channel", scale_dtype="float16"),
    QuantSpec.named("nf4", double_quant=True),
    QuantSpec.named("fp8_block128", scale_rule="absmax/max_pow2"),
    *(QuantSpec.named("fp8_channel", element=e) for e in ("e5m2", "e4m3fnuz", "e5m2fnuz")),
]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# (relative to the largest |w| of a group, where scales are not rounded to 16 bits)
@pytest.mark.parametrize(
    ("name", "bound"),
    [("int4_channel", 1 / 15 + 2**-8), ("nf4", 0.1520), ("int8_channel", 0.5 / 127), ("fp8_channel", 2**-4)],
)
def test_errors_stay_below_the_published_fraction_of_the_largest_value(name, bound) -> None:
    weight = normal(64, 64)
    error = (dequantize(quantize(weight, name)) - weight).abs()
    assert bool((error <= weight.abs().amax(1, keepdim=True) * bound * 1.0001).all())


def test_power_of_two_scales_round_up() -> None:
    weight = torch.tensor([[448.0], [449.0], [224.0], [1.0]])
    w = quantize(weight, QuantSpec.named("fp8_block128", scale_rule="absmax/max_pow2"))
    assert w.parts["scale"].item() == 2.0
    assert dequantize(w).flatten().tolist() == [448.0, 448.0, 224.0, 1.0]


def test_asymmetric_codes_hold_zero_exactly_and_both_ends_of_the_range() -> None:
    weight = torch.tensor([[-2.0, 0.0, 5.5, 1.0, -0.5]])
    w = quantize(weight, "int4_channel_asym")  # range 7.5: scale 0.5, zero-point 4
    assert (w.parts["scale"].item(), w.parts["zero"].item()) == (0.5, 4)
    assert torch.equal(weight, dequantize(w))


@pytest.mark.parametrize("offset", [1e5, -1e5])
def test_one_sided_groups_keep_their_size(offset) -> None:
    weight = normal(4, 128) + offset
    for name in ("int4_g128_asym", "int4_g128", "nf4", "int8_channel", "fp8_channel"):
        assert bool(((dequantize(quantize(weight, name)) / offset - 1).abs() < 0.08).all()), name


@pytest.mark.parametrize("zeros", [(0.0, 0.0), (-0.0, -0.0), (0.0, -0.0), (-0.0, 0.0)])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_scale_is_a_negative_zero(spec, zeros) -> None:
    w = quantize(torch.tensor(zeros).repeat(3, 64), spec)
    for name in ("scale", "absmax", "nested_absmax", "nested_offset"):
        negative = w.parts.get(name, torch.zeros(1)).float().signbit().any()
        assert not negative or w.format == "gguf_q4_0", name  # llama.cpp's is 0 / -8


def test_scales_beyond_float16_are_nan_and_not_inf() -> None:
    w = quantize(torch.tensor([[1e6, 0.0], [1.0, 2.0]]), QuantSpec.named("int4_channel", scale_dtype="float16"))
    assert dequantize(w)[0].isnan().all()
    assert dequantize(w)[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_other_dtypes_are_quantised_as_their_fp32_value(spec, dtype) -> None:
    weight = normal(40, 70).to(dtype)
    w = quantize(weight, spec)
    assert w.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    assert quantize(weight.float(), spec, dtype=w.dtype).same_bits(w)


def test_the_search_by_cells_is_the_search() -> None:
    table = torch.tensor(TABLE)
    middle = (table[:-1] + table[1:]) / 2
    edges = torch.arange(-16, 17) / 16
    x = torch.cat(
        [
            torch.linspace(-1, 1, 100_001),
            *(torch.nextafter(v, v + s) for v in (middle, edges[1:-1], table[1:-1]) for s in (-1, 0, 1)),
            torch.tensor([-1.0, 1.0, -0.0, 1e-45, -1e-45]),
        ]
    )
    assert torch.equal(nearest(x, table), _nearest_by_cell(x, table))


def test_ties_take_the_lower_nf4_code() -> None:
    tie = (TABLE[9] + TABLE[10]) / 2
    w = quantize(torch.tensor([[1.0, tie]]), "nf4")
    assert w.parts["codes"].tolist() == [15 << 4 | 9]


def test_shapes_are_known_without_values() -> None:
    of_codec = {row.codec: name for name, row in FORMATS.items()}
    for spec in (*of_codec.values(), QuantSpec.named("int4_g32", act_order=True)):
        w = quantize(torch.empty(200, 130, device="meta"), spec)
        assert isinstance(w, QuantTensor)
        assert dequantize(prepack(w)).shape == (200, 130)
