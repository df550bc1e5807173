"""qmatmul: within the stated bound of the dequantised and of the full product, epilogues, layouts, bad arguments."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import QuantSpec, quantize_activation
from rlkernel_core.spec.qmatmul import SPEC, UNITS, LoRA, accumulation_bound
from rlkernel_torch.direct import dequantize, qmatmul, quantize


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
