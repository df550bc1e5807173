"""A run: draw mutants of plain torch by seed, attack them, and look for calls that tell survivors from the original."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from rlkernel.sources import CLONE
from rlkernel_conformance.leak_check import attacks_with_leak_check
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.source_mutants import differences, trials
from rlkernel_conformance.source_mutants.draws import Site, drawn, sites, unexecuted
from rlkernel_conformance.source_mutants.plugin_copy import PluginCopy, original, source_of
from rlkernel_conformance.source_mutants.processes import Answer, Trial, carried_out
from rlkernel_conformance.source_mutants.trials import ClauseRun, Kill
from rlkernel_core.errors import RLKernelError, UnknownNameError
from rlkernel_core.spec import OPERATORS

_SLOWER: Final = 5.0  # a mutant may take so many times what the original took for a clause
_AND_S: Final = 30.0  # and so many seconds more
KILLED: Final = ("killed", "timeout", "died")


@dataclass(frozen=True)
class SourceMutant:
    """One mutant and how it fared."""

    op: str
    kind: str  # of mutation
    file: str
    line: int
    diff: str
    status: str  # killed | timeout | died | trivial | survived | equivalent
    clause: str  # that killed it
    why: str  # what the clause said; of a survivor, what differs from the original, or that nothing does

    @property
    def counts(self) -> bool:
        """Whether it is in the share: no equivalent one, and none that fails every call."""
        return self.status not in {"trivial", "equivalent"}

    @property
    def killed(self) -> bool:
        """A clause failed."""
        return self.status in KILLED


@dataclass(frozen=True)
class Findings:
    """All that a run found."""

    seed: int
    profile: str
    mutants: tuple[SourceMutant, ...]
    unexecuted: Mapping[str, list[str]]  # operator -> lines that no clause executes
    broken: Mapping[str, dict[str, str]]  # operator -> clauses that the unchanged copy fails, which kill nothing

    @property
    def share(self) -> float:
        """Share killed of those that count; 1 of none."""
        counted = [m for m in self.mutants if m.counts]
        return sum(m.killed for m in counted) / len(counted) if counted else 1.0

    def by(self, name: str) -> dict[str, Counter[str]]:
        """Statuses by "op" or "kind"."""
        found: dict[str, Counter[str]] = {}
        for m in self.mutants:
            found.setdefault(getattr(m, name), Counter())[m.status] += 1
        return found

    def content(self) -> dict[str, Any]:
        """Everything as plain data."""
        counted = [m for m in self.mutants if m.counts]
        return {
            "seed": self.seed,
            "profile": self.profile,
            "killed": sum(m.killed for m in counted),
            "of": len(counted),
            "share": self.share,
            "mutants": [vars(m) for m in self.mutants],
            "unexecuted": dict(self.unexecuted),
            "broken": dict(self.broken),
        }


def run(
    ops: Iterable[str],
    number: int,
    seed: int,
    profile: Profile,
    *,
    clauses: Iterable[str] = (),
    jobs: int = 1,
    watch: Callable[[SourceMutant], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Draw mutants, evenly over operators, and attack them.

    Args:
        ops: operators; empty for all.
        number: mutants.
        seed: what is drawn depends on it, on the sources, and on which lines the clauses execute.
        profile: effort of each attack.
        clauses: ids such as "GF-04"; mutants are attacked with these alone. Empty for all.
        jobs: processes at a time.
        watch: told every mutant as it is done.
        tell: told what goes on.

    Raises:
        UnknownNameError: no clause of that id.
        RLKernelError: an attack on the unchanged copy did not end.
    """
    names, wanted = tuple(ops) or tuple(OPERATORS), frozenset(clauses)
    known = {clause for op in names for clause in attacks_with_leak_check(op)}
    for clause in wanted - known:
        raise UnknownNameError("clause", clause, known)
    with tempfile.TemporaryDirectory(prefix="rlkernel-mutants-") as temporary:
        folder = Path(temporary)
        copy = PluginCopy.written(folder / "original")
        tell(f"attacking the original: {', '.join(names)}")
        runs = originals(copy, names, profile, clauses=wanted, jobs=jobs, tell=tell)
        todo = []
        for i, op in enumerate(names):
            share = number // len(names) + (i < number % len(names))
            held = [r for r in runs[op] if r.held]
            todo += [Drawn(op, site, held) for site in islice(drawn(sites(held), seed, op), share)]
        done = attacked(copy, folder, todo, profile, jobs=jobs, watch=watch)
    return Findings(
        seed,
        profile.name,
        tuple(done),
        {op: unexecuted(runs[op]) for op in names},
        {op: {r.clause: r.message for r in runs[op] if not r.held} for op in names},
    )


