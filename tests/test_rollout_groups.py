"""rollout_buffer@1: group rules, weights, and arguments that are refused."""

from __future__ import annotations

import pytest
import torch

from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.rollouts import Field, GroupRules, RolloutBuffer, Slots
from tests.rollouts import balanced, buffer, fill, tokens


def test_groups_say_why_they_wait():
    buf = buffer(group_size=2)
    fill(buf, [0, 0], [1, 1], reward=[1.0, 0.0])
    fill(buf, [1], [1])
    buf.reserve(2, [2, 2])
    fill(buf, [3, 3], [1, 1], reward=[0.5, 0.5], version=4)
    reasons = lambda rules=None, **k: [g.reason for g in buf.groups(rules, **k)]  # noqa: E731
    assert reasons() == ["ready", "incomplete", "open", "ready"]
    assert reasons(GroupRules(max_age=3)) == ["too old", "too old", "too old", "ready"]
    assert reasons(GroupRules(max_age=3), version=3) == ["ready", "incomplete", "open", "ready"]
    assert reasons(GroupRules(distinct_rewards=True)) == ["ready", "incomplete", "open", "constant rewards"]
    assert reasons(GroupRules(complete=False)) == ["ready", "ready", "open", "ready"]
    assert reasons(GroupRules(min_valid=3)) == ["too few valid", "incomplete", "open", "too few valid"]
    assert [g.age for g in buf.groups()] == [4, 4, 4, 0]


def test_prune_drops_what_will_never_be_ready_and_counts_it():
    buf = buffer(group_size=2)
    fill(buf, [0, 0], [3, 1], reward=[1.0, 1.0])
    fill(buf, [1, 1], [1, 1], status="abort")
    old = buf.reserve(2, [2, 2])
    fill(buf, [3, 3], [2, 2], reward=[0.0, 1.0], version=9)
    rules = GroupRules(distinct_rewards=True)
    assert buf.prune(rules) == {"constant rewards": 1, "too few valid": 1}
    assert buf.prune(GroupRules(max_age=8)) == {"too old": 1}
    buf.append(old, tokens(1, 1))
    stats = buf.stats
    assert stats.dropped == {"constant rewards": 4, "too few valid": 2, "too old": 0, "stale": 2}
    assert stats.dropped_seqs == {"constant rewards": 2, "too few valid": 2, "too old": 2}
    balanced(stats)


def test_several_rewards_for_each_sequence():
    buf = buffer(rewards=2)
    fill(buf, [0, 0], [1, 1], reward=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert buf.pop(groups=1, rows_multiple_of=3).reward.tolist() == [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    "change, name",
    [
        ({"tokens": 63}, "max_tokens"),
        ({"tokens": 0}, "max_tokens"),
        ({"seqs": 0}, "max_seqs"),
        ({"seqs": 1.5}, "max_seqs"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"rewards": 0}, "rewards"),
        ({"group_size": 0}, "group_size"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"on_full": "block"}, "on_full"),
        ({"fields": {"x": "float32"}}, "fields['x']"),
        ({"fields": {"x": Field("float31")}}, "fields"),
    ],
)
def test_a_bad_size_is_named(change, name):
    with pytest.raises(ArgumentError) as caught:
        buffer(**change)
    assert caught.value.argument == name


def test_a_bad_call_is_named_and_changes_nothing():
    buf = buffer(max_seq_tokens=8)
    slots = buf.reserve(4, [0, 0])
    before = buf.stats
    calls = {
        "limits": lambda: buf.reserve(9, [1]),
        "groups": lambda: buf.reserve(1, [-1]),
        "values": lambda: buf.append(slots, {}),
        "values['token']": lambda: buf.append(slots, tokens(1)),
        "alive": lambda: buf.append(slots, tokens(1, 2), alive=torch.tensor([1, 1])),
        "cu_seqlens": lambda: buf.append(slots, tokens(1, 2), cu_seqlens=torch.tensor([0, 2])),
        "status": lambda: buf.finish(slots, status="done"),
        "reward": lambda: buf.finish(slots, [1.0]),
        "slots": lambda: buf.finish(Slots(slots.ids[:1].repeat(2), slots.stamps[:1].repeat(2))),
        "groups, tokens": buf.pop,
        "order": lambda: buf.pop(groups=1, order="lifo"),
        "weighting": lambda: buf.pop(groups=1, weighting="two"),
        "rows_multiple_of": lambda: buf.pop(groups=1, rows_multiple_of=9),
    }
    for name, call in calls.items():
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == name
    with pytest.raises(UnknownNameError, match="field 'tok'"):
        buf.append(slots, {"tok": torch.zeros(2)})
    assert buf.stats == before


def test_the_spec_is_whole():
    spec = OPERATORS["rollout_buffer"]
    buf = buffer()
    assert isinstance(buf, RolloutBuffer)
    assert len(spec.clauses) == len({c.id for c in spec.clauses})
    assert {c.feature for c in spec.clauses} - {None} <= spec.feature_names
    assert spec.needs(spec.call(8, 2)) == {"on_full:raise"}
    assert spec.where(spec.call(8, 2, device="meta")) == "meta"
