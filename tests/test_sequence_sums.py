"""Sums of values over sequences: against sums one by one, their gradient, and what they refuse."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

import rlkernel as rlk

STARTS = [0, 3, 3, 4, 9]  # of 11 tokens: one sequence is empty, two tokens belong to none


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    values = torch.randn(11, generator=g, dtype=torch.float64)
    return values, torch.rand(11, generator=g) < 0.6, torch.tensor(STARTS)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_every_sequence_is_summed_alone(masked, mean) -> None:
    values, mask, starts = packed()
    found = rlk.sequence_sums(values, cu_seqlens=starts, mask=mask if masked else None, mean=mean)
    for i, (first, last) in enumerate(pairwise(STARTS)):
        own = [float(values[t]) for t in range(first, last) if mask[t] or not masked]
        assert float(found[i]) == pytest.approx(math.fsum(own) / (max(len(own), 1) if mean else 1), rel=1e-14)


@pytest.mark.parametrize("mean", [False, True])
def test_packed_sequences_give_what_padded_ones_give(mean) -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(5) < torch.tensor([[5], [2], [4]])
    padded = rlk.sequence_sums(values, mask=mask, mean=mean)
    joined = rlk.sequence_sums(values[mask], cu_seqlens=torch.tensor([0, 5, 7, 11]), mean=mean)
    torch.testing.assert_close(joined, padded, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mean", [False, True])
def test_the_gradient_is_that_of_the_sum_and_zero_where_nothing_counts(mean) -> None:
    values, mask, starts = packed()
    values[~mask] = math.nan
    values.requires_grad_()
    upstream = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    (rlk.sequence_sums(values, cu_seqlens=starts, mask=mask, mean=mean) * upstream).sum().backward()
    expected = torch.zeros(11, dtype=torch.float64)
    for i, (first, last) in enumerate(pairwise(STARTS)):
        own = [t for t in range(first, last) if mask[t]]
        for t in own:
            expected[t] = upstream[i] / (len(own) if mean else 1)
    assert values.grad is not None
    torch.testing.assert_close(values.grad, expected, rtol=1e-14, atol=0)


def test_a_long_sequence_loses_nothing_in_fp32_and_disturbs_no_other() -> None:
    values = torch.rand(20000, generator=torch.Generator().manual_seed(2))
    short = values[-7:].clone()
    found = rlk.sequence_sums(values, cu_seqlens=torch.tensor([0, 19993, 20000]))
    assert float(found[0]) == pytest.approx(math.fsum(values[:-7].tolist()), rel=1e-7)
    assert torch.equal(found[1:], rlk.sequence_sums(short, cu_seqlens=torch.tensor([0, 7])))
    assert found.dtype == torch.float32


def test_sequence_log_probabilities_give_the_ratio_of_gspo() -> None:
    g = torch.Generator().manual_seed(4)
    logprob, starts = -torch.rand(9, generator=g, dtype=torch.float64), torch.tensor([0, 2, 5, 9])
    old, A = logprob + 0.1 * torch.randn(9, generator=g, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    ratio = rlk.sequence_sums(logprob - old, cu_seqlens=starts, mean=True).exp()
    loss = rlk.policy_loss(logprob, old, A, cu_seqlens=starts, kind="gspo", clip=(math.inf, math.inf)).loss
    assert float(loss) == pytest.approx(-float(ratio.mean()), rel=1e-12)


def test_it_reads_no_value_on_the_host() -> None:
    values, mask, starts = packed()
    sums = rlk.capture(lambda x, m, c: rlk.sequence_sums(x, cu_seqlens=c, mask=m, mean=True), (values, mask, starts))
    assert torch.equal(sums(values, mask, starts), rlk.sequence_sums(values, cu_seqlens=starts, mask=mask, mean=True))


@pytest.mark.parametrize("shape", [(0,), (4,), (0, 5), (2, 0)])
def test_a_batch_without_sequences_or_tokens_has_a_connected_gradient(shape) -> None:
    values = torch.ones(shape, requires_grad=True)
    found = rlk.sequence_sums(values, cu_seqlens=torch.tensor([0]) if len(shape) == 1 else None, mean=True)
    assert found.tolist() == [0.0] * (shape[0] if len(shape) == 2 else 0)
    found.sum().backward()
    assert values.grad is not None
    assert not values.grad.any()


def test_starts_beyond_the_tokens_read_nothing_outside() -> None:
    found = rlk.sequence_sums(torch.ones(4), cu_seqlens=torch.tensor([0, 2, 10**8, 1]))
    assert found.tolist() == [2.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("values", {"values": torch.ones(2, 2, 2)}),
        ("values", {"values": torch.ones(3, dtype=torch.int64), "cu_seqlens": torch.tensor([0, 3])}),
        ("cu_seqlens", {"values": torch.ones(3)}),
        ("cu_seqlens", {"values": torch.ones(3), "cu_seqlens": torch.zeros(0, dtype=torch.int64)}),
        ("cu_seqlens", {"values": torch.ones(3), "cu_seqlens": torch.tensor([0.0, 3.0])}),
        ("cu_seqlens", {"values": torch.ones(2, 2), "cu_seqlens": torch.tensor([0, 4])}),
        ("mask", {"values": torch.ones(2, 2), "mask": torch.ones(2, dtype=torch.bool)}),
        ("mean", {"values": torch.ones(2, 2), "mean": 1}),
    ],
)
def test_arguments_without_meaning_are_refused_by_name(argument, given) -> None:
    with pytest.raises((rlk.ArgumentError, rlk.ArgumentTypeError)) as found:
        rlk.sequence_sums(**given)
    assert found.value.argument == argument
