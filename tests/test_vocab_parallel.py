"""A vocabulary split over ranks: what clauses LL-20 to LL-22 and LP-31 to LP-34 do not say."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_common.row_statistics import (
    join,
    partial_softmax,
    side_by_side,
    softmax_stats,
    temperatures,
    tile_width,
)
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.sampling import TokenLists
from rlkernel_torch.direct import linear_logprob, logprob
from tests.logprob_inputs import rows
from tests.process_groups import alone

__all__ = ["alone"]
SPLIT = Subject("torch", "logprob")
CUTS = (0, 7, 8, 61)


def test_ranks_that_hold_other_tokens_are_refused():
    def refused(rank, group):
        hidden, ids = torch.zeros(2 + rank, 4), torch.zeros(2 + rank).long()
        try:
            linear_logprob(hidden, torch.zeros(3, 4), ids, group=group)
        except ArgumentError as error:
            return error.argument

    assert on_ranks(Subject("torch", "linear_logprob"), 3, refused) == ["hidden"] * 3


def test_ranks_that_hold_other_rows_of_logits_are_refused():
    def refused(rank, group):
        try:
            logprob(torch.zeros(2 + rank, 4), torch.zeros(2 + rank).long(), group=group)
        except ArgumentError as error:
            return error.argument

    assert on_ranks(SPLIT, 3, refused) == ["ids"] * 3


@pytest.mark.parametrize("peak", (0.0, 40.0))
def test_split_logits_have_the_log_softmax_and_gradient_of_float64(peak):
    x, ids = rows(5, CUTS[-1], dtype=torch.float64, peak=peak)
    whole = x.clone().requires_grad_()
    z = torch.log_softmax(whole / 0.7, -1)
    want = [z.gather(1, ids[:, None])[:, 0], -(z.exp() * z).sum(1), torch.logsumexp(whole / 0.7, -1)]
    weights = torch.linspace(-1, 1, 5, dtype=torch.float64)
    sum((i + 1) * (y * weights).sum() for i, y in enumerate(want)).backward()

    def on_rank(rank, group):
        leaf = x[:, CUTS[rank] : CUTS[rank + 1]].clone().requires_grad_()
        out = logprob(leaf, ids, temperature=0.7, entropy=True, group=group)
        have = (out.logprob, out.entropy, out.lse)
        sum((i + 1) * (y * weights).sum() for i, y in enumerate(have)).backward()
        return *(y.detach() for y in have), leaf.grad

    ranks = on_ranks(SPLIT, 3, on_rank)
    torch.testing.assert_close(ranks[2][:3], tuple(y.detach() for y in want), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.cat([r[3] for r in ranks], 1), whole.grad, atol=1e-12, rtol=1e-12)


def test_validation_knows_the_whole_vocabulary():
    x, ids = rows(5, CUTS[-1])
    outside = ids.clone()
    outside[2] = CUTS[-1]

    def on_rank(rank, group):
        mine = x[:, CUTS[rank] : CUTS[rank + 1]]
        taken = logprob(mine, ids, validate=True, group=group).invalid.any().item()
        try:
            logprob(mine, outside, validate=True, group=group)
        except ArgumentError as error:
            return taken, error.argument

    assert on_ranks(SPLIT, 3, on_rank) == [(False, "ids")] * 3


def test_what_a_rank_sends_does_not_depend_on_the_vocabulary(alone, monkeypatch):
    sent, gather = [], dist.all_gather
    monkeypatch.setattr(dist, "all_gather", lambda out, x, group: sent.append(x.numel()) or gather(out, x, group=group))
    for V in (40, 4000):
        logprob(*rows(6, V), entropy=True, group=alone)
    assert sent == [3, 6 * 4] * 2  # sizes; the logit of the id, the largest other one, their sum and its moment


@given(
    cuts=st.lists(st.integers(1, 2999), max_size=5, unique=True).map(sorted),
    seed=st.integers(0, 100),
    peak=st.sampled_from((0.0, 20.0)),
)
@settings(derandomize=True, deadline=None, max_examples=25)
def test_joining_any_shards_in_one_process_gives_the_whole(cuts, seed, peak):
    """What a simulated run of more ranks would gather: top, total, moment and target of each shard."""
    logits, ids = rows(6, 3000, seed=seed, dtype=torch.float64, peak=peak)
    T = temperatures(torch.linspace(0.5, 2, 6), torch.Size((6,)), torch.float64, logits.device)
    parts = []
    for first, last in zip([0, *cuts], [*cuts, 3000], strict=True):
        y = logits[:, first:last]
        parts.append(join(partial_softmax(y, ids - first, T, tile_width(last - first), None, moment=True), T))
    shards = side_by_side([_column(p) for p in parts])
    got = softmax_stats(join(shards, T), T)
    whole = softmax_stats(join(partial_softmax(logits, ids, T, tile_width(3000), None, moment=True), T), T)
    for name in ("logprob", "lse", "entropy"):
        torch.testing.assert_close(getattr(got, name), getattr(whole, name), atol=1e-12, rtol=1e-9)


def _column(part):
    return part._replace(
        target=part.target[:, None],
        rest=part.rest._replace(**{n: getattr(part.rest, n)[:, None] for n in ("top", "total", "moment")}),
    )


def test_lists_of_ids_on_several_ranks_have_the_values_and_gradients_of_the_whole():
    x, _ = rows(5, CUTS[-1], dtype=torch.float64)
    each = torch.tensor([3, 60, 3, -1, 7, 8, 9, CUTS[-1], 60, 0])  # on every rank, twice, absent, on none; one beyond
    lists, row = TokenLists(each, torch.tensor([0, 4, 4, 7, 8, 9])), torch.tensor([0, 0, 0, 0, 2, 2, 2, 3, 4, 4])
    leaf, there = x.clone().requires_grad_(), torch.tensor([1, 1, 1, 0, 1, 1, 1, 0, 1, 0]).bool()
    want = torch.where(there, torch.log_softmax(leaf / 0.7, -1)[row, each.clamp(0, CUTS[-1] - 1)], 0.0)
    up = torch.linspace(-1, 1, 10, dtype=torch.float64)
    (want * up).sum().backward()

    def on_rank(rank, group):
        mine = x[:, CUTS[rank] : CUTS[rank + 1]].clone().requires_grad_()
        out = logprob(mine, lists, temperature=0.7, group=group)
        (torch.where(there, out.logprob, 0.0) * up).sum().backward()
        return out.logprob.detach(), out.invalid, mine.grad

    ranks = on_ranks(SPLIT, 3, on_rank)
    for value, invalid, _ in ranks:
        torch.testing.assert_close(value[there], want[there].detach(), atol=1e-12, rtol=1e-12)
        assert invalid.nonzero().tolist() == [[7]]
    torch.testing.assert_close(torch.cat([r[2] for r in ranks], 1), leaf.grad, atol=1e-12, rtol=1e-12)
