"""Plain torch on a GPU, beside its clauses: capture, bits of the CPU, ranks that are threads of one process.

Needs a CUDA or HIP device; elsewhere these tests are skipped, and nothing else stands for them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")


@pytest.fixture(autouse=True)
def by_the_reference():
    """Plain torch, whatever is installed: on a GPU it is a fallback unless the order names it."""
    with rlk.use("torch"):
        yield


def test_capture_on_a_gpu_is_the_eager_model() -> None:
    weight = torch.randn(8, 8, device="cuda")
    step = rlk.capture(lambda x: x @ weight, (torch.zeros(4, 8, device="cuda"),), static=[weight])
    x = torch.randn(4, 8, device="cuda")
    assert torch.equal(step(x), x @ weight)


def test_the_architecture_is_part_of_the_decision() -> None:
    rlk.logprob(torch.zeros(2, 3, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda"))
    major, minor = torch.cuda.get_device_capability()
    assert rlk.last_decision("logprob").call.arch == f"sm{major}{minor}"


@pytest.mark.parametrize("kind", ["int4_g32", "int8_channel", "fp8_channel", "nf4"])
def test_a_gpu_quantizes_to_the_bits_of_the_cpu(kind) -> None:
    """Dividing by a number multiplies by its reciprocal on CUDA, which is another scale in the last bit."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    with rlk.use("torch"):
        found, expected = rlk.quantize(weight.cuda(), kind), rlk.quantize(weight, kind)
    for name in ("scale", "absmax"):
        if name in expected.parts:
            assert torch.equal(expected.parts[name], found.parts[name].cpu())


def test_strides_and_alignment_of_qmatmul_s_arguments_change_no_bit_on_a_gpu() -> None:
    w = rlk.quantize(torch.randn(2, 8), "int4_g128").to("cuda")
    wide = torch.randn(1, 10, dtype=torch.float64, device="cuda")
    A, B = (torch.randn(*s, dtype=torch.float64, device="cuda") for s in ((4, 8), (2, 4)))
    with rlk.use("torch"):
        expected = rlk.qmatmul(wide[:, 1:9].clone(), w, lora=rlk.LoRA(A, B, 0.5))
        found = rlk.qmatmul(wide[:, 1:9], w, lora=rlk.LoRA(A.t().contiguous().t(), B.t().contiguous().t(), 0.5))
    assert torch.equal(expected, found)


class Summed(torch.autograd.Function):
    """Identity whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        summed = grad.contiguous()  # that of a sum is one element, expanded
        ctx.group.allreduce([summed]).wait()
        return summed, None


def test_threads_that_are_ranks_on_one_gpu_do_not_wait_for_each_other_in_backward() -> None:
    def gradient(rank: int, group: Any) -> torch.Tensor:
        x = torch.ones(3, device="cuda", requires_grad=True)
        return torch.autograd.grad(Summed.apply(x, group).sum() * (rank + 1), x)[0]

    found = on_ranks(Subject("torch", "logprob", "cuda"), 2, gradient)
    assert [g.tolist() for g in found] == [[3.0] * 3] * 2


def test_the_gpu_that_the_suite_attacks_is_the_current_one() -> None:
    """The suite measures the memory of the current device. With one GPU this says little."""
    last = torch.cuda.device_count() - 1
    with Subject("torch", "whiten", f"cuda:{last}").chosen():
        assert torch.cuda.current_device() == last
