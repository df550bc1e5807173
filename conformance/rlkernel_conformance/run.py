"""A whole run: every operator of a backend, each in processes of its own, several at a time."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from rlkernel import policy
from rlkernel.discover import known_names
from rlkernel_conformance import sanitizer
from rlkernel_conformance import waivers as waived
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.clauses import module_of
from rlkernel_conformance.device_pool import Work, attack_on_devices
from rlkernel_conformance.harness import Outcome, clauses_of
from rlkernel_conformance.isolation import attack_in_processes, not_run
from rlkernel_conformance.leak_check import CLAUSE, attacks_with_leak_check
from rlkernel_conformance.manifests import load, provider
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.report import NOT_ASKED, has_result, present, report
from rlkernel_conformance.shares import joined, shares
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_core.spec import OPERATORS

__all__ = ["Progress", "run"]


@dataclass(frozen=True)
class Progress:
    """An outcome as it comes, and how far the run is."""

    outcome: Outcome
    done: int  # clauses, this one included
    due: int  # clauses that are attacked in this run
    seconds: float  # since the run began


Watch = Callable[[Progress], None]


def run(
    backend: str,
    profile: Profile,
    *,
    ops: Iterable[str] = (),
    clauses: Iterable[str] = (),
    devices: tuple[str, ...] = ("cpu",),
    jobs: int = 1,
    manifest: str | None = None,
    waivers: Path | None = None,
    watch: Watch = lambda _: None,
    within: float = math.inf,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Hold a backend against the clauses of its operators; returns the report of this run alone.

    Args:
        backend: name of the backend.
        profile: effort.
        ops: operators; empty for all that the backend implements.
        clauses: ids such as "SA-08"; the others are `not_run`, and the report is unfinished. Empty for all.
        devices: devices of one kind that share the work; the report names the first.
        jobs: operators attacked at the same time on each device; where there are fewer, they are attacked by several,
            each with some clauses, and with some calls of the clause on pairs of options.
        manifest: "module:attribute" of the backend's manifest; None for an installed one.
        waivers: file of waivers, see `rlkernel_conformance.waivers`.
        watch: told every outcome of an attack as it comes.
        within: seconds for all of it; clauses that have not ended by then are `not_run`, and the report is unfinished.
        earlier: a report; clauses that have a result there, of the present sources and at this effort or more, are not
            asked for.

    Raises:
        UnknownNameError: no such backend or operator, or no attack on a clause of that id here.
        ConfigError: the backend did not load, or implements none of the operators on this device; the devices differ
            in kind; the waivers are malformed or expired; the profile's sanitizer is missing, or has no GPU to look at.
    """
    kinds = {d.partition(":")[0] for d in devices}
    if len(kinds) != 1:
        raise ConfigError(f"devices of several kinds, {', '.join(devices)}: attack each kind in a run of its own")
    if profile.sanitizer is not None:
        sanitizer.executable()
        if kinds != {"cuda"}:
            raise ConfigError(
                f"profile {profile.name} looks at kernels on an NVIDIA GPU, and the device is {devices[0]}: "
                "add --device cuda"
            )
    with nullcontext() if manifest is None else policy.registered(_named(load(manifest), backend)):
        reason = policy.installed()[backend].reason
        if reason is not None:
            raise ConfigError(f"backend {backend!r} did not load: {reason}")
        for op in ops:
            if not policy.is_operator(op):
                raise UnknownNameError("operator", op, OPERATORS)
        known = known_names(policy.installed())
        excused = waived.read(waivers, backend, known, datetime.now(UTC).date()) if waivers is not None else ()
        subjects = [s for op in (ops or OPERATORS) if (s := Subject(backend, op, devices[0])).impls]
        if not subjects:
            raise ConfigError(
                f"{backend} implements none of {', '.join(ops or OPERATORS)} on {devices[0]} with what is installed "
                "here; rlkernel explain OPERATOR says what it needs"
            )
        sources = {s.op: present(s) for s in subjects}
        plan = _asked_for({s: due_on(s) for s in subjects}, frozenset(clauses))
        if earlier is not None:
            plan = {s: _missing(s, due, rest, earlier, sources[s.op], profile) for s, (due, rest) in plan.items()}
        took = {s: _seconds(s, earlier) for s in subjects}
        attacked = _attack_all(plan, took, devices, jobs, manifest, profile, watch, within)
        found = {s: plan[s][1] + attacked[s.op] for s in subjects}
        by = provider(manifest) if manifest else None
        return report(found, profile, provider=by, manifest=manifest, waivers=excused, sources=sources)


