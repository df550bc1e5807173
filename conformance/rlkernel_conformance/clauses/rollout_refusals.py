"""Attacks on rollout_buffer@1: what a refusal changes, what grows, what can be captured, what raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.attack import attack
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
from rlkernel_conformance.graphs import recorded
from rlkernel_conformance.memory import growth
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ArgumentError, BufferFullError, StaleBatchError, UnknownNameError
from rlkernel_core.spec.rollouts import Field, GroupRules, RolloutBuffer, Slots


@dataclass(frozen=True)
class Held:
    """Tokens of the sequences of a buffer; `word` is what the attack varies."""

    lengths: tuple[int, ...]
    word: str


def held(*words: str) -> Callable[[Subject], st.SearchStrategy[Held]]:
    """Cases with one of these words."""
    lengths = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
    return lambda s: st.builds(Held, lengths, st.sampled_from(words))


def each(words: Iterable[str]) -> tuple[Held, ...]:
    """A case of every word, for an attack to try before it draws."""
    return tuple(Held((3, 2), word) for word in words)


def content(buffer: RolloutBuffer) -> tuple[Any, ...]:
    """All that can be seen of a buffer without changing it."""
    stored = {n: x.clone() for n, x in buffer.tensors().items()}
    return buffer.stats, buffer.groups(), {n: x.tolist() for n, x in stored.items()}


Refusal = Callable[[RolloutBuffer, Slots, str], object]
REFUSALS: Final[Mapping[str, Refusal]] = {
    "reserve in part": lambda b, _, d: b.reserve([PAGE, PAGE * PAGES], [3, 3]),
    "reserve too many": lambda b, _, d: b.reserve(1, [3] * (SEQS + 1)),
    "reserve badly": lambda b, _, d: b.reserve([2, 0], [3, 3]),
    "finish a stranger": lambda b, s, d: b.finish(Slots(s.ids, s.stamps + _last(s, 1))),
    "finish twice at once": lambda b, s, d: b.finish(Slots(s.ids[[0, 0]], s.stamps[[0, 0]])),
    "finish badly": lambda b, s, d: b.finish(s, status=["stop"] * (len(s.ids) - 1) + ["lost"]),
    "reward of another size": lambda b, s, d: b.finish(s, [1.0] * (len(s.ids) + 1)),
    "pop too many": lambda b, _, d: _none(b.pop(groups=5)),
    "pop none ready": lambda b, _, d: _none(b.pop(groups=2, rules=GroupRules(min_valid=9))),
    "pop a part of a group": lambda b, _, d: b.pop(tokens=b.groups()[0].tokens - 1),
    "pop badly": lambda b, _, d: b.pop(groups=1, order="newest"),
    "discard a stranger": lambda b, _, d: b.discard([0, 77]),
}


def _last(slots: Slots, by: int) -> Tensor:
    """`by` at the last slot, 0 elsewhere."""
    x = torch.zeros_like(slots.stamps)
    x[-1] = by
    return x


def _none(batch: Any) -> None:
    if batch is None:
        raise BufferFullError("no batch, as it should be")
    raise Violation("pop gives a batch that is not full")


@attack("RB-05", held(*REFUSALS), examples=each(REFUSALS), scale=0.3)
def a_refusal_changes_nothing(subject: Subject, case: Held) -> None:
    """Counters, groups and every byte of the storage; then the buffer goes on."""
    buffer, device = small(subject), subject.device
    want = fill(buffer, device, 0, *case.lengths[:2])
    slots = buffer.reserve(3, [1, 2])
    buffer.append(slots, values([1, 2], device))
    before = content(buffer)
    try:
        REFUSALS[case.word](buffer, slots, device)
    except (ArgumentError, BufferFullError, UnknownNameError):
        pass
    else:
        raise Violation(f"{case.word}: accepted")
    after = content(buffer)
    require(after == before, f"{case.word} left {after[:2]}, was {before[:2]}")
    buffer.finish(slots)
    batch = buffer.pop(groups=3)
    found = rows_of(batch) if batch else None
    require(found == [*want, [1], [2]], f"after {case.word} there is {found}, expected {[*want, [1], [2]]}")


@attack("RB-07", programs, examples=(Program((("pop", 1),) * 4, "raise"),), scale=0.5)
def nothing_grows(subject: Subject, case: Program) -> None:
    """Addresses of storage and of batches, bytes after turns; the buffer's own word on a turn."""
    Machine(subject, case).run("place")
    buffer, device, seen = small(subject), subject.device, set[int]()
    claimed = buffer.stats.nbytes

    def turn() -> None:
        fill(buffer, device, 1, 5, 3)
        batch = buffer.pop(groups=1)
        if batch is None:
            raise Violation("there is no batch")
        seen.add(batch["token"].data_ptr())
        batch.release()

    with buffer.assert_zero_growth():
        turn()
    for _ in range(3):
        turn()
    require(len(seen) == 1, f"batches lie at {len(seen)} addresses")
    require(buffer.stats.nbytes == claimed, f"{buffer.stats.nbytes} bytes, {claimed} when made")
    if case.steps == (("pop", 1),) * 4:  # once is enough: profiling takes its time
        grown = growth(subject, turn, times=10)
        require(grown <= 0, f"ten turns leave {grown} bytes behind")


