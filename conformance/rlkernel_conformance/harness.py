"""Attack clauses in this process: hypothesis draws and shrinks cases; an outcome tells how to see it again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import hypothesis
from hypothesis.errors import Unsatisfiable, UnsatisfiedAssumption

from rlkernel.discover import guarded
from rlkernel_conformance import faults
from rlkernel_conformance.attack import Attack, Table
from rlkernel_conformance.clauses import attacks_on
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.memory import room
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.reproduce import script
from rlkernel_conformance.search import search
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ResolutionError


@dataclass(frozen=True)
class Outcome:
    """How one clause fared."""

    op: str
    clause: str  # "LP-08"
    title: str
    status: str  # held | violated | fault | not_claimed | not_attacked | no_room | not_run
    fault: str | None = None  # a name of faults.FAULTS, where violated or fault
    message: str = ""
    reproduce: str = ""  # a script that shows the failure alone
    executed: int = 0  # cases
    measures: dict[str, float] = field(default_factory=dict)  # worst error over tolerance, by output
    features: tuple[str, ...] = ()  # features that its calls needed
    coverage: dict[str, Any] = field(default_factory=dict)  # of a table: executed, possible, missed; of a part: rows
    seconds: float = 0.0
    call: str = ""  # the last call of the failing case, in words

    @property
    def failed(self) -> bool:
        """The clause was refuted, or its attack could not be carried out."""
        return self.status in {"violated", "fault"}


def clauses_of(subject: Subject) -> tuple[list[Attack], list[Outcome]]:
    """The attacks that apply to a subject, and the outcomes of the clauses that need none here."""
    attacks = {a.clause.id: a for a in attacks_on(subject.op)}
    due, rest = [], []
    for clause in subject.spec.clauses:
        if clause.feature is not None and clause.feature not in subject.claims:
            text = f"{subject.backend} does not claim {clause.feature}"
            rest.append(Outcome(subject.op, clause.id, clause.title, "not_claimed", message=text))
        elif clause.id not in attacks:
            rest.append(
                Outcome(subject.op, clause.id, clause.title, "not_attacked", message="no attack is written yet")
            )
        elif attacks[clause.id].memory > room(subject.device):
            text = f"needs a device with {attacks[clause.id].memory >> 30} GiB free; {subject.device} is not one"
            rest.append(Outcome(subject.op, clause.id, clause.title, "no_room", message=text))
        else:
            due.append(attacks[clause.id])
    return due, rest


def carry_out(
    subject: Subject, attack: Attack, profile: Profile, *, manifest: str | None = None, shrink: bool = True
) -> Outcome:
    """Try to refute one clause; `manifest` is where the backend's stands, if it is not installed.

    Without `shrink` a counterexample is the first one that was found.
    """
    seen: list[Any] = []
    taken: list[Any] = []  # cases that were executed
    rejected: list[str] = []  # what the subject's own check said of cases that it takes in no form
    worst: dict[str, float] = {}

    def body(case: Any) -> None:
        seen.append(case)
        subject.measures.clear()
        subject.called.clear()
        try:
            attack.prop(subject, case)
        except UnsatisfiedAssumption as rejection:
            rejected.append(str(rejection))
            raise
        except ResolutionError as refusal:
            if not (subject.disclaims(refusal) or subject.refuses(refusal)):
                raise
            rejected.append(str(refusal))
            raise UnsatisfiedAssumption(str(refusal)) from refusal
        taken.append(case)
        for output, error in subject.measures.items():
            worst[output] = max(error, worst.get(output, 0.0))
        if subject.measures and not isinstance(attack.cases, Table):  # hypothesis climbs towards the worst case
            hypothesis.target(max(subject.measures.values()), label="error over tolerance")

    def attacked() -> None:
        examples = max(1, round(profile.examples * attack.scale))
        if isinstance(attack.cases, Table):
            most = math.inf if profile.thorough else examples
            try_all(body, attack.cases, subject, examples=most, shrink=shrink, part=attack.part)
        else:
            search(body, attack.cases(subject), first=attack.examples, examples=examples, shrink=shrink)

    began = time.perf_counter()
    _, error = guarded(attacked)
    common: dict[str, Any] = {"executed": len(seen) - len(rejected), "measures": worst}
    common["seconds"] = time.perf_counter() - began
    if isinstance(attack.cases, Table):
        common["coverage"] = _covered(attack.cases, subject, taken, attack.part)
    clause = attack.clause
    if error is None:
        return Outcome(subject.op, clause.id, clause.title, "held", **common)
    if isinstance(error, Unsatisfiable) and not seen:
        text = "nothing that is claimed makes a case of it"
        return Outcome(subject.op, clause.id, clause.title, "not_claimed", message=text, seconds=common["seconds"])
    if isinstance(error, Unsatisfiable) and len(rejected) == len(seen):
        text = f"refused at selection, every case of {len(rejected)}: {rejected[-1]}"
        return Outcome(subject.op, clause.id, clause.title, "not_claimed", message=text, seconds=common["seconds"])
    common["call"] = " ".join(subject.called)
    common["reproduce"] = script(subject, attack, seen[-1], manifest) if seen else ""
    if isinstance(error, Violation):
        fault = "nan" if " is nan," in str(error) else "wrong_result"
        return Outcome(subject.op, clause.id, clause.title, "violated", fault, str(error), **common)
    return Outcome(
        subject.op, clause.id, clause.title, "fault", faults.of_error(error), faults.message_of(error), **common
    )


def _covered(table: Table, subject: Subject, taken: list[Any], part: tuple[int, int]) -> dict[str, Any]:
    """Of a whole table its coverage; of a part the rows that were executed, by number."""
    if part[1] == 1:
        return asdict(table.coverage(subject, taken))
    return {"rows": [i for i, row in enumerate(table.rows(subject)) if row in taken]}


def try_all(
    body: Callable[[Any], None],
    table: Table,
    subject: Subject,
    *,
    examples: float,
    shrink: bool = True,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Run `body` on rows of a table until one raises; raise the error of a simpler case, if there is one.

    Raises:
        Unsatisfiable: no row is a case.
    """

    def error_of(case: Any) -> BaseException | None:
        _, error = guarded(lambda: body(case))
        return None if isinstance(error, UnsatisfiedAssumption) else error

    executed = 0
    first, step = part
    for number, case in enumerate(table.rows(subject)):
        if number >= examples:
            break
        if number % step != first:
            continue
        _, error = guarded(lambda case=case: body(case))  # type: ignore[misc]
        executed += error is None
        if error is not None and not isinstance(error, UnsatisfiedAssumption):
            if faults.needs_new_process(faults.of_error(error), subject.device):
                raise error  # whatever is called now fails
            while shrink and (found := next(filter(error_of, table.simpler(subject, case)), None)) is not None:
                case = found  # noqa: PLW2901  a simpler one
            body(case)
            raise error
    if not executed:
        raise Unsatisfiable
