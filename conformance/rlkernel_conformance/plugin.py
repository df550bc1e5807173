"""The suite under pytest, for those who prefer it: one test a clause, in processes of their own as ever.

    pytest --pyargs rlkernel_conformance -p rlkernel_conformance.plugin --backend acme

Nothing loads it but `-p`. A clause that is not claimed is skipped with its reason; a refuted one fails with the
counterexample and a script that shows it alone. The clauses of an operator that were selected are attacked together,
when the first of them is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from rlkernel import policy
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.isolation import attack_in_processes
from rlkernel_conformance.manifests import load
from rlkernel_conformance.profiles import profile
from rlkernel_conformance.run import due_on
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import RLKernelError, UnknownNameError
from rlkernel_core.spec import OPERATORS

HERE: Final = Path(__file__)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What to attack, and how hard."""
    group = parser.getgroup("conformance", "rlkernel conformance")
    group.addoption("--backend", help="backend to hold against its claims; its clauses become tests")
    group.addoption("--conformance-op", action="append", default=[], help="operator; may be given several times")
    group.addoption("--conformance-profile", default="quick", help="quick, standard or deep")
    group.addoption("--conformance-device", default="cpu", help="torch device, such as cuda:0")
    group.addoption("--conformance-manifest", metavar="MODULE:ATTRIBUTE", help="manifest of one that is not installed")


def pytest_configure(config: pytest.Config) -> None:
    """Register the backend for the time of the session, and see that all that was named exists."""
    if config.getoption("backend") is None:
        return
    scope = ExitStack()
    config.add_cleanup(scope.close)
    try:
        if where := config.getoption("conformance_manifest"):
            scope.enter_context(policy.registered(load(where)))
        found = policy.installed()[config.getoption("backend")]
        profile(config.getoption("conformance_profile"))
        for op in config.getoption("conformance_op"):
            if not policy.is_operator(op):
                raise UnknownNameError("operator", op, OPERATORS)
    except RLKernelError as error:
        raise pytest.UsageError(str(error)) from error
    if found.reason is not None:
        raise pytest.UsageError(f"backend {found.name!r} did not load: {found.reason}")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """This file stands for the suite: its items are the clauses."""
    if file_path != HERE or parent.config.getoption("backend") is None:
        return None
    return Suite.from_parent(parent, path=file_path)


class Suite(pytest.File):
    """All operators of the backend."""

    def collect(self) -> Iterable[pytest.Collector]:
        """One collector an operator."""
        option = self.config.getoption
        for op in option("conformance_op") or OPERATORS:
            subject = Subject(option("backend"), op, option("conformance_device"))
            if subject.impls:
                yield Operator.from_parent(self, name=op, subject=subject)


class Operator(pytest.Collector):
    """The clauses of one operator, and their outcomes once one of them was due."""

    def __init__(self, *, subject: Subject, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.subject = subject
        self.due, rest = due_on(subject)
        self.outcomes = {o.clause: o for o in rest}

    def collect(self) -> Iterator[pytest.Item]:
        """One item a clause, in the order of the spec, what has no attack here included."""
        titles = {a.clause.id: a.clause.title for a in self.due} | {c: o.title for c, o in self.outcomes.items()}
        order = [c.id for c in self.subject.spec.clauses]
        for clause in sorted(titles, key=lambda c: order.index(c) if c in order else len(order)):
            yield ClauseItem.from_parent(self, name=f"{clause} {titles[clause]}", clause=clause)

    def outcome(self, clause: str) -> Outcome:
        """How a clause fared; attacks all that were selected of this operator if none was yet."""
        if clause not in self.outcomes:
            option = self.config.getoption
            selected = {i.clause for i in self.session.items if isinstance(i, ClauseItem) and i.parent is self}
            attacks = [a for a in self.due if a.clause.id in selected]
            effort = profile(option("conformance_profile"))
            found = attack_in_processes(self.subject, attacks, effort, manifest=option("conformance_manifest"))
            self.outcomes |= {o.clause: o for o in found}
        return self.outcomes[clause]


class ClauseItem(pytest.Item):
    """One clause."""

    def __init__(self, *, clause: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clause = clause

    def runtest(self) -> None:
        """Pass where the clause held."""
        outcome = self.parent.outcome(self.clause)  # type: ignore[union-attr]
        if outcome.status in {"not_claimed", "not_attacked", "no_room"}:
            pytest.skip(outcome.message)
        if outcome.status != "held" or not outcome.executed:
            raise Refuted(outcome)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The counterexample and its script; nobody wants the plugin's own stack."""
        return str(excinfo.value) if isinstance(excinfo.value, Refuted) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where it stands, for pytest's lines."""
        return self.path, 0, f"{self.parent.name} {self.name}"  # type: ignore[union-attr]


class Refuted(Exception):
    """A clause did not hold, or its attack could not be carried out."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        what = outcome.fault or ("no case was executed" if outcome.status == "held" else outcome.status)
        script = f"\n\n{outcome.reproduce}" if outcome.reproduce else ""
        super().__init__(f"{outcome.op} {outcome.clause} {outcome.title}\n{what}: {outcome.message}{script}")
