"""The sources of an operator's attacks as fingerprints: whether a clause is attacked today as a report says it was.

Counted are the definitions that an attack reaches by name: its property and its cases, what those use of the suite, and
the definitions of operators (`rlkernel_core.definitions`). Comments, docstrings and layout do not count
(`rlkernel.sources`), nor how a case is carried out, nor rows of other operators in the suite's tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from types import CodeType, FunctionType
from typing import Any, Final

from rlkernel.sources import Scope, fingerprint
from rlkernel_conformance.attack import Attack, Table
from rlkernel_conformance.clauses import module_of
from rlkernel_conformance.leak_check import attacks_with_leak_check
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.brought import BROUGHT

# How a case is carried out, whatever the clause.
_APART: Final = frozenset(("rlkernel_conformance.attack", "rlkernel_conformance.subject"))


@cache
def attack_sources(op: str) -> dict[str, str]:
    """Clause -> fingerprint of its attack, as its sources were when this process first asked; empty without attacks."""
    if op not in OPERATORS or module_of(op) is None:
        return {}
    attacks, scope = attacks_with_leak_check(op), scope_of(op)
    return {clause: fingerprint(targets(attack), scope=scope) for clause, attack in attacks.items()}


def scope_of(op: str) -> Scope:
    """What counts of the suite for the attacks on an operator."""
    return Scope("rlkernel_core.definitions", _APART, bare_calls=False, others=frozenset(OPERATORS) - {op})


def targets(attack: Attack) -> frozenset[str]:
    """The functions that an attack is made of, "module:name"; a table's cases are of the operator's space of calls."""
    found = {*_functions(attack.prop), *_functions(attack.cases)}
    if isinstance(attack.cases, Table):
        home = BROUGHT[attack.op].attacks if attack.op in BROUGHT else f"rlkernel_conformance.spaces.{attack.op}"
        found.add(f"{home}:SPACE")
    return frozenset(found)


def _used(code: CodeType) -> set[str]:
    """Names that code uses, and comprehensions within it, which are code of their own before Python 3.12."""
    within = (_used(inner) for inner in code.co_consts if isinstance(inner, CodeType))
    return set(code.co_names).union(*within)


def _functions(x: Any) -> Iterator[str]:
    """A function by its name in its module, with the functions that it holds; a lambda by the names that it uses."""
    if isinstance(x, FunctionType):
        name = x.__qualname__.partition(".")[0]
        names = _used(x.__code__) if name.startswith("<") else {name}
        yield from (f"{x.__module__}:{used}" for used in names)
        for cell in x.__closure__ or ():
            yield from _functions(cell.cell_contents)
    elif isinstance(x, partial):
        yield from _functions((x.func, *x.args, *x.keywords.values()))
    elif isinstance(x, Table):
        yield from _functions((x.rows, x.simpler, x.coverage))
    elif isinstance(x, tuple | list):
        for item in x:
            yield from _functions(item)
    elif isinstance(x, dict):
        yield from _functions(tuple(x.values()))
