"""Planted bugs in rollout_buffer@1: in what it keeps, drops, holds back, hands out and saves.

Each is a method of plain torch's buffer, or of one of its parts, that does something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import torch

from rlkernel_conformance.mutants import plant
from rlkernel_conformance.mutants import rollout_pages as pages
from rlkernel_conformance.mutants.bug import Bug, How
from rlkernel_core.errors import ArgumentError, BufferFullError, FileError
from rlkernel_core.spec.rollouts import STATUS, BufferStats, GroupRules, Slots
from rlkernel_torch.rollout.batch import Batch, Staging
from rlkernel_torch.rollout.pages import Pages
from rlkernel_torch.rollout.slot_allocator import SlotAllocator
from rlkernel_torch.rollout_buffer import PagedRolloutBuffer, rollout_buffer

_KEPT: Final[list[Batch]] = []
LOST: Final = ("over the limit", "stale")


def made_of(kind: type[PagedRolloutBuffer] = PagedRolloutBuffer, **parts: type) -> How:
    """Another buffer, or plain torch's with other parts: `allocator`, `pages` or `staging`."""
    made = type("FaultyBuffer", (kind,), parts)
    return lambda right, call: rollout_buffer(call, made)


def counts(**changes: Callable[[BufferStats], Any]) -> How:
    """Other counters: functions of all of them."""

    class Miscounting(PagedRolloutBuffer):
        @property
        def stats(self) -> BufferStats:
            found = super().stats
            return replace(found, **{name: change(found) for name, change in changes.items()})

    return made_of(Miscounting)


def without(dropped: dict[str, int], *reasons: str) -> dict[str, int]:
    return {reason: n for reason, n in dropped.items() if reason not in reasons}


class LoadsWhatItCan(PagedRolloutBuffer):
    def load(self, path: str) -> None:
        with suppress(FileError):
            super().load(path)


class GroupsComeAgain(PagedRolloutBuffer):
    def _popped(self, rollouts: Any, newest: int, tokens: int) -> None:
        """Popped sequences stay."""


class Cramped(SlotAllocator):
    """Keeps some room that nobody gets."""

    seqs, pages = 0, 0

    def victims(self, limits: Any, groups: Any, *, drop_oldest: bool) -> list[int]:
        slots = [self._free_slots.pop() for _ in range(min(self.seqs, len(self._free_slots)))]
        pages = [self._free_pages.pop() for _ in range(min(self.pages, len(self._free_pages)))]
        try:
            return super().victims(limits, groups, drop_oldest=drop_oldest)
        finally:
            self._free_slots.extend(reversed(slots))
            self._free_pages.extend(reversed(pages))


class OnePlaceLess(Cramped):
    seqs = 1


class OnePageLess(Cramped):
    pages = 1


class LeakingPages(SlotAllocator):
    def free(self, sequences: Any) -> None:
        sequences = list(sequences)
        for r in sequences[1:]:  # of all but the first
            r.pages.clear()
        super().free(sequences)


class ReservesAPart(PagedRolloutBuffer):
    def reserve(self, limits: Any, groups: Any, **more: Any) -> Slots:
        try:
            return super().reserve(limits, groups, **more)
        except BufferFullError:
            if len(groups) > 1 and not isinstance(limits, int):
                super().reserve(limits[:1], groups[:1], **more)
            raise


class FinishesSome(PagedRolloutBuffer):
    def finish(self, slots: Slots, reward: Any = None, **more: Any) -> None:
        try:
            super().finish(slots, reward, **more)
        except ArgumentError:
            if len(slots.ids) > 1:
                super().finish(Slots(slots.ids[:1], slots.stamps[:1]))
            raise


class RefusedPopTakes(PagedRolloutBuffer):
    def pop(self, **wanted: Any) -> Batch | None:
        batch = super().pop(**wanted)
        ready = [g.id for g in self.groups() if g.ready]
        if batch is None and ready and wanted.get("groups"):
            self.discard(ready[:1], "given up")
        return batch


class SmallBatches(PagedRolloutBuffer):
    def pop(self, **wanted: Any) -> Batch | None:
        ready = sum(g.ready for g in self.groups(wanted.get("rules"), version=wanted.get("version")))
        if wanted.get("groups") and 0 < ready < wanted["groups"] and not self._staging.out:
            wanted["groups"] = ready
        return super().pop(**wanted)


