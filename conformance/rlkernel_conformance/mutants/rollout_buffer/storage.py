"""Planted bugs in what rollout_buffer@1 keeps: order, counts, room, atomic steps, storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlkernel_conformance.mutants import mutant
from rlkernel_conformance.mutants.rollout_buffer.planting import counted, replaced
from rlkernel_core.errors import ArgumentError, BufferFullError

CONTENT = ("RB-01", "RB-03", "RB-04", "RB-05", "RB-06", "RB-08", "RB-09", "RB-10", "RB-15", "RB-17")


@mutant("RB-01", *CONTENT, origin="pages of a sequence taken from a set")
def pages_in_another_order(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def gather(true: Any, slots: Any, cu_seqlens: Any, into: Any) -> None:
        true(slots, cu_seqlens, into)
        for a, b in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
            if b - a > 4:  # more than one page
                for x in into.values():
                    x[a : a + 4] = x[a : a + 4].flip(0).clone()

    replaced(buffer._pages, "gather", gather)
    return buffer


@mutant("RB-01", "RB-17", origin="a field that is not given is stored as 0")
def defaults_are_zero(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)
    for name, f in buffer._pages.fields.items():
        if f.default is not None:
            buffer._pages.fields[name] = replace(f, default=0)
    return buffer


@mutant("RB-01", origin="a field is one number a token")
def the_first_number_of_a_field_is_all(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def gather(true: Any, slots: Any, cu_seqlens: Any, into: Any) -> None:
        true(slots, cu_seqlens, into)
        for x in into.values():
            x.copy_(x[:, :1].expand_as(x) if x.dim() > 1 else x)

    replaced(buffer._pages, "gather", gather)
    return buffer


@mutant("RB-02", "RB-17", origin="what a discard throws away is not counted")
def discarded_tokens_are_forgotten(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)
    return counted(buffer, dropped=lambda s: {k: v for k, v in s.dropped.items() if k != "discarded"})


@mutant("RB-02", "RB-17", origin="tokens counted where they are stored, not where they are given")
def refused_tokens_are_not_appended(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)
    lost = ("over the limit", "stale")
    return counted(buffer, appended=lambda s: s.appended - sum(s.dropped.get(k, 0) for k in lost))


@mutant("RB-02", *CONTENT, "RB-07", "RB-11", "RB-14", origin="a batch is a copy, and its groups come again")
def popped_groups_come_again(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)
    buffer._popped = lambda *_: None
    return buffer


def with_room(buffer: Any, **less: int) -> Any:
    """A allocator that believes in more or less room than there is."""
    allocator = buffer._allocator
    victims = allocator.victims

    def believes(limits: Any, groups: Any, *, drop_oldest: bool) -> Any:
        slots, pages = list(allocator._free_slots), list(allocator._free_pages)
        for _ in range(less.get("seqs", 0)):
            allocator._free_slots and allocator._free_slots.pop()
        for _ in range(less.get("pages", 0)):
            allocator._free_pages and allocator._free_pages.pop()
        try:
            return victims(limits, groups, drop_oldest=drop_oldest)
        finally:
            allocator._free_slots.clear()
            allocator._free_slots.extend(slots)
            allocator._free_pages.clear()
            allocator._free_pages.extend(pages)

    allocator.victims = believes
    return buffer


FULL = ("RB-01", "RB-02", "RB-04", "RB-05", "RB-10", "RB-13", "RB-17")


@mutant("RB-03", *FULL, origin="a ring with one place that stays empty")
def one_place_stays_empty(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    return with_room(reference(max_tokens, max_seqs, **rest), seqs=1)


@mutant("RB-03", *FULL, origin="one page kept for what must not be stored")
def one_page_stays_empty(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    return with_room(reference(max_tokens, max_seqs, **rest), pages=1)


@mutant(
    "RB-03",
    "RB-02",
    "RB-05",
    "RB-13",
    "RB-17",
    "RB-18",
    origin="max_groups read by nobody (TritonForge: max_buffer_size)",
)
def groups_are_not_bounded(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    return reference(max_tokens, max_seqs, **{**rest, "max_groups": None})


@mutant(
    "RB-04", "RB-01", "RB-02", "RB-07", "RB-08", "RB-13", "RB-17", origin="pages of popped sequences are not given back"
)
def pages_leak(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def free(true: Any, rollouts: Any) -> None:
        rollouts = list(rollouts)
        for r in rollouts[1:]:  # of all but the first
            r.pages.clear()
        true(rollouts)

    replaced(buffer._allocator, "free", free)
    return buffer


@mutant("RB-05", "RB-01", "RB-02", "RB-13", "RB-17", origin="a reservation that fails keeps what it had taken")
def a_refused_reservation_keeps_a_part(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def reserve(true: Any, limits: Any, groups: Any, **more: Any) -> Any:
        try:
            return true(limits, groups, **more)
        except BufferFullError:
            if len(groups) > 1 and not isinstance(limits, int):
                true(limits[:1], groups[:1], **more)
            raise

    return replaced(buffer, "reserve", reserve)


@mutant("RB-05", origin="finish ends one after the other, until one is refused")
def a_refused_finish_ends_some(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def finish(true: Any, slots: Any, reward: Any = None, **more: Any) -> Any:
        try:
            return true(slots, reward, **more)
        except ArgumentError:
            first = type(slots)(slots.ids[:1], slots.stamps[:1])
            if len(slots.ids) > 1:
                true(first)
            raise

    return replaced(buffer, "finish", finish)


LOST = ("RB-01", "RB-02", "RB-05", "RB-17")


@mutant("RB-05", *LOST, "RB-06", origin="pop not atomic: finished groups go though there are too few (TritonForge)")
def a_refused_pop_takes_what_there_is(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def pop(true: Any, **wanted: Any) -> Any:
        batch = true(**wanted)
        ready = [g.id for g in buffer.groups() if g.ready]
        if batch is None and ready and wanted.get("groups"):
            buffer.discard(ready[:1], "given up")
        return batch

    return replaced(buffer, "pop", pop)


@mutant("RB-06", *LOST, origin="pop gives what there is")
def a_batch_may_be_small(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def pop(true: Any, **wanted: Any) -> Any:
        ready = sum(g.ready for g in buffer.groups(wanted.get("rules"), version=wanted.get("version")))
        if wanted.get("groups") and 0 < ready < wanted["groups"] and not buffer._staging.out:
            wanted["groups"] = ready
        return true(**wanted)

    return replaced(buffer, "pop", pop)


@mutant("RB-06", *LOST, "RB-11", origin="groups beyond the batch are thrown away (TritonForge)")
def leftovers_are_thrown_away(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def pop(true: Any, **wanted: Any) -> Any:
        batch = true(**wanted)
        if batch is not None:
            buffer.discard([g.id for g in buffer.groups() if g.ready], "left over")
        return batch

    return replaced(buffer, "pop", pop)


@mutant("RB-06", origin="the first groups, whatever their length")
def longest_first_is_ignored(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def pop(true: Any, **wanted: Any) -> Any:
        longest = wanted.get("order") == "longest_first"
        return true(**{**wanted, "order": "fifo"} if longest else wanted)

    return replaced(buffer, "pop", pop)


@mutant("RB-07", origin="every batch is new memory")
def a_batch_is_new_memory(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer, kept = reference(max_tokens, max_seqs, **rest), []

    def pop(true: Any, **wanted: Any) -> Any:
        batch = true(**wanted)
        if batch is not None:
            batch._fields = {n: x.clone() for n, x in batch._fields.items()}
            kept.append(batch)  # and it stays
        return batch

    return replaced(buffer, "pop", pop)


@mutant("RB-07", "RB-17", "RB-08", origin="storage that is made anew when it is written")
def storage_moves(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def append(true: Any, *args: Any, **more: Any) -> None:
        true(*args, **more)
        tokens = buffer._pages.tokens
        tokens["token"] = tokens["token"].clone()

    return replaced(buffer, "append", append)


@mutant("RB-08", origin="append asks the host how many rows live")
def append_asks_the_host(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def append(true: Any, slots: Any, given: Any, *, alive: Any = None, **more: Any) -> None:
        if alive is not None and not bool(alive.any()):
            return
        true(slots, given, alive=alive, **more)

    return replaced(buffer, "append", append)


ALIVE = ("RB-01", "RB-02", "RB-07", "RB-08", "RB-17", "RB-18")


@mutant("RB-09", *ALIVE, origin="alive read by nobody")
def dead_rows_are_stored(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)
    replaced(buffer, "append", lambda true, *args, alive=None, **more: true(*args, **more))
    return buffer


@mutant("RB-09", *ALIVE, "RB-10", origin="dead rows are counted as lost")
def dead_rows_are_counted(reference: Any, max_tokens: int, max_seqs: int, **rest: Any) -> Any:
    buffer = reference(max_tokens, max_seqs, **rest)

    def append(true: Any, slots: Any, given: Any, *, alive: Any = None, cu_seqlens: Any = None) -> None:
        true(slots, given, alive=alive, cu_seqlens=cu_seqlens)
        if alive is not None:
            buffer._pages.counts[:2] += (~alive).sum()

    return replaced(buffer, "append", append)
