"""The trial of one candidate: read it, run it where it can do no harm, attack it, probe it, time it, score it.

python -m rlkernel_judge.trial      task and source as JSON on standard input, the verdict on standard
                                                output; no line of the candidate's runs in this process
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from rlkernel import policy
from rlkernel_conformance import faults
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.clauses import attacks_on
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.harness import Outcome, carry_out, clauses_of
from rlkernel_conformance.profiles import profile
from rlkernel_conformance.report import environment
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ArgumentError, ConfigError, LayoutError, RLKernelError, UnknownNameError
from rlkernel_core.manifest import Impl
from rlkernel_core.spec import OPERATORS
from rlkernel_judge import sandbox, score, timing, workloads
from rlkernel_judge.probes import REPLACED, probed
from rlkernel_judge.source import Reading, read
from rlkernel_judge.verdict import (
    ClauseTold,
    Counterexample,
    FindingTold,
    Isolation,
    ProbeTold,
    Task,
    Verdict,
)
from rlkernel_judge.worker_client import BACKEND, BaselineError, CandidateError, Lost, Seat, gathered, seated

# Clauses about the process of the caller, which a candidate in another one cannot be held against.
_ELSEWHERE: Final = {
    "LL-05": "memory is measured in the process of the caller",
    "LL-07": "memory is measured in the process of the caller",
    "LH-03": "memory is measured in the process of the caller",
    "LPL-02": "memory is measured in the process of the caller",
}
# The same of every operator, by the number that ends a clause's id.
_OWED: Final = {
    "93": "unwritten results: the probe `all written` gives the judged process poisoned memory",
    "94": "results of its own: the probe `results stay` looks at the judged process",
    "95": "the process of the caller cannot be reached from the judged one",
    "96": "the process of the caller cannot be reached from the judged one",
}
_CAPTURE: Final = "a graph cannot be recorded across processes; `rlkernel conformance run` attacks it"
_DISTRIBUTED: Final = "a group of processes cannot be sent to the judged one; `rlkernel conformance run` attacks it"
_LIVES: Final = 3  # hosts that may die under clauses before the rest is given up
_BROKEN: Final = frozenset(
    {"import_error", "syntax_error", "compile_error", "jit_error", "unsupported_arch", "shared_memory_exceeded"}
)


def judge(data: bytes, task: Task, *, file: str = "candidate.py") -> Verdict:
    """The verdict on one file.

    Raises:
        ConfigError: the task asks for what this machine or this operator does not have.
        UnknownNameError: no such operator, clause, baseline or score.
    """
    trial = _Trial(data, task, file)
    trial.run()
    return trial.verdict()


class _Trial:
    """What is known so far, stage by stage; the first stage that fails is the last."""

    def __init__(self, data: bytes, task: Task, file: str) -> None:
        if task.op not in workloads.TOY:
            what = "operator that can be judged" if task.op in OPERATORS else "operator"
            raise UnknownNameError(what, task.op, workloads.TOY)
        known = {a.clause.id for a in attacks_on(task.op)}
        for wanted in task.clauses:
            if wanted not in known:
                raise UnknownNameError(f"clause of {task.op} with an attack", wanted, known)
        self.task, self.file, self.data = task, file, data
        self.weights = score.weights(task.score)
        self.baseline = baseline_of(task)
        self.began = time.monotonic()
        self.reading: Reading = read(data, task.op)
        self.claims = self.reading.claims | workloads.needs(task.op)
        self.dtypes = self.reading.dtypes or ("float32",)
        self.fault, self.message = self.reading.fault, self.reading.message
        self.compiled = False
        self.outcomes: list[Outcome] = []
        self.elsewhere: dict[str, str] = {}
        self.probes: list[ProbeTold] = []
        self.measured = timing.Measured(None)
        self.cage = sandbox.cage(task.sandbox)
        self.facts: dict[str, bool] = {}
        if self.fault is None and task.strict and self.reading.forbidden:
            self.fault = "rejected"
            self.message = "; ".join(f"line {f.line}: {f.message}" for f in self.reading.forbidden[:5])

    def run(self) -> None:
        """The stages."""
        if self.fault is not None:
            return
        with ExitStack() as stack:
            seat: list[Seat] = []

            def current() -> Seat:
                if not seat or seat[-1].lost is not None:
                    while seat:
                        seat.pop().close()
                    seat.append(self._start(stack))
                return seat[-1]

            for stage in (self._first_call, self._attack, self._probe, self._time):
                try:
                    stage(current)
                except Lost as error:
                    self._fail(error.fault, str(error))
                except (CandidateError, ArgumentError, LayoutError) as error:
                    self._fail(fault_of(error), str(error))
                except Violation as error:
                    self._fail("wrong_result", str(error))
                if self.fault is not None and stage != self._attack:
                    break
                if self.fault in _BROKEN:
                    break

    def _left(self) -> float:
        return self.task.limit_s - (time.monotonic() - self.began)

    def _fail(self, fault: str, message: str) -> None:
        if self.fault is None:
            self.fault, self.message = fault, message

    def _start(self, stack: ExitStack, *, impls: tuple[Impl, ...] = (), compiled: bool = False) -> Seat:
        """A host with the candidate loaded, or with implementations that are installed."""
        gpu = not self.task.device.startswith("cpu")
        cpu_s = int(self.task.limit_s * (os.cpu_count() or 1))
        limits = sandbox.Limits(cpu_s=cpu_s, memory=0 if gpu else sandbox.Limits.memory)
        seat = stack.enter_context(Seat(self.cage, self.task.op, self.task.device, limits, baseline=bool(impls)))
        seat.until = time.monotonic() + max(1.0, self._left())
        said, _, _ = seat.ask("ready")
        if said["complaint"] is not None:
            seat.close()
            self._weaken(said["complaint"])
            return self._start(stack, impls=impls, compiled=compiled)
        text = None if impls else self.data.decode()
        seat.ask("load", source=text, impls=impls, op=self.task.op, compile=compiled)
        if not impls:
            self.facts = said["facts"]
        return seat

    def _weaken(self, complaint: str) -> None:
        """Take the next cage, for the device cannot be used in this one."""
        found = sandbox.weaker(self.cage) if self.task.sandbox == "auto" else None
        if found is None:
            raise ConfigError(f"{complaint} (in sandbox {self.cage.level}); --sandbox says which to use")
        self.cage = found

    def _first_call(self, current: Callable[[], Seat]) -> None:
        """Load it and call it once."""
        seat, op = current(), self.task.op
        self.compiled = True
        given = workloads.draw(workloads.small(op, self.dtypes[0]), 0, self.task.device)
        try:
            gathered(seat, given)
        except (CandidateError, ArgumentError, LayoutError) as error:
            self.compiled = fault_of(error) not in _BROKEN
            raise

    def _attack(self, current: Callable[[], Seat]) -> None:
        """Every clause of what is claimed."""
        effort, deaths = profile(self.task.profile), 0
        with seated(self.task.op, self.claims, self.dtypes, self.task.device, current):
            subject = Subject(BACKEND, self.task.op, self.task.device)
            for attack in self._due(subject):
                if deaths >= _LIVES or self._left() <= 0:
                    fault = "not_run" if deaths < _LIVES else self.outcomes[-1].fault
                    clause = attack.clause
                    self.outcomes.append(
                        Outcome(subject.op, clause.id, clause.title, "fault", fault, "given up before this clause")
                    )
                    continue
                seat = current()
                seat.until = time.monotonic() + max(0.1, min(effort.limit_s, self._left()))
                with subject.chosen():
                    outcome = carry_out(subject, attack, effort)
                if seat.lost is not None:
                    deaths += 1
                    outcome = replace(outcome, status="fault", fault=seat.lost.fault, message=str(seat.lost))
                self.outcomes.append(outcome)
        if refuted := next((o for o in self.outcomes if o.failed), None):
            self._fail(refuted.fault or "unknown", f"{refuted.clause} {refuted.title}: {refuted.message}")
        elif not self.outcomes:
            self._fail("not_run", "no clause that was asked for applies and can be judged from another process")

    def _due(self, subject: Subject) -> Iterator[Attack]:
        """Attacks that apply and that the task asks for."""
        for attack in clauses_of(subject)[0]:
            clause = attack.clause
            if self.task.clauses and clause.id not in self.task.clauses:
                continue
            why = _ELSEWHERE.get(clause.id) or _OWED.get(clause.id.rpartition("-")[2])
            why = _DISTRIBUTED if clause.feature in {"group", "process_group", "collectives"} else why
            why = _CAPTURE if clause.judges == "capture" else why
            if why is None:
                yield attack
            else:
                self.elsewhere[clause.id] = why

    def _probe(self, current: Callable[[], Seat]) -> None:
        """Look for cheating; what a wrong candidate does is wrong, not cheating."""
        if self.fault is not None:
            return
        seat = current()
        seat.until = time.monotonic() + max(1.0, min(60.0, self._left()))
        for probe in probed(seat, self.task.op, self.dtypes[0]):
            self.probes.append(probe)
        if caught := next((p for p in self.probes if not p.held), None):
            self._fail("tampering" if caught.name == REPLACED else "cheating", f"{caught.name}: {caught.message}")

    def _time(self, current: Callable[[], Seat]) -> None:
        """Candidate against baseline."""
        if self.fault is not None or not self.task.timing:
            return
        work = workloads.workload(self.task.op, self.task.device)
        if work.dtype not in self.dtypes:
            work = replace(work, dtype=self.dtypes[0])
        impls, compiled = self.baseline
        with ExitStack() as stack:
            try:
                rival = self._start(stack, impls=impls, compiled=compiled)
                seat = current()
                seat.until = rival.until = time.monotonic() + max(1.0, self._left())
                self.measured = timing.measure(seat, rival, work)
            except BaselineError as error:
                self.message = f"no speedup: the baseline {self.task.baseline} failed: {error}"
            if self.measured.fault is not None:
                self._fail(self.measured.fault, self.measured.message)

    def verdict(self) -> Verdict:
        """What was found."""
        task, held = self.task, sum(o.status == "held" for o in self.outcomes)
        correct = self.fault is None and held > 0
        rate = held / len(self.outcomes) if self.outcomes else 0.0
        speedup, bounds = self.measured.speedup, self.measured.interval
        found = score.terms(
            self.weights,
            compiled=self.compiled,
            correct=correct,
            pass_rate=rate,
            fault=self.fault,
            speedup=speedup,
            low=bounds[0] if bounds else None,
        )
        return Verdict(
            op=task.op,
            file=self.file,
            source_hash=hashlib.sha256(self.data).hexdigest(),
            device=task.device,
            profile=task.profile,
            compiled=self.compiled,
            correct=correct,
            pass_rate=rate,
            held=held,
            attacked=len(self.outcomes),
            fault=self.fault,
            message=self.message[:4000],
            counterexample=self._counterexample(),
            claims=tuple(sorted(self.claims)),
            clauses=tuple(
                ClauseTold(clause=o.clause, title=o.title, status=o.status, fault=o.fault, message=o.message[:2000])
                for o in self.outcomes
            ),
            not_judged=self.elsewhere,
            probes=tuple(self.probes),
            findings=tuple(FindingTold(code=f.code, line=f.line, message=f.message) for f in self.reading.findings),
            speedup=speedup,
            speedup_interval=bounds,
            fast_p=score.fast(correct=correct, speedup=speedup),
            score=sum(found.values()),
            score_terms=found,
            baseline=task.baseline,
            times=self.measured.times,
            isolation=Isolation(level=self.cage.level, as_nobody=self.cage.as_nobody, facts=self.facts),
            environment={k: str(v) for k, v in environment(task.device).items()},
            seconds=round(time.monotonic() - self.began, 3),
        )

    def _counterexample(self) -> Counterexample | None:
        refuted = next((o for o in self.outcomes if o.status == "violated"), None)
        if refuted is None:
            return None
        case = re.search(rf"'{refuted.clause}', (.*), device=", refuted.reproduce)
        again = f"rlkernel judge {self.file} --op {self.task.op} --clause {refuted.clause} --no-timing"
        return Counterexample(
            clause=refuted.clause,
            title=refuted.title,
            message=refuted.message[:2000],
            case=case[1] if case else "",
            reproduce=again if self.task.device == "cpu" else f"{again} --device {self.task.device}",
        )


def fault_of(error: Exception) -> str:
    """The fault of what a candidate raised; a refusal of good arguments is a wrong result."""
    return "wrong_result" if isinstance(error, ArgumentError | LayoutError) else faults.of_error(error)


def baseline_of(task: Task) -> tuple[tuple[Impl, ...], bool]:
    """The baseline's implementations, and whether torch.compile goes over the first.

    Raises:
        UnknownNameError: no such backend.
        ConfigError: it does not implement the operator on the device.
    """
    name = "torch" if task.baseline in {"torch", "compile"} else task.baseline
    installed = policy.installed()
    if name not in installed:
        raise UnknownNameError("baseline", name, {"torch", "compile", *installed})
    found = installed[name]
    if found.reason is not None:
        raise ConfigError(f"baseline {name!r} did not load: {found.reason}")
    impls: tuple[Impl, ...] = Subject(name, task.op, task.device).impls
    if not impls:
        raise ConfigError(f"baseline {name!r} implements no {task.op} on {task.device}")
    return impls, task.baseline == "compile"


def main() -> None:
    """One trial over standard input and output; a task that cannot be carried out is answered with its error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the hosts on the way out
    asked = json.load(sys.stdin)
    try:
        verdict = judge(base64.b64decode(asked["source"]), Task(**asked["task"]), file=asked["file"])
    except RLKernelError as error:
        sys.stdout.write(json.dumps({"error": str(error)}))
    else:
        sys.stdout.write(json.dumps({"verdict": verdict.model_dump(mode="json")}))


if __name__ == "__main__":
    main()
