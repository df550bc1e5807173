"""What objects with methods give a clause: noted call by call, and compared between a mutant and the original."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.source_mutants.draws import sites
from rlkernel_conformance.source_mutants.plugin_copy import PluginCopy, source_of
from rlkernel_conformance.source_mutants.run import Drawn, SourceMutant, attacked, originals
from rlkernel_conformance.source_mutants.transcripts import RecordingObject, Transcript, first_difference
from rlkernel_core.errors import ArgumentError


@dataclass(frozen=True)
class Stats:
    calls: int
    guard_ns: int


class Counter:
    """An object of the kind that operators make."""

    def __init__(self) -> None:
        self.total, self.calls = torch.zeros(2), 0

    def add(self, x):
        if x is None:
            raise ArgumentError("x", x, "is no number", "Pass one.")
        self.calls += 1
        return self.total.add_(x)

    def __call__(self, x):
        return self.add(x).clone()

    def __getitem__(self, key):
        return self.total[key]

    @property
    def stats(self):
        return Stats(self.calls, id(self))

    @contextmanager
    def adding(self, x):
        yield self.add(x).clone()

    def child(self):
        return Counter()

    def tensors(self):
        return {"total": self.total}


def use(counter) -> None:
    counter.add(1)
    counter(2)
    _ = counter[0], counter.stats, counter.tensors()
    with counter.adding(3):
        pass
    counter.child().add(4)
    with pytest.raises(ArgumentError):
        counter.add(None)


def told(body=use) -> list:
    transcript = Transcript()
    body(RecordingObject(Counter(), "counter", transcript))
    return [(n, x.tolist() if isinstance(x, torch.Tensor) else x) for n, x in transcript.end("holds")]


def test_calls_attributes_items_scopes_objects_and_errors_are_told() -> None:
    now = told()
    assert now[: now.index(("counter.add()", "ArgumentError of x")) + 1] == [
        ("counter.add()", [1.0, 1.0]),
        ("counter()", [3.0, 3.0]),
        ("counter[0]", 3.0),
        ("counter.stats.calls", 2),
        ("counter.tensors().total", str((torch.Size([2]), torch.float32))),
        ("counter.adding()", "_GeneratorContextManager"),
        ("counter.adding().__enter__()", [6.0, 6.0]),
        ("counter.adding().__exit__()", False),
        ("counter.child()", "Counter"),
        ("counter.child().add()", [4.0, 4.0]),
        ("counter.add()", "ArgumentError of x"),
    ]


def test_a_result_that_changed_later_is_told_at_the_end() -> None:
    assert ("counter.add() at the end", [6.0, 6.0]) in told()
    assert ("counter() at the end", [3.0, 3.0]) in told()
    assert told()[-1] == ("the clause", "holds")


def unequal(name, x, y) -> str:
    return "" if x == y else f"{name} is {y}, was {x}"


def test_the_first_difference_of_two_transcripts_is_named() -> None:
    def otherwise(counter) -> None:
        counter.add(1)
        counter(5)

    def shorter(counter) -> None:
        counter.add(1)

    assert first_difference(told(), told(), unequal) == ""
    assert first_difference(told(), told(otherwise), unequal) == "counter() is [6.0, 6.0], was [3.0, 3.0]"
    assert first_difference(told(otherwise), told(shorter), unequal).startswith("counter.add() at the end gives")


EFFORT = Profile("test", 2, 60)


STAGING = "copied_torch/rollout/batch.py"


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, SourceMutant]:
    """Changes of a batch's storage whose effect is known: each with a clause that executes it and does not fail."""
    wanted = {"RB-02": ("x.copy_", "pass"), "RB-15": ("torch.zeros", "torch.ones")}
    folder = tmp_path_factory.mktemp("mutants")
    copy = PluginCopy.written(folder / "original")
    runs = originals(copy, ("rollout_buffer",), EFFORT, clauses=frozenset(wanted))["rollout_buffer"]
    lines = source_of(STAGING).decode().splitlines()
    todo = []
    for clause, (old, new) in wanted.items():
        own = [r for r in runs if r.clause == clause]
        found = (s for s in sites(own) if s.file == STAGING and s.mutation.new == new)
        todo.append(Drawn("rollout_buffer", next(s for s in found if old in lines[s.mutation.line - 1]), own))
    return dict(zip(wanted, attacked(copy, folder, todo, EFFORT, calls=100), strict=True))


def test_what_a_clause_is_given_tells_a_mutant_from_the_original(judged) -> None:
    """RB-02 counts tokens; the ids of groups, which it reads, are compared all the same."""
    assert judged["RB-02"].status == "survived"
    assert judged["RB-02"].why.startswith("a case of RB-02")
    assert "rollout_buffer.pop().group_ids" in judged["RB-02"].why


def test_a_mutant_that_gives_clauses_the_same_is_ruled_out(judged) -> None:
    """Storage of batches is written before it is read."""
    assert (judged["RB-15"].status, judged["RB-15"].clause) == ("equivalent", "")
