"""What follows the product of qmatmul: LoRA, bias, activation, residual, in that order and rounded once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from rlkernel_core.spec.qmatmul import ACTIVATIONS, PAIRS, LoRA
from rlkernel_torch.direct import qmatmul, quantize
from tests.test_qmatmul import exact, normal


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
