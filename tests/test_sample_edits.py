"""Masks, bias, bans and penalties of sample, and rows that are degenerate or stand for nothing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlkernel_conformance.sampling_batches import KINDS, pack, random_batch
from rlkernel_core.definitions.sampling import edited
from rlkernel_core.spec.sampling import LogitBias, Penalties, Status, TokenLists
from rlkernel_torch.direct import sample
from tests.test_philox import EXTREMES
from tests.test_sample import one

INF = math.inf


def drawn_ids(x, steps=400, **arguments):
    """Tokens of one row over many steps."""
    rows = torch.as_tensor(x).expand(steps, -1)
    return set(sample(rows, seed=9, step=torch.arange(steps), **arguments).token.tolist())


def test_a_disallowed_token_is_never_drawn() -> None:
    mask = np.zeros((400, 40), bool)
    mask[:, [0, 31, 32, 39]] = True
    assert drawn_ids(np.zeros(40, np.float32), allowed=pack(mask)) == {0, 31, 32, 39}


@pytest.mark.parametrize("step, token, word", EXTREMES)
def test_extreme_noise_words_neither_force_nor_lose_a_token(step, token, word) -> None:
    """A uniform of 0 or 1 makes noise infinite, and then masked tokens are drawn (SGLang 25106, vLLM 43249)."""
    x = torch.zeros(1, 4)
    mask = np.ones((1, 4), bool)
    mask[0, token] = False
    free = sample(x, seed=1, step=step)
    masked = sample(x, seed=1, step=step, allowed=pack(mask))
    banned = sample(x, seed=1, step=step, banned=TokenLists(torch.tensor([token]), torch.tensor([0, 1])))
    assert (int(free.token) == token) == (word == 0)  # the best noise there is, or the worst
    assert int(masked.token) != token
    assert int(banned.token) != token
    assert math.isfinite(masked.logprob)


def test_a_row_that_allows_nothing_is_empty_and_alone() -> None:
    x = torch.zeros(3, 40)
    mask = np.ones((3, 40), bool)
    mask[1] = False
    seeds = torch.arange(3)
    plain, masked = sample(x, seed=seeds, step=0), sample(x, seed=seeds, step=0, allowed=pack(mask), invalid_token=-7)
    assert masked.status.tolist() == [0, Status.EMPTY, 0]
    assert masked.token.tolist() == [int(plain.token[0]), -7, int(plain.token[2])]
    assert (masked.logprob[1], masked.log_kept_mass[1], int(masked.kept_count[1])) == (-INF, -INF, 0)


def test_all_bits_set_in_the_last_word_allow_the_last_token() -> None:
    mask = np.zeros((400, 64), bool)
    mask[:, [31, 63]] = True  # the sign bits of both words
    assert drawn_ids(np.zeros(64, np.float32), allowed=pack(mask)) == {31, 63}


def test_banned_lists_are_ragged_and_ignore_foreign_entries() -> None:
    x = torch.zeros(3, 4)
    lists = TokenLists(torch.tensor([0, 1, 2, 3, -1, 99, 0, 77, 77]), torch.tensor([0, 3, 3, 7]))
    result = sample(x, seed=torch.arange(3), step=0, banned=lists, kept_capacity=4)
    assert result.kept_ids.tolist() == [[3, -1, -1, -1], [0, 1, 2, 3], [1, 2, -1, -1]]


def test_bias_adds_up_bans_and_never_revives() -> None:
    x = torch.tensor([[0.0, -INF, 1.0, INF], [0.0, 0.0, 0.0, 0.0]])
    bias = LogitBias(
        torch.tensor([0, 0, 1, 3, 9, -1, 2, 3]),
        torch.tensor([2.0, 3.0, 50.0, -INF, 9.0, 9.0, -INF, 1.0]),
        torch.tensor([0, 6, 7]),
    )
    result = sample(x, seed=torch.arange(2), step=0, bias=bias, top_n=4, top_n_from="processed")
    assert result.top_ids.tolist() == [[0, 2, -1, -1], [0, 1, 3, -1]]
    expected = torch.log_softmax(torch.tensor([5.0, 1.0]), 0)
    torch.testing.assert_close(result.top_logprobs[0, :2], expected)


def test_penalties_are_those_of_ctrl_and_openai() -> None:
    x = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0]])
    history = Penalties(2.0, 0.25, 0.5, pack([[1, 1, 0, 0, 0]]), torch.tensor([[2, 3, 3, -1]]))
    result = sample(x, seed=0, step=0, penalties=history, top_n=5, top_n_from="processed")
    expected = torch.tensor([1.0, -4.0, 1.0 - 0.25 - 0.5, -4.0 - 0.5 - 0.5, 1.0])
    order = torch.sort(expected, descending=True, stable=True).indices
    assert result.top_ids[0].tolist() == order.tolist()
    torch.testing.assert_close(result.top_logprobs[0], torch.log_softmax(expected, 0)[order])


def test_each_penalty_may_stand_alone_and_counts_equal_repeated_ids() -> None:
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))
    for name in ("repetition", "frequency", "presence"):
        repeated = Penalties(**{name: 1.5}, output_ids=torch.tensor([[4, 4, 5], [6, 99, -3]]))
        counted = Penalties(
            **{name: torch.tensor([1.5, 1.5])},
            output_ids=torch.tensor([[5, 4, 29], [6, 0, 1]]),
            output_counts=torch.tensor([[1, 2, 0], [1, 0, 0]]),
        )
        a, b = (
            sample(x, seed=torch.arange(2), step=0, penalties=p, top_n=30, top_n_from="processed")
            for p in (repeated, counted)
        )
        assert torch.equal(a.top_ids, b.top_ids)
        assert torch.equal(a.top_logprobs, b.top_logprobs)
        plain = sample(x, seed=torch.arange(2), step=0, top_n=30, top_n_from="processed")
        assert not torch.equal(a.top_logprobs, plain.top_logprobs)


def test_edited_logits_have_the_bits_of_the_contract() -> None:
    """Order and top-k are decided on them, so they are compared through the threshold of every k."""
    batch = random_batch(3, 24, 1, kinds=("normal",))
    row = batch.rows[0]
    row.temperature, row.top_p, row.min_p = 1.0, 1.0, 0.0
    row.allowed = np.ones(24, bool)
    row.repetition, row.frequency, row.presence = (float(np.float32(v)) for v in (1.3, 0.4, -0.7))
    x, _ = edited(batch.logits[0].numpy(), row, np.float32)
    for k in range(1, 24):
        row.top_k = k
        result = sample(batch.logits, **batch.arguments())
        assert float(result.threshold[0]) == float(np.sort(x)[-k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_degenerate_rows_have_their_stated_answers(dtype) -> None:
    x = torch.tensor(
        [
            [0.0, math.nan, 1.0, -INF],
            [INF, 0.0, INF, math.nan],
            [-INF, -INF, -INF, -INF],
            [math.nan] * 4,
            [3e38, -3e38, 0.0, 1.0],
            [1e-45, 0.0, -0.0, -1e-45],
            [-INF, -INF, 2.0, -INF],
        ],
        dtype=dtype,
    )
    result = sample(x, temperature=0.5, seed=torch.arange(7), step=1, raw_logprob=True, entropy=True)
    N, P, E = Status.NAN, Status.POSINF, Status.EMPTY
    assert result.status.tolist() == [N, N | P, E, N | E, 0, 0, 0]
    assert result.kept_count.tolist() == [2, 2, 0, 0, 4, 4, 1]
    assert int(result.token[1]) in {0, 2}
    assert float(result.logprob[1]) == pytest.approx(-math.log(2))
    assert float(result.entropy[1]) == pytest.approx(math.log(2))
    assert result.logprob[2:4].tolist() == [-INF, -INF]
    assert result.raw_logprob[2:4].isnan().all()
    assert (int(result.token[4]), float(result.logprob[4]), float(result.entropy[4])) == (0, 0.0, 0.0)
    assert (int(result.token[6]), float(result.logprob[6])) == (2, 0.0)


def test_plus_infinity_is_uniform_and_filters_by_count_apply() -> None:
    x = torch.tensor([1.0, INF, INF, 5.0, INF])
    assert drawn_ids(x) == {1, 2, 4}
    assert drawn_ids(x, top_k=2) == {1, 2}
    assert drawn_ids(x, top_p=0.5) == {1, 2}
    assert drawn_ids(x, temperature=0.0) == {1}
    assert one(x, top_k=2)["threshold"] == INF
    assert (one(x)["threshold"], one(x)["threshold_id"]) == (INF, 4)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "normal"])
def test_a_degenerate_row_changes_no_other_row(kind) -> None:
    batch = random_batch(1, 33, 4, kinds=("normal",))
    arguments = batch.arguments()
    options = {"raw_logprob": True, "entropy": True, "kept_capacity": 5, "top_n": 3, "rank": True}
    before = sample(batch.logits, **arguments, **options)
    poisoned = batch.logits.clone()
    poisoned[2] = random_batch(8, 33, 1, kinds=(kind,)).logits[0]
    after = sample(poisoned, **arguments, **options)
    others = torch.tensor([0, 1, 3])
    for field in dataclasses.fields(before):
        torch.testing.assert_close(
            getattr(before, field.name)[others], getattr(after, field.name)[others], atol=0, rtol=0, equal_nan=True
        )


def test_parameters_without_meaning_spoil_their_row_alone() -> None:
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    seeds = torch.arange(5)
    T = torch.tensor([1.0, -1.0, math.nan, INF, 1.0])
    plain, result = sample(x, seed=seeds, step=0), sample(x, temperature=T, seed=seeds, step=0, invalid_token=-1)
    assert result.status.tolist() == [0, Status.PARAM, Status.PARAM, Status.PARAM, 0]
    assert result.token.tolist() == [int(plain.token[0]), -1, -1, -1, int(plain.token[4])]
    assert result.logprob[1:4].tolist() == [-INF] * 3
    for name, values in {
        "repetition": [1.0, 0.0, -1.0, math.nan, INF],
        "frequency": [0.0, math.nan, INF, -INF, math.nan],
        "presence": [0.0, math.nan, INF, -INF, math.nan],
    }.items():
        bad = sample(x, seed=seeds, step=0, penalties=Penalties(**{name: torch.tensor(values)}))
        assert bad.status.tolist() == [0, *[Status.PARAM] * 4]
    bias = LogitBias(torch.tensor([1]), torch.tensor([math.nan]), torch.tensor([0, 1, 1, 1, 1, 1]))
    assert sample(x, seed=seeds, step=0, bias=bias).status.tolist() == [Status.PARAM, 0, 0, 0, 0]


def test_nan_filters_are_off() -> None:
    off = one([1.0, 2.0, 3.0], top_p=torch.tensor([math.nan]), min_p=torch.tensor([math.nan]))
    assert off["kept_count"] == 3


def test_the_raw_rank_beside_infinities_is_by_logit() -> None:
    """The infinities are banned; the best of the rest stands behind both of them, not behind all lower ids."""
    x = torch.tensor([[0.0, INF, 1.0, 5.0, INF]])
    banned = TokenLists(torch.tensor([1, 4]), torch.tensor([0, 2]))
    result = sample(x, temperature=0.0, seed=0, step=0, banned=banned, top_n=5, rank=True)
    assert (int(result.token[0]), int(result.rank[0])) == (3, 2)
    assert result.top_ids.tolist() == [[1, 4, -1, -1, -1]]
