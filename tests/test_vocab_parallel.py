"""A vocabulary split over ranks: what clauses LL-20 to LL-22 do not say."""

import torch
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
from rlkernel_torch.direct import linear_logprob
from tests.logprob_inputs import rows


def test_ranks_that_hold_other_tokens_are_refused():
    def refused(rank, group):
        hidden, ids = torch.zeros(2 + rank, 4), torch.zeros(2 + rank).long()
        try:
            linear_logprob(hidden, torch.zeros(3, 4), ids, group=group)
        except ArgumentError as error:
            return error.argument

    assert on_ranks(Subject("torch", "linear_logprob"), 3, refused) == ["hidden"] * 3


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