def _attack_all(
    plan: Plan,
    took: Mapping[Subject, Mapping[str, float]],
    devices: tuple[str, ...],
    jobs: int,
    manifest: str | None,
    profile: Profile,
    watch: Watch,
    within: float,
) -> dict[str, list[Outcome]]:
    total, done, began, lock = sum(len(due) for due, _ in plan.values()), 0, time.monotonic(), Lock()
    attacked = {(s.op, a.clause.id): (s, a) for s, (due, _) in plan.items() for a in due}
    each = len(devices) * jobs // len(plan)
    work = [Work(s, share) for s, (due, _) in plan.items() for share in shares(due, each, took[s])]
    awaited = Counter((w.subject.op, a.clause.id) for w in work for a in w.attacks)
    parts: defaultdict[tuple[str, str], list[Outcome]] = defaultdict(list)
    late: set[tuple[str, str]] = set()

    def heard(outcome: Outcome) -> None:
        nonlocal done
        of = outcome.op, outcome.clause
        with lock:
            if outcome.status == "not_run":  # another device may
                if of in late:
                    return
                late.add(of)
            else:
                parts[of].append(outcome)
                if len(parts[of]) < awaited[of]:
                    return
                done, outcome = done + 1, joined(*attacked[of], parts[of])
            watch(Progress(outcome, done, total, time.monotonic() - began))

    def attack(subject: Subject, attacks: list[Attack]) -> list[Outcome]:
        return attack_in_processes(subject, attacks, profile, manifest=manifest, watch=heard, until=began + within)

    ended: defaultdict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcomes in attack_on_devices(work, devices, jobs, attack).values():
        for outcome in outcomes:
            ended[outcome.op, outcome.clause].append(outcome)
    return {s.op: [joined(s, a, ended[s.op, a.clause.id]) for a in due] for s, (due, _) in plan.items()}


Plan = dict[Subject, tuple[list[Attack], list[Outcome]]]


def _asked_for(plan: Plan, clauses: frozenset[str]) -> Plan:
    """The attacks on some clauses alone."""
    known = {attack.clause.id for due, _ in plan.values() for attack in due}
    for clause in clauses - known:
        raise UnknownNameError("clause", clause, known)
    return {s: _parted(due, rest, lambda a: not clauses or a.clause.id in clauses) for s, (due, rest) in plan.items()}


def _seconds(subject: Subject, earlier: Mapping[str, Any] | None) -> dict[str, float]:
    """What the clauses of an operator took in an earlier run, whatever came of them."""
    clauses = {} if earlier is None else earlier["operators"].get(subject.spec.id, {})
    return {c["clause"]: c["seconds"] for c in clauses.get("clauses", ()) if c["seconds"] > 0}


def _missing(
    subject: Subject,
    due: list[Attack],
    rest: list[Outcome],
    earlier: Mapping[str, Any],
    sources: str,
    profile: Profile,
) -> tuple[list[Attack], list[Outcome]]:
    """The attacks on clauses without a result."""
    clauses = earlier["operators"].get(subject.spec.id, {}).get("clauses", ())
    there = {c["clause"] for c in clauses if has_result(subject.op, c, earlier, sources, profile.examples)}
    return _parted(due, rest, lambda a: a.clause.id not in there)


def _parted(
    due: list[Attack], rest: list[Outcome], asked: Callable[[Attack], bool]
) -> tuple[list[Attack], list[Outcome]]:
    return [a for a in due if asked(a)], [*rest, *(not_run(a, NOT_ASKED) for a in due if not asked(a))]


def due_on(subject: Subject) -> tuple[list[Attack], list[Outcome]]:
    """The attacks on an operator, and the outcomes of the clauses that have none here."""
    if module_of(subject.op) is None:
        text = "no attack is written yet"
        return [], [Outcome(subject.op, c.id, c.title, "not_attacked", message=text) for c in subject.spec.clauses]
    due, rest = clauses_of(subject)
    return [*due, attacks_with_leak_check(subject.op)[CLAUSE.id]], rest


def _named(manifest: Any, backend: str) -> Any:
    if manifest.name != backend:
        raise ConfigError(f"the manifest is of {manifest.name!r}, not of {backend!r}")
    return manifest