@attack("RB-08", held("steps"), scale=0.5)
def appending_can_be_captured(subject: Subject, case: Held) -> None:
    """One recording, replayed for several reservations, with rows that live and rows that do not."""
    buffer, device, count = small(subject), subject.device, len(case.lengths)

    def step(ids: Tensor, stamps: Tensor, token: Tensor, alive: Tensor) -> None:
        buffer.append(Slots(ids, stamps), {"token": token, "logprob": -token / 8}, alive=alive)

    none = torch.zeros(count, dtype=torch.int64, device=device)
    first = {"ids": none - 1, "stamps": none, "token": none.int(), "alive": none.bool()}
    replay = recorded(subject, step, first, written=buffer.tensors())
    for turn in range(2):
        slots = buffer.reserve(8, [turn] * count)
        for t in range(max(case.lengths)):
            token = torch.arange(count, dtype=torch.int32, device=device) * 10 + t + 1
            alive = torch.tensor([t < n for n in case.lengths], device=device)
            replay(ids=slots.ids, stamps=slots.stamps, token=token, alive=alive)
        buffer.finish(slots)
        batch = buffer.pop(groups=1)
        found = rows_of(batch) if batch else None
        want = [[10 * i + t + 1 for t in range(n)] for i, n in enumerate(case.lengths)]
        require(found == want, f"replays stored {found}, expected {want}")
        if batch:
            batch.release()
    stats = buffer.stats
    total = 2 * sum(case.lengths)
    require((stats.appended, stats.popped) == (total, total), f"{stats.appended} appended, {stats.popped} popped")


NAMES: Final = ("cu_seqlens", "group", "group_ids", "reward", "valid", "weight", "status", "version")


@attack("RB-11", held(*NAMES, "token", "release"), examples=each((*NAMES, "token", "release")), scale=0.2)
def a_released_batch_is_stale(subject: Subject, case: Held) -> None:
    """Every attribute, at once and when its storage holds another batch."""
    buffer = small(subject)
    fill(buffer, subject.device, 0, *case.lengths[:2])
    fill(buffer, subject.device, 1, 2)
    batch = buffer.pop(groups=1)
    if batch is None:
        raise Violation("there is no batch")
    try:
        buffer.pop(groups=1)
    except BufferFullError:
        pass
    else:
        raise Violation("a second batch is given out over the first")
    batch.release()
    for again in (False, True):
        if again:
            require(buffer.pop(groups=1) is not None, "there is no second batch")
        try:
            _ = batch["token"] if case.word == "token" else getattr(batch, case.word)
            if case.word == "release":
                batch.release()
        except StaleBatchError:
            continue
        raise Violation(f"{case.word} of a released batch is answered")


