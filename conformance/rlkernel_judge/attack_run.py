"""The hostile candidates: data files in `attacks/`, each with what it tries and the honest body it is compared with.

    rlkernel judge attack                 run them all; exit code 1 if any scores above its honest body
    rlkernel judge attack --only NAME     one of them

Each is judged as the server judges a request: by a trial in a process of its own, whose answer is JSON. An attack
succeeds if it scores above its honest body, if the trial gives no verdict, or if it says that it escaped: an attack on
the sandbox raises an error whose text begins with `ESCAPED` where it reached what it should not.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from os import cpu_count
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlkernel_core.documents import read_toml
from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_judge.verdict import Task, complaints

FOLDER: Final = Path(__file__).parent / "attacks"
ESCAPED: Final = "ESCAPED"
Area = Literal["timing", "results", "borrowing", "harm", "source", "sandbox"]
AREAS: Final[tuple[str, ...]] = get_args(Area)
MARGIN: Final = 0.1  # by which a score must be higher, in every one of _PAIRS runs beside its honest body, to count
_PAIRS: Final = 3
_ANY_NOISE: Final = 1e9
_FIRST_S: Final = 20.0
_GRACE_S: Final = 60.0  # beyond the limit of a trial, to start and to end
# A busy process for --loaded: computes, and moves more memory than caches hold, for as long as what started it lives.
_BUSY: Final = """
import os, torch
torch.set_num_threads(1)
x, parent = torch.ones(1 << 23), os.getppid()
while os.getppid() == parent:
    x = (x * 1.0001).clone()
"""


class Repeated(BaseModel):
    """Text that a source holds many times, in place of `{repeated}`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    times: int


class Honest(BaseModel):
    """A body that does what it should, and how attacks that are compared with it are judged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clauses: tuple[str, ...]
    source: str


class Attack(BaseModel):
    """One hostile candidate, as its file says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    tries: str = Field(description="what it tries, in one sentence")
    area: Area
    honest: str = Field(description="file in attacks/honest, named as its operator: the body it is compared with")
    source: str
    whole: bool = Field(default=False, description="the source is the whole file; else it follows the honest body")
    repeated: Repeated | None = None
    clauses: tuple[str, ...] | None = Field(
        default=None, description="clauses to attack; those of the honest body unless said"
    )
    device: Literal["any", "cpu", "cuda"] = "any"
    limit_s: float = 180.0
    memory_gib: float = Field(default=16.0, description="memory that it may use")

    @property
    def text(self) -> str:
        """The file that is judged."""
        found = self.source
        if self.repeated is not None:
            found = found.replace("{repeated}", self.repeated.text * self.repeated.times)
        return found if self.whole else f"{honest(self.honest).source}\n\n{found}"


class Attempt(BaseModel):
    """How one attack ended."""

    name: str
    area: str
    tries: str
    honest: str
    stage: str = Field(description="where it was stopped; nothing where it was not")
    fault: str | None = None
    message: str = ""
    score: float | None = Field(description="none where the trial gave no verdict")
    honest_score: float | None
    speedup: float | None = None
    honest_speedup: float | None = None
    runs: int = Field(default=1, description="pairs of runs that the answer rests on")
    succeeded: bool
    skipped: str = ""

    @property
    def summary(self) -> str:
        """One line for people."""
        if self.skipped:
            return f"skipped, {self.skipped}"
        how = f"stopped at {self.stage} by {self.fault}" if self.fault else "not stopped, and worth no more"
        if not self.fault and self.speedup is None:
            how = f"not timed: {self.message}"
        if self.succeeded:
            how = f"SUCCEEDED: {self.message or self.fault or 'a higher score'}"
        scores = [f"{s:.3f}" if s is not None else "none" for s in (self.score, self.honest_score)]
        return f"{how}; score {scores[0]}, honest {scores[1]}"


def attacks(op: str | None = None, only: Sequence[str] = (), area: str | None = None) -> tuple[Attack, ...]:
    """The attacks on an operator, or of an area, or all, by name.

    Raises:
        UnknownNameError: no attack has a name in `only`, or none is of the area.
        ConfigError: a file is none of an attack.
    """
    found = {path.stem: _read(path) for path in sorted(FOLDER.glob("*.toml"))}
    for name in only:
        if name not in found:
            raise UnknownNameError("attack", name, found)
    if area is not None and area not in AREAS:
        raise UnknownNameError("area", area, AREAS)
    wanted = [found[name] for name in only] if only else list(found.values())
    return tuple(a for a in wanted if op in {None, a.honest} and area in {None, a.area})


def _read(path: Path) -> Attack:
    try:
        return Attack(name=path.stem, **read_toml(path, {str: object}, "Mend the attack."))
    except ValidationError as error:
        raise ConfigError(f"{path.name}: {complaints(error)}") from error


@cache
def honest(op: str) -> Honest:
    """The honest body of an operator."""
    return Honest(**read_toml(FOLDER / "honest" / f"{op}.toml", {str: object}, "Mend the honest body."))


