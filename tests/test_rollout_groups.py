"""rollout_buffer@1: group rules, weights, and arguments that are refused."""

from __future__ import annotations

import torch

from rlkernel_core.spec.rollouts import GroupRules
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
