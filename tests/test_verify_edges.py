"""verify at its edges: foreign ids, rows without a law, penalties and masks, batches, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkernel_conformance.sampling_batches import pack
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.sampling import LogitBias, Penalties, Status, TokenLists
from rlkernel_torch.direct import sample, verify
from tests.test_verify import V, cumulated, random_logits, rows_of


@pytest.mark.parametrize("bad", [-1, V, 2**40])
def test_foreign_draft_ids_are_rejected_in_their_request(bad) -> None:
    target = random_logits(6)
    ids = torch.tensor([3, bad, 3])
    given = {"cu_draft": torch.arange(4), "draft_probs": torch.full((3, V), 1e-9), "seed": torch.arange(3), "step": 0}
    result = verify(target, ids, **given)
    assert result.accepted.tolist() == [1, 0, 1]


def test_rows_without_a_law_reject_and_emit_nothing() -> None:
    target = random_logits(6)
    target[2] = -math.inf
    target[5] = math.nan
    result = verify(target, torch.zeros(3, dtype=torch.int64), cu_draft=torch.arange(4),
                    draft_probs=torch.full((3, V), 1e-9), seed=torch.arange(3), step=0, raw_logprob=True)  # fmt: skip
    assert result.accepted.tolist() == [1, 0, 1]
    assert result.token.tolist()[2:4] == [-1, -1]
    assert result.token[5] == -1
    assert result.status.tolist() == [0, 0, Status.EMPTY, 0, 0, Status.EMPTY | Status.NAN]
    assert result.logprob[[2, 3, 5]].tolist() == [-math.inf, 0.0, -math.inf]
    assert math.isnan(result.raw_logprob[2])


def test_rows_behind_the_last_token_hold_nothing_and_may_hold_anything() -> None:
    target = random_logits(4)
    ids = torch.tensor([0, 1, 2])
    given = {"cu_draft": torch.tensor([0, 3]), "draft_probs": torch.full((3, V), 0.5), "seed": 0, "step": 0}
    target[1, 1] = -math.inf  # the second draft has no mass
    target[0, 0] = 50.0
    clean = verify(target, ids, **given, raw_logprob=True)
    poisoned = target.clone()
    poisoned[2:] = math.nan
    dirty = verify(poisoned, ids, **given, raw_logprob=True)
    assert clean.accepted.tolist() == dirty.accepted.tolist() == [1]
    for name in vars(clean):
        assert torch.equal(getattr(clean, name), getattr(dirty, name))
    assert clean.token[2:].tolist() == [-1, -1]
    assert clean.logprob[2:].tolist() == clean.status[2:].tolist() == [0, 0]


def test_penalties_count_the_drafts_before_a_row() -> None:
    target = torch.zeros(4, V)
    target[:, 3] = 0.5
    history = Penalties(presence=1.0, frequency=1.0, output_ids=torch.tensor([[4]]))
    drafts = torch.tensor([3, 0, 0])
    result = verify(target, drafts, cu_draft=torch.tensor([0, 3]), temperature=0.0, seed=0, step=0, penalties=history)
    assert result.token.tolist() == [3, 0, 1, -1]  # 3 is spent after its row, then 0; the second 0 misses
    counts = [{}, {3: 1}, {3: 1, 0: 1}]
    for j, seen in enumerate(counts):
        x = target[[j]]
        full = [4, *seen]
        alone = Penalties(presence=1.0, frequency=1.0, output_ids=torch.tensor([full]))
        assert int(sample(x, temperature=0.0, seed=0, step=0, penalties=alone).token) == int(result.token[j])
    prompt = Penalties(repetition=torch.tensor([2.0]), prompt_bits=pack(np.arange(V)[None] == 3))
    repeated = verify(target, drafts, cu_draft=torch.tensor([0, 3]), temperature=0.0, seed=0, step=0, penalties=prompt)
    assert repeated.token.tolist()[0] == 3  # 0.25 is still the largest


def test_edits_are_per_row() -> None:
    target = random_logits(5)
    mask = np.ones((5, V), bool)
    mask[1, :11] = False
    banned = TokenLists(torch.tensor([0, 1]), torch.tensor([0, 0, 0, 0, 1, 2]))
    bias = LogitBias(torch.tensor([7]), torch.tensor([99.0]), torch.tensor([0, 0, 0, 1, 1, 1]))
    result = verify(
        target,
        torch.tensor([11, 11, 7]),
        cu_draft=torch.tensor([0, 2, 3]),
        draft_probs=torch.full((3, V), 1e-9),
        seed=torch.arange(2),
        step=0,
        allowed=pack(mask),
        banned=banned,
        bias=bias,
    )
    assert result.accepted.tolist() == [2, 1]
    assert int(result.token[2]) == 7
    assert int(result.token[4]) != 1


def test_a_request_has_the_same_outcome_in_any_batch() -> None:
    counts = [3, 0, 2, 4]
    cu, K = cumulated(counts), sum(counts)
    target, q = random_logits(K + 4), torch.softmax(random_logits(K, 1), 1)
    ids = torch.arange(K) % V
    seeds, T = torch.arange(4), torch.tensor([1.0, 0.5, 0.0, 2.0])
    whole = verify(target, ids, cu_draft=cu, draft_probs=q, seed=seeds, step=5, temperature=T, top_p=0.9)
    for i in range(4):
        rows, mine = rows_of(i, cu), slice(int(cu[i]), int(cu[i + 1]))
        alone = verify(target[rows], ids[mine], cu_draft=torch.tensor([0, counts[i]]), draft_probs=q[mine],
                       seed=seeds[[i]], step=5, temperature=T[[i]], top_p=0.9)  # fmt: skip
        assert int(alone.accepted) == int(whole.accepted[i])
        for name in ("token", "logprob", "log_kept_mass", "kept_count", "status"):
            assert torch.equal(getattr(alone, name), getattr(whole, name)[rows])


def test_without_drafts_it_is_sample() -> None:
    target = random_logits(5)
    none = torch.zeros(0, dtype=torch.int64)
    result = verify(target, none, cu_draft=torch.zeros(6, dtype=torch.int32), seed=torch.arange(5), step=2, top_k=4)
    plain = sample(target, seed=torch.arange(5), step=2, top_k=4)
    assert torch.equal(result.token, plain.token)
    assert torch.equal(result.logprob, plain.logprob)
    empty = verify(torch.zeros(0, V), none, cu_draft=torch.tensor([0]), seed=none, step=0)
    assert (empty.accepted.shape, empty.token.shape) == ((0,), (0,))


def test_inputs_are_read_only_and_shapes_do_not_depend_on_data() -> None:
    target, ids, cu = random_logits(5), torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
    q = torch.softmax(random_logits(3, 1), 1)
    before = [x.clone() for x in (target, ids, cu, q)]
    verify(target, ids, cu_draft=cu, draft_probs=q, seed=torch.arange(2), step=0)
    assert all(torch.equal(a, b) for a, b in zip((target, ids, cu, q), before, strict=True))
    with FakeTensorMode() as mode:
        t, i, c, p, s = (mode.from_tensor(x) for x in (target, ids, cu, q, torch.arange(2)))
        result = verify(t, i, cu_draft=c, draft_probs=p, seed=s, step=0, penalties=Penalties(presence=0.1))
        assert (result.accepted.shape, result.token.shape) == ((2,), (5,))


@pytest.mark.parametrize(
    "wrong, argument",
    [
        ({"target_logits": torch.zeros(4, V)}, "target_logits"),
        ({"target_logits": torch.zeros(5, V, requires_grad=True)}, "target_logits"),
        ({"draft_ids": torch.zeros(3)}, "draft_ids"),
        ({"cu_draft": torch.zeros(0, dtype=torch.int64)}, "target_logits"),
        ({"draft_probs": torch.zeros(3, V - 1)}, "draft_probs"),
        ({"draft_logits": torch.zeros(4, V)}, "draft_logits"),
        ({"draft_probs": torch.zeros(3, V), "draft_logits": torch.zeros(3, V)}, "draft_probs and draft_logits"),
        ({"seed": 0}, "seed"),
        ({"temperature": torch.ones(5)}, "temperature"),
        ({"allowed": torch.zeros(2, 1, dtype=torch.int32)}, "allowed"),
        ({"penalties": Penalties(output_ids=torch.zeros(5, 1, dtype=torch.int64))}, "penalties.output_ids"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(wrong, argument) -> None:
    arguments = {
        "target_logits": torch.zeros(5, V),
        "draft_ids": torch.zeros(3, dtype=torch.int64),
        "cu_draft": torch.tensor([0, 2, 3]),
        "seed": torch.arange(2),
        "step": 0,
    } | wrong
    with pytest.raises(ArgumentError) as caught:
        verify(arguments.pop("target_logits"), arguments.pop("draft_ids"), **arguments)
    assert caught.value.argument == argument


@pytest.mark.parametrize("op", ["verify", "lm_head_sample"])
def test_clauses_name_known_features_once(op) -> None:
    spec = OPERATORS[op]
    assert {c.feature for c in spec.clauses} - {None} <= spec.feature_names
    assert len({c.id for c in spec.clauses}) == len(spec.clauses)
