"""Mutants: backends with one planted bug each, which prove the suite. A clause that no mutant fails proves nothing.

A module per operator holds its bugs as a table, name -> `Bug`: the clause that must refute it, what is wrong, and how:

    "entropy_in_bits": Bug("LP-12", "entropy in bits", answers(entropy=lambda c, o: o.entropy * 1.4427)),

`how` is a function of plain torch's implementation, which is right, and of the record of a call. It changes the record
that goes in or the result that comes out (`plant` has the usual ways), or computes the result itself. What can go
wrong inside only goes through a parameter of plain torch's own functions, such as `best` of `rlkernel_torch.sample`.

The front door refuses bad calls before an implementation sees them. A mutant that passes them has a `check` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Final

from rlkernel_conformance.mutants.bug import Bug, Run
from rlkernel_conformance.mutants.common import bugs_of
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import UnknownNameError
from rlkernel_core.manifest import API_VERSION, Backend, Impl
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import prefix_of
from rlkernel_torch import backend as plain

TARGETS: Final = "rlkernel_conformance.mutants.targets"


@dataclass(frozen=True)
class Mutant:
    """Plain torch with one bug in one operator."""

    op: str
    name: str
    bug: Bug

    @property
    def clause(self) -> str:
        """The clause that must refute it."""
        return self.bug.clause

    @cached_property
    def manifest(self) -> Backend:
        """The backend: right in everything but the operator."""
        op = OPERATORS[self.op].id
        changes = {"target": self._named(""), "gradient": None, "check": self.bug.fits}
        impls = [
            i.model_copy(update={**changes, "supports": i.supports | self.bug.claims}) if i.op == op else i
            for i in plain.impls
        ]
        return Backend(name=f"mutant-{self.name.replace('_', '-')}", api=API_VERSION, impls=tuple(impls))

    @property
    def where(self) -> str:
        """The manifest as "module:attribute", for a worker."""
        return self._named("__manifest")

    @property
    def subject(self) -> Subject:
        """What is attacked, once the manifest is registered."""
        return Subject(self.manifest.name, self.op, check=self._named("__check") if self.bug.check else None)

    def implementation(self) -> Run:
        """The function of a record that the manifest names."""
        module, _, name = self._plain.target.partition(":")
        run, check = getattr(import_module(module), name), OPERATORS[self.op].check

        def right(call: Any) -> Any:
            if check is not None:
                check(call)  # the bug may have made it of another
            return run(call)

        return lambda call: self.bug.how(right, call)

    @property
    def _plain(self) -> Impl:
        return next(i for i in plain.impls if i.op == OPERATORS[self.op].id)

    def _named(self, what: str) -> str:
        return f"{TARGETS}:{self.op}__{self.name}{what}"


def mutants_of(op: str) -> tuple[Mutant, ...]:
    """The mutants of an operator: its own, then those that all operators have.

    Raises:
        UnknownNameError: no such operator.
    """
    if op not in OPERATORS:
        raise UnknownNameError("operator", op, OPERATORS)
    own: dict[str, Bug] = import_module(f"rlkernel_conformance.mutants.{op}").BUGS
    bugs = {**own, **bugs_of(op, prefix_of(OPERATORS[op]))}
    return tuple(Mutant(op, name, bug) for name, bug in bugs.items())
