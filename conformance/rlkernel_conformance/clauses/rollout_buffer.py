"""Attacks on rollout_buffer@1: what is kept, and what comes out. `rollout_refusals` holds refusals and side effects."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from hypothesis import strategies as st

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses import rollout_groups, rollout_refusals
from rlkernel_conformance.clauses.rollout_refusals import content
from rlkernel_conformance.clauses.rollout_state_machine import (
    PAGE,
    PAGES,
    SEQS,
    Machine,
    Program,
    fill,
    programs,
    rows_of,
    small,
    values,
)
from rlkernel_conformance.compare import Violation, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ArgumentError, BufferFullError, FileError
from rlkernel_core.files import write_bytes
from rlkernel_core.spec.rollouts import STATUS, RolloutBuffer

__all__ = ["rollout_groups", "rollout_refusals"]  # their attacks belong to this operator

CYCLE: Final = (
    ("reserve", (9, 3), 1),
    ("append", ((0, 3, True), (1, 2, True))),
    ("append", ((0, 3, True), (1, 2, False))),
    ("append", ((0, 3, True),)),
    ("finish", (0, 1)),
    ("pop", 1),
    ("release",),
)
BATCH_DTYPES: Final = {
    "cu_seqlens": torch.int64, "group": torch.int64, "group_ids": torch.int64, "reward": torch.float32,
    "valid": torch.bool, "weight": torch.float32, "status": torch.uint8, "version": torch.int64,
}  # fmt: skip
NOWHERE: Final = {"behind the last": 1, "before the first": -1, "far away": 2**40}  # places that one sequence lacks
LOST: Final = (("reserve", (2, 5), 0), ("append", ((0, 3, True), (1, 3, True))), ("discard", 0), *CYCLE)


@attack("RB-01", lambda s: programs(s, any_fields=True), examples=(Program(CYCLE), Program(CYCLE, own_fields=True)))
def tokens_come_out_as_they_went_in(subject: Subject, case: Program) -> None:
    """Every field of every batch, in the order of appends, groups oldest first."""
    if case.own_fields and "fields" not in subject.claims:
        return
    Machine(subject, case).run("content", "other fields", "groups")


@attack("RB-02", programs, examples=(Program(LOST),))
def nothing_is_lost(subject: Subject, case: Program) -> None:
    """After every step: tokens and sequences beside the model's."""
    Machine(subject, case).run("tokens", "sequences")


@dataclass(frozen=True)
class Filled:
    """Lengths of sequences, one group each; a number and a word that the attack reads."""

    lengths: tuple[int, ...]
    number: int = 1
    word: str = ""


def filled(*words: str, longest: int = 9, most: int = 4) -> Callable[[Subject], st.SearchStrategy[Filled]]:
    """Cases with a few sequences."""
    lengths = st.lists(st.integers(0, longest), min_size=1, max_size=most).map(tuple)
    return lambda s: st.builds(Filled, lengths, st.integers(1, 5), st.sampled_from(words or ("",)))


def each(*words: str, lengths: tuple[int, ...] = (3, 5, 2), number: int = 2) -> tuple[Filled, ...]:
    """A case of every word, for an attack to try before it draws."""
    return tuple(Filled(lengths, number, word) for word in words)


def no_room(buffer: RolloutBuffer, limits: Any, groups: list[int]) -> bool:
    """Whether a reservation is refused for want of room."""
    try:
        buffer.reserve(limits, groups)
    except BufferFullError:
        return True
    return False


