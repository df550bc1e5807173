"""Gradients of qmatmul: exact in float64, bounded in memory, none for the weight, no mixture of old and new weights."""

from __future__ import annotations

import pytest
import torch

from rlkernel_core.quant import FORMATS, QuantSpec, update_
from rlkernel_core.spec.qmatmul import ACTIVATIONS, PAIRS, LoRA
from rlkernel_torch.direct import dequantize, prepack, qmatmul, quantize


def normal(*shape, seed=0, dtype=torch.float64, grad=False):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return x.requires_grad_(grad)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gradcheck_of_every_argument(activation) -> None:
    outputs = 14
    w = quantize(normal(outputs, 10), "int4_g32_asym")
    width = outputs // 2 if activation in PAIRS else outputs
    x, bias, residual = (
        normal(2, 3, 10, seed=1, grad=True),
        normal(14, seed=2, grad=True),
        normal(2, 3, width, grad=True),
    )
    a, b = normal(4, 10, seed=3, grad=True), normal(outputs, 4, seed=4, grad=True)

    def call(x, bias, a, b, residual):
        return qmatmul(x, w, bias=bias, lora=LoRA(a, b, 0.3), activation=activation, residual=residual)

    assert torch.autograd.gradcheck(call, (x, bias, a, b, residual))


@pytest.mark.parametrize("spec", [*FORMATS, QuantSpec.named("nf4", double_quant=True)], ids=str)
def test_the_gradient_of_x_is_dy_times_the_dequantised_weight(spec) -> None:
    """Where x is quantised inside, the gradient passes through that rounding as if it were not there."""
    w = quantize(normal(300, 70), spec)
    for weight in (w, prepack(w)):
        x, dy = normal(5, 70, seed=1, grad=True), normal(5, 300, seed=2)
        qmatmul(x, weight).backward(dy)
        assert torch.allclose(dy @ dequantize(w, dtype=torch.float32).double(), x.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_accumulated_in_fp32_and_rounded_once(dtype) -> None:
    w = quantize(normal(400, 96), "nf4")
    x, dy = normal(64, 96, seed=1, dtype=dtype, grad=True), normal(64, 400, seed=2, dtype=dtype)
    bias = normal(400, seed=3, dtype=dtype, grad=True)
    a, b = normal(8, 96, seed=4, dtype=dtype, grad=True), normal(400, 8, seed=5, dtype=dtype, grad=True)
    qmatmul(x, w, bias=bias, lora=LoRA(a, b, 2.0)).backward(dy)
    X, DY, A, B = (t.detach().double() for t in (x, dy, a, b))
    expected = {
        "x": DY @ dequantize(w, dtype=torch.float32).double() + 2 * DY @ B @ A,
        "bias": DY.sum(0),
        "a": 2 * (DY @ B).t() @ X,
        "b": 2 * DY.t() @ (X @ A.t()),
    }
    for name, leaf in (("x", x), ("bias", bias), ("a", a), ("b", b)):
        error = (leaf.grad.double() - expected[name]).abs()
        unit = torch.finfo(dtype).eps / 2
        assert leaf.grad.dtype == dtype
        assert bool((error <= unit * expected[name].abs() + 2e-6 * expected[name].abs().max()).all()), name


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    w = quantize(normal(20, 30), "int8_channel")
    x, a, b = normal(4, 30, seed=1), normal(2, 30, seed=2, grad=True), normal(20, 2, seed=3)
    qmatmul(x, w, lora=LoRA(a, b)).sum().backward()
    assert (x.grad, b.grad) == (None, None)
    assert a.grad.shape == (2, 30)
    assert not qmatmul(x, w).requires_grad
    assert all(not part.requires_grad for part in w.parts.values())
    with torch.no_grad():
        assert not qmatmul(x, w, lora=LoRA(a, b)).requires_grad


def test_no_rows_give_zero_gradients() -> None:
    w = quantize(normal(20, 30), "nf4")
    x, bias = normal(0, 30, grad=True), normal(20, grad=True)
    a, b = normal(2, 30, grad=True), normal(20, 2, grad=True)
    qmatmul(x, w, bias=bias, lora=LoRA(a, b), activation="silu").sum().backward()
    assert x.grad.shape == (0, 30)
    assert all(torch.equal(torch.zeros_like(t), t.grad) for t in (bias, a, b))


def saved_bytes(run) -> int:
    """Bytes that autograd keeps for the backward pass of what `run` returns, each storage once."""
    kept: dict[int, int] = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(kept.values())


def test_the_weight_is_saved_packed_and_x_only_where_it_is_needed() -> None:
    w = quantize(normal(256, 512), "int4_g128")
    x = normal(64, 512, seed=1, dtype=torch.float32, grad=True)
    assert saved_bytes(lambda: qmatmul(x, w)) == w.nbytes
    assert saved_bytes(lambda: qmatmul(x, w, activation="silu")) == w.nbytes + 64 * 512 * 4


@pytest.mark.parametrize("what", ["weight", "lora"])
def test_an_update_between_forward_and_backward_raises(what) -> None:
    w = quantize(normal(20, 30), "nf4")
    x, lora = normal(4, 30, seed=1, grad=True), LoRA(normal(2, 30, seed=2), normal(20, 2, seed=3))
    y = qmatmul(x, w, lora=lora)
    if what == "weight":
        update_(w, normal(20, 30, seed=9))
    else:
        lora.B.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_autocast_does_not_lower_the_precision_of_gradients() -> None:
    w = quantize(normal(20, 64), "nf4")
    grads = []
    for enabled in (False, True):
        x = normal(4, 64, seed=1, dtype=torch.float32, grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            qmatmul(x, w, activation="silu").sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
