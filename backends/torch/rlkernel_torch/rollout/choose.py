"""Which groups make a full batch, and the rows that they become."""

from __future__ import annotations

from collections.abc import Sequence

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.rollouts import STATUS, GroupState
from rlkernel_torch.rollout.batch import Row
from rlkernel_torch.rollout.slot_allocator import Rollout


def choose(ready: Sequence[GroupState], groups: int | None, tokens: int | None, order: str) -> list[GroupState] | None:
    """A full batch of ready groups, oldest first or longest first; None if there is none."""
    if order == "longest_first":
        ready = sorted(ready, key=lambda g: -g.tokens)
    if groups is not None:
        return list(ready[:groups]) if len(ready) >= groups else None
    budget = tokens or 0
    chosen: list[GroupState] = []
    total = 0
    for group in ready:
        if group.tokens > budget:
            remedy = "Raise tokens, or discard the group."
            raise ArgumentError("tokens", tokens, f"is less than the {group.tokens} tokens of group {group.id}", remedy)
        if total + group.tokens > budget:
            return chosen
        chosen.append(group)
        total += group.tokens
    return chosen if total == budget and chosen else None


def rows_of(members: Sequence[Sequence[Rollout]], weighting: str, multiple: int, rewards: int) -> list[Row]:
    """Rows of a batch: the finished members of each group, then fillers up to a multiple."""
    rows = []
    for dense, group in enumerate(members):
        valid = sum(m.valid for m in group)
        weight = len(group) / valid if weighting == "group" and valid else 1.0
        rows += [_row(m, dense, weight) for m in group]
    nothing = dict.fromkeys(("reward",), (0.0,) * rewards)
    fields = {"group": -1, "group_ids": -1, "valid": False, "weight": 0.0, "status": STATUS["filler"], "version": -1}
    return rows + [Row(0, 0, {**fields, **nothing}) for _ in range(-len(rows) % multiple)]


def _row(m: Rollout, dense: int, weight: float) -> Row:
    values: dict[str, float | tuple[float, ...]] = {
        "group": dense,
        "group_ids": m.group,
        "reward": m.rewards,
        "valid": m.valid,
        "weight": weight if m.valid else 0.0,
        "status": STATUS[m.status],
        "version": m.version,
    }
    return Row(m.slot, m.length, values)
