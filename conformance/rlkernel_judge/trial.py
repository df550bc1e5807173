"""The trial of one candidate, no line of which runs here: read it, run it in a sandbox, attack, probe, time, score it.

python -m rlkernel_judge.trial [PARENT]: task as JSON on standard input, verdict on standard output; ends with PARENT.
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
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, Final

from rlkernel import policy
from rlkernel.discover import brief, guarded
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
from rlkernel_judge.arena import Arena
from rlkernel_judge.guard import our_functions, plugin_packages
from rlkernel_judge.probes import PROBE_FAULTS, run_probes
from rlkernel_judge.source import SourceReport, read
from rlkernel_judge.verdict import (
    ClauseReport,
    Counterexample,
    FindingReport,
    Isolation,
    ProbeReport,
    Task,
    Verdict,
    bad_fields,
)
from rlkernel_judge.worker_client import (
    BACKEND,
    BaselineError,
    CandidateError,
    Worker,
    WorkerLost,
    call_candidate,
    registered_candidate,
)

# Clauses about the process of the caller, which a candidate in another one cannot be held against: by clause, and of
# every operator by the number that ends a clause's id.
_MEMORY: Final = "memory is measured in the process of the caller"
_CALLER: Final = "the process of the caller cannot be reached from the judged one"
_NOT_JUDGED: Final = {
    **dict.fromkeys(("LL-05", "LL-07", "LH-03", "LPL-02"), _MEMORY),
    "93": "unwritten results: the probe `all written` gives the judged process poisoned memory",
    "94": "results of its own: the probe `results stay` looks at the judged process",
    "95": _CALLER,
    "96": _CALLER,
}
_CAPTURE: Final = "a graph cannot be recorded across processes; `rlkernel conformance run` attacks it"
_DISTRIBUTED: Final = "a group of processes cannot be sent to the judged one; `rlkernel conformance run` attacks it"
_MAX_DEATHS: Final = 3  # workers that may die under clauses before the rest is given up
_NOT_COMPILED: Final = frozenset(
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
        if task.op not in workloads.ON_CPU:
            what = "operator that can be judged" if task.op in OPERATORS else "operator"
            raise UnknownNameError(what, task.op, workloads.ON_CPU)
        known = {a.clause.id for a in attacks_on(task.op)}
        for wanted in task.clauses:
            if wanted not in known:
                raise UnknownNameError(f"clause of {task.op} with an attack", wanted, known)
        self.task, self.file, self.data = task, file, data
        self.weights = score.weights(task.score)
        self.baseline = baseline_of(task)
        self.began = time.monotonic()
        self.stage = ""  # in which the fault was found
        self.source = self._read()
        self.claims = self.source.claims | workloads.needs(task.op)
        self.dtypes = self.source.dtypes or ("float32",)
        self.leaves_out = frozenset(OPERATORS[task.op].optional) - self.claims
        self.work = workloads.workload(task.op, task.device)
        if self.work.dtype not in self.dtypes:
            self.work = replace(self.work, dtype=self.dtypes[0])
        self.fault, self.message = self.source.fault, self.source.message
        self.stage = "read" if self.fault is not None else ""
        self.compiled = False
        self.outcomes: list[Outcome] = []
        self.not_judged: dict[str, str] = {}
        self.probes: list[ProbeReport] = []
        self.measured = timing.Measured(None)
        self.sandbox = sandbox.choose(task.sandbox)
        self.facts: dict[str, bool] = {}
        self.worker: Worker | None = None
        if self.fault is None and task.strict and self.source.forbidden:
            self.fault, self.stage = "rejected", "read"
            self.message = "; ".join(f"line {f.line}: {f.message}" for f in self.source.forbidden[:5])

    def run(self) -> None:
        """The stages."""
        if self.fault is not None:
            return
        with ExitStack() as stack:

            def current() -> Worker:
                """The worker with the candidate; a new one where it is lost."""
                if self.worker is None or self.worker.lost is not None:
                    if self.worker is not None:
                        self.worker.close()
                    self.worker = self._start(stack)
                return self.worker

            for name, stage in self._stages().items():
                self._carry_out(name, partial(stage, current))
                if self.fault is not None and (name != "clauses" or self.fault in _NOT_COMPILED):
                    break

    def _stages(self) -> dict[str, Callable[[Callable[[], Worker]], None]]:
        return {"first call": self._first_call, "clauses": self._attack, "probes": self._probe, "timing": self._time}

    def _carry_out(self, name: str, stage: Callable[[], None]) -> None:
        """One stage; whatever it raises is a fault of this file, but for what concerns the task."""
        _, error = guarded(stage)
        match error:
            case None:
                pass
            case SystemExit():  # a signal asked the trial to end
                raise error
            case ConfigError() if not isinstance(error, UnknownNameError):
                raise error
            case WorkerLost():
                self._fail(error.fault, str(error))
            case Violation():
                self._fail("wrong_result", str(error))
            case CandidateError() | ArgumentError() | LayoutError():
                self._fail(fault_of(error), str(error))
            case _:
                self._fail(faults.of_error(error), f"it could not be judged: {brief(error)}")
        if self.fault is not None and not self.stage:
            self.stage = name

    def _read(self) -> SourceReport:
        """What the source holds; one that breaks the reading is refused."""
        found, error = guarded(partial(read, self.data, self.task.op))
        if isinstance(error, UnknownNameError):
            raise error
        return found or SourceReport("rejected", f"the source cannot be read: {brief(error)}")

    def _left(self) -> float:
        return self.task.limit_s - (time.monotonic() - self.began)

    def _fail(self, fault: str, message: str) -> None:
        if self.fault is None:
            self.fault, self.message = fault, message

    def _start(self, stack: ExitStack, *, impls: tuple[Impl, ...] = (), compiled: bool = False) -> Worker:
        """A worker with the candidate loaded, or with implementations that are installed.

        Raises:
            WorkerLost: it did not start, which is `not_run`, or loading it failed.
        """
        gpu, memory = not self.task.device.startswith("cpu"), int(self.task.memory_gib * 2**30)
        limits = sandbox.Limits(int(self.task.limit_s * (os.cpu_count() or 1)), memory, gpu=gpu)
        size = timing.shared_memory(self.work, self.task.device) if self.task.timing else 0
        arena = stack.enter_context(closing(Arena.new(size))) if size else None
        worker = stack.enter_context(
            Worker(self.sandbox, self.task.op, self.task.device, limits, baseline=bool(impls), arena=arena)
        )
        try:
            ready, _, _ = worker.ask("ready")
        except WorkerLost as error:
            raise WorkerLost("not_run", f"its process did not start: {error}") from error
        if ready["complaint"] is not None:
            worker.close()
            self._weaken(ready["complaint"])
            return self._start(stack, impls=impls, compiled=compiled)
        if self._left() <= 0:
            raise WorkerLost("not_run", "the time of the trial was over when its process had started")
        worker.deadline = time.monotonic() + min(self.task.first_s, self._left())
        text = None if impls else self.data.decode()
        known = {} if impls else {"functions": our_functions(), "plugins": plugin_packages()}
        if not impls:
            self.facts = ready["facts"]
        worker.ask("load", source=text, impls=impls, op=self.task.op, compile=compiled, **known)
        return worker

    def _weaken(self, complaint: str) -> None:
        """Take the next sandbox, for the device cannot be used in this one."""
        found = sandbox.weaker(self.sandbox) if self.task.sandbox == "auto" else None
        if found is None:
            raise ConfigError(f"{complaint} (in sandbox {self.sandbox.level}); --sandbox says which to use")
        self.sandbox = found

    def _first_call(self, current: Callable[[], Worker]) -> None:
        """Load it and call it once."""
        worker, op = current(), self.task.op
        worker.deadline = time.monotonic() + max(1.0, min(self.task.first_s, self._left()))
        given = workloads.draw(workloads.small(op, self.dtypes[0]), 0, self.task.device)
        try:
            result = call_candidate(worker, given)
        except (CandidateError, ArgumentError, LayoutError) as error:
            self.compiled = fault_of(error) not in _NOT_COMPILED
            raise
        except Violation:
            self.compiled = True
            raise
        self.compiled = True
        # What it gives once it gives always.
        self.leaves_out -= {n for n in self.leaves_out if getattr(result, n, None) is not None}

    def _attack(self, current: Callable[[], Worker]) -> None:
        """Every clause of what is claimed."""
        effort, deaths = profile(self.task.profile), 0
        with registered_candidate(self.task.op, self.claims, self.dtypes, self.task.device, current):
            subject = Subject(BACKEND, self.task.op, self.task.device)
            for attack in self._attacks(subject):
                clause = attack.clause
                if deaths >= _MAX_DEATHS or self._left() <= 0:
                    fault = "not_run" if deaths < _MAX_DEATHS else self.outcomes[-1].fault
                    why = "given up before this clause"
                    self.outcomes.append(Outcome(subject.op, clause.id, clause.title, "fault", fault, why))
                    continue
                worker = current()
                worker.deadline = time.monotonic() + max(0.1, min(effort.limit_s, self._left()))
                with subject.chosen():
                    outcome = carry_out(subject, attack, effort)
                if worker.lost is not None:
                    deaths += 1
                    outcome = replace(outcome, status="fault", fault=worker.lost.fault, message=str(worker.lost))
                self.outcomes.append(outcome)
        if refuted := next((o for o in self.outcomes if o.failed), None):
            self._fail(refuted.fault or "unknown", f"{refuted.clause} {refuted.title}: {refuted.message}")
        elif not self.outcomes:
            self._fail("not_run", "no clause that was asked for applies and can be judged from another process")

    def _attacks(self, subject: Subject) -> Iterator[Attack]:
        """Attacks that apply and that the task asks for."""
        for attack in clauses_of(subject)[0]:
            clause = attack.clause
            if self.task.clauses and clause.id not in self.task.clauses:
                continue
            why = _NOT_JUDGED.get(clause.id) or _NOT_JUDGED.get(clause.id.rpartition("-")[2])
            why = _DISTRIBUTED if clause.feature in {"group", "process_group", "collectives"} else why
            why = _CAPTURE if clause.judges == "capture" else why
            if why is None:
                yield attack
            else:
                self.not_judged[clause.id] = why

    def _probe(self, current: Callable[[], Worker]) -> None:
        """Look for cheating; what a wrong candidate does is wrong, not cheating."""
        if self.fault is not None:
            return
        worker = current()
        worker.deadline = time.monotonic() + max(1.0, min(60.0, self._left()))
        for probe in run_probes(worker, self.task.op, self.dtypes[0], self.leaves_out):
            self.probes.append(probe)
        if caught := next((p for p in self.probes if not p.held), None):
            self._fail(PROBE_FAULTS.get(caught.name, "cheating"), f"{caught.name}: {caught.message}")

    def _time(self, current: Callable[[], Worker]) -> None:
        """Candidate against baseline."""
        if self.fault is not None or not self.task.timing:
            return
        impls, compiled = self.baseline
        with ExitStack() as stack:
            try:
                worker = current()
                rival = self._start(stack, impls=impls, compiled=compiled)
                until = time.monotonic() + max(1.0, self._left())
                self.measured = timing.measure(
                    worker, rival, self.work,
                    until=until, call_s=self.task.first_s, noise=self.task.noise, leaves_out=self.leaves_out,
                )  # fmt: skip
            except BaselineError as error:
                self.message = f"no speedup: the baseline {self.task.baseline} failed: {error}"
            if self.measured.fault is not None:
                self._fail(self.measured.fault, self.measured.message)

    def verdict(self) -> Verdict:
        """What was found."""
        task, measured, held = self.task, self.measured, sum(o.status == "held" for o in self.outcomes)
        correct = self.fault in {None, "not_measurable"} and held > 0
        found: dict[str, Any] = {"compiled": self.compiled, "correct": correct, "fault": self.fault}
        found |= {"pass_rate": held / max(1, len(self.outcomes)), "speedup": measured.speedup}
        terms = score.terms(self.weights, **found, low=measured.interval[0] if measured.interval else None)
        return Verdict(
            **task.model_dump(include={"op", "device", "profile", "baseline"}),
            **found,
            file=self.file,
            source_hash=hashlib.sha256(self.data).hexdigest(),
            held=held,
            attacked=len(self.outcomes),
            stage=self.stage,
            message=self.message[:4000],
            counterexample=self._counterexample(),
            claims=tuple(sorted(self.claims)),
            clauses=tuple(
                ClauseReport(clause=o.clause, title=o.title, status=o.status, fault=o.fault, message=o.message[:2000])
                for o in self.outcomes
            ),
            not_judged=self.not_judged,
            probes=tuple(self.probes),
            findings=tuple(FindingReport(**f._asdict()) for f in self.source.findings),
            speedup_interval=measured.interval,
            fast_p=score.fast_p_of(correct=correct, speedup=measured.speedup),
            score=sum(terms.values()),
            score_terms=terms,
            times=measured.times,
            isolation=Isolation(level=self.sandbox.level, as_nobody=self.sandbox.as_nobody, facts=self.facts),
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
    sandbox.end_with_parent(*map(int, sys.argv[1:]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the workers on the way out
    asked = json.load(sys.stdin)
    try:
        verdict = judge(base64.b64decode(asked["source"]), Task(**asked["task"]), file=asked["file"])
    except RLKernelError as error:
        sys.stdout.write(json.dumps({"error": str(error), "fields": bad_fields(error)}))
    else:
        sys.stdout.write(json.dumps({"verdict": verdict.model_dump(mode="json")}))


if __name__ == "__main__":
    main()
