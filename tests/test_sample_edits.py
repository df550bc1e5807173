"""sample: infinities under a bias, a ban or a filter, and filters that are NaN."""

from __future__ import annotations

import math

import torch

from rlkernel_core.spec.sampling import LogitBias, TokenLists
from rlkernel_torch.direct import sample
from tests.test_sample import one

INF = math.inf


def drawn_ids(x, steps=400, **arguments):
    """Tokens of one row over many steps."""
    rows = torch.as_tensor(x).expand(steps, -1)
    return set(sample(rows, seed=9, step=torch.arange(steps), **arguments).token.tolist())


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


def test_plus_infinity_is_uniform_and_filters_by_count_apply() -> None:
    x = torch.tensor([1.0, INF, INF, 5.0, INF])
    assert drawn_ids(x) == {1, 2, 4}
    assert drawn_ids(x, top_k=2) == {1, 2}
    assert drawn_ids(x, top_p=0.5) == {1, 2}
    assert drawn_ids(x, temperature=0.0) == {1}
    assert one(x, top_k=2)["threshold"] == INF
    assert (one(x)["threshold"], one(x)["threshold_id"]) == (INF, 4)


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
