"""sample by the plain-torch backend: large vocabularies, precision, and what its clauses do not say."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlkernel_conformance.sampling_batches import DTYPES, Batch, random_batch
from rlkernel_core.definitions.sampling import sample_row
from rlkernel_torch.direct import sample

INF = math.inf


def numpy_type(dtype):
    return np.float64 if dtype == torch.float64 else np.float32


def oracle(batch: Batch):
    work = torch.float64 if batch.logits.dtype == torch.float64 else torch.float32
    with np.errstate(all="ignore"):
        return [
            sample_row(x.to(work).numpy(), row, numpy_type(batch.logits.dtype))
            for x, row in zip(batch.logits, batch.rows, strict=True)
        ]


def close(actual, expected, tolerance) -> bool:
    return actual == expected or abs(actual - expected) <= tolerance * max(1.0, abs(expected))


def one(logits, **arguments):
    """One row through sample, its results as numbers and lists."""
    result = sample(torch.as_tensor(logits)[None], **{"seed": 3, "step": 0, "kept_capacity": 8} | arguments)
    fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    return {name: value[0].tolist() for name, value in fields.items() if value is not None}


def test_a_large_vocabulary_with_every_filter() -> None:
    batch = random_batch(5, 151936, 4, kinds=("normal", "ties"), edits=False)
    for row in batch.rows:
        row.temperature, row.top_k, row.top_p, row.min_p = 0.7, 1000, 0.95, 1e-4
    result = sample(batch.logits, **batch.arguments())
    for i, expected in enumerate(oracle(batch)):
        assert int(result.token[i]) == expected.token
        assert int(result.kept_count[i]) == len(expected.kept)
        assert close(float(result.logprob[i]), expected.logprob, 2e-6)
        assert close(float(result.log_kept_mass[i]), expected.log_kept_mass, 2e-6)


def test_large_offsets_and_confident_rows_keep_their_precision() -> None:
    x = torch.tensor([[1e5, 1e5 - 20.0, 1e5 - 21.0, -1e5]])
    result = sample(x, seed=0, step=0, top_p=1.0)
    rest = math.exp(-20) + math.exp(-21)
    assert int(result.token) == 0
    assert float(result.logprob) == pytest.approx(-math.log1p(rest), rel=1e-6)
    truncated = sample(x, seed=0, step=0, top_k=2)
    assert float(truncated.log_kept_mass) == pytest.approx(-math.exp(-21) / (1 + math.exp(-20)), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_is_top_k_one_and_the_argmax_of_lowest_id(dtype) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -0.0, 0.0, -1.0]], dtype=dtype)
    seeds = torch.arange(2)
    greedy = sample(x, temperature=0.0, seed=0, step=0, kept_capacity=2)
    assert greedy.token.tolist() == [1, 0]
    assert (greedy.logprob.tolist(), greedy.log_kept_mass.tolist()) == ([0.0, 0.0], [0.0, 0.0])
    assert (greedy.kept_count.tolist(), greedy.kept_ids.tolist()) == ([1, 1], [[1, -1], [0, -1]])
    for step in range(20):
        for other in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": -1.0}, {"temperature": 1e-30}):
            drawn = sample(x, seed=seeds, step=step, **other)
            assert drawn.token.tolist() == [1, 0] if "temperature" not in other else [[1, 2], [0, 1, 2]]


def test_greedy_ignores_filters_and_breaks_ties_although_ties_are_kept() -> None:
    result = one([2.0, 5.0, 5.0], temperature=0.0, tie="keep_all", top_k=3)
    assert (result["token"], result["kept_count"], result["kept_ids"][:2]) == (1, 1, [1, -1])


def test_raw_and_processed_agree_bitwise_where_nothing_is_processed() -> None:
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1)) * 4
    result = sample(x, seed=torch.arange(64), step=0, raw_logprob=True)
    assert torch.equal(result.logprob, result.raw_logprob)


def test_the_kept_set_feeds_logprob() -> None:
    from rlkernel_torch.direct import logprob

    x = torch.randn(9, 50, generator=torch.Generator().manual_seed(3)) * 2
    drawn = sample(x, temperature=0.7, top_p=0.8, top_k=20, seed=torch.arange(9), step=4, kept_capacity=50)
    trainer = logprob(x, drawn.token, temperature=0.7, support=drawn.support())
    torch.testing.assert_close(trainer.logprob, drawn.logprob, atol=4e-6, rtol=4e-6)
    torch.testing.assert_close(trainer.log_kept_mass, drawn.log_kept_mass, atol=4e-6, rtol=4e-6)
    tempered = logprob(x, drawn.token, temperature=0.7).logprob
    torch.testing.assert_close(tempered, drawn.logprob + drawn.log_kept_mass, atol=4e-6, rtol=4e-6)
    none = torch.zeros(0, dtype=torch.int64)
    assert sample(x[:0], seed=none, step=0, kept_capacity=4).support().offsets.tolist() == [0]


def test_result_types() -> None:
    for dtype, real in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        result = sample(
            torch.zeros(1, 5, dtype=dtype), seed=0, step=0, raw_logprob=True, entropy=True, rank=True, top_n=2
        )
        types = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
        types = {name: value.dtype for name, value in types.items() if value is not None}
        ids = {"token": torch.int64, "threshold_id": torch.int64, "top_ids": torch.int64}
        counts = {"kept_count": torch.int32, "status": torch.int32, "rank": torch.int32}
        reals = ("logprob", "log_kept_mass", "threshold", "raw_logprob", "entropy", "top_logprobs")
        assert types == ids | counts | dict.fromkeys(reals, real)