@attack("RB-12", held("tokens", "seqs"), examples=each(("tokens", "seqs")), scale=0.2)
def a_full_buffer_refuses(subject: Subject, case: Held) -> None:
    """Finished groups that could go are kept; a batch larger than its storage is refused too."""
    buffer, device = small(subject, on_full="raise", max_batch_tokens=4), subject.device
    fill(buffer, device, 0, 5)
    before = buffer.stats
    for refused in (
        lambda: buffer.reserve(PAGE * PAGES, [1]) if case.word == "tokens" else buffer.reserve(1, [1] * SEQS),
        lambda: buffer.pop(groups=1),
    ):
        try:
            refused()
        except BufferFullError:
            continue
        raise Violation("what does not fit is not refused")
    require(buffer.stats == before, f"a refusal left {buffer.stats}, was {before}")


SIZES: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "max_tokens": ("max_tokens", {"max_tokens": PAGE * PAGES + 1}),
    "no tokens": ("max_tokens", {"max_tokens": 0}),
    "max_seqs": ("max_seqs", {"max_seqs": 1.5}),
    "page_tokens": ("page_tokens", {"page_tokens": 0}),
    "rewards": ("rewards", {"rewards": 0}),
    "group_size": ("group_size", {"group_size": 0}),
    "max_groups": ("max_groups", {"max_groups": 0}),
    "max_batch_tokens": ("max_batch_tokens", {"max_batch_tokens": 0}),
    "on_full": ("on_full", {"on_full": "block"}),
    "fields": ("fields", {"fields": {"x": "float32"}}),
    "dtype": ("fields", {"fields": {"x": Field("float31")}}),
}
CALLS: Final[Mapping[str, tuple[str, Refusal]]] = {
    "limits": ("limits", lambda b, s, d: b.reserve(PAGE * PAGES + 1, [3])),
    "no limit": ("limits", lambda b, s, d: b.reserve([], [])),
    "groups": ("groups", lambda b, s, d: b.reserve(1, [-1])),
    "a field less": ("values", lambda b, s, d: b.append(s, {"token": values([1], d)["token"]})),
    "rows": ("values", lambda b, s, d: b.append(s, values([1, 2], d))),
    "cu_seqlens": ("cu_seqlens", lambda b, s, d: b.append(s, values([1], d), cu_seqlens=torch.zeros(2, device=d))),
    "alive": ("alive", lambda b, s, d: b.append(s, values([1], d), alive=torch.ones(1, device=d))),
    "status": ("status", lambda b, s, d: b.finish(s, status="done")),
    "reward": ("reward", lambda b, s, d: b.finish(s, [1.0, 2.0])),
    "nothing to fill": ("groups", lambda b, s, d: b.pop()),
    "both": ("groups", lambda b, s, d: b.pop(groups=1, tokens=1)),
    "order": ("order", lambda b, s, d: b.pop(groups=1, order="newest")),
    "weighting": ("weighting", lambda b, s, d: b.pop(groups=1, weighting="all")),
    "rows_multiple_of": ("rows_multiple_of", lambda b, s, d: b.pop(groups=1, rows_multiple_of=0)),
    "more rows than sequences": ("rows_multiple_of", lambda b, s, d: b.pop(groups=1, rows_multiple_of=SEQS + 1)),
    "rules": ("rules", lambda b, s, d: b.groups("complete")),
    "rules of a batch": ("rules", lambda b, s, d: b.pop(groups=1, rules="complete")),
    "version": ("version", lambda b, s, d: b.groups(version=-1)),
    "version to prune by": ("version", lambda b, s, d: b.prune(version=0.5)),
}


@attack("RB-18", held(*SIZES, *CALLS), examples=each((*SIZES, *CALLS)), scale=0.1)
def bad_arguments_are_named(subject: Subject, case: Held) -> None:
    """Of the constructor and of every method."""
    buffer = small(subject)
    if case.word in SIZES:
        argument, options = SIZES[case.word]
        if {"fields", "group_size"} & options.keys() - subject.claims:
            return
        call: Callable[[], object] = lambda: small(subject, **options)  # noqa: E731
    else:
        argument, method = CALLS[case.word]
        slots = buffer.reserve(3, [0])
        call = lambda: method(buffer, slots, subject.device)  # noqa: E731
    try:
        call()
    except ArgumentError as error:
        require(error.argument.startswith(argument), f"{case.word}: {argument} is blamed on {error.argument}")
        return
    raise Violation(f"{case.word}: accepted")
