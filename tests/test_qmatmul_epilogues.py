"""What follows the product of qmatmul: LoRA, bias, activation, residual, in that order and rounded once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rlkernel_core.spec.qmatmul import ACTIVATIONS, PAIRS, LoRA
from rlkernel_torch.direct import qmatmul, quantize
from tests.test_qmatmul import bound, exact, normal


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lora_adds_its_product(dtype) -> None:
    x, w = normal(5, 96, seed=1, dtype=dtype), quantize(normal(140, 96), "int4_g32")
    lora = LoRA(normal(8, 96, seed=2, dtype=dtype), normal(140, 8, seed=3, dtype=dtype), 0.25)
    added = 0.25 * (x.double() @ lora.A.double().t()) @ lora.B.double().t()
    expected = exact(x, w) + added
    lora_reach = 0.25 * (x.double().abs() @ lora.A.double().abs().t()) @ lora.B.double().abs().t()
    error = (qmatmul(x, w, lora=lora).double() - expected).abs()
    assert bool((error <= bound(expected, x, w, weight_rounding="none", lora_reach=lora_reach)).all())
    assert torch.equal(qmatmul(x, w), qmatmul(x, w, lora=LoRA(lora.A, torch.zeros_like(lora.B))))


def test_lora_written_in_place_is_seen_by_the_next_call() -> None:
    x, w = normal(5, 96, seed=1), quantize(normal(40, 96), "nf4")
    lora = LoRA(normal(4, 96, seed=2), torch.zeros(40, 4))
    before = qmatmul(x, w, lora=lora)
    lora.B.copy_(normal(40, 4, seed=3))
    after = qmatmul(x, w, lora=lora)
    assert torch.allclose(after - before, (x @ lora.A.t()) @ lora.B.t(), atol=1e-4)
    lora.A.mul_(2)
    assert torch.allclose(qmatmul(x, w, lora=lora) - before, 2 * (after - before), atol=1e-4)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_epilogue_order_is_lora_bias_activation_residual(activation) -> None:
    outputs = 300
    x, w = normal(4, 50, seed=1, dtype=torch.float64), quantize(normal(outputs, 50) / 7, "int8_channel")
    lora, bias = LoRA(normal(2, 50, seed=2), normal(outputs, 2, seed=3), 0.1), normal(outputs, seed=4)
    width = outputs // 2 if activation in PAIRS else outputs
    residual = normal(4, width, seed=5)
    h = exact(x, w) + 0.1 * (x @ lora.A.double().t()) @ lora.B.double().t() + bias.double()
    gate, value = h[:, : outputs // 2], h[:, outputs // 2 :]
    expected = {
        None: h,
        "relu": h.clamp(min=0),
        "silu": h / (1 + torch.exp(-h)),
        "gelu": h * (1 + torch.erf(h / 2**0.5)) / 2,
        "gelu_tanh": functional.gelu(h, approximate="tanh"),
        "swiglu": gate / (1 + torch.exp(-gate)) * value,
        "geglu_tanh": functional.gelu(gate, approximate="tanh") * value,
    }[activation] + residual.double()
    found = qmatmul(x, w, lora=lora, bias=bias, activation=activation, residual=residual)
    assert torch.allclose(expected, found, rtol=1e-12, atol=1e-12)


def test_the_sum_is_rounded_once() -> None:
    """In bfloat16, 256 + 0.75 + 0.75 is 258 if rounded at the end and 256 if rounded after every step."""
    w = quantize(torch.full((1, 1), 127.0), "int8_channel")
    x = torch.full((1, 1), 256 / 127).double().to(torch.bfloat16)
    h = x.item() * 127
    bias, residual = torch.tensor([256.75 - h]), torch.full((1, 1), 0.75, dtype=torch.bfloat16)
    assert qmatmul(x, w, bias=bias, residual=residual).item() == 258.0
