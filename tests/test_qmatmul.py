"""qmatmul: within the stated bound of the dequantised and of the full product, epilogues, layouts, bad arguments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkernel as rlk
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import FORMATS, QuantSpec, error_bound, quantize_activation
from rlkernel_core.spec.qmatmul import SPEC, UNITS, LoRA, accumulation_bound
from rlkernel_torch.direct import dequantize, prepack, qmatmul, quantize

EVERY = [*FORMATS, QuantSpec.named("nf4", double_quant=True), QuantSpec.named("fp8_channel", element="e5m2")]
WEIGHT_ONLY = [f for f in EVERY if f != "int8_w8a8"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def exact(x, w, *, rounded=False) -> torch.Tensor:
    """x times the dequantised weight in float64."""
    value = dequantize(w, dtype=torch.float32)
    return x.double() @ (value.to(x.dtype) if rounded else value).double().t()


def bound(y, x, w, *, weight_rounding="any", lora_reach=0.0, more=0.0):
    reach = x.double().abs() @ dequantize(w, dtype=torch.float32).double().abs().t() + more
    unit = UNITS[str(x.dtype).removeprefix("torch.")]
    return accumulation_bound(
        y, reach, unit=unit, inner=x.shape[-1], weight_rounding=weight_rounding, lora_reach=lora_reach
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", WEIGHT_ONLY, ids=str)
def test_it_is_within_the_bound_of_the_dequantised_product(spec, dtype) -> None:
    x, w = normal(7, 200, seed=1, dtype=dtype), quantize(normal(131, 200), spec)
    y = qmatmul(x, w)
    assert (y.dtype, y.shape) == (dtype, (7, 131))
    expected = exact(x, w)
    assert bool(((y.double() - expected).abs() <= bound(expected, x, w, weight_rounding="none")).all())


@pytest.mark.parametrize("spec", WEIGHT_ONLY, ids=str)
def test_it_is_within_the_format_s_bound_of_the_full_product(spec) -> None:
    weight, x = normal(65, 130), normal(9, 130, seed=1)
    w = quantize(weight, spec)
    full = x.double() @ weight.double().t()
    allowed = bound(full, x, w) + x.double().abs() @ error_bound(w, weight).t()
    assert bool(((qmatmul(x, w).double() - full).abs() <= allowed).all())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    spec=st.sampled_from(WEIGHT_ONLY),
    rows=st.integers(0, 5),
    outputs=st.integers(1, 140),
    inputs=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_any_shape_counts_every_element_once(spec, rows, outputs, inputs, dtype, seed) -> None:
    x, w = normal(rows, inputs, seed=seed, dtype=dtype), quantize(normal(outputs, inputs, seed=seed + 1), spec)
    expected = exact(x, w)
    assert bool(((qmatmul(x, w).double() - expected).abs() <= bound(expected, x, w)).all())


@pytest.mark.parametrize("spec", WEIGHT_ONLY, ids=str)
def test_the_identity_gives_the_weight_back(spec) -> None:
    w = quantize(normal(130, 66), spec)
    assert torch.equal(dequantize(w, dtype=torch.float32).t(), qmatmul(torch.eye(66), w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_rounding_chooses_which_weight_is_multiplied(dtype) -> None:
    x, w = normal(3, 256, seed=1, dtype=dtype), quantize(normal(40, 256), "nf4")
    for rounding, rounded in (("none", False), ("dtype", True)):
        expected = exact(x, w, rounded=rounded)
        error = (qmatmul(x, w, weight_rounding=rounding).double() - expected).abs()
        assert bool((error <= bound(expected, x, w, weight_rounding=rounding)).all())
    one = torch.eye(256, dtype=torch.float32)
    assert torch.equal(qmatmul(one, w, weight_rounding="dtype"), qmatmul(one, w, weight_rounding="none"))


def test_rounding_the_weight_shows_where_the_sum_cancels() -> None:
    w = quantize(torch.tensor([[1.0, 1.001], [1.0, 1.0]]), QuantSpec.named("int8_channel"))
    x = torch.tensor([[1.0, -1.0]], dtype=torch.bfloat16)
    full, rounded = (qmatmul(x, w, weight_rounding=r)[0] for r in ("none", "dtype"))
    assert full.tolist() == exact(x, w)[0].to(torch.bfloat16).tolist()
    assert rounded.tolist() == exact(x, w, rounded=True)[0].to(torch.bfloat16).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_w8a8_is_an_exact_integer_product_scaled_twice(dtype) -> None:
    x, w = normal(5, 4096, seed=1, dtype=dtype), quantize(normal(33, 4096), "int8_w8a8")
    scale_x = x.float().abs().amax(1, keepdim=True) / 127
    codes = (x.float() / scale_x).round().clamp(-127, 127).long()
    total = codes @ w.parts["codes"].long().t()
    expected = (total.float() * scale_x) * w.parts["scale"].t()
    assert torch.equal(expected.to(dtype), qmatmul(x, w))


@pytest.mark.parametrize("spec", ["int8_w8a8", QuantSpec.named("fp8_channel", act="token_fp8")], ids=str)
def test_a_token_is_quantised_on_its_own(spec) -> None:
    x, w = normal(6, 100, seed=1), quantize(normal(10, 100), spec)
    x[1], x[2], x[3, 5] = 1e4 * x[1], 0, torch.nan
    y = qmatmul(x, w)
    assert torch.equal(torch.zeros(10), y[2])
    assert bool(y[3].isnan().all())
    for i in (0, 1, 4, 5):
        assert torch.allclose(qmatmul(x[i : i + 1], w)[0], y[i], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "act", "size"), [("fp8_channel", "token_fp8", 300), ("fp8_block128", "block128_fp8", 128)]
)
@pytest.mark.parametrize("element", ["e4m3fn", "e4m3fnuz"])
def test_fp8_activations_are_quantised_by_token_or_block(name, act, size, element) -> None:
    spec = QuantSpec.named(name, act=act, element=element)
    x, w = normal(4, 300, seed=1), quantize(normal(20, 300), spec)
    x[:, 130] *= 50
    stored = quantize_activation(x, spec)
    assert stored.codes.dtype == w.parts["codes"].dtype
    assert stored.scale.shape == (4, -(-300 // size))
    largest = torch.stack([block.abs().amax(1) for block in x.split(size, 1)], 1)
    top = 448.0 if element == "e4m3fn" else 240.0
    assert torch.equal(largest / top, stored.scale)
    error = (stored.value() - x).abs()
    assert bool((error <= torch.maximum(x.abs() / 16, stored.scale.repeat_interleave(size, 1)[:, :300] / 512)).all())
    expected = exact(stored.value(), w)
    assert bool(((qmatmul(x, w).double() - expected).abs() <= bound(expected, stored.value(), w)).all())


def test_weight_only_fp8_leaves_x_alone() -> None:
    x = normal(1, 64, seed=1)
    assert torch.equal(dequantize(quantize(torch.eye(64), "fp8_channel")), torch.eye(64))
    assert torch.equal(x, qmatmul(x, quantize(torch.eye(64), "fp8_channel")))


def test_a_requantised_weight_is_used_by_the_next_call() -> None:
    x, w = normal(5, 96, seed=1), quantize(normal(40, 96), "int4_g32")
    second = normal(40, 96, seed=7)
    packed = prepack(w)
    for target in (w, packed):
        quantize(second, "int4_g32", out=target)
        assert torch.equal(qmatmul(x, quantize(second, "int4_g32")), qmatmul(x, target))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 0, 3), (0,)])
def test_leading_dimensions_are_kept(lead) -> None:
    x, w = normal(*lead, 40, seed=1), quantize(normal(12, 40), "nf4")
    residual = normal(*lead, 6, seed=2)
    y = qmatmul(x, w, activation="swiglu", residual=residual)
    assert y.shape == (*lead, 6)
    flat = qmatmul(x.reshape(-1, 40), w, activation="swiglu", residual=residual.reshape(-1, 6))
    assert torch.allclose(flat.view(y.shape), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_layout_of_lora_changes_no_bit(rows) -> None:
    """A BLAS product of a transposed matrix sums in another order for some sizes."""
    x, w = normal(rows, 8, seed=1), quantize(normal(2, 8), "int4_g128")
    for seed in range(20):
        a, b = normal(4, 8, seed=seed), normal(2, 4, seed=seed + 1)
        expected = qmatmul(x, w, lora=LoRA(a, b, 0.5))
        assert torch.equal(expected, qmatmul(x, w, lora=LoRA(a.t().contiguous().t(), b.t().contiguous().t(), 0.5)))
        assert torch.equal(expected, qmatmul(x.t().contiguous().t(), w, lora=LoRA(a, b, 0.5)))


def test_sums_of_one_sign_are_within_the_bound() -> None:
    """Equal addends round to the same side again and again: the worst case of a sum in sequence."""
    x = normal(64, 289, seed=3).abs() + 0.1
    w = quantize(normal(40, 1).expand(40, 289), "int4_g128")
    expected = exact(x, w)
    assert bool(((qmatmul(x, w).double() - expected).abs() <= bound(expected, x, w, weight_rounding="none")).all())


def test_strided_views_give_the_bits_of_contiguous_tensors() -> None:
    w = quantize(normal(24, 40), "int4_g32")
    views = {
        "x": normal(40, 2, 6, seed=1).permute(1, 2, 0)[:, ::2],
        "residual": normal(2, 6, 30, seed=2)[:, ::2, 3:27],
        "bias": normal(48, seed=3)[::2],
        "lora": LoRA(normal(40, 4, seed=4).t(), normal(4, 24, seed=5).t(), 0.5),
    }
    copies = {name: v.contiguous() for name, v in views.items() if name != "lora"}
    copies["lora"] = LoRA(views["lora"].A.contiguous(), views["lora"].B.contiguous(), 0.5)
    assert torch.equal(qmatmul(w=w, **copies), qmatmul(w=w, **views))


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_a_prepacked_weight_gives_the_same_bits(spec) -> None:
    x, w = normal(5, 130, seed=1), quantize(normal(70, 130), spec)
    assert torch.equal(qmatmul(x, w), qmatmul(x, prepack(w)))


def test_what_is_not_finite_stays_where_it_belongs() -> None:
    weight = normal(6, 256)
    weight[2, 200] = torch.inf
    x = normal(4, 256, seed=1)
    x[3, 0] = torch.nan
    y = qmatmul(x, quantize(weight, "int4_g128"))
    bad = torch.zeros(4, 6, dtype=torch.bool)
    bad[3], bad[:, 2] = True, True
    assert torch.equal(bad, y.isnan())


def test_inputs_and_global_state_are_untouched() -> None:
    x, bias, residual = normal(4, 64, seed=1), normal(20, seed=2), normal(4, 20, seed=3)
    w, lora = quantize(normal(20, 64), "int8_w8a8"), LoRA(normal(2, 64, seed=4), normal(20, 2, seed=5))
    everything = [x, bias, residual, lora.A, lora.B, *w.flatten()[0]]
    before, state = [t.clone() for t in everything], torch.get_rng_state()
    qmatmul(x, w, bias=bias, lora=lora, activation="silu", residual=residual)
    assert all(torch.equal(a, b) for a, b in zip(before, everything, strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_autocast_does_not_lower_the_precision() -> None:
    x, w = normal(4, 64, seed=1), quantize(normal(20, 64), "nf4")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(qmatmul(x, w), qmatmul(x, w).float())
        inside = qmatmul(x, w)
    assert torch.equal(qmatmul(x, w), inside)


def test_shapes_are_known_without_values() -> None:
    w = quantize(torch.empty(24, 40, device="meta"), "nf4")
    assert qmatmul(torch.empty(3, 40, device="meta"), w, activation="swiglu").shape == (3, 12)


def test_bad_arguments_are_named() -> None:
    x, w = normal(4, 64), quantize(normal(21, 64), "nf4")
    good = LoRA(normal(2, 64), normal(21, 2))
    for arguments, message in (
        ({"x": [1.0]}, "x: must be a torch.Tensor"),
        ({"x": normal(4, 63)}, "x: needs a last dimension K = 64"),
        ({"x": torch.tensor(1.0)}, "x: needs a last dimension"),
        ({"x": x.long()}, "x: must be a floating-point"),
        ({"x": x.to(torch.float8_e4m3fn)}, "x: must be bf16"),
        ({"x": x.to("meta")}, "w: must be on the device of x"),
        ({"w": normal(21, 64)}, "w: must be a QuantTensor"),
        ({"bias": normal(1, 21)}, "bias: must have 1 dim"),
        ({"bias": normal(20)}, "bias: must have the shape of the rows of w"),
        ({"bias": torch.zeros(21, device="meta")}, "bias: must be on the device"),
        ({"residual": normal(21)}, "residual: must have the shape of the result"),
        ({"residual": normal(4, 21).long()}, "residual: must be a floating"),
        ({"lora": (good.A, good.B)}, "lora: must be a LoRA"),
        ({"lora": LoRA(good.A.t(), good.B)}, "lora.A: must have the shape"),
        ({"lora": LoRA(good.A, good.B.t())}, "lora.B: must have the shape"),
        ({"lora": LoRA(good.A, good.B, float("nan"))}, "lora.scale: must be finite"),
        ({"activation": "swigl"}, "activation: is not a known choice.*Did you mean 'swiglu'"),
        ({"activation": "swiglu"}, "activation: halves the rows of w, which are 21"),
        ({"weight_rounding": "bf16"}, "weight_rounding: is not a known choice"),
    ):
        with pytest.raises(ArgumentError, match=message):
            qmatmul(**{"x": x, "w": w, **arguments})


def test_the_front_door_runs_it() -> None:
    x, w = normal(3, 64, seed=1), rlk.quantize(normal(20, 64), QuantSpec.named("nf4", double_quant=True))
    with rlk.use("torch"):
        assert torch.equal(qmatmul(x, w), rlk.qmatmul(x, rlk.prepack(w)))
        assert torch.equal(dequantize(w), rlk.dequantize(w))
    with pytest.raises(ArgumentError, match="activation"):
        rlk.qmatmul(x, w, activation="sillu")
    with pytest.raises(ArgumentError, match="w: must be a QuantTensor"):
        rlk.qmatmul(x, x)


def test_a_call_needs_what_it_uses() -> None:
    w = quantize(normal(20, 64), QuantSpec.named("fp8_channel", element="e5m2", act="token_fp8"))
    arguments = {
        "w": w,
        "bias": normal(20),
        "lora": None,
        "activation": "swiglu",
        "residual": None,
        "weight_rounding": "none",
        "ends": torch.tensor([5], dtype=torch.int32),
    }
    expected = {
        "grouped",
        "format:fp8_channel",
        "element:e5m2",
        "act:token_fp8",
        "bias",
        "activation:swiglu",
        "weight_rounding:none",
    }
    assert SPEC.needs(SPEC.call(torch.zeros(1, 1), **arguments)) == expected
    assert expected <= SPEC.feature_names
