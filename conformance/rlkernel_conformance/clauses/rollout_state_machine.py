"""Programs for a rollout buffer: any order of its calls, beside a model that is lists.

A program is a tuple of steps of plain values, so that it shrinks and can be run again. Sequences are named by their
place among those that live, oldest first, with the last two that are gone behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.compare import require
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import BufferFullError
from rlkernel_core.spec.rollouts import DEFAULT_FIELDS, Field, RolloutBatch, RolloutBuffer, Slots

PAGE, PAGES, SEQS, GROUPS = 4, 8, 6, 4
FIRST_TOKEN: Final = 7  # no token of a program is 0, which is what fresh storage holds
WIDE: Final = -(1 + 2.0**-40)  # a token times this is exact in float64, on every device, and is no number of fp32
# Fields of the caller's choice: two numbers a token, and one that no append gives.
OWN: Final = {**DEFAULT_FIELDS, "pair": Field("float64", (2,)), "tag": Field("int16", default=-3)}

Step = tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """What happens to a buffer, in order."""

    steps: tuple[Step, ...]
    on_full: str = "raise"
    own_fields: bool = False


@dataclass
class Item:
    """One sequence of the model."""

    slot: int
    stamp: int
    group: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    open: bool = True

    @property
    def pages(self) -> int:
        """Pages it holds."""
        return -(-(self.limit if self.open else len(self.tokens)) // PAGE)


RESERVE: Final = st.tuples(
    st.just("reserve"), st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple), st.integers(0, 5)
)
ROW: Final = st.tuples(st.integers(0, 7), st.integers(0, 3), st.booleans())  # which sequence, tokens, alive
APPEND: Final = st.tuples(st.just("append"), st.lists(ROW, min_size=1, max_size=4).map(tuple))
FINISH: Final = st.tuples(st.just("finish"), st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple))
POP: Final = st.tuples(st.just("pop"), st.integers(1, 2))
REST: Final = st.one_of(st.just(("release",)), st.tuples(st.just("discard"), st.integers(0, 5)))


def programs(
    subject: Subject, *steps: st.SearchStrategy[Step], longest: int = 20, any_fields: bool = False
) -> st.SearchStrategy[Program]:
    """Programs of these steps (all unless given), for every claimed answer to a full buffer; some with own fields."""
    policies = [f.partition(":")[2] for f in sorted(subject.claims) if f.startswith("on_full:")]
    chosen = steps or (RESERVE, RESERVE, APPEND, APPEND, APPEND, FINISH, FINISH, POP, REST)
    steps_drawn = st.lists(st.one_of(*chosen), min_size=4, max_size=longest).map(tuple)
    own = st.booleans() if any_fields and "fields" in subject.claims else st.just(value=False)
    return st.builds(Program, steps=steps_drawn, on_full=st.sampled_from(policies), own_fields=own)


def values(tokens: list[int], device: str) -> dict[str, Tensor]:
    """The default fields of some tokens; the mask is left to its default."""
    token = torch.tensor(tokens, dtype=torch.int32, device=device)
    return {"token": token, "logprob": -token / 8}


def small(subject: Subject, **options: Any) -> RolloutBuffer:
    """A buffer of eight pages of four tokens for six sequences in four groups."""
    policy = "raise" if "on_full:raise" in subject.claims else "drop_oldest"
    given = {"max_tokens": PAGE * PAGES, "max_seqs": SEQS, "page_tokens": PAGE, "max_groups": GROUPS}
    made: RolloutBuffer = subject(**given | {"on_full": policy, "device": subject.device} | options)
    return made


def fill(buffer: RolloutBuffer, device: str, group: int, *lengths: int, **ending: Any) -> list[list[int]]:
    """Reserve, append at once and finish sequences of one group; returns their tokens."""
    version = ending.pop("version", 0)
    slots = buffer.reserve(max(*lengths, 1), [group] * len(lengths), version=version)
    rows = [[FIRST_TOKEN + 100 * group + 20 * i + t for t in range(n)] for i, n in enumerate(lengths)]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    buffer.append(slots, values([t for row in rows for t in row], device), cu_seqlens=ends)
    buffer.finish(slots, ending.pop("reward", None), **ending)
    return rows


def rows_of(batch: RolloutBatch, name: str = "token") -> list[list[Any]]:
    """A field of a batch, a list per row."""
    flat, ends = batch[name].tolist(), batch.cu_seqlens.tolist()
    return [flat[a:b] for a, b in pairwise(ends)]


class Machine:
    """A buffer and its model, running the same program."""

    def __init__(self, subject: Subject, program: Program) -> None:
        self.program, self.device = program, subject.device
        own = {"fields": OWN} if program.own_fields else {}
        self.buffer = small(subject, on_full=program.on_full, **own)
        self.items: dict[int, list[Item]] = {}  # group -> members, in order of first reservation
        self.gone: list[Item] = []
        self.batch: RolloutBatch | None = None
        self.expected: list[tuple[int, list[int]]] = []
        self.counter = FIRST_TOKEN
        self.counts = dict.fromkeys(("appended", "popped", "dropped", "reserved", "popped_seqs", "dropped_seqs"), 0)
        self.places = {n: x.data_ptr() for n, x in self.buffer.tensors().items()}
        self.wrong: dict[str, str] = {}  # aspect -> the first difference

    def run(self, *aspects: str) -> None:
        """All steps in order; a Violation if one of these aspects went wrong, every one unless given."""
        for at, (word, *given) in enumerate(self.program.steps):
            getattr(self, word)(*given)
            self.look()
            found = {k: v for k, v in self.wrong.items() if k in aspects or not aspects}
            for aspect, text in found.items():
                require(holds=False, message=f"{aspect} after step {at}, {word}{tuple(given)}: {text}")

    def differ(self, aspect: str, found: Any, expected: Any) -> None:
        """Note the first difference of an aspect."""
        if found != expected:
            self.wrong.setdefault(aspect, f"{found}, expected {expected}")

    def everything(self) -> list[Item]:
        """All that is stored."""
        return [i for members in self.items.values() for i in members]

    def slots(self, items: list[Item]) -> Slots:
        """Places of sequences."""
        ids, stamps = ([getattr(i, n) for i in items] for n in ("slot", "stamp"))
        return Slots(torch.tensor(ids, device=self.device), torch.tensor(stamps, device=self.device))

    def victims(self, limits: tuple[int, ...], group: int) -> list[int] | None:
        """Groups that make room, oldest first; None if there is none to be had."""
        gone: list[int] = []
        while True:
            left = [i for g, m in self.items.items() if g not in gone for i in m]
            if (
                sum(i.pages for i in left) + sum(-(-n // PAGE) for n in limits) <= PAGES
                and len(left) + len(limits) <= SEQS
                and len({i.group for i in left} | {group}) <= GROUPS
            ):
                return gone
            closed = [g for g, m in self.items.items() if g not in {*gone, group} and not any(i.open for i in m)]
            if self.program.on_full == "raise" or not closed:
                return None
            gone.append(closed[0])

    def reserve(self, limits: tuple[int, ...], group: int) -> None:
        """Room is given, made, or refused."""
        room, before = self.victims(limits, group), (self.buffer.stats, self.buffer.groups())
        try:
            slots = self.buffer.reserve(list(limits), [group] * len(limits))
        except BufferFullError as error:
            self.differ("capacity", f"{limits} is refused: {error}" if room is not None else None, None)
            self.differ("refusal", (self.buffer.stats, self.buffer.groups()), before)
            return
        if room is None:
            self.wrong.setdefault("capacity", f"{limits} is taken where there is no room")
            return
        for g in room:
            self.drop(g)
        for slot, stamp, limit in zip(slots.ids.tolist(), slots.stamps.tolist(), limits, strict=True):
            self.items.setdefault(group, []).append(Item(slot, stamp, group, limit))
        self.counts["reserved"] += len(limits)

    def drop(self, group: int) -> None:
        """A group goes."""
        for item in self.items.pop(group):
            self.counts["dropped"] += len(item.tokens)
            self.counts["dropped_seqs"] += 1
            self.gone.append(item)

    def append(self, rows: tuple[tuple[int, int, bool], ...]) -> None:
        """Tokens for sequences that live or are gone, dead rows among them."""
        pool = self.everything() + self.gone[-2:]
        chosen = {pool[which % len(pool)].slot: (pool[which % len(pool)], n, ok) for which, n, ok in rows if pool}
        if not chosen:
            return
        given: list[int] = []
        for item, count, alive in chosen.values():
            new = list(range(self.counter, self.counter + count))
            self.counter += count
            given += new
            if alive:
                writable = item.open and item not in self.gone
                kept = new[: item.limit - len(item.tokens)] if writable else []
                item.tokens += kept
                self.counts["appended"] += count
                self.counts["dropped"] += count - len(kept)
        counts = torch.tensor([0, *(n for _, n, _ in chosen.values())], device=self.device)
        alive_rows = torch.tensor([ok for _, _, ok in chosen.values()], device=self.device)
        places = self.slots([i for i, _, _ in chosen.values()])
        more = values(given, self.device)
        if self.program.own_fields:
            token = more["token"].double()
            more["pair"] = torch.stack([token, token * WIDE], 1)
        more["logprob"].requires_grad_()  # as a model gives it: storage keeps no graph
        self.buffer.append(places, more, cu_seqlens=counts.cumsum(0), alive=alive_rows)

    def finish(self, which: tuple[int, ...]) -> None:
        """Some open sequences end."""
        still = [i for i in self.everything() if i.open]
        ending = list({still[w % len(still)].slot: still[w % len(still)] for w in which}.values()) if still else []
        if ending:
            self.buffer.finish(self.slots(ending))
            for item in ending:
                item.open = False

    def pop(self, count: int) -> None:
        """A full batch, or none."""
        if self.batch is not None:
            return
        ready = [g for g, members in self.items.items() if not any(i.open for i in members)][:count]
        before = self.buffer.stats
        batch = self.buffer.pop(groups=count)
        if len(ready) < count:
            self.differ("full batch", None if batch is None else "a batch", None)
            self.differ("refusal", self.buffer.stats, before)
            return
        if batch is None:
            self.wrong.setdefault("full batch", f"no batch though {ready} are ready")
            return
        members = [i for g in ready for i in self.items.pop(g)]
        self.batch, self.expected = batch, [(i.group, list(i.tokens)) for i in members]
        self.counts["popped"] += sum(len(i.tokens) for i in members)
        self.counts["popped_seqs"] += len(members)
        self.gone += members

    def release(self) -> None:
        """The batch is given back."""
        if self.batch is not None:
            self.batch.release()
            self.batch = None

    def discard(self, which: int) -> None:
        """A group is thrown away."""
        if self.items:
            group = list(self.items)[which % len(self.items)]
            self.buffer.discard([group])
            self.drop(group)

    def look(self) -> None:
        """What is in the buffer now."""
        stats, items = self.buffer.stats, self.everything()
        tokens = (stats.appended, stats.popped, stats.stored, sum(stats.dropped.values()))
        stored = sum(len(i.tokens) for i in items)
        mine = self.counts
        self.differ("tokens", tokens, (mine["appended"], mine["popped"], stored, mine["dropped"]))
        seqs = (stats.reserved_seqs, stats.popped_seqs, stats.stored_seqs, sum(stats.dropped_seqs.values()))
        self.differ("sequences", seqs, (mine["reserved"], mine["popped_seqs"], len(items), mine["dropped_seqs"]))
        used = {"tokens": PAGE * sum(i.pages for i in items), "seqs": len(items), "groups": len(self.items)}
        self.differ("use", dict(stats.used), used)
        self.differ("groups", [g.id for g in self.buffer.groups()], list(self.items))
        storage = self.buffer.tensors()
        self.differ("place", {n: x.data_ptr() for n, x in storage.items()}, self.places)
        self.differ("place", [n for n, x in storage.items() if x.requires_grad], [])
        if self.batch is not None:
            found = list(zip(self.batch.group_ids.tolist(), rows_of(self.batch), strict=True))
            self.differ("content", found, self.expected)
            flat = [t for _, row in self.expected for t in row]
            self.differ("other fields", self.batch["logprob"].tolist(), [-t / 8 for t in flat])
            self.differ("other fields", self.batch["mask"].tolist(), [1] * len(flat))
            if self.program.own_fields:
                self.differ("other fields", self.batch["pair"].tolist(), [[t, t * WIDE] for t in flat])
                self.differ("other fields", self.batch["tag"].tolist(), [-3] * len(flat))