class LeftoversThrownAway(PagedRolloutBuffer):
    def pop(self, **wanted: Any) -> Batch | None:
        batch = super().pop(**wanted)
        if batch is not None:
            self.discard([g.id for g in self.groups() if g.ready], "left over")
        return batch


class AlwaysFirst(PagedRolloutBuffer):
    def pop(self, **wanted: Any) -> Batch | None:
        longest = wanted.get("order") == "longest_first"
        return super().pop(**{**wanted, "order": "fifo"} if longest else wanted)


class Copies(Batch):
    def __init__(self, staging: Staging, fields: Any, rows: Any) -> None:
        super().__init__(staging, {n: x.clone() for n, x in fields.items()}, rows)
        _KEPT.append(self)


class NewMemory(Staging):
    batch = Copies


class AsksWhoLives(PagedRolloutBuffer):
    def append(self, slots: Slots, values: Any, *, alive: Any = None, **more: Any) -> None:
        if alive is None or bool(alive.any()):
            super().append(slots, values, alive=alive, **more)


class AnswersWhenReleased(Staging):
    def check(self, generation: int) -> None:
        """Any batch will do."""


class TwoBatches(PagedRolloutBuffer):
    def pop(self, **wanted: Any) -> Batch | None:
        self._staging.out = False
        return super().pop(**wanted)


class NewestFirst(SlotAllocator):
    def victims(self, limits: Any, groups: Any, *, drop_oldest: bool) -> list[int]:
        kept, self.groups = self.groups, dict(reversed(self.groups.items()))
        try:
            return super().victims(limits, groups, drop_oldest=drop_oldest)
        finally:
            self.groups = kept


class DropsOpenGroups(SlotAllocator):
    def _open(self, group: int) -> bool:
        return False


def judging(change: Callable[[GroupRules], GroupRules]) -> How:
    """Groups judged by other rules."""

    class OtherRules(SlotAllocator):
        def _judge(self, members: Any, done: Any, valid: Any, age: int, rules: GroupRules) -> tuple[str, bool]:
            return super()._judge(members, done, valid, age, change(rules))

    return made_of(allocator=OtherRules)


class AgeOfTheNewest(SlotAllocator):
    def state(self, group: int, rules: GroupRules, version: int) -> Any:
        versions = [m.version for m in self.members(group)]
        return super().state(group, rules, version - (max(versions) - min(versions)))


def batches(change: Callable[[dict[str, torch.Tensor]], object]) -> How:
    """Batches whose numbers per row are changed in place."""

    class OtherRows(Staging):
        def fill(self, pages: Pages, rows: Any) -> Batch:
            batch = super().fill(pages, rows)
            change({name: x[: len(rows)] for name, x in self.per_row.items()})
            return batch

    return made_of(staging=OtherRows)


def fillers_repeat(rows: dict[str, torch.Tensor]) -> None:
    filler = rows["group"] < 0
    for name in ("group", "group_ids", "weight", "valid"):
        rows[name][filler] = rows[name][~filler][-1].clone()


def nan_counts(rows: dict[str, torch.Tensor]) -> None:
    ended = (rows["status"] == STATUS["stop"]) | (rows["status"] == STATUS["length"])
    rows["weight"].copy_(torch.where(ended & rows["reward"].isnan(), 1.0, rows["weight"]))


class WeighsOne(PagedRolloutBuffer):
    def pop(self, **wanted: Any) -> Batch | None:
        grouped = wanted.get("weighting") == "group"
        return super().pop(**{**wanted, "weighting": "one"} if grouped else wanted)


class ForgetsTheOpen(PagedRolloutBuffer):
    def load(self, path: str) -> None:
        super().load(path)
        for r in self._allocator.sequences.values():
            if r.open:
                self._pages.stamp[r.slot] = -1


class ForgetsCounters(PagedRolloutBuffer):
    def load(self, path: str) -> None:
        super().load(path)
        self._allocator.dropped, self._allocator.reserved_seqs = Counter(), 0