@dataclass(frozen=True)
class Drawn:
    """A mutation that an operator is attacked with."""

    op: str
    site: Site
    runs: list[ClauseRun]  # of the original, with what each clause took

    def order(self, kills: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
        """The clauses that execute the change: first those that take little time and killed many so far."""
        mine = (r for r in self.runs if r.clause in self.site.clauses)
        return tuple(r.clause for r in sorted(mine, key=lambda r: r.seconds / (1 + kills[self.op, r.clause])))

    @property
    def limits(self) -> dict[str, float]:
        """Seconds for each clause."""
        return {r.clause: _AND_S + _SLOWER * r.seconds for r in self.runs}

    def result(self, status: str, clause: str = "", why: str = "") -> SourceMutant:
        """The mutant with how it fared."""
        path, m = original(self.site.file), self.site.mutation
        file = str(path.relative_to(CLONE)) if path.is_relative_to(CLONE) else self.site.file
        return SourceMutant(self.op, m.kind, file, m.line, m.diff(source_of(self.site.file)), status, clause, why)


def originals(
    copy: PluginCopy,
    ops: tuple[str, ...],
    profile: Profile,
    *,
    clauses: frozenset[str] = frozenset(),
    jobs: int = 1,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, list[ClauseRun]]:
    """How the unchanged copy fares with these clauses of the operators, or all; tells a line of each operator.

    Raises:
        RLKernelError: an attack on it did not end.
    """
    due = [
        Trial(op, trials.attack_original, (copy.folder, op, profile, clauses), limit_s=4 * profile.limit_s)
        for op in ops
    ]
    found = {}
    for trial, answer in carried_out(due, jobs):
        if answer.ended != "done":
            raise RLKernelError(f"the unchanged copy did not answer for {trial.name}, {answer.step}: {answer.ended}")
        found[trial.name] = answer.found
        lost = [r.clause for r in answer.found if not r.held]
        took = f"{trial.name}: {len(answer.found)} clauses, {sum(r.seconds for r in answer.found):.1f} s"
        tell(took + (f"; it fails {', '.join(lost)}, which kill nothing" if lost else ""))
    return {op: found[op] for op in ops}


def attacked(
    copy: PluginCopy,
    folder: Path,
    todo: list[Drawn],
    profile: Profile,
    *,
    jobs: int = 1,
    calls: int = differences.CALLS,
    watch: Callable[[SourceMutant], None] = lambda _: None,
) -> list[SourceMutant]:
    """Each attacked, and if it survives, compared in about so many `calls`; in the order drawn."""
    found: dict[int, SourceMutant] = {}
    survivors: list[int] = []
    kills = Counter[tuple[str, str]]()

    def due() -> Iterator[Trial]:
        for i, one in enumerate(todo):
            made = copy.mutant(folder / f"mutant-{i}", one.site.file, one.site.mutation)
            args = (made.folder, one.op, profile, one.order(kills))
            yield Trial(str(i), trials.attack_mutant, args, one.limits)

    def compared() -> Iterator[Trial]:
        for i in survivors:
            one = todo[i]
            args = (folder / f"mutant-{i}", one.op, one.site.where, one.order(kills), calls)
            yield Trial(str(i), differences.search_differences, args, limit_s=120.0)

    for trial, answer in carried_out(due(), jobs):
        one, i = todo[int(trial.name)], int(trial.name)
        mutant = _judged(one, answer)
        if mutant is None:
            survivors.append(i)
        else:
            found[i] = mutant
            kills[one.op, mutant.clause] += 1
            shutil.rmtree(folder / f"mutant-{i}")
            watch(mutant)
    for trial, answer in carried_out(compared(), jobs):
        one, i = todo[int(trial.name)], int(trial.name)
        found[i] = _told_apart(one, answer)
        watch(found[i])
    return [found[i] for i in sorted(found)]


def _judged(one: Drawn, answer: Answer) -> SourceMutant | None:
    """How a mutant fared; None for one that failed no clause."""
    if answer.found:
        kill: Kill = answer.found[0]
        return one.result("killed" if kill.clause else "trivial", kill.clause, kill.message)
    if answer.ended == "timeout":
        return one.result("timeout", answer.step, f"no answer within {one.limits.get(answer.step, 0):.0f} s")
    if answer.ended != "done":
        return one.result("died", answer.step, answer.ended)
    return None


def _told_apart(one: Drawn, answer: Answer) -> SourceMutant:
    said: list[differences.Difference] = answer.found
    last = said[-1] if said else differences.Difference(0)
    if last.found:
        return one.result("survived", why=last.found)
    if answer.ended != "done":
        return one.result("survived", why=f"the comparison ended in {answer.step}: {answer.ended}")
    what = "rounding alone differs" if last.rounding else "no difference"
    if last.calls < differences.ENOUGH:
        return one.result("survived", why=f"{what} in {last.calls} calls that execute it, too few to rule it out")
    return one.result("equivalent", why=f"{what} in {last.calls} calls that execute it")
