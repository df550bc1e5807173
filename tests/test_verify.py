"""verify: drafts are accepted and replaced so that what comes out follows the target's law."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlkernel_core.definitions.sampling import gumbel, uniform, words
from rlkernel_core.spec.sampling import STREAMS
from rlkernel_torch.direct import sample, verify
from tests.test_sample_law import assert_follows

V = 12


def random_logits(rows, seed=0, scale=2.0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def cumulated(drafts) -> torch.Tensor:
    return torch.tensor(np.cumsum([0, *drafts]))


def rows_of(i, cu) -> list[int]:
    """Rows of request i."""
    return list(range(int(cu[i]) + i, int(cu[i + 1]) + i + 1))


def by_hand(p, q, drafts, seed, step):
    """One request in numpy: p [k + 1, V], q [k, V] -> emitted tokens."""
    out = []
    for j, d in enumerate(drafts):
        u = uniform(words(seed, step + j, V, STREAMS["accept"]))[d]
        if u * q[j][d] < p[j][d]:
            out.append(d)
            continue
        residual = np.maximum(p[j] - q[j], 0)
        residual = residual if residual.sum() else p[j]
        with np.errstate(divide="ignore"):
            return [*out, int(np.argmax(np.log(residual) + gumbel(words(seed, step + j, V, STREAMS["residual"]))))]
    with np.errstate(divide="ignore"):
        return [*out, int(np.argmax(np.log(p[-1]) + gumbel(words(seed, step + len(drafts), V))))]


@pytest.mark.parametrize("form", ["probs", "logits"])
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 6}, {"top_p": 0.8}])
def test_outcomes_are_those_of_the_definition(form, filters) -> None:
    counts = [3, 0, 1, 5, 2, 4] * 8
    cu, K, B = cumulated(counts), sum(counts), len(counts)
    target, draft = random_logits(K + B), random_logits(K, 1)
    law = sample(target, seed=torch.arange(K + B), step=0, top_n=V, top_n_from="processed", **filters)
    p = torch.zeros(K + B, V + 1, dtype=torch.float64)
    p.scatter_(1, torch.where(law.top_ids < 0, V, law.top_ids), law.top_logprobs.double().exp())
    q = torch.softmax(draft.double(), 1)
    ids = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(2))[:, 0]
    seeds, steps = torch.arange(B) * 7, torch.arange(B) + 100
    given = {"draft_probs": q.float()} if form == "probs" else {"draft_logits": draft}
    result = verify(target, ids, cu_draft=cu, **given, seed=seeds, step=steps, **filters)
    for i in range(B):
        rows = rows_of(i, cu)
        mine = slice(int(cu[i]), int(cu[i + 1]))
        expected = by_hand(p[rows, :V].numpy(), q[mine].numpy(), ids[mine].tolist(), int(seeds[i]), int(steps[i]))
        assert result.token[rows].tolist() == expected + [-1] * (len(rows) - len(expected))
        assert int(result.accepted[i]) == len(expected) - 1
        torch.testing.assert_close(
            result.logprob[rows[: len(expected)]].double(),
            p[rows[: len(expected)], expected].log(),
            atol=1e-5,
            rtol=1e-5,
        )
    assert 0 < int(result.accepted.sum()) < K


def chains(n, p, q_law=None, **arguments):
    """n requests that draft two tokens of the same laws: emitted pairs, -1 where none."""
    target = torch.stack([p[0], p[1], p[2]]).repeat(n, 1)
    draft = torch.stack([q_law, q_law]).repeat(n, 1)
    stream = STREAMS["draft"]
    ids = sample(draft, seed=torch.arange(n).repeat_interleave(2), step=torch.arange(2).repeat(n), stream=stream).token
    if not arguments.pop("strict", False):
        arguments["draft_logits"] = draft
    result = verify(target, ids, cu_draft=torch.arange(n + 1) * 2, seed=torch.arange(n), step=0, **arguments)
    return result.token.view(n, 3), result


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("filters", [{}, {"top_k": 4}])
def test_tokens_follow_the_target_whatever_the_draft(strict, filters) -> None:
    """First tokens, and second tokens given that they were reached; alpha 1e-7 each."""
    n = 6000
    p, q = random_logits(3, 3, 1.0), random_logits(1, 4, 1.0)[0]
    tokens, result = chains(n, p, q, strict=strict, **filters)
    if filters:
        p = torch.where(p >= p.topk(4, 1).values[:, -1:], p, -math.inf)
    law = torch.softmax(p.double(), 1).numpy()
    assert_follows(torch.bincount(tokens[:, 0], minlength=V).numpy(), law[0])
    second = tokens[result.accepted >= 1, 1]
    assert_follows(torch.bincount(second, minlength=V).numpy(), law[1])
    third = tokens[result.accepted == 2, 2]
    assert_follows(torch.bincount(third, minlength=V).numpy(), law[2])


def test_the_share_of_accepted_drafts_is_the_overlap_of_the_laws() -> None:
    p, q = random_logits(3, 3, 1.0), random_logits(1, 4, 1.0)[0]
    _, result = chains(6000, p, q)
    overlap = float(torch.minimum(torch.softmax(p[0], 0), torch.softmax(q, 0)).sum())
    assert float((result.accepted >= 1).double().mean()) == pytest.approx(overlap, abs=5.3 * 0.5 / 6000**0.5)


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.0}])
def test_strict_tokens_are_those_that_sample_draws_one_by_one(filters) -> None:
    counts = [4, 2, 0, 3]
    cu = cumulated(counts)
    target = random_logits(sum(counts) + 4)
    seeds, steps = torch.arange(4) + 50, torch.tensor([0, 10, 20, 30])
    one_by_one = [
        int(sample(target[[r]], seed=seeds[i : i + 1], step=int(steps[i]) + j, **filters).token)
        for i in range(4)
        for j, r in enumerate(rows_of(i, cu))
    ]
    drafts = [one_by_one[r] for i in range(4) for r in rows_of(i, cu)[:-1]]
    drafts[2] = (drafts[2] + 1) % V  # the third draft of request 0 misses
    result = verify(target, torch.tensor(drafts), cu_draft=cu, seed=seeds, step=steps, **filters)
    assert result.accepted.tolist() == [2, 2, 0, 3]
    emitted = [t for i in range(4) for t in result.token[rows_of(i, cu)].tolist()]
    expected = list(one_by_one)
    expected[3:5] = [-1, -1]
    assert emitted == expected


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.6, "top_k": 5}])
def test_a_draft_law_equal_to_the_target_is_always_accepted(filters) -> None:
    n = 500
    target = random_logits(2 * n)
    draws = sample(target[::2], seed=torch.arange(n), step=0, stream=1, kept_capacity=V, **filters)
    kept = torch.zeros(n, V + 1, dtype=torch.bool).scatter_(1, draws.kept_ids % (V + 1), True)[:, :V]
    draft = torch.where(kept, target[::2] / filters.get("temperature", 1.0), -math.inf)
    cu = torch.arange(n + 1)
    result = verify(target, draws.token, cu_draft=cu, draft_logits=draft, seed=torch.arange(n), step=0, **filters)
    assert result.accepted.tolist() == [1] * n
    torch.testing.assert_close(result.logprob[::2], draws.logprob, atol=0, rtol=0)
    torch.testing.assert_close(result.log_kept_mass[::2], draws.log_kept_mass, atol=0, rtol=0)


def test_drafts_without_mass_under_the_target_are_never_accepted() -> None:
    n = 300
    target = random_logits(2 * n)
    target[:, :6] = -math.inf
    draft = torch.zeros(n, V)
    draft[:, :6] = 1 / 6
    ids = torch.arange(n) % 6
    result = verify(target, ids, cu_draft=torch.arange(n + 1), draft_probs=draft, seed=torch.arange(n), step=0)
    assert result.accepted.tolist() == [0] * n
    assert int(result.token[::2].min()) >= 6
    assert result.token[1::2].tolist() == [-1] * n


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    target = torch.zeros(2, V)
    result = verify(
        target, torch.tensor([V]), cu_draft=torch.tensor([0, 1]), draft_probs=torch.ones(1, V), seed=0, step=0
    )
    assert result.accepted.tolist() == [0]
    assert 0 <= int(result.token[0]) < V
    assert float(result.logprob[0]) == pytest.approx(-math.log(V))
