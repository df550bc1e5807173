"""Quantising: scales by rule, nearest codes, bounds on the error, what zeros, infinities and odd shapes give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_core.definitions import quantise
from rlkernel_core.quant import FORMATS, QuantSpec, QuantTensor, error_bound
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
SHAPES = [(1, 1), (3, 5), (128, 256), (130, 129), (257, 65)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def range_of(index, size) -> slice:
    """The group of an index; size 0 is all."""
    return slice(index // size * size, (index // size + 1) * size) if size else slice(None)


def spec_of(spec) -> QuantSpec:
    return spec if isinstance(spec, QuantSpec) else QuantSpec.named(spec)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_value_is_further_away_than_the_bound(spec, shape) -> None:
    weight = normal(*shape)
    w = quantize(weight, spec)
    w.validate()
    error = (dequantize(w).double() - weight.double()).abs()
    assert bool((error <= error_bound(w, weight)).all())


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    spec=st.sampled_from(SPECS),
    rows=st.integers(1, 20),
    columns=st.integers(1, 150),
    exponent=st.integers(-60, 30),
    shift=st.sampled_from([0.0, 1.0, -3.0]),
    seed=st.integers(0, 999),
)
def test_the_bound_holds_at_any_size_scale_and_offset(spec, rows, columns, exponent, shift, seed) -> None:
    weight = (normal(rows, columns, seed=seed) + shift) * 2.0**exponent
    w = quantize(weight, spec)
    error = (dequantize(w).double() - weight.double()).abs()
    # A float16 scale that overflows makes its group NaN, which is no number to bound.
    has_half = any(part.dtype == torch.float16 for part in w.parts.values())
    assert bool((error <= error_bound(w, weight))[error.isfinite()].all())
    assert bool(error.isfinite().all()) or has_half


# (relative to the largest |w| of a group, where scales are not rounded to 16 bits)
@pytest.mark.parametrize(
    ("name", "bound"),
    [("int4_channel", 1 / 15 + 2**-8), ("nf4", 0.1520), ("int8_channel", 0.5 / 127), ("fp8_channel", 2**-4)],
)
def test_errors_stay_below_the_published_fraction_of_the_largest_value(name, bound) -> None:
    weight = normal(64, 64)
    error = (dequantize(quantize(weight, name)) - weight).abs()
    assert bool((error <= weight.abs().amax(1, keepdim=True) * bound * 1.0001).all())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_codes_are_nearest(spec) -> None:
    weight = normal(20, 130)
    assert quantise.codes_are_right(weight, quantize(weight, spec)).all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_scales_are_those_of_their_rule(spec) -> None:
    weight = normal(20, 130)
    w = quantize(weight, spec)
    for name, expected in quantise.scales(weight, w.spec).items():
        assert torch.equal(expected.view(torch.uint8), w.parts[name].view(torch.uint8)), name


@pytest.mark.parametrize(
    ("name", "rule", "divisor"),
    [
        ("int4_g32", "absmax/7.5", 7.5),  # not 8: that halves the range it may use
        ("int4_g32", "absmax/7", 7.0),
        ("int8_channel", "absmax/127", 127.0),
        ("fp8_channel", "absmax/max", 448.0),
    ],
)
def test_scales_follow_their_rule_bit_for_bit(name, rule, divisor) -> None:
    weight = normal(8, 32)
    w = quantize(weight, QuantSpec.named(name, scale_rule=rule) if name != "int8_channel" else name)
    expected = (weight.abs().amax(1, keepdim=True) / divisor).to(w.parts["scale"].dtype)
    assert torch.equal(expected, w.parts["scale"])


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


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_zeros_stay_zero(spec) -> None:
    weight = normal(4, 256)
    weight[1] = 0
    found = dequantize(quantize(weight, spec))
    assert torch.equal(torch.zeros(256), found[1])
    assert torch.equal(torch.zeros(3, 5), dequantize(quantize(torch.zeros(3, 5), spec)))


@pytest.mark.parametrize("zeros", [(0.0, 0.0), (-0.0, -0.0), (0.0, -0.0), (-0.0, 0.0)])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_scale_is_a_negative_zero(spec, zeros) -> None:
    w = quantize(torch.tensor(zeros).repeat(3, 64), spec)
    for name in ("scale", "absmax", "nested_absmax", "nested_offset"):
        negative = w.parts.get(name, torch.zeros(1)).float().signbit().any()
        assert not negative or w.format == "gguf_q4_0", name  # llama.cpp's is 0 / -8


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_scales_that_underflow_give_zeros(spec) -> None:
    found = dequantize(quantize(torch.full((2, 40), 1e-45), spec))
    assert bool(((found == 0) | (found == 1e-45)).all())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_value_that_is_not_finite_makes_its_own_group_nan_and_no_other(spec, poison) -> None:
    weight = normal(300, 256)
    clean = dequantize(quantize(weight, spec))
    weight[130, 70] = poison
    found = dequantize(quantize(weight, spec))
    spec = spec_of(spec)
    group = torch.zeros(300, 256, dtype=torch.bool)
    if spec.element in {"nf4", "fp4"}:
        flat = 130 * 256 + 70
        size = spec.group * (256 if spec.double_quant else 1)
        group.view(-1)[flat // size * size : (flat // size + 1) * size] = True
    else:
        group[range_of(130, spec.rows), range_of(70, spec.group)] = True
    assert bool(found[group].isnan().all())
    # A mean or a maximum of all scales is moved by a missing block.
    if not spec.double_quant and spec.format != "nvfp4":
        assert torch.equal(clean[~group], found[~group])
    assert bool(found[~group].isfinite().all())


def test_scales_beyond_float16_are_nan_and_not_inf() -> None:
    w = quantize(torch.tensor([[1e6, 0.0], [1.0, 2.0]]), QuantSpec.named("int4_channel", scale_dtype="float16"))
    assert dequantize(w)[0].isnan().all()
    assert dequantize(w)[1].isfinite().all()


@pytest.mark.parametrize("element", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_fp8_saturates(element) -> None:
    """The largest value of a group divides to the format's maximum or one rounding above, never to NaN or inf."""
    weight = normal(4096, 3) * 1e3
    found = dequantize(quantize(weight, QuantSpec.named("fp8_channel", element=element)))
    assert bool(found.isfinite().all())
    largest = weight.abs().argmax(1, keepdim=True)
    assert torch.allclose(weight.gather(1, largest), found.gather(1, largest), rtol=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_powers_of_two_scale_the_result_and_change_no_code(spec) -> None:
    weight = normal(130, 100)
    w, scaled = quantize(weight, spec), quantize(weight * 2.0**5, spec)
    assert torch.equal(w.parts["codes"].view(torch.uint8), scaled.parts["codes"].view(torch.uint8))
    assert torch.equal(dequantize(w) * 2.0**5, dequantize(scaled))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_strided_weights_give_the_bits_of_contiguous_ones(spec) -> None:
    base = normal(258, 130)
    before = base.clone()
    for view in (base.t(), base[::2, ::3], base[1:, 7:], base[:1].expand(40, 130)):
        assert quantize(view.contiguous(), spec).same_bits(quantize(view, spec))
    assert torch.equal(before, base)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_other_dtypes_are_quantised_as_their_fp32_value(spec, dtype) -> None:
    weight = normal(40, 70).to(dtype)
    w = quantize(weight, spec)
    assert w.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    assert quantize(weight.float(), spec, dtype=w.dtype).same_bits(w)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_requantising_writes_in_place_in_either_layout(spec) -> None:
    first, second = normal(50, 130, seed=1), normal(50, 130, seed=2) * 3
    for w in (quantize(first, spec), prepack(quantize(first, spec))):
        addresses = {name: part.data_ptr() for name, part in w.parts.items()}
        with torch.no_grad():
            assert quantize(second.requires_grad_(), w.spec, out=w) is w
        assert addresses == {name: part.data_ptr() for name, part in w.parts.items()}
        assert quantize(second.detach(), spec).same_bits(prepack(w, layout="canonical"))


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
