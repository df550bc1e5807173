"""What a worker does with one clause: attack it, then ask whether the answer can be believed.

A refuted case is carried out a second time (another answer is nondeterminism), the clocks and the suite's own functions
are looked at, and the features that calls needed are noted, so that a claim without an executed case is found.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import rlkernel
from rlkernel.discover import guarded
from rlkernel_conformance import leak_check
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.harness import Outcome, carry_out
from rlkernel_conformance.integrity import Integrity
from rlkernel_conformance.manifests import load
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.reproduce import script
from rlkernel_conformance.subject import Subject


@dataclass(frozen=True)
class RecordingSubject(Subject):
    """A subject that notes the features its calls needed."""

    needed: set[str] = field(default_factory=set, compare=False)
    tell: Callable[[], None] = field(default=lambda: None, compare=False)  # writes the case and its call down

    def note(self, values: Iterable[Any], names: Iterable[str]) -> None:
        """Keep a call in words, here and where it outlives this process."""
        super().note(values, names)
        self.tell()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator."""
        needed, _ = guarded(lambda: self.spec.needs(self.spec.call(*args, **kwargs)))  # what has none is refused below
        result = super().__call__(*args, **kwargs)
        self.needed.update(needed or ())
        self.needed.update(name for name in self.spec.optional if getattr(result, name) is not None)
        return result


class ClauseRunner:
    """The subject of a job, chosen for the time of the scope, and its attacks."""

    def __init__(self, job: dict[str, Any], last_case: int, scope: ExitStack) -> None:
        self.manifest: str | None = job["manifest"]
        if self.manifest:
            scope.enter_context(rlkernel.registered(load(self.manifest)))
        self.attacks = leak_check.attacks_with_leak_check(job["op"])  # a plugin may have brought the operator
        self.profile = Profile(**job["profile"])
        subject = RecordingSubject(job["backend"], job["op"], job["device"], job["check"])
        self.subject = replace(subject, tell=self._write)
        self.last_case = last_case  # descriptor of the file that tells it
        self.case: Any = None
        self.attack: Attack | None = None
        scope.enter_context(self.subject.chosen())
        self.integrity = Integrity()

    def run(self, clause: str, scale: float, part: tuple[int, int]) -> Outcome:
        """Attack one clause with `scale` times the profile's cases, or with a part of its table."""
        attack = replace(self.attacks[clause], scale=scale, part=part)
        self.subject.needed.clear()
        self.case = None
        os.ftruncate(self.last_case, 0)
        try:
            outcome = carry_out(self.subject, self._told(attack), self.profile, manifest=self.manifest)
        except KeyboardInterrupt:
            text = "raised KeyboardInterrupt"
            outcome = Outcome(
                self.subject.op, clause, attack.clause.title, "fault", "protocol_error", text, self._script(attack)
            )
        if outcome.status == "violated":
            leak = clause == leak_check.CLAUSE.id  # what is grown is grown: a second look may find another number
            outcome = replace(outcome, fault="leak") if leak else self._again(attack, outcome)
        broken = self.integrity.broken()
        if broken and outcome.status == "held":  # a clause that was refuted all the same stays so
            text = f"replaced {', '.join(broken)}"
            outcome = replace(outcome, status="fault", fault="tampering", message=text, reproduce=self._script(attack))
        return replace(outcome, features=tuple(sorted(self.subject.needed)))

    def _told(self, attack: Attack) -> Attack:
        """The attack, with a script of every case written down before it is carried out."""

        @wraps(attack.prop)
        def prop(subject: Subject, case: Any) -> None:
            self.case, self.attack = case, attack
            self._write()
            attack.prop(subject, case)

        return replace(attack, prop=prop)

    def _write(self) -> None:
        """The script of the case at hand, for the process that reports it if this one ends."""
        if self.attack is not None:
            os.ftruncate(self.last_case, 0)
            os.pwrite(self.last_case, self._script(self.attack).encode(), 0)

    def _script(self, attack: Attack) -> str:
        return "" if self.case is None else script(self.subject, attack, self.case, self.manifest)

    def _again(self, attack: Attack, outcome: Outcome) -> Outcome:
        """The outcome of a refuted clause, after a second look at its case."""
        _, error = guarded(lambda: attack.prop(self.subject, self.case))
        if isinstance(error, Violation) and str(error) == outcome.message:
            return outcome
        now = "the case holds" if error is None else str(error)
        return replace(outcome, fault="nondeterminism", message=f"{outcome.message}; carried out again: {now}")
