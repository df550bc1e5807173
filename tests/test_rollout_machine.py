"""rollout_buffer@1 under any order of calls; the model is lists."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlkernel_core.errors import BufferFullError, StaleBatchError
from rlkernel_core.spec.rollouts import Field, Slots
from rlkernel_torch.direct import rollout_buffer

PAGE, PAGES, SEQS = 4, 8, 6


class Item:
    """One sequence of the model."""

    def __init__(self, slot, stamp, group, limit):
        self.slot, self.stamp, self.group, self.limit = slot, stamp, group, limit
        self.tokens: list[int] = []
        self.open = True

    @property
    def pages(self):
        return -(-(self.limit if self.open else len(self.tokens)) // PAGE)


class Buffered(RuleBasedStateMachine):
    @initialize(on_full=st.sampled_from(["raise", "drop_oldest"]))
    def start(self, on_full):
        self.on_full = on_full
        self.buf = rollout_buffer(
            PAGE * PAGES, SEQS, page_tokens=PAGE, fields={"token": Field("int32")}, on_full=on_full, max_groups=4
        )
        self.addresses = self.buf._addresses()
        self.items: dict[int, list[Item]] = {}  # group -> members, in order of first reservation
        self.gone: list[Item] = []
        self.appended = self.popped = self.dropped = self.counter = 0
        self.batch, self.expected = None, []

    def everything(self):
        return [i for members in self.items.values() for i in members]

    @rule(limits=st.lists(st.integers(1, 13), min_size=1, max_size=3), group=st.integers(0, 5))
    def reserve(self, limits, group):
        victims, room = [], None
        while True:
            left = [i for g, m in self.items.items() if g not in victims for i in m]
            fits = (
                sum(i.pages for i in left) + sum(-(-n // PAGE) for n in limits) <= PAGES
                and len(left) + len(limits) <= SEQS
                and len({i.group for i in left} | {group}) <= 4
            )
            closed = [
                g for g, m in self.items.items() if g not in victims and g != group and not any(i.open for i in m)
            ]
            if fits or self.on_full == "raise" or not closed:
                room = fits
                break
            victims.append(closed[0])
        if not room:
            before = self.buf.stats
            with pytest.raises(BufferFullError):
                self.buf.reserve(limits, [group] * len(limits))
            assert self.buf.stats == before
            return
        slots = self.buf.reserve(limits, [group] * len(limits))
        for g in victims:
            self.drop(g)
        for slot, stamp, limit in zip(slots.ids.tolist(), slots.stamps.tolist(), limits, strict=True):
            self.items.setdefault(group, []).append(Item(slot, stamp, group, limit))

    def drop(self, group):
        for item in self.items.pop(group):
            self.dropped += len(item.tokens)
            self.gone.append(item)

    @rule(data=st.data())
    def append(self, data):
        """Any subset of sequences, live or long gone, dead rows among them."""
        pool = self.everything() + self.gone[-2:]
        slots = {i.slot: i for i in pool if data.draw(st.booleans())}  # distinct places
        if not slots:
            return
        rows = list(slots.values())
        counts = [data.draw(st.integers(0, 3)) for _ in rows]
        alive = [data.draw(st.booleans()) for _ in rows]
        values = []
        for item, count, live in zip(rows, counts, alive, strict=True):
            new = list(range(self.counter, self.counter + count))
            self.counter += count
            values += new
            if not live:
                continue
            self.appended += count
            writable = item.open and item not in self.gone
            stored = new[: item.limit - len(item.tokens)] if writable else []
            item.tokens += stored
            self.dropped += count - len(stored)
        self.buf.append(
            Slots(torch.tensor([i.slot for i in rows]), torch.tensor([i.stamp for i in rows])),
            {"token": torch.tensor(values, dtype=torch.int32)},
            cu_seqlens=torch.tensor([0, *counts]).cumsum(0),
            alive=torch.tensor(alive),
        )

    @rule(data=st.data())
    def finish(self, data):
        ending = [i for i in self.everything() if i.open and data.draw(st.booleans())]
        if ending:
            ids, stamps = torch.tensor([i.slot for i in ending]), torch.tensor([i.stamp for i in ending])
            self.buf.finish(Slots(ids, stamps))
            for item in ending:
                item.open = False

    @precondition(lambda self: self.batch is None)
    @rule(count=st.integers(1, 2))
    def pop(self, count):
        ready = [g for g, members in self.items.items() if not any(i.open for i in members)][:count]
        batch = self.buf.pop(groups=count)
        if len(ready) < count:
            assert batch is None
            return
        self.batch = batch
        members = [i for g in ready for i in self.items.pop(g)]
        self.expected = [(i.group, list(i.tokens)) for i in members]
        self.popped += sum(len(i.tokens) for i in members)
        self.gone += members

    @precondition(lambda self: self.batch is not None)
    @rule()
    def release(self):
        self.batch.release()
        with pytest.raises(StaleBatchError):
            _ = self.batch.reward
        self.batch = None

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def discard(self, data):
        group = data.draw(st.sampled_from(sorted(self.items)))
        self.buf.discard([group])
        self.drop(group)

    @invariant()
    def nothing_is_lost_and_nothing_grows(self):
        if not hasattr(self, "buf"):
            return
        stats = self.buf.stats
        items = self.everything()
        stored = sum(len(i.tokens) for i in items)
        assert (stats.appended, stats.popped, stats.stored) == (self.appended, self.popped, stored)
        assert sum(stats.dropped.values()) == self.dropped
        assert stats.appended == stats.popped + stats.stored + sum(stats.dropped.values())
        assert stats.used["tokens"] == PAGE * sum(i.pages for i in items)
        assert (stats.used["seqs"], stats.used["groups"]) == (len(items), len(self.items))
        assert [g.id for g in self.buf.groups()] == list(self.items)
        assert self.buf._addresses() == self.addresses
        if self.batch is not None:
            ends = self.batch.cu_seqlens.tolist()
            flat = self.batch["token"].tolist()
            rows = [flat[a:b] for a, b in pairwise(ends)]
            assert list(zip(self.batch.group_ids.tolist(), rows, strict=True)) == self.expected


Buffered.TestCase.settings = settings(derandomize=True, deadline=None, max_examples=40, stateful_step_count=25)
TestBuffered = Buffered.TestCase
