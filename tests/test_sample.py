"""sample against the float64 oracle: kept sets, tokens, log-probabilities, edits, degenerate rows, what is returned."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_conformance.sampling_batches import DTYPES, Batch, pack, random_batch
from rlkernel_core.definitions.sampling import sample_row
from rlkernel_core.spec.sampling import FILTER_ORDERS, TIES, LogitBias, Penalties, Status, TokenLists
from rlkernel_torch.direct import sample

INF = math.inf
SIZES = (1, 2, 31, 32, 33, 100, 1000)
quick = settings(derandomize=True, deadline=None, max_examples=60)


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


@quick
@given(
    seed=st.integers(0, 2**32),
    V=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(FILTER_ORDERS),
    tie=st.sampled_from(TIES),
    edits=st.booleans(),
)
def test_rows_match_the_oracle(seed, V, dtype, order, tie, edits) -> None:
    batch = random_batch(seed, V, 6, dtype, filter_order=order, tie=tie, edits=edits)
    result = sample(batch.logits, **batch.arguments(), raw_logprob=True, entropy=True, kept_capacity=V)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-6
    for i, expected in enumerate(oracle(batch)):
        kept = result.kept_ids[i, : int(result.kept_count[i])].tolist()
        assert int(result.status[i]) == expected.status
        if kept != expected.kept.tolist():  # the nucleus ends within a rounding of p
            assert expected.edge < 1e-12
            continue
        assert close(float(result.logprob[i]), expected.logprob, tolerance)
        assert close(float(result.log_kept_mass[i]), expected.log_kept_mass, tolerance)
        if expected.status & Status.EMPTY:
            assert int(result.token[i]) == 0
            assert math.isnan(result.raw_logprob[i])
            continue
        assert int(result.token[i]) == expected.token
        assert close(float(result.raw_logprob[i]), expected.raw_logprob, tolerance)
        assert close(float(result.entropy[i]), expected.entropy, tolerance)
        assert close(
            float(result.logprob[i] + result.log_kept_mass[i]),
            expected.logprob + expected.log_kept_mass,
            2 * tolerance,
        )


@quick
@given(seed=st.integers(0, 2**32), V=st.sampled_from(SIZES), tie=st.sampled_from(TIES))
def test_threshold_describes_the_kept_set(seed, V, tie) -> None:
    batch = random_batch(seed, V, 6, tie=tie)
    result = sample(batch.logits, **batch.arguments(), kept_capacity=V)
    for i, expected in enumerate(oracle(batch)):
        if expected.x is None:
            assert int(result.kept_count[i]) == 0
            continue
        tau, cut = float(result.threshold[i]), int(result.threshold_id[i])
        described = (expected.x > tau) | ((expected.x == tau) & (np.arange(V) <= cut))
        assert sorted(result.kept_ids[i, : int(result.kept_count[i])].tolist()) == np.flatnonzero(described).tolist()


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


@pytest.mark.parametrize(
    "values", [{"top_k": k} for k in (0, -1, 7, 700)] + [{"top_p": p} for p in (1.0, 3.0)] + [{"min_p": 0.0}]
)
def test_values_that_are_off_change_no_bit(values) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    plain = sample(x, temperature=0.7, seed=torch.arange(5), step=0, raw_logprob=True, entropy=True)
    off = sample(x, temperature=0.7, seed=torch.arange(5), step=0, raw_logprob=True, entropy=True, **values)
    for field in dataclasses.fields(plain):
        a, b = getattr(plain, field.name), getattr(off, field.name)
        assert a is b is None or torch.equal(a, b)


def test_neutral_edits_change_no_bit() -> None:
    x = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    neutral = {
        "penalties": Penalties(1.0, 0.0, 0.0, pack(np.ones((2, 40), bool)), torch.tensor([[1, 2], [3, 3]])),
        "bias": LogitBias(torch.tensor([5, 6]), torch.zeros(2), torch.tensor([0, 1, 2])),
        "allowed": torch.full((2, 2), -1, dtype=torch.int32),
        "banned": TokenLists(torch.tensor([40, -1, 10**9]), torch.tensor([0, 1, 3])),
    }
    plain = sample(x, seed=torch.arange(2), step=0)
    edited = sample(x, seed=torch.arange(2), step=0, **neutral)
    assert torch.equal(plain.logprob, edited.logprob)
    assert torch.equal(plain.token, edited.token)


def test_raw_and_processed_agree_bitwise_where_nothing_is_processed() -> None:
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1)) * 4
    result = sample(x, seed=torch.arange(64), step=0, raw_logprob=True)
    assert torch.equal(result.logprob, result.raw_logprob)


def test_raw_logprob_depends_on_logits_and_token_alone() -> None:
    batch = random_batch(11, 100, 8, kinds=("normal",))
    result = sample(batch.logits, **batch.arguments(), raw_logprob=True)
    rows = torch.arange(8)[result.status == 0]
    plain = torch.log_softmax(batch.logits.double(), 1)[rows, result.token[rows]].float()
    torch.testing.assert_close(result.raw_logprob[rows], plain, atol=2e-6, rtol=2e-6)


def test_exactly_k_are_kept_and_ties_go_to_the_lowest_ids() -> None:
    assert one([5.0, 5.0, 5.0, 5.0], top_k=2)["kept_ids"][:3] == [0, 1, -1]
    assert one([5.0, 5.0, 5.0, 4.0], top_k=2, tie="keep_all")["kept_ids"][:4] == [0, 1, 2, -1]


def test_the_crossing_token_of_the_nucleus_is_kept() -> None:
    x = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    assert one(x, top_p=0.5)["kept_count"] == 1  # the mass before the second token is not below p
    assert one(x, top_p=0.51)["kept_count"] == 2
    assert one(x, top_p=0.8)["kept_count"] == 3


def test_filter_orders_differ_as_stated() -> None:
    x = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    # top-k 2 leaves (4/7, 3/7): a nucleus of 0.5 is one token there, two on the full law.
    assert one(x, top_k=2, top_p=0.5)["kept_count"] == 1
    assert one(x, top_k=2, top_p=0.5, filter_order="joint")["kept_count"] == 2
    assert one(x, top_k=2, top_p=0.5, filter_order="topp_topk")["kept_count"] == 2
    # min-p 0.7 leaves two tokens, and top-p comes after it, except under "joint".
    assert one(x, min_p=0.7, top_p=0.5)["kept_count"] == 1
    assert one(x, min_p=0.7, top_p=0.5, filter_order="topp_topk")["kept_count"] == 1
    assert one(x, min_p=0.7, top_p=0.5, filter_order="joint")["kept_count"] == 2


@quick
@given(seed=st.integers(0, 2**32), V=st.sampled_from(SIZES), order=st.sampled_from(FILTER_ORDERS))
def test_weaker_filters_keep_supersets(seed, V, order) -> None:
    g = np.random.default_rng(seed)
    x = torch.from_numpy(np.round(g.normal(size=(1, V)) * 2, 1)).float()
    k, p, m = int(g.integers(1, V + 1)), float(g.uniform(0.05, 0.9)), float(g.uniform(0.05, 0.9))
    strict = {"top_k": k, "top_p": p, "min_p": m}
    kept = sample(x, seed=0, step=0, filter_order=order, kept_capacity=V, **strict).kept_ids[0].tolist()
    for weaker in ({"top_k": k + 1}, {"top_p": p + 0.1}, {"min_p": m / 2}):
        more = sample(x, seed=0, step=0, filter_order=order, kept_capacity=V, **strict | weaker).kept_ids[0].tolist()
        assert set(kept) - {-1} <= set(more)


def test_kept_probabilities_sum_to_one() -> None:
    batch = random_batch(4, 100, 20, kinds=("normal",), edits=False)
    for row in batch.rows:
        row.temperature, row.top_p = 0.7, 0.9
    result = sample(batch.logits, **batch.arguments(), kept_capacity=100, top_n=100, top_n_from="processed")
    torch.testing.assert_close(result.top_logprobs.exp().sum(1), torch.ones(20))
    assert torch.equal(result.top_ids, result.kept_ids)


@pytest.mark.parametrize("capacity", [1, 3, 100, 300])
def test_results_do_not_depend_on_the_capacity_and_overflow_is_flagged(capacity) -> None:
    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(2)) * 3
    free = sample(x, top_p=0.9, seed=torch.arange(6), step=0)
    capped = sample(x, top_p=0.9, seed=torch.arange(6), step=0, kept_capacity=capacity)
    assert torch.equal(free.logprob, capped.logprob)
    assert capped.kept_ids.shape == (6, capacity)
    flagged = (capped.status & Status.KEPT_OVERFLOW.value) != 0
    assert flagged.tolist() == (capped.kept_count > capacity).tolist()
    assert (capped.kept_ids >= 0).sum(1).tolist() == capped.kept_count.clamp(max=capacity).tolist()


def test_the_kept_set_feeds_logprob() -> None:
    from rlkernel_torch.direct import logprob

    x = torch.randn(9, 50, generator=torch.Generator().manual_seed(3)) * 2
    drawn = sample(x, temperature=0.7, top_p=0.8, top_k=20, seed=torch.arange(9), step=4, kept_capacity=50)
    trainer = logprob(x, drawn.token, temperature=0.7, support=drawn.support())
    torch.testing.assert_close(trainer.logprob, drawn.logprob, atol=4e-6, rtol=4e-6)
    torch.testing.assert_close(trainer.log_kept_mass, drawn.log_kept_mass, atol=4e-6, rtol=4e-6)
    tempered = logprob(x, drawn.token, temperature=0.7).logprob
    torch.testing.assert_close(tempered, drawn.logprob + drawn.log_kept_mass, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("source", ["raw", "processed"])
def test_top_n_and_rank(source) -> None:
    batch = random_batch(7, 33, 12, kinds=("normal", "ties", "holes", "posinf", "nan"))
    result = sample(batch.logits, **batch.arguments(), top_n=9, top_n_from=source, rank=True, kept_capacity=33)
    for i, expected in enumerate(oracle(batch)):
        raw = np.nan_to_num(batch.logits[i].double().numpy(), nan=-INF, posinf=INF, neginf=-INF)
        raw = np.where(np.isposinf(raw), 0.0, -INF) if np.isposinf(raw).any() else raw
        order = np.lexsort((np.arange(33), -raw))
        order = order[: int((raw > -INF).sum())] if source == "raw" else expected.kept
        assert result.top_ids[i].tolist() == [*order[:9].tolist(), *[-1] * (9 - len(order))]
        assert (result.top_logprobs[i] == -INF).tolist() == (result.top_ids[i] == -1).tolist()
        if len(expected.kept):
            assert int(result.rank[i]) == int(np.flatnonzero(np.append(order, expected.token) == expected.token)[0])
        else:
            assert int(result.rank[i]) == -1


def test_padding_columns_change_nothing() -> None:
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    padded = torch.full((4, 64), math.nan)
    padded[:, :50] = x
    padded[:, 50] = INF
    arguments = {"seed": torch.arange(4), "step": 0, "top_p": 0.9, "raw_logprob": True, "kept_capacity": 50}
    plain, cut = sample(x, **arguments), sample(padded, vocab_size=50, **arguments)
    for field in dataclasses.fields(plain):
        a, b = getattr(plain, field.name), getattr(cut, field.name)
        assert a is b is None or torch.equal(a, b)


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    result = sample(torch.zeros(0, 9), seed=none, step=0, top_p=0.9, top_n=3, rank=True, kept_capacity=4, entropy=True)
    assert (result.token.shape, result.kept_ids.shape, result.top_ids.shape) == ((0,), (0, 4), (0, 3))
    assert result.support().offsets.tolist() == [0]


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