class AnyStatus(PagedRolloutBuffer):
    def finish(self, slots: Slots, reward: Any = None, *, status: Any = "stop") -> None:
        known = not isinstance(status, str) or status in STATUS
        super().finish(slots, reward, status=status if known else "stop")


class ForgetsVersions(PagedRolloutBuffer):
    def pop(self, *, version: Any = None, **how: Any) -> Any:
        return super().pop(**how)


class AnyRules(PagedRolloutBuffer):
    def groups(self, rules: Any = None, *, version: Any = None) -> Any:
        return super().groups(rules if isinstance(rules, GroupRules) else None, version=version)


class AnyMultiple(PagedRolloutBuffer):
    def pop(self, *, rows_multiple_of: Any = 1, **how: Any) -> Any:
        most = self._shape["max_seqs"]
        return super().pop(rows_multiple_of=min(rows_multiple_of, most), **how)


class CutsLimits(PagedRolloutBuffer):
    def reserve(self, limits: Any, groups: Any, **more: Any) -> Slots:
        most = self._shape["max_tokens"]
        cut = min(limits, most) if isinstance(limits, int) else [min(n, most) for n in limits]
        return super().reserve(cut, groups, **more)


BUGS: Final = {
    # what is kept: order, counts, room, atomic steps, storage
    "pages_in_another_order": Bug(
        "RB-01", "pages of a sequence taken from a set", made_of(pages=pages.PagesInAnotherOrder)
    ),
    "defaults_are_zero": Bug("RB-01", "a field that is not given is stored as 0", made_of(pages=pages.ZeroDefaults)),
    "the_first_number_of_a_field_is_all": Bug(
        "RB-01", "a field is one number a token", made_of(pages=pages.FirstNumbers)
    ),
    "discarded_tokens_are_forgotten": Bug(
        "RB-02", "what a discard throws away is not counted", counts(dropped=lambda s: without(s.dropped, "discarded"))
    ),
    "refused_tokens_are_not_appended": Bug(
        "RB-02",
        "tokens counted where they are stored, not where they are given",
        counts(appended=lambda s: s.appended - sum(s.dropped.get(k, 0) for k in LOST)),
    ),
    "popped_groups_come_again": Bug("RB-02", "a batch is a copy, and its groups come again", made_of(GroupsComeAgain)),
    "one_place_stays_empty": Bug("RB-03", "a ring with one place that stays empty", made_of(allocator=OnePlaceLess)),
    "one_page_stays_empty": Bug("RB-03", "one page kept for what must not be stored", made_of(allocator=OnePageLess)),
    "groups_are_not_bounded": Bug(
        "RB-03", "max_groups read by nobody (TritonForge: max_buffer_size)", plant.ignores("max_groups")
    ),
    "sequences_are_not_bounded": Bug("RB-03", "max_seq_tokens read by nobody", plant.ignores("max_seq_tokens")),
    "pages_leak": Bug("RB-04", "pages of popped sequences are not given back", made_of(allocator=LeakingPages)),
    "a_refused_reservation_keeps_a_part": Bug(
        "RB-05", "a reservation that fails keeps what it had taken", made_of(ReservesAPart)
    ),
    "a_refused_finish_ends_some": Bug(
        "RB-05", "finish ends one after the other, until one is refused", made_of(FinishesSome)
    ),
    "a_refused_pop_takes_what_there_is": Bug(
        "RB-05", "pop not atomic: finished groups go though there are too few (TritonForge)", made_of(RefusedPopTakes)
    ),
    "a_batch_may_be_small": Bug("RB-06", "pop gives what there is", made_of(SmallBatches)),
    "leftovers_are_thrown_away": Bug(
        "RB-06", "groups beyond the batch are thrown away (TritonForge)", made_of(LeftoversThrownAway)
    ),
    "longest_first_is_ignored": Bug("RB-06", "the first groups, whatever their length", made_of(AlwaysFirst)),
    "a_batch_is_new_memory": Bug("RB-07", "every batch is new memory", made_of(staging=NewMemory)),
    "storage_moves": Bug("RB-07", "storage that is made anew when it is written", made_of(pages=pages.MovingStorage)),
    "graphs_are_kept": Bug(
        "RB-07", "storage that keeps the graphs of appended values", made_of(pages=pages.KeepsGraphs)
    ),
    "append_asks_the_host": Bug("RB-08", "append asks the host how many rows live", made_of(AsksWhoLives)),
    "dead_rows_are_stored": Bug("RB-09", "alive read by nobody", made_of(pages=pages.StoresTheDead)),
    "dead_rows_are_counted": Bug("RB-09", "dead rows are counted as lost", made_of(pages=pages.CountsTheDead)),
    # what is dropped, held back, handed out and saved
    "the_last_token_is_written_over": Bug(
        "RB-10", "the last token of a full sequence is written over", made_of(pages=pages.WritesOverTheLast)
    ),
    "places_go_round": Bug("RB-10", "a place that there is not is taken modulo", made_of(pages=pages.WrapsPlaces)),
    "stamps_are_not_looked_at": Bug(
        "RB-10", "a place is known by its number alone", made_of(pages=pages.IgnoresStamps)
    ),
    "drops_are_not_counted": Bug(
        "RB-10", "what does not fit is dropped without a word", counts(dropped=lambda s: without(s.dropped, *LOST))
    ),
    "released_batches_answer": Bug(
        "RB-11", "views of storage that belongs to the next batch", made_of(staging=AnswersWhenReleased)
    ),
    "two_batches_at_a_time": Bug("RB-11", "a second batch over the first", made_of(TwoBatches)),
    "a_full_buffer_drops": Bug("RB-12", "on_full read by nobody: the oldest goes", plant.given(on_full="drop_oldest")),
    "the_newest_goes_first": Bug("RB-13", "popitem() takes the newest", made_of(allocator=NewestFirst)),
    "open_groups_go_too": Bug("RB-13", "a group that is being written is dropped", made_of(allocator=DropsOpenGroups)),
    "too_few_valid_will_do": Bug("RB-14", "min_valid read by nobody", judging(lambda r: replace(r, min_valid=0))),
    "age_is_that_of_the_newest": Bug("RB-14", "age by the newest member", made_of(allocator=AgeOfTheNewest)),
    "complete_is_ignored": Bug(
        "RB-14", "a group is whole when one of its members is done", judging(lambda r: replace(r, complete=False))
    ),
    "constant_groups_pass": Bug(
        "RB-14", "rewards of invalid members count as distinct", judging(lambda r: replace(r, distinct_rewards=False))
    ),
    "a_batch_is_of_any_age": Bug("RB-14", "pop does not hand on the newest version", made_of(ForgetsVersions)),
    "groups_of_any_size_are_whole": Bug(
        "RB-14",
        "group_size read by nobody: the first members of a group go without the others",
        plant.ignores("group_size"),
    ),
    "fillers_repeat_a_row": Bug(
        "RB-15", "fillers repeat the last row, and count (pad by duplication)", batches(fillers_repeat)
    ),
    "fillers_have_a_group": Bug(
        "RB-15", "fillers belong to group 0", batches(lambda rows: rows["group"].clamp_(min=0))
    ),
    "nan_counts": Bug("RB-16", "a NaN reward is a reward", batches(nan_counts)),
    "every_member_weighs_one": Bug("RB-16", "weighting='group' read by nobody", made_of(WeighsOne)),
    "open_sequences_are_not_saved": Bug(
        "RB-17", "a file without the sequences that were being written", made_of(ForgetsTheOpen)
    ),
    "counters_are_not_saved": Bug("RB-17", "counters start from nothing after a load", made_of(ForgetsCounters)),
    "a_cut_file_is_no_news": Bug("RB-17", "a file that cannot be read is passed over", made_of(LoadsWhatItCan)),
    "an_unknown_status_is_stop": Bug("RB-18", "a status that nobody knows is stop", made_of(AnyStatus)),
    "unknown_rules_are_none": Bug("RB-18", "rules that are none hold nothing back", made_of(AnyRules)),
    "rows_are_not_bounded": Bug("RB-18", "rows up to any multiple", made_of(AnyMultiple)),
    "limits_are_cut": Bug("RB-18", "a limit above the capacity is cut to fit", made_of(CutsLimits)),
}
