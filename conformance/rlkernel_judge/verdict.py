"""The judge's question and its answer: frozen pydantic models with a schema version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlkernel_conformance import faults
from rlkernel_core.errors import RLKernelError, UnknownNameError

SCHEMA: Final = 1

# The suite's faults, and those that only a judged file can have.
FAULTS: Final[Mapping[str, str]] = {
    **faults.FAULTS,
    "rejected": "the source was refused before anything of it ran",
    "cheating": "a result or a time is not what a kernel made of these inputs",
    "too_fast": "faster than memory can be moved: the time or the work is not real",
    "not_run": "the time of the whole trial was over before this was reached, or its process did not start",
    "background_work": "threads or processes are left, or compute, when no call runs",
    "not_measurable": "the machine was too busy to time anything: nothing is said against the candidate",
}


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Task(_Message):
    """What is asked of the judge, beside the source."""

    op: str = Field(description="operator that the file's function implements")
    device: str = Field(default="cpu", pattern=r"^[a-z]+(:\d+)?$", description="torch device")
    baseline: str = Field(
        default="torch",
        description="reference, compile (the reference under torch.compile) or an installed backend",
    )
    profile: Literal["quick", "standard", "deep"] = "quick"
    clauses: tuple[str, ...] = Field(default=(), description="ids of clauses to attack; all that apply unless given")
    timing: bool = Field(default=True, description="measure a speedup where the candidate is correct")
    strict: bool = Field(default=True, description="refuse sources with forbidden findings before anything runs")
    limit_s: Annotated[float, Field(gt=0, le=3600)] = Field(default=300.0, description="seconds for the whole trial")
    first_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=60.0, description="seconds for importing the file, for its first call, and for each timed call"
    )
    noise: Annotated[float, Field(gt=1)] = Field(
        default=1.6, description="times as long as at its best that the machine's own work may take in a timed round"
    )
    memory_gib: Annotated[float, Field(ge=0.5, le=4096)] = Field(
        default=16.0, description="memory that the candidate may use, all its processes together"
    )
    sandbox: Literal["auto", "namespaces", "bubblewrap", "limits"] = "auto"
    score: str = Field(default="rlkernel", description="row of the score table")


class FindingReport(_Message):
    """Something that was read in the source."""

    code: str
    line: int
    message: str


class ClauseReport(_Message):
    """How one clause fared."""

    clause: str
    title: str
    status: str
    fault: str | None = None
    message: str = ""


class ProbeReport(_Message):
    """How one probe for cheating fared."""

    name: str
    held: bool
    message: str = ""


class Counterexample(_Message):
    """The first clause that was refuted, on the smallest case that was found."""

    clause: str
    title: str
    message: str
    case: str = Field(description="the drawn case as Python source")
    reproduce: str = Field(description="command that attacks this clause alone; draws are the same every time")


class Spread(_Message):
    """Seconds per call over the rounds of one side."""

    median: float
    low: float = Field(description="lower quartile")
    high: float = Field(description="upper quartile")
    cpu: float = Field(description="median seconds that its threads computed, by the kernel's account")


class Times(_Message):
    """How long candidate and baseline took on the same inputs, in turn."""

    workload: str
    rounds: int
    calls: int = Field(description="calls per round and side")
    candidate: Spread
    baseline: Spread
    moved_bytes: int = Field(description="arguments read once and results written once")
    floor_s: float = Field(description="least that the work can take at the rates measured here, times a margin")
    idle_s: float = Field(description="most that the candidate's threads computed while they were stopped")
    overhead_s: float = Field(description="of letting a process go on and stopping it, taken off every call")


class Isolation(_Message):
    """What was in force while the candidate ran, as its own process measured it before loading it."""

    level: str
    as_nobody: bool
    facts: dict[str, bool] = {}


class Verdict(_Message):
    """The answer for one file."""

    schema_version: int = SCHEMA
    op: str
    file: str
    source_hash: str = Field(description="sha256 of the file")
    device: str
    profile: str
    compiled: bool = Field(description="parsed, imported, and a first call came back")
    correct: bool = Field(description="every attacked clause holds and no probe found cheating")
    pass_rate: float = Field(description="clauses held over clauses attacked")
    held: int = 0
    attacked: int = 0
    fault: str | None = None
    stage: str = Field(default="", description="where the fault was found: read, first call, clauses, probes, timing")
    message: str = ""
    counterexample: Counterexample | None = None
    claims: tuple[str, ...] = ()
    clauses: tuple[ClauseReport, ...] = ()
    not_judged: dict[str, str] = Field(default={}, description="clauses that cannot be judged from outside, and why")
    probes: tuple[ProbeReport, ...] = ()
    findings: tuple[FindingReport, ...] = ()
    speedup: float | None = Field(default=None, description="median time of the baseline over that of the candidate")
    speedup_interval: tuple[float, float] | None = Field(default=None, description="95 % bootstrap interval")
    fast_p: dict[str, float] = Field(
        default={}, description="p -> 1 where correct and faster than p times the baseline"
    )
    score: float = 0.0
    score_terms: dict[str, float] = {}
    baseline: str = "torch"
    times: Times | None = None
    isolation: Isolation | None = None
    environment: dict[str, str] = {}
    seconds: float = 0.0


class Summary(_Message):
    """Several candidates of one task."""

    schema_version: int = SCHEMA
    op: str
    n: int
    compiled: int
    correct: int
    pass_at_k: dict[str, float]
    fast_p: dict[str, float] = Field(description="p -> share of candidates that are correct and faster than p")
    geometric_mean: dict[str, float | None] = Field(
        description="of speedups: correct; faster (correct and above 1); all (1 for each that is not correct)"
    )
    best: str | None = Field(description="file of the highest score")
    candidates: tuple[Verdict, ...]


def complaints_by_field(error: ValidationError) -> dict[str, str]:
    """What is wrong with a question, by the name of the field; of what is no question at all, under `body`."""
    return {".".join(str(p) for p in e["loc"]) or "body": e["msg"] for e in error.errors()}


def complaints(error: ValidationError) -> str:
    """What is wrong with a question, in one line, each with the name of the field."""
    return "; ".join(f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}, got {e['input']!r}" for e in error.errors())


# The field of a task that an unknown name stands in, by what it names.
_FIELDS: Final = {"operator": "op", "clause": "clauses", "baseline": "baseline", "score": "score"}


def bad_fields(error: RLKernelError) -> dict[str, str]:
    """The field of the task that an error is about, with what is wrong; none where it is about this machine."""
    if isinstance(error, UnknownNameError):
        return {_FIELDS[error.what.split()[0]]: str(error)}
    return {"baseline": str(error)} if str(error).startswith("baseline ") else {}
