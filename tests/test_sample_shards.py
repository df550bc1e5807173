"""A vocabulary split over ranks draws as one: every bit of every result, on every rank, whichever way it takes."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist

import rlkernel as rlk
from rlkernel.distributed import sample_shard
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.graphed import CaptureGroup
from rlkernel_core.spec.sample import SPEC
from rlkernel_torch import sample as of_torch
from rlkernel_torch.direct import sample
from rlkernel_torch.sharded import sampling, statistics
from rlkernel_torch.truncation import descending
from tests.process_groups import in_ranks

SUBJECT = Subject("torch", "sample")
LAWS = (
    {},
    {"top_k": 50, "top_p": 0.95},
    {"top_p": 0.7, "temperature": 0.5, "raw_logprob": True},
    {"min_p": 0.05, "entropy": True, "kept_capacity": 8, "top_k": 8},
)


def in_float64(x, **request):
    """The draw whose log-probabilities are those of the law in float64, rounded once."""
    return of_torch.sample(SPEC.call(x, **request), trainer=None)


def differing(want, have):
    """Names of the results whose bits differ."""

    def same(a, b):
        if a is None or b is None:
            return a is b
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=7e7), b.nan_to_num(nan=7e7))

    return [f.name for f in fields(want) if not same(getattr(want, f.name), getattr(have, f.name))]


def split(x, sizes, **request):
    """The draw by as many ranks as there are sizes."""
    ends = torch.tensor(sizes).cumsum(0).tolist()

    def one(rank, group):
        shard = x[:, ends[rank] - sizes[rank] : ends[rank]]
        return sample_shard(shard, group=group, sizes=sizes, **request)

    return on_ranks(SUBJECT, len(sizes), one)


@st.composite
def requests(draw):
    """Rows with ties, holes, infinities and NaN; sizes of shards; a law with every filter and edit."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = tuple(draw(st.lists(st.integers(1, 90), min_size=1, max_size=4)))
    N, V = 5, sum(sizes)
    x = draw(st.sampled_from((0.1, 1.0, 6.0))) * torch.randn(N, V, generator=g)
    x = (2 * x).round() / 2 if draw(st.booleans()) else x
    for value in draw(st.lists(st.sampled_from((torch.inf, -torch.inf, torch.nan)), max_size=2)):
        x[draw(st.integers(0, N - 1)), torch.rand(V, generator=g) < draw(st.sampled_from((0.05, 1.0)))] = value
    x = x.to(draw(st.sampled_from((torch.float32, torch.bfloat16))))

    def maybe(*values):
        return draw(st.sampled_from((None, *values)))

    law = {
        "temperature": draw(st.sampled_from((1.0, 0.7, 0.0, torch.tensor([0.0, 0.5, 1.0, -1.0, 1.3])))),
        "top_k": maybe(1, 5, 40) if draw(st.booleans()) else torch.tensor([0, 1, 3, 7, 500]),
        "top_p": maybe(0.3, 0.9) if draw(st.booleans()) else torch.tensor([0.1, 0.5, 0.99, 0.0, 1.0]),
        "min_p": maybe(0.05, 0.3),
        "filter_order": draw(st.sampled_from(("topk_topp", "joint", "topp_topk"))),
        "tie": draw(st.sampled_from(("lowest_id", "keep_all"))),
        "vocab_size": maybe(1, V // 2 + 1),
        "bias": maybe(rlk.LogitBias(torch.tensor([0, V - 1]), torch.tensor([4.0, -2.0]), torch.tensor([0] + 5 * [2]))),
        "banned": maybe(rlk.TokenLists(torch.randint(V, (9,), generator=g), torch.tensor([0] + 5 * [9]))),
        "penalties": maybe(rlk.Penalties(repetition=1.3, output_ids=torch.randint(V, (N, 5), generator=g))),
    }
    extras = {"raw_logprob": True, "entropy": draw(st.booleans()), "kept_capacity": draw(st.sampled_from((0, 3)))}
    if draw(st.booleans()):  # no filter
        law |= dict.fromkeys(("top_k", "top_p", "min_p"))
    return x, sizes, {**law, **extras, "seed": torch.arange(N), "step": draw(st.integers(0, 9))}


def test_the_best_ids_are_those_of_the_total_order() -> None:
    x = (4 * torch.randn(4, 900, generator=torch.Generator().manual_seed(0))).round() / 2
    x[0, :90], x[1, 5], x[2] = -torch.inf, torch.inf, -0.0 * x[2].sign()
    assert torch.equal(statistics._first(x, 300), descending(x)[1][:, :300])


@settings(derandomize=True, deadline=None, max_examples=120)
@given(requests(), st.sampled_from((1, 4, 64)))
def test_every_bit_is_that_of_the_joined_rows(drawn, candidates) -> None:
    x, sizes, request = drawn
    want = in_float64(x, **request)
    found = split(x, sizes, candidates=candidates, **request)
    assert [differing(want, have) for have in found] == [[]] * len(sizes)


@pytest.mark.parametrize(("request_", "gathered"), [(LAWS[0], 0), (LAWS[1], 0), (LAWS[3], 0), ({"top_n": 2}, 1)])
def test_candidates_settle_what_models_ask_for(monkeypatch, request_, gathered) -> None:
    calls = []
    real = sampling.joined
    monkeypatch.setattr(sampling, "joined", lambda *args: calls.append(1) or real(*args))
    x = 6 * torch.randn(16, 4000, generator=torch.Generator().manual_seed(0))
    want = in_float64(x, seed=torch.arange(16), step=3, **request_)
    found = split(x, (1000,) * 4, candidates=128, seed=torch.arange(16), step=3, **request_)
    assert ([differing(want, have) for have in found], len(calls)) == ([[]] * 4, 4 * gathered)


def test_a_nucleus_of_more_than_was_sent_is_drawn_from_the_gathered_logits() -> None:
    x = torch.zeros(3, 400)
    request = {"top_p": 0.9, "seed": torch.arange(3), "step": 0}
    found = split(x, (100, 300), candidates=8, **request)
    assert [differing(in_float64(x, **request), have) for have in found] == [[], []]
    assert found[0].kept_count.tolist() == [360] * 3


def test_the_law_in_float64_is_within_a_rounding_of_what_sample_states() -> None:
    x = 6 * torch.randn(64, 4000, generator=torch.Generator().manual_seed(0))
    request = {"seed": torch.arange(64), "step": 3, "top_p": 0.9, "raw_logprob": True}
    stated, law = sample(x, **request), in_float64(x, **request)
    assert set(differing(stated, law)) <= {"logprob", "log_kept_mass", "raw_logprob"}
    for name in ("logprob", "log_kept_mass", "raw_logprob"):
        torch.testing.assert_close(getattr(stated, name), getattr(law, name), rtol=1e-6, atol=2e-6)


def test_unless_candidates_are_asked_for_it_is_the_call_that_the_policy_chooses() -> None:
    x = torch.randn(3, 50)
    want = rlk.sample(x, seed=torch.arange(3), step=1, top_k=5)
    found = split(x, (20, 30), seed=torch.arange(3), step=1, top_k=5)
    assert [differing(want, have) for have in found] == [[], []]


def test_in_a_graph_the_logits_are_gathered_and_the_bits_stay() -> None:
    x = 3 * torch.randn(4, 60, generator=torch.Generator().manual_seed(1))

    def one(rank, group):
        def step(shard, at):
            law = {"seed": torch.arange(4), "step": at, "top_p": 0.9}
            return sample_shard(shard, group=group, sizes=(20, 40), candidates=64, **law).logprob

        own = CaptureGroup(f"rank {rank}")
        shard = x.split((20, 40), 1)[rank]
        graphed = rlk.capture(step, (shard, torch.tensor(0)), collectives=True, group=own)
        return [graphed(shard, torch.tensor(at)) for at in range(3)]

    want = [in_float64(x, seed=torch.arange(4), step=torch.tensor(at), top_p=0.9).logprob for at in range(3)]
    for found in on_ranks(SUBJECT, 2, one):
        assert all(map(torch.equal, want, found))


@pytest.mark.parametrize("sizes", [(10,), (10, 20), (30, 0), (10, 10, 10)])
def test_sizes_that_are_not_those_of_the_ranks_are_refused(sizes) -> None:
    def one(_, group):
        with pytest.raises(ArgumentError, match="sizes") as caught:
            sample_shard(torch.zeros(1, 30), group=group, sizes=sizes, seed=0, step=0)
        return caught.value.argument

    assert on_ranks(SUBJECT, 2, one) == ["sizes"] * 2


def test_a_graph_without_sizes_is_refused() -> None:
    def one(rank, group):
        def step(shard):
            return sample_shard(shard, group=group, seed=0, step=0).token

        with pytest.raises(ArgumentError) as caught:
            rlk.capture(step, (torch.zeros(1, 30),), collectives=True, group=CaptureGroup(f"rank {rank}"))
        return caught.value.argument

    assert on_ranks(SUBJECT, 2, one) == ["sizes"] * 2


def test_ranks_with_other_rows_are_refused() -> None:
    def one(rank, group):
        with pytest.raises(ArgumentError) as caught:
            sample_shard(torch.zeros(1 + rank, 30), group=group, seed=0, step=0)
        return caught.value.argument, caught.value.got

    assert on_ranks(SUBJECT, 3, one) == [("logits", [1, 2, 3])] * 3


def process(index, folder, ranks, cuts):
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=index, world_size=ranks, timeout=timedelta(seconds=60))
    two = dist.new_group([0, 1])
    x = 4 * torch.randn(8, 1200, generator=torch.Generator().manual_seed(5))
    for group, members, sizes in zip((dist.group.WORLD, two), (ranks, 2), cuts, strict=True):
        for law in LAWS if index < members else ():
            request = {**law, "seed": torch.arange(8), "step": 2}
            for candidates in (0, 128):
                have = sample_shard(x.split(sizes, 1)[index], group=group, candidates=candidates, **request)
                want = in_float64(x, **request) if candidates else sample(x, **request)
                assert differing(want, have) == []
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "cuts", [((300, 300, 300, 300), (600, 600)), ((500, 500, 200), (1199, 1))], ids=("equal", "uneven")
)
def test_processes_draw_as_one_without_being_told_sizes(tmp_path, cuts) -> None:
    ranks = len(cuts[0])
    in_ranks(ranks, process, str(tmp_path), ranks, cuts)