@attack(
    "RB-03",
    filled("tokens", "seqs", "groups", "limit", "longest"),
    examples=each("tokens", "seqs", "groups", "limit", "longest"),
    scale=0.5,
)
def the_capacity_is_exact(subject: Subject, case: Filled) -> None:
    """All of it at once, in tokens, in sequences, in groups, in tokens of one sequence; then one more."""
    if case.word == "longest":
        longest = PAGE + case.number
        buffer = small(subject, max_seq_tokens=longest)
        [row] = fill(buffer, subject.device, 0, longest)
        require(buffer.stats.stored == len(row), f"{buffer.stats.stored} of {len(row)} tokens are stored")
        try:
            buffer.reserve(longest + 1, [1])
        except ArgumentError as error:
            require(error.argument.startswith("limits"), f"a limit above max_seq_tokens is blamed on {error.argument}")
            return
        raise Violation("a limit above max_seq_tokens is taken")
    if case.word == "limit":
        buffer = small(subject)
        slots = buffer.reserve(PAGE * PAGES, [0])
        tokens = list(range(1, PAGE * PAGES + 1))
        ends = torch.tensor([0, len(tokens)], device=subject.device)
        buffer.append(slots, values(tokens, subject.device), cu_seqlens=ends)
        require(buffer.stats.stored == len(tokens), f"{buffer.stats.stored} of {len(tokens)} tokens are stored")
        require(no_room(buffer, 1, [0]), "one token more than max_tokens fits")
        return
    if case.word == "groups":
        buffer = small(subject, max_groups=case.number)
        require(not no_room(buffer, 1, list(range(case.number))[:SEQS]), f"{case.number} groups do not fit")
        require(case.number >= SEQS or no_room(buffer, 1, [case.number]), "one group more than max_groups fits")
        return
    limit, count = (PAGE, PAGES) if case.word == "tokens" else (1, case.number)
    buffer = small(subject, max_seqs=20 if case.word == "tokens" else count)
    for _ in range(count):
        require(
            not no_room(buffer, limit, [0]), f"{buffer.stats.used} of {buffer.stats.capacity}, and there is no room"
        )
    require(no_room(buffer, limit, [0]), f"{buffer.stats.used} of {buffer.stats.capacity}, and one more fits")


