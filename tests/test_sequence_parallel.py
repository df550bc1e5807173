"""Rows of hidden states split over a tensor-parallel group, whose gradients come back by a reduce-scatter."""

import pytest
import torch

import rlkernel as rlk
from rlkernel.sequence_parallel import gather_rows
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_torch.direct import linear_logprob
from tests.process_groups import alone

__all__ = ["alone"]

SPLIT = Subject("torch", "linear_logprob")
N, D, V = 8, 16, 61
CUTS = {2: (0, 20, V), 4: (0, 7, 8, 40, V)}
G = torch.Generator().manual_seed(0)
HIDDEN, HEAD = torch.randn(N, D, generator=G), torch.randn(V, D, generator=G)
IDS, UP = torch.randint(V, (N,), generator=G), torch.randn(N, generator=G)
LORA = torch.randn(3, D, generator=G), torch.randn(V, 3, generator=G)


def leaves(*tensors):
    return [x.clone().requires_grad_() for x in tensors]


def whole():
    h, w, A, B = leaves(HIDDEN, HEAD, *LORA)
    out = linear_logprob(h, w, IDS, lora=rlk.LoRA(A, B, 0.5), temperature=0.7).logprob
    return out.detach(), *torch.autograd.grad((out * UP).sum(), (h, w, A, B))


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_and_a_vocabulary_that_are_split_have_the_values_and_gradients_of_the_whole(ranks) -> None:
    def on_rank(rank, group):
        mine, part = slice(rank * N // ranks, (rank + 1) * N // ranks), slice(*CUTS[ranks][rank : rank + 2])
        h, w, A, B = leaves(HIDDEN[mine], HEAD[part], LORA[0], LORA[1][part])
        every = gather_rows(h, group=group)
        lora = rlk.LoRA(A, B, 0.5)
        out = linear_logprob(every, w, IDS, lora=lora, temperature=0.7, group=group, partial_grad=True).logprob
        return out.detach(), *torch.autograd.grad((out * UP).sum(), (h, w, A, B))

    found = list(zip(*on_ranks(SPLIT, ranks, on_rank), strict=True))
    value, dX, dW, dA, dB = whole()
    for have in found[0]:
        torch.testing.assert_close(have, value, atol=1e-5, rtol=1e-5)
    for have in found[3]:
        torch.testing.assert_close(have, dA, atol=1e-5, rtol=1e-5)
    for have, want in zip((found[1], found[2], found[4]), (dX, dW, dB), strict=True):
        torch.testing.assert_close(torch.cat(have), want, atol=1e-5, rtol=1e-5)


def test_parts_of_a_gradient_are_added_in_fp32_and_in_rank_order() -> None:
    parts = (1.0, 2**-8, 2**-8)  # in bf16 the sum of the first two is 1

    def on_rank(rank, group):
        x = torch.zeros(1, 1, dtype=torch.bfloat16).requires_grad_()
        (grad,) = torch.autograd.grad(gather_rows(x, group=group), x, torch.full((3, 1), parts[rank]).bfloat16())
        return grad.item()

    assert on_ranks(SPLIT, 3, on_rank) == [1 + 2**-7] * 3


def test_rows_of_one_rank_stay_as_they_are(alone) -> None:
    (h,) = leaves(HIDDEN)
    every = gather_rows(h, group=alone)
    assert torch.equal(every, HIDDEN)
    assert torch.equal(torch.autograd.grad(every, h, HIDDEN)[0], HIDDEN)


def test_what_is_no_rows_or_no_group_is_refused(alone) -> None:
    with pytest.raises(rlk.ArgumentTypeError, match=r"^hidden: must be a floating-point tensor"):
        gather_rows(IDS, group=alone)
    with pytest.raises(rlk.ArgumentError, match=r"^hidden: has no rows"):
        gather_rows(torch.tensor(1.0), group=alone)
    with pytest.raises(rlk.ArgumentTypeError, match=r"^group: must be a torch.distributed.ProcessGroup"):
        gather_rows(HIDDEN, group=2)


def test_a_partial_gradient_without_a_group_is_refused() -> None:
    with pytest.raises(rlk.ArgumentError, match=r"^partial_grad: is there with a group alone"):
        rlk.linear_logprob(HIDDEN, HEAD, IDS, partial_grad=True)
