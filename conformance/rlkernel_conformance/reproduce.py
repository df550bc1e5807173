"""A failing case as a program that shows it alone.

from rlkernel_conformance.reproduce import reproduce
from rlkernel_conformance.clauses.logprob import Rows

reproduce('acme', 'logprob', 'LP-08', Rows(...), device='cpu')
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import rlkernel
from rlkernel_conformance.attack import Attack
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import UnknownNameError


def script(subject: Subject, attack: Attack, case: Any, manifest: str | None = None) -> str:
    """Source of a program that carries out one attack on one case."""
    kinds = sorted({(k.__module__, k.__qualname__) for k in _kinds(case)})
    shown = repr(case)
    numbers = [n for n in ("inf", "nan") if n in shown]
    lines = [
        *([f"from math import {', '.join(numbers)}", ""] if numbers else []),
        "from rlkernel_conformance.reproduce import reproduce",
        *(f"from {module} import {name}" for module, name in kinds),
        "",
    ]
    where = f", manifest={manifest!r}" if manifest else ""
    call = f"{subject.backend!r}, {subject.op!r}, {attack.clause.id!r}, {shown}, device={subject.device!r}{where}"
    said = f"  # its last call: {subject.called[0]}" if subject.called else ""
    return "\n".join(lines) + f"\nreproduce({call}){said}\n"


def reproduce(
    backend: str, op: str, clause: str, case: Any, *, device: str = "cpu", manifest: str | None = None
) -> None:
    """Carry out one attack on one case; raises what it raises, returns if the clause holds.

    Args:
        backend: name of the backend.
        op: operator.
        clause: id of the clause.
        case: as the suite printed it.
        device: torch device.
        manifest: "module:attribute" of a backend that is not installed.

    Raises:
        UnknownNameError: there is no such attack.
    """
    from rlkernel_conformance.leak_check import attacks_with_leak_check
    from rlkernel_conformance.manifests import load

    with ExitStack() as scope:
        if manifest is not None:
            found = load(manifest)
            if found.name not in rlkernel.policy.installed():
                scope.enter_context(rlkernel.registered(found))
        attacks = attacks_with_leak_check(op)
        if clause not in attacks:
            raise UnknownNameError("clause with an attack", clause, attacks)
        subject = Subject(backend, op, device)
        scope.enter_context(subject.chosen())
        attacks[clause].prop(subject, case)


def _kinds(value: Any) -> Iterable[type]:
    """Classes whose names stand in the `repr` of a case."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        for part in dataclasses.fields(value):
            yield from _kinds(getattr(value, part.name))
    elif isinstance(value, tuple | list | set | frozenset):
        for part in value:
            yield from _kinds(part)
    elif isinstance(value, dict):
        yield from _kinds((*value, *value.values()))
