"""What is done with one copy in a process of its own: attack it with clauses, and note which lines each executes."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rlkernel import policy
from rlkernel.discover import brief, guarded
from rlkernel_conformance.example_calls import Call
from rlkernel_conformance.harness import carry_out
from rlkernel_conformance.leak_check import attacks_with_leak_check
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.run import due_on
from rlkernel_conformance.source_mutants.plugin_copy import NAME, PluginCopy
from rlkernel_conformance.source_mutants.processes import Send
from rlkernel_conformance.subject import Subject

_PLAIN: Final = (0, 1, 2)  # seeds of the calls that every mutant is tried with first

Executed = dict[str, frozenset[int]]  # file of the copy -> lines


@dataclass(frozen=True)
class ClauseRun:
    """How the unchanged copy fared with a clause."""

    clause: str
    held: bool
    seconds: float
    message: str
    lines: Executed


@dataclass(frozen=True)
class Kill:
    """How a clause failed, or why it was not asked."""

    clause: str  # "" where a mutant could not be called at all
    message: str


@contextmanager
def subject_of(copy: PluginCopy, op: str) -> Iterator[Subject]:
    """The copy as what is attacked, chosen in the scope."""
    with copy.importable() as manifest, policy.registered(manifest):
        subject = Subject(NAME, op)
        with subject.chosen():
            yield subject


def attack_original(send: Send, folder: Path, op: str, profile: Profile, clauses: frozenset[str]) -> None:
    """Attack the unchanged copy with some clauses, or all if none is named; says a ClauseRun of each."""
    with subject_of(PluginCopy(folder), op) as subject:
        gc.freeze()
        for attack in (a for a in due_on(subject)[0] if not clauses or a.clause.id in clauses):
            send(attack.clause.id, None)
            with executed_lines(folder, *_functions(subject)) as lines:
                outcome = carry_out(subject, attack, profile, shrink=False)
            found = {name: frozenset(seen) for name, seen in lines.items()}
            held = not outcome.failed
            send("found", ClauseRun(attack.clause.id, held, outcome.seconds, outcome.message, found))


def attack_mutant(send: Send, folder: Path, op: str, profile: Profile, clauses: tuple[str, ...]) -> None:
    """Attack a mutant with clauses in this order, up to the first that fails; says a Kill, or nothing."""

    def attack() -> Kill | None:
        with subject_of(PluginCopy(folder), op) as subject:
            send("plain calls", None)
            errors = [guarded(partial(Call(seed).run, subject))[1] for seed in _PLAIN]
            if all(errors):
                return Kill("", brief(errors[0]))
            gc.freeze()
            attacks = attacks_with_leak_check(op)
            for clause in clauses:
                send(clause, None)
                outcome = carry_out(subject, attacks[clause], profile, shrink=False)
                if outcome.failed:
                    return Kill(clause, outcome.message)
            return None

    kill, error = guarded(attack)
    if error is not None:  # it cannot be imported, or be chosen
        kill = Kill("", brief(error))
    if kill is not None:
        send("found", kill)


Function = tuple[str, str]  # file relative to the folder, name


def _functions(subject: Subject) -> tuple[frozenset[Function], frozenset[Function]]:
    """The functions that implement the operator, and those of others, which clauses make arguments with."""
    manifest = policy.installed()[subject.backend].manifest
    impls = manifest.impls if manifest is not None else ()
    places = [(i.op == subject.spec.id, i.target.partition(":")) for i in impls]
    named = [(mine, (f"{module.replace('.', '/')}.py", name)) for mine, (module, _, name) in places]
    own = frozenset(function for mine, function in named if mine)
    return own, frozenset(function for _, function in named) - own


def _at_import(frame: FrameType) -> bool:
    """Whether a frame is the body of a module or a class, or a comprehension or lambda that one runs itself."""
    by = frame.f_back if frame.f_code.co_name.startswith("<") else None
    return any(f is not None and not f.f_code.co_flags & inspect.CO_OPTIMIZED for f in (frame, by))


class _Depth(threading.local):
    """How many calls of the operator, and of others outside of it, a thread is in."""

    own = others = 0


@contextmanager
def executed_lines(
    folder: Path, own: frozenset[Function] = frozenset(), others: frozenset[Function] = frozenset()
) -> Iterator[Mapping[str, set[int]]]:
    """Lines of the functions in a folder that run in the scope, in any thread, by file relative to the folder.

    What runs within one of `others` does not count, unless one of `own` called it, nor what a module runs as it is
    imported: whichever clause comes first would have executed it.
    """
    prefix = f"{folder}/"
    seen: dict[str, set[int]] = {}
    depth = _Depth()

    def called(frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(prefix) or _at_import(frame):
            return None
        file = code.co_filename.removeprefix(prefix)
        is_own, is_other = (file, code.co_name) in own, (file, code.co_name) in others and not depth.own
        depth.own += is_own
        depth.others += is_other
        lines = set() if depth.others else seen.setdefault(file, set())
        lines.add(frame.f_lineno)

        def within(frame: FrameType, event: str, _arg: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            elif event == "return":
                depth.own -= is_own
                depth.others -= is_other
            return within

        return within

    before = sys.gettrace()
    threading.settrace(called)
    sys.settrace(called)
    try:
        yield seen
    finally:
        sys.settrace(before)
        threading.settrace(before)
