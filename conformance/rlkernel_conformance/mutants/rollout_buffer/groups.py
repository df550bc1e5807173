"""Planted bugs in what rollout_buffer@1 drops, holds back, hands out and saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlkernel_conformance.mutants import mutant
from rlkernel_conformance.mutants.rollout_buffer.planting import counted, replaced
from rlkernel_core.spec.rollouts import STATUS, GroupRules
from rlkernel_torch.rollout.slot_allocator import Rollout, SlotAllocator


@mutant("RB-10", origin="the last token of a full sequence is written over")
def the_last_token_is_written_over(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def append(true: Any, slots: Any, given: Any, *, cu_seqlens: Any = None, **more: Any) -> None:
        pages = buffer._pages
        if cu_seqlens is None and len(slots.ids) == 1:
            at = slots.ids.clamp(0, len(pages.stamp) - 1)
            full = (pages.stamp[at] == slots.stamps) & (pages.length[at] == pages.limit[at])
            pages.length.index_add_(0, at, -full.long())
        true(slots, given, cu_seqlens=cu_seqlens, **more)

    return replaced(buffer, "append", append)


@mutant("RB-10", "RB-01", "RB-02", "RB-07", "RB-09", "RB-17", origin="a place is known by its number alone")
def stamps_are_not_looked_at(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def append(true: Any, slots: Any, given: Any, **more: Any) -> None:
        now = buffer._pages.stamp[slots.ids.clamp(0, len(buffer._pages.stamp) - 1)]
        true(type(slots)(slots.ids, torch.where(now >= 0, now, slots.stamps)), given, **more)

    return replaced(buffer, "append", append)


@mutant("RB-10", "RB-02", "RB-17", origin="what does not fit is dropped without a word")
def drops_are_not_counted(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)
    return counted(
        buffer, dropped=lambda s: {k: v for k, v in s.dropped.items() if k not in {"stale", "over the limit"}}
    )


@mutant("RB-11", "RB-17", origin="views of storage that belongs to the next batch")
def released_batches_answer(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)
    buffer._staging.check = lambda generation: None
    return buffer


@mutant("RB-11", "RB-12", origin="a second batch over the first")
def two_batches_at_a_time(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def pop(true: Any, **wanted: Any) -> Any:
        buffer._staging.out = False
        return true(**wanted)

    return replaced(buffer, "pop", pop)


@mutant(
    "RB-12",
    "RB-01",
    "RB-02",
    "RB-05",
    "RB-07",
    "RB-17",
    origin="on_full read by nobody: the oldest goes",
)
def a_full_buffer_drops(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    return reference(max_tokens, max_seqs, **{**rest, "on_full": "drop_oldest"})


def choosing(buffer: Any, order: Callable[[SlotAllocator, list[int]], list[int]], *, open_too: bool = False) -> Any:
    """A allocator that looks for victims in another order."""
    allocator = buffer._allocator
    victims = allocator.victims

    def other(limits: Any, groups: Any, *, drop_oldest: bool) -> Any:
        kept, asked = allocator.groups, allocator._open
        allocator.groups = {g: kept[g] for g in order(allocator, list(kept))}
        if open_too:
            allocator._open = lambda group: False
        try:
            return victims(limits, groups, drop_oldest=drop_oldest)
        finally:
            allocator.groups = kept
            if open_too:
                allocator._open = asked

    allocator.victims = other
    return buffer


EVICTED = ("RB-01", "RB-02", "RB-07", "RB-17")


@mutant("RB-13", *EVICTED, origin="popitem() takes the newest")
def the_newest_goes_first(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    return choosing(reference(max_tokens, max_seqs, **rest), lambda _, groups: groups[::-1])


@mutant("RB-13", *EVICTED, origin="a group that is being written is dropped")
def open_groups_go_too(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    return choosing(reference(max_tokens, max_seqs, **rest), lambda _, groups: groups, open_too=True)


def ruled(buffer: Any, change: Callable[[GroupRules], GroupRules]) -> Any:
    """A allocator that judges by other rules."""
    judge = buffer._allocator._judge
    buffer._allocator._judge = lambda members, done, valid, age, rules: judge(members, done, valid, age, change(rules))
    return buffer


@mutant("RB-14", "RB-05", origin="min_valid read by nobody")
def too_few_valid_will_do(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    return ruled(reference(max_tokens, max_seqs, **rest), lambda r: replace(r, min_valid=0))


@mutant("RB-14", origin="age by the newest member")
def age_is_that_of_the_newest(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def state(true: Any, group: int, rules: GroupRules, version: int) -> Any:
        members: list[Rollout] = buffer._allocator.members(group)
        oldest, newest = min(m.version for m in members), max(m.version for m in members)
        return true(group, rules, version - (newest - oldest))

    replaced(buffer._allocator, "state", state)
    return buffer


@mutant("RB-14", "RB-01", "RB-02", "RB-07", "RB-17", origin="a group is whole when one of its members is done")
def complete_is_ignored(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    return ruled(reference(max_tokens, max_seqs, **rest), lambda r: replace(r, complete=False))


@mutant("RB-14", origin="rewards of invalid members count as distinct")
def constant_groups_pass(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    return ruled(reference(max_tokens, max_seqs, **rest), lambda r: replace(r, distinct_rewards=False))


@mutant("RB-14", "RB-18", origin="group_size read by nobody: the first members of a group go without the others")
def groups_of_any_size_are_whole(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    return reference(max_tokens, max_seqs, **{**rest, "group_size": None})


def batched(buffer: Any, change: Callable[[Any], object]) -> Any:
    """Change every batch that is given out."""

    def pop(true: Any, **wanted: Any) -> Any:
        batch = true(**wanted)
        if batch is not None:
            change(batch)
        return batch

    return replaced(buffer, "pop", pop)


@mutant("RB-15", origin="fillers repeat the last row, and count (pad by duplication)")
def fillers_repeat_a_row(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    def change(batch: Any) -> None:
        filler = batch._rows["group"] < 0
        for name in ("group", "group_ids", "weight", "valid"):
            x = batch._rows[name]
            x[filler] = x[~filler][-1].clone()

    return batched(reference(max_tokens, max_seqs, **rest), change)


@mutant("RB-15", origin="fillers belong to group 0")
def fillers_have_a_group(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    return batched(reference(max_tokens, max_seqs, **rest), lambda b: b._rows["group"].clamp_(min=0))


@mutant("RB-16", origin="a NaN reward is a reward")
def nan_counts(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    def change(batch: Any) -> None:
        rows = batch._rows
        ended = (rows["status"] == STATUS["stop"]) | (rows["status"] == STATUS["length"])
        rows["weight"].copy_(torch.where(ended & rows["reward"].isnan(), 1.0, rows["weight"]))

    return batched(reference(max_tokens, max_seqs, **rest), change)


@mutant("RB-16", origin="weighting='group' read by nobody")
def every_member_weighs_one(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def pop(true: Any, **wanted: Any) -> Any:
        grouped = wanted.get("weighting") == "group"
        return true(**{**wanted, "weighting": "one"} if grouped else wanted)

    return replaced(buffer, "pop", pop)


@mutant("RB-17", origin="a file without the sequences that were being written")
def open_sequences_are_not_saved(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def load(true: Any, path: str) -> None:
        true(path)
        for r in buffer._allocator.sequences.values():
            if r.open:
                buffer._pages.stamp[r.slot] = -1

    return replaced(buffer, "load", load)


@mutant("RB-17", origin="counters start from nothing after a load")
def counters_are_not_saved(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def load(true: Any, path: str) -> None:
        true(path)
        buffer._allocator.dropped, buffer._allocator.reserved_seqs = Counter(), 0

    return replaced(buffer, "load", load)


@mutant("RB-18", "RB-05", origin="a status that nobody knows is stop")
def an_unknown_status_is_stop(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def finish(true: Any, slots: Any, reward: Any = None, *, status: Any = "stop") -> Any:
        if isinstance(status, str) and status not in STATUS:
            status = "stop"
        return true(slots, reward, status=status)

    return replaced(buffer, "finish", finish)


@mutant("RB-18", "RB-12", origin="a limit above the capacity is cut to fit")
def limits_are_cut(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def reserve(true: Any, limits: Any, groups: Any, **more: Any) -> Any:
        cut = min(limits, max_tokens) if isinstance(limits, int) else [min(n, max_tokens) for n in limits]
        return true(cut, groups, **more)

    return replaced(buffer, "reserve", reserve)
