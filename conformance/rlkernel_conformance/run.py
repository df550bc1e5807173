"""A whole run: every operator of a backend, each in processes of its own, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlkernel import policy
from rlkernel_conformance.clauses import MODULES
from rlkernel_conformance.harness import Outcome, clauses_of
from rlkernel_conformance.isolation import attack_apart
from rlkernel_conformance.mutants import Mutant, mutants_of
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.report import report
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_core.spec import OPERATORS

Watch = Callable[[Outcome], None]


def run(
    backend: str,
    profile: Profile,
    *,
    ops: Iterable[str] = (),
    devices: tuple[str, ...] = ("cpu",),
    jobs: int = 1,
    watch: Watch = lambda _: None,
) -> dict[str, Any]:
    """Hold a backend against the clauses of its operators; returns the report.

    Args:
        backend: name of an installed backend.
        profile: effort.
        ops: operators; empty for all that the backend implements.
        devices: devices of one kind that share the work; the report names the first.
        jobs: operators attacked at the same time on each device.
        watch: told every outcome as it comes.

    Raises:
        UnknownNameError: no such backend or operator.
        ConfigError: the backend did not load, or implements none of the operators on this device.
    """
    found = policy.installed()[backend]
    if found.reason is not None:
        raise ConfigError(f"backend {backend!r} did not load: {found.reason}")
    for op in ops:
        if op not in OPERATORS:
            raise UnknownNameError("operator", op, OPERATORS)
    subjects = [s for op in (ops or OPERATORS) if (s := Subject(backend, op, devices[0])).impls]
    if not subjects:
        raise ConfigError(f"{backend} implements none of {', '.join(ops or OPERATORS)} on {devices[0]}")
    with ThreadPoolExecutor(max_workers=jobs * len(devices)) as pool:
        places = [Subject(s.backend, s.op, devices[i % len(devices)]) for i, s in enumerate(subjects)]
        outcomes = list(pool.map(lambda s: _operator(s, profile, watch), places))
    return report(dict(zip(subjects, outcomes, strict=True)), profile.name)


def _operator(subject: Subject, profile: Profile, watch: Watch) -> list[Outcome]:
    """All clauses of one operator: attacked where there are attacks."""
    if subject.op not in MODULES:
        text = "no attack is written yet"
        return [Outcome(subject.op, c.id, c.title, "not_attacked", message=text) for c in subject.spec.clauses]
    due, rest = clauses_of(subject)
    for outcome in rest:
        watch(outcome)
    return rest + (attack_apart(subject, due, profile, watch=watch) if due else [])


@dataclass(frozen=True)
class Death:
    """How a mutant died, or that it did not."""

    mutant: Mutant
    killed_by: tuple[str, ...]

    @property
    def as_stated(self) -> bool:
        """It died on the clause it was planted for, and on no other than it names."""
        return self.mutant.planted in self.killed_by and set(self.killed_by) <= self.mutant.kills


def zoo(op: str, profile: Profile, *, watch: Callable[[Death], None] = lambda _: None) -> list[Death]:
    """Attack every mutant of an operator."""
    deaths = []
    for bug in mutants_of(op):
        with policy.registered(bug.manifest):
            subject = Subject(bug.manifest.name, op)
            outcomes = attack_apart(subject, clauses_of(subject)[0], profile, manifest=bug.where)
        death = Death(bug, tuple(o.clause for o in outcomes if o.failed))
        deaths.append(death)
        watch(death)
    return deaths
