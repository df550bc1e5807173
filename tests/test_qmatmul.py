"""qmatmul by the plain-torch backend: epilogues together, what autograd keeps, memory, and what clauses do not say."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import rlkernel as rlk
from rlkernel_conformance.quantized_weights import SPECS
from rlkernel_core.quant import FORMATS, QuantSpec, stack
from rlkernel_core.spec.qmatmul import ACTIVATIONS, PAIRS, LoRA
from rlkernel_torch.direct import dequantize, prepack, qmatmul, quantize
from tests.test_linear_logprob_memory import peak


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_epilogue_order_is_lora_bias_activation_residual(activation) -> None:
    outputs = 300
    x, w = normal(4, 50, seed=1, dtype=torch.float64), quantize(normal(outputs, 50) / 7, "int8_channel")
    lora, bias = LoRA(normal(2, 50, seed=2), normal(outputs, 2, seed=3), 0.1), normal(outputs, seed=4)
    residual = normal(4, outputs // 2 if activation in PAIRS else outputs, seed=5)
    product = x @ dequantize(w, dtype=torch.float32).double().t()
    h = product + 0.1 * (x @ lora.A.double().t()) @ lora.B.double().t() + bias.double()
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


@pytest.mark.parametrize("rows", [1, 3])
def test_the_layout_of_lora_changes_no_bit(rows) -> None:
    """A BLAS product of a transposed matrix sums in another order for some sizes."""
    x, w = normal(rows, 8, seed=1), quantize(normal(2, 8), "int4_g128")
    for seed in range(20):
        a, b = normal(4, 8, seed=seed), normal(2, 4, seed=seed + 1)
        expected = qmatmul(x, w, lora=LoRA(a, b, 0.5))
        assert torch.equal(expected, qmatmul(x, w, lora=LoRA(a.t().contiguous().t(), b.t().contiguous().t(), 0.5)))
        assert torch.equal(expected, qmatmul(x.t().contiguous().t(), w, lora=LoRA(a, b, 0.5)))


def test_ends_of_experts_are_those_of_torch() -> None:
    w, x = quantize(normal(12, 64), "int8_channel"), normal(5, 64, seed=1).bfloat16()
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    dense = rlk.dequantize(w, dtype=torch.bfloat16).view(3, 4, 64)
    want = functional.grouped_mm(x, dense.transpose(1, 2), offs=ends)
    torch.testing.assert_close(qmatmul(x, w, ends=ends, weight_rounding="dtype"), want)


@pytest.mark.parametrize("experts", [False, True])
def test_several_adapters_are_those_of_calls_of_their_own(experts) -> None:
    x = normal(6, 50, seed=1, dtype=torch.float64).requires_grad_()
    parts = [quantize(normal(4, 50, seed=seed), "int8_channel") for seed in ((2, 3) if experts else (2,))]
    w, ends = stack(parts), torch.tensor([2, 5], dtype=torch.int32)
    A = normal(2, 3, 50, seed=4, dtype=torch.float64).requires_grad_()
    B = normal(2, 4, 3, seed=5, dtype=torch.float64).requires_grad_()
    rows, weights = (slice(0, 2), slice(2, 5)), parts if experts else parts * 2
    each = [qmatmul(x[r], v, lora=LoRA(a, b, 0.5)) for r, v, a, b in zip(rows, weights, A, B, strict=True)]
    expected = torch.cat([*each, x.new_zeros(1, 4) if experts else qmatmul(x[5:], w)])
    found = qmatmul(x, w, lora=LoRA(A, B, 0.5), **{"ends" if experts else "lora_ends": ends})
    leaves, dy = (x, A, B), normal(6, 4, seed=6, dtype=torch.float64)
    torch.testing.assert_close(
        (found, *torch.autograd.grad(found, leaves, dy)), (expected, *torch.autograd.grad(expected, leaves, dy))
    )


def test_autocast_lowers_the_precision_of_neither_result_nor_gradient() -> None:
    w, found = quantize(normal(20, 64), "nf4"), []
    for enabled in (False, True):
        x = normal(4, 64, seed=1).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = qmatmul(x, w, activation="silu")
            y.sum().backward()
        found.append((y.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_shapes_are_known_without_values() -> None:
    w = quantize(torch.empty(24, 40, device="meta"), "nf4")
    assert qmatmul(torch.empty(3, 40, device="meta"), w, activation="swiglu").shape == (3, 12)


@pytest.mark.parametrize("kind", ["int8_channel", "int8_w8a8", "mxfp8[act=mxfp8]", "nvfp4[act=nvfp4]"])
@pytest.mark.parametrize("experts", [False, True])
def test_adapters_and_quantized_inputs_read_no_value(kind, experts) -> None:
    """A tensor on meta has no values: whatever reads one fails, and so it would in a capture."""
    w = quantize(torch.zeros(8, 50), SPECS[kind]).to("meta")
    x = torch.zeros(6, 50, device="meta", requires_grad=True)
    A, B = (torch.zeros(2, *shape, device="meta", requires_grad=True) for shape in ((3, 50), (4 if experts else 8, 3)))
    ends = torch.zeros(2, dtype=torch.int32, device="meta")
    y = qmatmul(x, w, lora=LoRA(A, B), activation="silu", **{"ends" if experts else "lora_ends": ends})
    grads = torch.autograd.grad(y, (x, A, B), torch.zeros_like(y))
    assert [t.shape for t in (y, *grads)] == [(6, 4 if experts else 8), x.shape, A.shape, B.shape]


def test_the_front_door_runs_it() -> None:
    x, w = normal(3, 64, seed=1), rlk.quantize(normal(20, 64), QuantSpec.named("nf4", double_quant=True))
    with rlk.use("torch"):
        assert torch.equal(qmatmul(x, w), rlk.qmatmul(x, rlk.prepack(w)))
        assert torch.equal(dequantize(w), rlk.dequantize(w))


@pytest.mark.parametrize("spec", [*FORMATS, QuantSpec.named("nf4", double_quant=True)], ids=str)
def test_the_gradient_through_a_packed_weight_is_that_of_the_dequantized_one(spec) -> None:
    """Where x is quantized inside, the gradient passes through that rounding as if it were not there."""
    w = quantize(normal(300, 70), spec)
    x, dy = normal(5, 70, seed=1, dtype=torch.float64).requires_grad_(), normal(5, 300, seed=2, dtype=torch.float64)
    qmatmul(x, prepack(w)).backward(dy)
    assert torch.allclose(dy @ dequantize(w, dtype=torch.float32).double(), x.grad, rtol=1e-12, atol=1e-12)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    w = quantize(normal(20, 30), "int8_channel")
    x, a, b = normal(4, 30, seed=1), normal(2, 30, seed=2).requires_grad_(), normal(20, 2, seed=3)
    qmatmul(x, w, lora=LoRA(a, b)).sum().backward()
    assert (x.grad, b.grad, a.grad.shape) == (None, None, (2, 30))
    assert not qmatmul(x, w).requires_grad


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
    x = normal(64, 512, seed=1).requires_grad_()
    assert saved_bytes(lambda: qmatmul(x, w)) == w.nbytes
    assert saved_bytes(lambda: qmatmul(x, w, activation="silu")) == w.nbytes + 64 * 512 * 4


K, BLOCK = 1024, 4 << 20  # BLOCK: bytes of a block of the weight in fp32


def extra(N: int, kind: str, *, grad: bool) -> int:
    """Bytes at the peak of a product beyond its result and gradient; the dense weight would be 4 N K."""
    w = quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), kind)
    x = torch.randn(2, K, requires_grad=grad)

    def run() -> torch.Tensor:
        y = qmatmul(x, w)
        if grad:
            y.sum().backward()
        return y.detach()

    most, y = peak(run)
    return int(most - y.nbytes - (x.grad.nbytes if x.grad is not None else 0))


@pytest.mark.parametrize("kind", ["int4_g128", "nf4", "mxfp4", "gguf_q4_k"])
def test_memory_is_a_few_blocks_of_the_weight_however_large_it_is(kind) -> None:
    small, large = extra(4096, kind, grad=False), extra(8192, kind, grad=False)
    assert large < 7 * BLOCK < 4 * 8192 * K
    assert large - small < BLOCK / 4
    assert extra(8192, kind, grad=True) < 7 * BLOCK
    full = torch.randn(8192, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    most, w = peak(lambda: quantize(full, kind))
    assert most - w.nbytes < full.nbytes + 7 * BLOCK
    most, out = peak(lambda: dequantize(w))
    assert most - out.nbytes < 7 * BLOCK


def test_a_nan_reaches_the_gradient_of_lora_whatever_its_scale() -> None:
    w, x = quantize(normal(6, 64), "int8_channel"), normal(2, 64, seed=1)
    x[0, 0] = torch.nan
    A, B = normal(2, 64, seed=2).requires_grad_(), normal(6, 2, seed=3).requires_grad_()
    y = qmatmul(x, w, lora=LoRA(A, B, 0.0), activation="silu")
    assert all(grad.isnan().all() for grad in torch.autograd.grad(y.sum(), [A, B]))