def attempts(
    chosen: Sequence[Attack],
    device: str = "cpu",
    *,
    sandbox: str = "auto",
    loaded: bool = False,
    jobs: int = 1,
    progress: Callable[[str], None] = print,
) -> Iterator[Attempt]:
    """Run attacks, `jobs` at a time, in their order; with `loaded` beside a busy process for each processor.

    Attacks that run together disturb each other's timing as other work does: the answer is that of a loaded machine.
    """
    with ExitStack() as stack:
        if loaded:
            stack.enter_context(busy(cpu_count() or 1))
        verdicts: dict[str, dict[str, Any]] = {}
        for attack in chosen:
            if _runs_on(attack, device) and attack.honest not in verdicts:
                progress(f"honest {attack.honest}")
                verdicts[attack.honest] = _judged_honest(attack, device, sandbox)

        def attempt(attack: Attack) -> Attempt:
            if not _runs_on(attack, device):
                return _skipped(attack, f"needs a device of kind {attack.device}")
            progress(attack.name)
            return _attempt(attack, device, sandbox, verdicts[attack.honest])

        yield from stack.enter_context(ThreadPoolExecutor(jobs)).map(attempt, chosen)


def _runs_on(attack: Attack, device: str) -> bool:
    return attack.device == "any" or device.startswith(attack.device)


def _judged_honest(attack: Attack, device: str, sandbox: str) -> dict[str, Any]:
    """The verdict on the honest body of an attack.

    Raises:
        ConfigError: there is none, as where a device cannot be used: then an attack without one says nothing.
    """
    verdict = judged(honest(attack.honest).source, _task(attack, device, sandbox))
    if "score" not in verdict:
        why = verdict.get("message") or verdict.get("error") or "no verdict"
        raise ConfigError(f"the judge cannot judge an honest {attack.honest} on {device}, so no attack was run: {why}")
    return verdict


def _attempt(attack: Attack, device: str, sandbox: str, other: dict[str, Any]) -> Attempt:
    """One attack; where it scores higher, again beside its honest body."""
    verdict = judged(attack.text, _task(attack, device, sandbox))
    runs = 1
    while _above(verdict, other) and runs < _PAIRS:
        other = _judged_honest(attack, device, sandbox)
        verdict = judged(attack.text, _task(attack, device, sandbox))
        runs += 1
    said = [verdict.get("message") or verdict.get("error") or "", *(c["message"] for c in verdict.get("clauses", ()))]
    escape = next((text for text in said if ESCAPED in text), None)
    return Attempt(
        **attack.model_dump(include={"name", "area", "tries", "honest"}),
        stage=verdict.get("stage", ""),
        fault=verdict.get("fault"),
        message=str(escape or said[0])[:500],
        score=verdict.get("score"),
        honest_score=other.get("score"),
        speedup=verdict.get("speedup"),
        honest_speedup=other.get("speedup"),
        runs=runs,
        succeeded=escape is not None or "score" not in verdict or _above(verdict, other),
    )


def _above(verdict: dict[str, Any], honest: dict[str, Any]) -> bool:
    return float(verdict.get("score", 0.0)) > float(honest.get("score", 0.0)) + MARGIN


def _skipped(attack: Attack, why: str) -> Attempt:
    named = attack.model_dump(include={"name", "area", "tries", "honest"})
    return Attempt(**named, stage="", score=None, honest_score=None, succeeded=False, skipped=why)


def _task(attack: Attack, device: str, sandbox: str) -> Task:
    """What is asked of the judge, without what protects by chance: findings in the source, and a noisy machine."""
    clauses = honest(attack.honest).clauses if attack.clauses is None else attack.clauses
    return Task.model_validate(
        {
            "op": attack.honest,
            "device": device,
            "clauses": clauses,
            "strict": False,
            "timing": attack.area != "sandbox",
            "limit_s": attack.limit_s,
            "sandbox": sandbox,
            "memory_gib": attack.memory_gib,
            "noise": _ANY_NOISE,
            "first_s": _FIRST_S,
        }
    )


def judged(text: str, task: Task) -> dict[str, Any]:
    """The verdict as JSON, or {"error": ...}."""
    source = base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()
    asked = {"task": task.model_dump(mode="json"), "source": source, "file": "attack.py"}
    command = [sys.executable, "-m", "rlkernel_judge.trial"]
    try:
        done = subprocess.run(  # noqa: S603 our own interpreter and module
            command, input=json.dumps(asked).encode(), capture_output=True, timeout=task.limit_s + _GRACE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": "the trial did not end in time"}
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return {"error": f"the trial ended with {done.returncode} and without a verdict: {last}"}
    found: dict[str, Any] = answer.get("verdict") or answer
    return found


# Faults that say that a candidate is not honest.
ACCUSATIONS: Final = frozenset({"cheating", "tampering", "too_fast", "background_work"})


def honest_runs(op: str, times: int, device: str = "cpu", *, loaded: bool = False) -> Iterator[dict[str, Any]]:
    """Verdicts on the honest body of an operator, judged as a user's file is, so many times."""
    body = honest(op)
    task = Task(op=op, device=device, clauses=body.clauses)
    with busy(cpu_count() or 1) if loaded else nullcontext():
        for _ in range(times):
            yield judged(body.source, task)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that keep processors and memory busy."""
    running = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]  # noqa: S603 our own text
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
