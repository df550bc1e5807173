"""Backends that do to their process what tested code may do: crash it, hang it, fill its memory, report falsely.

Each serves `logprob@1` and names the fault as which the suite must report it, in bounded time, while the run goes on.
They prove the isolation as `mutants` prove the clauses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from rlkernel import policy
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.isolation import attack_in_processes
from rlkernel_conformance.leak_check import attacks_with_leak_check
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS

OP: Final = "logprob"
CLAUSES: Final = ("LP-05",)  # what each is attacked with, unless it says otherwise
_MODULES: Final = ("processes", "results", "sources")


@dataclass(frozen=True)
class Hostile:
    """A backend that misbehaves, and the fault that the suite must report."""

    name: str
    does: str  # one sentence
    fault: str  # a name of faults.FAULTS
    manifest: Backend
    where: str  # of the manifest, "module:attribute", for a worker
    clauses: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Verdict:
    """What the suite reported of a hostile backend."""

    hostile: Hostile
    outcomes: tuple[Outcome, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults found, one a clause; "held" where none was."""
        return tuple(o.fault or o.status for o in self.outcomes)

    @property
    def as_expected(self) -> bool:
        """Every clause got an answer, and it was the expected fault."""
        return self.faults == (self.hostile.fault,) * len(self.hostile.clauses)


BACKENDS: Final[dict[str, Hostile]] = {}


def hostile(
    fault: str, *, target: str | None = None, clauses: tuple[str, ...] = CLAUSES, limit_s: float = 30.0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a backend: its function of a call's record, which has the docstring that says what it does.

    Args:
        fault: what the suite must report.
        target: the implementation, where it is not the function itself.
        clauses: what it is attacked with.
        limit_s: for one clause.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        module, name = function.__module__, function.__name__
        requires = Requires(device="*", dtypes=("float32",))
        impl = Impl(op=OPERATORS[OP].id, target=target or f"{module}:{name}", requires=requires)
        manifest = Backend(name=f"hostile-{name.replace('_', '-')}", api=API_VERSION, impls=(impl,))
        import_module(module).__dict__[f"{name}_manifest"] = manifest
        does = " ".join((function.__doc__ or "").split())
        BACKENDS[name] = Hostile(name, does, fault, manifest, f"{module}:{name}_manifest", clauses, limit_s)
        return function

    return register


def hostile_backends() -> tuple[Hostile, ...]:
    """All of them."""
    for module in _MODULES:
        import_module(f"rlkernel_conformance.hostile.{module}")
    return tuple(BACKENDS.values())


def attack_hostile(one: Hostile) -> Verdict:
    """Attack one."""
    attacks = attacks_with_leak_check(OP)
    with policy.registered(one.manifest):
        subject = Subject(one.manifest.name, OP)
        effort = Profile("hostile", 2, one.limit_s)
        outcomes = attack_in_processes(subject, [attacks[c] for c in one.clauses], effort, manifest=one.where)
    return Verdict(one, tuple(outcomes))