@attack("RB-04", filled("pop", "discard"), examples=each("pop", "discard"), scale=0.5)
def storage_goes_round(subject: Subject, case: Filled) -> None:
    """Forty times through a buffer that holds the sequences once or twice."""
    lengths = tuple(max(1, n) for n in case.lengths)
    buffer = small(subject, max_groups=1)
    for turn in range(40):
        turned = lengths[turn % len(lengths) :] + lengths[: turn % len(lengths)]
        need = sum(-(-max(turned) // PAGE) for _ in turned)
        if need > PAGES:
            turned = turned[:2]
        want = fill(buffer, subject.device, turn % 3, *turned)
        if case.word == "discard" and turn % 2:
            buffer.discard([turn % 3])
            continue
        batch = buffer.pop(groups=1)
        require(batch is not None, f"no batch in turn {turn}")
        found = rows_of(batch) if batch else []
        require(found == want, f"turn {turn} gives {found}, expected {want}")
        if batch:
            batch.release()
    require(buffer.stats.used["tokens"] == 0, f"{buffer.stats.used} is in use when all is gone")


@attack("RB-06", filled("groups", "tokens", longest=8), examples=each("groups", "tokens"), scale=0.5)
def a_batch_is_full_or_there_is_none(subject: Subject, case: Filled) -> None:
    """By groups and by tokens, fifo and longest first; what is left comes out next."""
    buffer, kept = small(subject), []
    for group, n in enumerate(case.lengths):
        kept.append((group, fill(buffer, subject.device, group, n)))
    by_groups = case.word == "groups"
    order = "longest_first" if case.number % 2 else "fifo"
    while True:
        queue = sorted(kept, key=lambda g: -len(g[1][0])) if order == "longest_first" else list(kept)
        full = _first(queue, case.number if by_groups else 3 * case.number, by_groups=by_groups)
        if full == "too long":
            return
        batch = (
            buffer.pop(groups=case.number, order=order)
            if by_groups
            else buffer.pop(tokens=3 * case.number, order=order)
        )
        want = None if full is None else [g for g, _ in full]
        have = None if batch is None else batch.group_ids.tolist()
        require(have == want, f"pop gives groups {have}, expected {want} of {[len(r[0]) for _, r in kept]} tokens")
        left = [g.id for g in buffer.groups()]
        kept = [g for g in kept if want is None or g[0] not in want]
        require(left == [g for g, _ in kept], f"left are groups {left}, expected {[g for g, _ in kept]}")
        if batch is None:
            return
        require(rows_of(batch) == [row for _, rows in full for row in rows], "a batch holds other tokens")
        batch.release()


def _first(queue: list[Any], wanted: int, *, by_groups: bool) -> Any:
    """The groups of a full batch; None if there is none, words where the next group never fits."""
    if by_groups:
        return queue[:wanted] if len(queue) >= wanted else None
    chosen: list[Any] = []
    total = 0
    for group in queue:
        tokens = len(group[1][0])
        if tokens > wanted:
            return "too long"
        if total + tokens > wanted:
            return chosen
        chosen.append(group)
        total += tokens
    return chosen if chosen and total == wanted else None


@attack("RB-09", filled("id", "value", "stale"), examples=each("id", "value", "stale"), scale=0.5)
def dead_rows_change_nothing(subject: Subject, case: Filled) -> None:
    """Rows with NaN, with places that do not exist, with stamps of others; and rows beyond a packed append."""
    buffer, device = small(subject), subject.device
    slots = buffer.reserve(9, [0, 0])
    ids, stamps = slots.ids.clone(), slots.stamps.clone()
    if case.word == "id":
        ids[1] = -(2**40)
    elif case.word == "stale":
        stamps[1] += 77
    alive = torch.tensor([True, False], device=device)
    want = []
    for t in range(case.number):
        given = values([t + 1, 99], device)
        given["logprob"][1] = torch.nan
        buffer.append(type(slots)(ids, stamps), given, alive=alive)
        want.append(t + 1)
    ends = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    buffer.append(slots, values([50, 98, 97], device), cu_seqlens=ends)
    stats = buffer.stats
    require(stats.appended == case.number + 1, f"{stats.appended} tokens are counted, given were {case.number + 1}")
    require(not stats.dropped, f"dead rows are counted as {stats.dropped}")
    buffer.finish(slots)
    batch = buffer.pop(groups=1)
    found = rows_of(batch) if batch else None
    require(found == [[*want, 50], []], f"stored is {found}, expected {[[*want, 50], []]}")


@attack(
    "RB-10",
    filled("limit", "finished", "popped", "reused", *NOWHERE),
    examples=each("limit", "finished", "popped", "reused", *NOWHERE),
    scale=0.5,
)
def what_cannot_be_stored_is_counted(subject: Subject, case: Filled) -> None:
    """Beyond the limit, after finish, after pop, for a place that belongs to another by now, and for none at all."""
    buffer, device, n = small(subject, max_seqs=1), subject.device, case.number
    slots = buffer.reserve(2, [0])
    if case.word == "limit":
        for t in range(2 + n):
            buffer.append(slots, values([t + 1], device))
        buffer.finish(slots)
    elif case.word in NOWHERE:
        places = type(slots)(torch.full_like(slots.ids, NOWHERE[case.word]), slots.stamps)
        for place, token in ((slots, 1), *[(places, 60)] * n, (slots, 2)):
            buffer.append(place, values([token], device))
        buffer.finish(slots)
    else:
        buffer.append(slots, values([1], device))
        buffer.append(slots, values([2], device))
        buffer.finish(slots)
        later = slots
        if case.word != "finished":
            first = buffer.pop(groups=1)
            if first is not None:
                first.release()
        if case.word == "reused":
            later = buffer.reserve(2, [0])
        for t in range(n):
            buffer.append(slots, values([60 + t], device))
        if case.word == "reused":
            for t in (1, 2):
                buffer.append(later, values([t], device))
            buffer.finish(later)
    stats = buffer.stats
    require(sum(stats.dropped.values()) == n, f"{n} tokens could not be stored, counted are {stats.dropped}")
    batch = None if case.word == "popped" else buffer.pop(groups=1)
    found = [[1, 2]] if case.word == "popped" else rows_of(batch) if batch else None
    require(found == [[1, 2]], f"stored is {found}, expected [[1, 2]]")


@attack("RB-13", filled("tokens", "seqs", "groups"), examples=each("tokens", "seqs", "groups"), scale=0.5)
def the_oldest_finished_go_first(subject: Subject, case: Filled) -> None:
    """Among open groups, and while the group that is joined is itself old."""
    device = subject.device
    buffer = small(subject, on_full="drop_oldest")
    fill(buffer, device, 0, PAGE)
    writing = buffer.reserve(PAGE, [1])
    for group in (2, 3):
        fill(buffer, device, group, PAGE)
    if case.word == "tokens":
        buffer.reserve([PAGE * (PAGES - 4)], [3])
        want, limits, groups = ([1, 2, 3], PAGE, [3]) if case.number % 2 else ([1, 3], PAGE, [3, 3])
    elif case.word == "seqs":
        buffer.reserve(1, [1, 1])
        want, limits, groups = ([1, 2, 3], 1, [1]) if case.number % 2 else ([1, 3], 1, [1, 1])
    else:
        want, limits, groups = ([1, 2, 3, 9], 1, [9]) if case.number % 2 else ([0, 1, 3, 9], 1, [9, 0])
    buffer.reserve(limits, groups)
    left = [g.id for g in buffer.groups()]
    require(left == want, f"left are groups {left}, expected {want}")
    stats, gone = buffer.stats, 4 - len([g for g in want if g < 9])
    counted = (sum(stats.dropped.values()), sum(stats.dropped_seqs.values()))
    require(counted == (PAGE * gone, gone), f"{gone} groups of {PAGE} tokens were dropped, counted are {counted}")
    buffer.append(writing, values([1], device))
    require(sum(buffer.stats.dropped.values()) == PAGE * gone, "an open sequence lost its place")
    before = buffer.stats
    require(no_room(buffer, PAGE * PAGES, [1]), "what can never fit is given room")
    require(buffer.stats == before, "a reservation that can never fit drops groups")


@attack("RB-15", filled(longest=2 * PAGE, most=3), scale=0.5)
def fillers_weigh_nothing(subject: Subject, case: Filled) -> None:
    """Rows up to a multiple."""
    buffer, rows = small(subject), len(case.lengths)
    want = [row for group, n in enumerate(case.lengths) for row in fill(buffer, subject.device, group, n, reward=[1.0])]
    batch = buffer.pop(groups=rows, rows_multiple_of=case.number)
    if batch is None:
        raise Violation("there is no batch")
    more = -rows % case.number
    require(rows_of(batch) == want + [[]] * more, f"rows are {rows_of(batch)}, expected {want} and {more} empty ones")
    found = {
        n: getattr(batch, n).tolist() for n in ("group", "group_ids", "weight", "valid", "status", "reward", "version")
    }
    filler = {"group": -1, "group_ids": -1, "weight": 0.0, "valid": False, "status": STATUS["filler"], "reward": 0.0}
    for name, value in (filler | {"version": -1}).items():
        tail = found[name][rows:]
        require(tail == [value] * more, f"{name} of filler rows is {tail}, expected {value}")
    require(found["weight"][:rows] == [1.0] * rows, f"rows weigh {found['weight']}")
    dtypes = {n: getattr(batch, n).dtype for n in BATCH_DTYPES}
    require(dtypes == BATCH_DTYPES, f"the batch has {dtypes}")


@attack("RB-17", programs, examples=(Program((*CYCLE[:4], ("finish", (0,)), ("reserve", (3,), 2))),), scale=0.5)
def a_loaded_buffer_goes_on(subject: Subject, case: Program) -> None:
    """Saved half way through a program and loaded into a buffer with other content; the rest then gives the same.

    A file that was cut, or that a buffer of another shape saved, is refused first, and changes nothing.
    """
    machine = Machine(subject, case)
    half = len(case.steps) // 2
    for word, *given in case.steps[:half]:
        getattr(machine, word)(*given)
    machine.release()
    other = small(subject, on_full=case.on_full)
    fill(other, subject.device, 4, 5, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "rollouts")
        machine.buffer.save(path)
        places = {n: x.data_ptr() for n, x in other.tensors().items()}
        _refused_files(subject, other, Path(path))
        other.load(path)
    require({n: x.data_ptr() for n, x in other.tensors().items()} == places, "loading moved the storage")
    require(other.stats == machine.buffer.stats, f"loaded {other.stats}, saved {machine.buffer.stats}")
    machine.buffer, machine.places, machine.wrong = other, places, {}
    for word, *given in (*case.steps[half:], ("release",), ("finish", (0, 1, 2, 3, 4, 5)), ("pop", 1)):
        getattr(machine, word)(*given)
        machine.look()
    require(not machine.wrong, f"after loading: {machine.wrong}")


def _refused_files(subject: Subject, buffer: RolloutBuffer, path: Path) -> None:
    """A file without its last byte, and one of another shape, are refused by a buffer that stays as it is."""
    cut, shaped = path.with_name("cut"), path.with_name("of another shape")
    write_bytes(cut, path.read_bytes()[:-1])
    small(subject, max_seqs=SEQS - 1).save(str(shaped))
    before = content(buffer)
    for file, refusal in ((cut, FileError), (shaped, ArgumentError)):
        try:
            buffer.load(str(file))
        except refusal:
            require(content(buffer) == before, f"a refused file, {file.name}, changes the buffer")
            continue
        raise Violation(f"a file that is {file.name} is loaded")
