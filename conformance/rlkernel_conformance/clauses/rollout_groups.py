"""Attacks on rollout_buffer@1: which groups may go, and what the members of a batch weigh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from hypothesis import strategies as st

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.rollout_state_machine import (
    PAGE,
    fill,
    small,
)
from rlkernel_conformance.compare import Violation, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.rollouts import STATUS, GroupRules


@dataclass(frozen=True)
class Judged:
    """Members of a group: (status, reward or None, version) each, and the rules they are held to."""

    members: tuple[tuple[str, float | None, int], ...]
    rules: GroupRules
    version: int = 4
    open: int = 0  # members that are still being written
    size: int | None = None  # members that make a group whole


def judged(subject: Subject) -> st.SearchStrategy[Judged]:
    """Groups and rules of every kind."""
    member = st.tuples(
        st.sampled_from(("stop", "length", "abort", "invalid")),
        st.sampled_from((0.0, 1.0, float("nan"))),
        st.integers(1, 4),
    )
    rules = st.builds(GroupRules, st.booleans(), st.integers(1, 3), st.sampled_from((None, 0, 1, 2)), st.booleans())
    members = st.lists(member, min_size=1, max_size=4).map(tuple)
    sizes = (None, 1, 2, 4) if "group_size" in subject.claims else (None,)
    return st.builds(Judged, members, rules, st.integers(4, 6), st.integers(0, 1), st.sampled_from(sizes))


GOOD: Final = (("stop", 0.0, 4), ("length", 1.0, 4))


@attack(
    "RB-14",
    judged,
    examples=(
        Judged(GOOD, GroupRules(complete=True), open=1),
        Judged(GOOD, GroupRules(complete=False), open=1),
        Judged(GOOD, GroupRules(min_valid=3)),
        Judged((("stop", 1.0, 2), ("stop", 0.0, 4)), GroupRules(max_age=1)),
        Judged((("stop", 1.0, 4), ("stop", 0.0, 4)), GroupRules(max_age=1), version=6),
        Judged((("stop", 1.0, 4), ("stop", 1.0, 4)), GroupRules(distinct_rewards=True)),
        Judged((("stop", 1.0, 4), ("abort", 0.0, 4)), GroupRules(distinct_rewards=True)),
        Judged(GOOD, GroupRules(), size=2),
        Judged(GOOD, GroupRules(), size=3),
        Judged(GOOD, GroupRules(complete=False), size=3),
        Judged(GOOD, GroupRules(complete=False, min_valid=3), size=3),  # it may still get a third
    ),
)
def a_rule_holds_a_group_back(subject: Subject, case: Judged) -> None:
    """Readiness, what is pruned for good, and what pop takes."""
    if case.size is not None and "group_size" not in subject.claims:
        return
    size = {} if case.size is None else {"group_size": case.size}
    buffer, popped = (small(subject, max_tokens=PAGE * 20, max_seqs=20, **size) for _ in range(2))
    for one in (buffer, popped):
        for status, reward, version in case.members:
            fill(one, subject.device, 5, 2, status=status, reward=[reward], version=version)
        if case.open:
            one.reserve(2, [5], version=4)
    ready = _is_ready(case)
    (state,) = buffer.groups(case.rules, version=case.version)
    require(state.ready == ready, f"{case.members} under {case.rules} is {state.reason}, ready should be {ready}")
    counts = (state.members, state.finished, state.tokens, state.age)
    oldest = min(v for *_, v in case.members)
    want = (len(case.members) + case.open, len(case.members), 2 * len(case.members), case.version - oldest)
    require(counts == want, f"members, finished, tokens and age are {counts}, expected {want}")
    pruned = sum(buffer.prune(case.rules, version=case.version).values())
    too_old = case.rules.max_age is not None and case.version - oldest > case.rules.max_age
    hopeless = too_old or (not ready and not case.open and not _lacks_members(case))
    require(pruned == hopeless, f"{pruned} groups are pruned, expected {int(hopeless)}")
    batch = popped.pop(groups=1, rules=case.rules, version=case.version)
    require((batch is not None) == ready, f"pop gives {'a batch' if batch else 'nothing'}, ready is {ready}")


def _lacks_members(case: Judged) -> bool:
    return case.size is not None and len(case.members) + case.open < case.size


def _is_ready(case: Judged) -> bool:
    rules, oldest = case.rules, min(v for *_, v in case.members)
    valid = [r for status, r, _ in case.members if status in {"stop", "length"} and r == r]  # noqa: PLR0124  NaN
    return (
        not (rules.complete and (case.open or _lacks_members(case)))
        and len(valid) >= rules.min_valid
        and (rules.max_age is None or case.version - oldest <= rules.max_age)
        and not (rules.distinct_rewards and len(set(valid)) <= 1)
    )


@attack("RB-16", judged, examples=(Judged((("stop", float("nan"), 4), *GOOD), GroupRules()),))
def invalid_members_weigh_nothing(subject: Subject, case: Judged) -> None:
    """Each is there, in its place, with weight 0; the valid ones weigh 1, or make up for the others."""
    for weighting in ("one", "group"):
        buffer = small(subject)
        for status, reward, version in case.members:
            fill(buffer, subject.device, 3, 2, status=status, reward=[reward], version=version)
        batch = buffer.pop(groups=1, rules=GroupRules(min_valid=0), weighting=weighting)
        if batch is None:
            raise Violation("there is no batch")
        valid = [s in {"stop", "length"} and r == r for s, r, _ in case.members]  # noqa: PLR0124  NaN
        each = len(valid) / sum(valid) if weighting == "group" and any(valid) else 1.0
        want = torch.tensor([each * v for v in valid])
        require(
            torch.allclose(batch.weight.cpu(), want), f"weights are {batch.weight.tolist()}, expected {want.tolist()}"
        )
        require(batch.valid.tolist() == valid, f"valid is {batch.valid.tolist()}, expected {valid}")
        codes = [STATUS[s] for s, *_ in case.members]
        require(batch.status.tolist() == codes, f"status is {batch.status.tolist()}, expected {codes}")
