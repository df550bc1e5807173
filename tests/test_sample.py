"""sample by the plain-torch backend: large vocabularies, precision, and what its clauses do not say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlkernel_conformance.goodness_of_fit import independent
from rlkernel_conformance.sampling_batches import Batch, random_batch
from rlkernel_core.definitions.sampling import sample_row
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.sampling import LogitBias, SampleResult, Status, TokenLists
from rlkernel_torch.direct import lm_head_sample, logprob, sample

INF = math.inf


def fields(result: SampleResult) -> dict[str, Tensor]:
    """The results that there are, by name."""
    return {n: x for n, x in vars(result).items() if x is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=0, rtol=0, equal_nan=True, msg=name)


def test_a_large_vocabulary_with_every_filter() -> None:
    batch = random_batch(5, 151936, 4, kinds=("normal", "ties"), edits=False)
    for row in batch.rows:
        row.temperature, row.top_k, row.top_p, row.min_p = 0.7, 1000, 0.95, 1e-4
    result = sample(batch.logits, **batch.arguments())
    for i, (x, row) in enumerate(zip(batch.logits, batch.rows, strict=True)):
        expected = sample_row(x.float().numpy(), row, np.float32)
        assert (int(result.token[i]), int(result.kept_count[i])) == (expected.token, len(expected.kept))
        assert float(result.logprob[i]) == pytest.approx(expected.logprob, rel=2e-6, abs=2e-6)
        assert float(result.log_kept_mass[i]) == pytest.approx(expected.log_kept_mass, rel=2e-6, abs=2e-6)


def test_large_offsets_and_confident_rows_keep_their_precision() -> None:
    x = torch.tensor([[1e5, 1e5 - 20.0, 1e5 - 21.0, -1e5]])
    result = sample(x, seed=0, step=0, top_p=1.0)
    rest = math.exp(-20) + math.exp(-21)
    assert int(result.token) == 0
    assert float(result.logprob) == pytest.approx(-math.log1p(rest), rel=1e-6)
    truncated = sample(x, seed=0, step=0, top_k=2)
    assert float(truncated.log_kept_mass) == pytest.approx(-math.exp(-21) / (1 + math.exp(-20)), rel=1e-6)


def test_a_row_of_a_batch_that_is_drawn_in_blocks_is_drawn_as_alone() -> None:
    x = torch.randn(300, 1000, generator=torch.Generator().manual_seed(2))  # 131 rows a block on a CPU
    token = sample(x, seed=torch.arange(300), step=7).token
    for row in (0, 130, 131, 262, 299):
        assert int(sample(x[row : row + 1], seed=row, step=7).token) == int(token[row])


def test_raw_and_processed_agree_bitwise_where_nothing_is_processed() -> None:
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1)) * 4
    result = sample(x, seed=torch.arange(64), step=0, raw_logprob=True)
    assert torch.equal(result.logprob, result.raw_logprob)


def test_the_kept_set_feeds_logprob() -> None:
    x = torch.randn(9, 50, generator=torch.Generator().manual_seed(3)) * 2
    drawn = sample(x, temperature=0.7, top_p=0.8, top_k=20, seed=torch.arange(9), step=4, kept_capacity=50)
    trainer = logprob(x, drawn.token, temperature=0.7, support=drawn.support())
    torch.testing.assert_close(trainer.logprob, drawn.logprob, atol=4e-6, rtol=4e-6)
    torch.testing.assert_close(trainer.log_kept_mass, drawn.log_kept_mass, atol=4e-6, rtol=4e-6)
    none = torch.zeros(0, dtype=torch.int64)
    assert sample(x[:0], seed=none, step=0, kept_capacity=4).support().offsets.tolist() == [0]
    with pytest.raises(ArgumentError, match="kept_capacity"):
        sample(x, seed=torch.arange(9), step=0).support()


def test_a_bias_never_revives_an_impossible_token() -> None:
    x = torch.tensor([[0.0, -INF, 1.0, INF], [0.0, 0.0, 0.0, 0.0]])
    bias = LogitBias(
        torch.tensor([0, 0, 1, 3, 9, -1, 2, 3]),
        torch.tensor([2.0, 3.0, 50.0, -INF, 9.0, 9.0, -INF, 1.0]),
        torch.tensor([0, 6, 7]),
    )
    result = sample(x, seed=torch.arange(2), step=0, bias=bias, top_n=4, top_n_from="processed")
    assert result.top_ids.tolist() == [[0, 2, -1, -1], [0, 1, 3, -1]]
    torch.testing.assert_close(result.top_logprobs[0, :2], torch.log_softmax(torch.tensor([5.0, 1.0]), 0))


def test_plus_infinity_is_uniform_and_filters_by_count_apply() -> None:
    x = torch.tensor([1.0, INF, INF, 5.0, INF]).expand(400, 5)

    def drawn(**given: Any) -> SampleResult:
        return sample(x, seed=9, step=torch.arange(400), **given)

    for given, kept in ({}, {1, 2, 4}), ({"top_k": 2}, {1, 2}), ({"top_p": 0.5}, {1, 2}), ({"temperature": 0.0}, {1}):
        assert set(drawn(**given).token.tolist()) == kept
    assert (float(drawn().threshold[0]), int(drawn().threshold_id[0])) == (INF, 4)


def test_the_raw_rank_beside_infinities_is_by_logit() -> None:
    """The infinities are banned; the best of the rest stands behind both of them, not behind all lower ids."""
    x = torch.tensor([[0.0, INF, 1.0, 5.0, INF]])
    banned = TokenLists(torch.tensor([1, 4]), torch.tensor([0, 2]))
    result = sample(x, temperature=0.0, seed=0, step=0, banned=banned, top_n=5, rank=True)
    assert (int(result.token[0]), int(result.rank[0])) == (3, 2)
    assert result.top_ids.tolist() == [[1, 4, -1, -1, -1]]


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_bitwise_the_same_in_any_batch_and_under_any_number_of_threads(threads) -> None:
    asked = {"raw_logprob": True, "entropy": True, "kept_capacity": 7, "top_n": 3, "rank": True}
    batch = random_batch(21, 1003, 23)
    whole = fields(sample(batch.logits, **batch.arguments(), **asked))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in np.array_split(np.random.default_rng(0).permutation(23), 4):
            part = Batch(batch.logits[rows], [batch.rows[i] for i in rows])
            arguments = batch.arguments() | part.arguments()  # the same features, whoever uses them
            for name in ("allowed", "penalties", "bias"):
                arguments[name] = part.arguments().get(name)
            assert_same(fields(sample(part.logits, **arguments, **asked)), {k: v[rows] for k, v in whole.items()})
    finally:
        torch.set_num_threads(before)


def test_numbers_mean_the_same_as_tensors_of_them() -> None:
    x = torch.randn(6, 90, generator=torch.Generator().manual_seed(0)) * 3
    numbers = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.03, "step": 5}
    types = {"top_k": torch.int32, "step": torch.int64}
    plain = fields(sample(x, seed=torch.arange(6), **numbers))
    for shape in ((), (1,), (6,)):
        tensors = {n: torch.full(shape, v, dtype=types.get(n, torch.float32)) for n, v in numbers.items()}
        assert_same(fields(sample(x, seed=torch.arange(6), **tensors)), plain)


def test_seeds_and_steps_are_unsigned_64_bit_numbers() -> None:
    x = torch.zeros(1, 1000)
    for big in (2**63, 2**64 - 1, 2**63 + 12345):
        bits = torch.tensor([big - 2**64])
        for name, other in (("seed", "step"), ("step", "seed")):
            drawn = {int(sample(x, **{name: v, other: 3}).token) for v in (big, bits, bits.view(torch.uint64))}
            assert len(drawn) == 1


def test_rows_may_share_noise_where_it_is_not_used_or_steps_tell_them_apart() -> None:
    x = torch.zeros(2, 40)
    assert sample(x, temperature=0.0, seed=0, step=0).token.tolist() == [0, 0]
    sample(x, seed=0, step=torch.arange(2))
    sample(x[:1], seed=0, step=0)
    with torch.no_grad():
        assert not sample(torch.nn.Parameter(x), seed=torch.arange(2), step=0).logprob.requires_grad


def test_noise_of_neighboring_tokens_steps_and_seeds_is_independent() -> None:
    n, V = 5000, 4
    x = torch.zeros(n, V)
    a = sample(x, seed=1, step=torch.arange(n)).token
    families = sample(x, seed=torch.arange(n), step=7).token
    pairs = {
        "next step": (a[:-1], a[1:]),
        "next seed": (a, sample(x, seed=2, step=torch.arange(n)).token),
        "other stream": (a, sample(x, seed=1, step=torch.arange(n), stream=1).token),
        "seeds in a row": (families[:-1], families[1:]),
        "far step": (a, sample(x, seed=1, step=torch.arange(n) + 2**32).token),
        "far seed": (a, sample(x, seed=1 + 2**32, step=torch.arange(n)).token),
    }
    for name, (left, right) in pairs.items():
        independent(name, left.numpy(), right.numpy(), np.full(V, 1 / V))


@pytest.mark.parametrize("more", [{"stream": 1}, {"temperature": torch.tensor([0.0, 1.0, 0.5, math.nan])}], ids=str)
def test_what_is_asked_of_a_draw_from_a_head_reaches_it(more) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4, 16, generator=g), torch.randn(2500, 16, generator=g)  # three tiles, the last ragged
    request = {"seed": torch.arange(4), "step": 3, "raw_logprob": True, **more}
    want = fields(sample((hidden.double() @ weight.double().T).float(), **request))
    for name, x in fields(lm_head_sample(hidden, weight, **request)).items():
        tolerance = 2e-5 if x.is_floating_point() else 0
        torch.testing.assert_close(x, want[name], atol=tolerance, rtol=tolerance, equal_nan=True, msg=name)


def test_no_rows_may_bring_entries_behind_the_last_offset() -> None:
    ids, offsets = torch.tensor([1]), torch.zeros(1, dtype=torch.int64)
    bias, banned = LogitBias(ids, torch.tensor([2.0]), offsets), TokenLists(ids, offsets)
    none = torch.zeros(0, dtype=torch.int64)
    assert sample(torch.zeros(0, 3), seed=none, step=none, bias=bias, banned=banned).token.shape == (0,)


def test_results_do_not_depend_on_the_default_dtype() -> None:
    x = torch.tensor([[0.0, 1.0], [math.inf, 0.0]])
    want = fields(sample(x, seed=torch.arange(2), step=0, raw_logprob=True, entropy=True))
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(fields(sample(x, seed=torch.arange(2), step=0, raw_logprob=True, entropy=True)), want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_row_whose_bias_has_no_meaning_has_no_best_tokens_and_no_infinity() -> None:
    bias = LogitBias(torch.tensor([0]), torch.tensor([math.nan]), torch.tensor([0, 1]))
    x = torch.tensor([[0.0, math.inf, 1.0]])
    drawn = sample(x, seed=0, step=0, bias=bias, top_n=2, top_n_from="processed")
    assert [drawn.status.tolist(), drawn.top_ids.tolist()] == [[Status.PARAM], [[-1, -1]]]
