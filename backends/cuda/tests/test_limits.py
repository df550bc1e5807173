"""The limits of the manifest are those of the kernels, and what a call is said to need keeps the caller's limit."""

import pytest
import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_cuda import COORDINATES, SAMPLED
from rlkernel_cuda.linear_logprob import launch as linear_logprob
from rlkernel_cuda.linear_policy_loss import launch as linear_policy_loss
from rlkernel_cuda.sample import kernel as launch
from rlkernel_cuda.sample import launch as call

N, D, V = 300, 64, 1000
HEAD = (
    torch.zeros(N, D, dtype=torch.bfloat16, requires_grad=True),
    torch.zeros(V, D, dtype=torch.bfloat16, requires_grad=True),
    torch.zeros(N, dtype=torch.long),
)


def sampled(rows: int, vocab: int) -> object:
    logits = torch.empty(1, 1, dtype=torch.bfloat16, device="meta").expand(rows, vocab)
    return OPERATORS["sample"].call(logits.as_strided((rows, vocab), (0, 1)), seed=0, step=0)


def test_the_sampler_takes_what_its_tiles_hold() -> None:
    assert SAMPLED.max_vocab == launch.TILE * launch.TILES


@pytest.mark.parametrize(("rows", "vocab", "taken"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_the_samplers_check_refuses_nothing_that_its_limits_admit(rows, vocab, taken) -> None:
    reason = call.fits(sampled(SAMPLED.max_rows + rows, SAMPLED.max_vocab + vocab))
    assert (reason is None) is taken


@pytest.mark.parametrize(("more", "taken"), [(0, True), (1, False)])
def test_the_heads_check_refuses_nothing_that_its_limits_admit(more, taken) -> None:
    weight = torch.empty(COORDINATES.max_vocab + more, 8, dtype=torch.bfloat16, device="meta")
    made = OPERATORS["linear_logprob"].call(HEAD[0][:, :8], weight, HEAD[2])
    assert (linear_logprob.fits(made) is None) is taken


def head(**options: object) -> object:
    return OPERATORS["linear_logprob"].call(*HEAD, **options)


def loss(**options: object) -> object:
    return OPERATORS["linear_policy_loss"].call(*HEAD, torch.zeros(N), torch.zeros(N), **options)


@pytest.mark.parametrize("made", [head, loss])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_call_needs_no_more_than_its_limit(made, gradients) -> None:
    module = linear_logprob if made is head else linear_policy_loss
    with torch.set_grad_enabled(gradients):
        free = module.workspace(made())
        assert free > 0
        most = free if gradients else 4 * free  # the least limit serves the same call with gradients, too
        assert module.workspace(made(max_workspace_bytes=most)) <= most


def test_a_limit_that_is_too_low_is_the_calls_own_error() -> None:
    assert linear_logprob.workspace(head(max_workspace_bytes=1)) > 1
    with pytest.raises(ArgumentError, match="max_workspace_bytes"):
        linear_policy_loss.workspace(loss(max_workspace_bytes=1))


def test_no_rows_need_nothing() -> None:
    empty = OPERATORS["linear_logprob"].call(HEAD[0][:0], HEAD[1], HEAD[2][:0])
    assert linear_logprob.workspace(empty) == 0
