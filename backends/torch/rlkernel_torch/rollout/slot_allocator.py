"""The host's side of a rollout buffer: which slots, pages and groups are in use, by whom, and since when.

Pure bookkeeping; imports no torch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlkernel_core.errors import ArgumentError, BufferFullError
from rlkernel_core.spec.rollouts import GroupRules, GroupState


@dataclass
class Rollout:
    """One sequence from reservation to pop."""

    slot: int
    stamp: int
    group: int
    version: int
    limit: int
    pages: list[int]
    open: bool = True
    length: int = 0  # known when finished
    status: str = ""
    valid: bool = False
    rewards: tuple[float, ...] = ()


class SlotAllocator:
    """Free lists, sequences by slot, groups in order of first reservation."""

    def __init__(self, slots: int, pages: int, groups: int, page_tokens: int, group_size: int | None) -> None:
        self._max_groups, self._page_tokens, self._group_size = groups, page_tokens, group_size
        self._free_slots, self._free_pages = deque(range(slots)), deque(range(pages))
        self.sequences: dict[int, Rollout] = {}
        self.groups: dict[int, list[int]] = {}  # group id -> slots
        self._capacity = {"tokens": pages * page_tokens, "seqs": slots, "groups": groups}
        self.high_water = dict.fromkeys(self._capacity, 0)
        self.next_stamp, self.newest_version = 1, 0
        self.reserved_seqs = self.popped = self.popped_seqs = 0
        self.dropped: Counter[str] = Counter()
        self.dropped_seqs: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()

    @property
    def capacity(self) -> dict[str, int]:
        """Tokens, sequences and groups that fit."""
        return dict(self._capacity)

    @property
    def used(self) -> dict[str, int]:
        """Tokens (in whole pages), sequences and groups held."""
        pages = self._capacity["tokens"] // self._page_tokens - len(self._free_pages)
        return {"tokens": pages * self._page_tokens, "seqs": len(self.sequences), "groups": len(self.groups)}

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-tokens // self._page_tokens)

    def victims(self, limits: Sequence[int], groups: Sequence[int], *, drop_oldest: bool) -> list[int]:
        """Groups to drop so that a reservation fits; BufferFullError if it cannot."""
        room = {"tokens": len(self._free_pages), "seqs": len(self._free_slots)}
        need = {"tokens": sum(map(self.pages_of, limits)), "seqs": len(limits)}
        wanted, gone = set(groups), list[int]()
        # A group that this reservation joins keeps its members: dropping it would break the group apart.
        finished = iter([g for g in self.groups if g not in wanted and not self._open(g)] if drop_oldest else [])

        def short() -> list[str]:
            held = len(self.groups) - len(gone) + len(wanted - self.groups.keys())
            return [k for k in need if need[k] > room[k]] + ["groups"] * (held > self._max_groups)

        while short():
            group = next(finished, None)
            if group is None:
                raise BufferFullError(
                    f"No room for {len(limits)} sequences of {sum(limits)} tokens: out of {' and '.join(short())}. "
                    f"In use {self.used} of {self._capacity}. Pop, discard or prune groups, or lower the limits."
                )
            gone.append(group)
            room["tokens"] += sum(len(self.sequences[s].pages) for s in self.groups[group])
            room["seqs"] += len(self.groups[group])
        return gone

    def reserve(self, limits: Sequence[int], groups: Sequence[int], version: int) -> list[Rollout]:
        """Take slots and pages; there is room."""
        made = []
        for limit, group in zip(limits, groups, strict=True):
            pages = [self._free_pages.popleft() for _ in range(self.pages_of(limit))]
            sequence = Rollout(self._free_slots.popleft(), self.next_stamp, group, version, limit, pages)
            self.next_stamp += 1
            self.sequences[sequence.slot] = sequence
            self.groups.setdefault(group, []).append(sequence.slot)
            made.append(sequence)
        self.reserved_seqs += len(made)
        self.newest_version = max(self.newest_version, version)
        self.high_water = {k: max(v, self.used[k]) for k, v in self.high_water.items()}
        return made

    def open_ones(self, slots: Sequence[int], stamps: Sequence[int]) -> list[Rollout]:
        """The open sequences of these slots, or an error that names the first that is none."""
        found = [self.sequences.get(s) for s in slots]
        for sequence, slot, stamp in zip(found, slots, stamps, strict=True):
            if sequence is None or sequence.stamp != stamp or not sequence.open:
                raise ArgumentError("slots", slot, "holds no open sequence of this reservation", "Finish slots once.")
        if len(set(slots)) != len(slots):
            raise ArgumentError("slots", list(slots), "must be distinct", "Finish slots once.")
        return [s for s in found if s is not None]

    def trim(self, sequence: Rollout) -> None:
        """Give back the pages that a finished sequence does not use."""
        keep = self.pages_of(sequence.length)
        self._free_pages.extend(sequence.pages[keep:])
        del sequence.pages[keep:]

    def free(self, sequences: Iterable[Rollout]) -> None:
        """Give back slots and pages, and forget groups that are empty."""
        for sequence in sequences:
            del self.sequences[sequence.slot]
            members = self.groups[sequence.group]
            members.remove(sequence.slot)
            if not members:
                del self.groups[sequence.group]
            self._free_slots.append(sequence.slot)
            self._free_pages.extend(sequence.pages)

    def members(self, group: int) -> list[Rollout]:
        """Sequences of a group, in order of reservation."""
        return [self.sequences[s] for s in self.groups[group]]

    def state(self, group: int, rules: GroupRules, version: int) -> GroupState:
        """What stands between a group and its use."""
        members = self.members(group)
        done = [m for m in members if not m.open]
        valid = [m for m in done if m.valid]
        age = version - min(m.version for m in members)
        reason, rejected = self._judge(members, done, valid, age, rules)
        tokens = sum(m.length for m in done)
        return GroupState(group, reason, rejected, len(members), len(done), len(valid), tokens, age)

    def _judge(
        self, members: list[Rollout], done: list[Rollout], valid: list[Rollout], age: int, rules: GroupRules
    ) -> tuple[str, bool]:
        whole = len(done) == len(members) and (self._group_size is None or len(members) >= self._group_size)
        if rules.max_age is not None and age > rules.max_age:
            return "too old", True
        if not done or (rules.complete and len(done) < len(members)):
            return "open", False
        if rules.complete and not whole:
            return "incomplete", False
        if len(valid) < rules.min_valid:
            return "too few valid", whole
        if rules.distinct_rewards and len({m.rewards for m in valid}) <= 1:
            return "constant rewards", whole
        return "ready", False

    def _open(self, group: int) -> bool:
        return any(self.sequences[s].open for s in self.groups[group])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a file."""
        return {
            "sequences": [asdict(s) for s in self.sequences.values()],
            "groups": {g: list(s) for g, s in self.groups.items()},
            "free_slots": list(self._free_slots),
            "free_pages": list(self._free_pages),
            "high_water": dict(self.high_water),
            "counts": {n: getattr(self, n) for n in _COUNTS},
            "counters": {n: dict(getattr(self, n)) for n in _COUNTERS},
        }

    def state_of(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Attributes as `to_dict` gave them; nothing is changed.

        Raises:
            KeyError, TypeError, AttributeError, ValueError: the values are not those of an allocator of this capacity.
        """
        sequences = {s["slot"]: Rollout(**s) for s in saved["sequences"]}
        groups = {g: list(s) for g, s in saved["groups"].items()}
        slots, pages = [*sequences, *saved["free_slots"]], [p for s in sequences.values() for p in s.pages]
        held = sorted(s for members in groups.values() for s in members)
        whole = self._capacity["seqs"], self._capacity["tokens"] // self._page_tokens
        for found, count in ((slots, whole[0]), (pages + list(saved["free_pages"]), whole[1])):
            if sorted(found) != list(range(count)):
                raise ValueError("slots or pages are lost, or there twice")
        if held != sorted(sequences) or any(sequences[s].group != g for g in groups for s in groups[g]):
            raise ValueError("a sequence is in no group, or in two")
        if not all(groups.values()):
            raise ValueError("a group of no sequences")
        if any(not 0 < s.stamp < saved["counts"]["next_stamp"] for s in sequences.values()):
            raise ValueError("a stamp that was never given out")
        return {
            "sequences": sequences,
            "groups": groups,
            "_free_slots": deque(saved["free_slots"]),
            "_free_pages": deque(saved["free_pages"]),
            "high_water": dict(saved["high_water"]),
            **{name: int(saved["counts"][name]) for name in _COUNTS},
            **{name: Counter(saved["counters"][name]) for name in _COUNTERS if name != "staleness"},
            "staleness": Counter({int(age): n for age, n in saved["counters"]["staleness"].items()}),
        }

    def take(self, state: dict[str, Any]) -> None:
        """Take over what `state_of` gave; stamps never repeat."""
        stamp = self.next_stamp
        vars(self).update(state)
        self.next_stamp = max(stamp, self.next_stamp)


_COUNTS = ("next_stamp", "newest_version", "reserved_seqs", "popped", "popped_seqs")
_COUNTERS = ("dropped", "dropped_seqs", "staleness")
