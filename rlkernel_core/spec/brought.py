"""Operators that plugins bring, beside those of this package: found in the same catalog, by name.

An operator is here while a manifest that brings it is loaded (`Backend.operators`). Imports no torch.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from rlkernel_core.spec import _WHERE
from rlkernel_core.spec.form import OpSpec


class Brought(NamedTuple):
    """An operator, and who brought it."""

    spec: OpSpec[Any, Any]
    backend: str
    attacks: str | None  # module with the attacks on its clauses


BROUGHT: Final[dict[str, Brought]] = {}  # by the operator's name


def bring(backend: str, spec: OpSpec[Any, Any], attacks: str | None = None) -> None:
    """Add an operator of a backend to the catalog."""
    BROUGHT[spec.name] = Brought(spec, backend, attacks)
    _WHERE[spec.name] = f"brought:{spec.name}"


def remove(backend: str | None = None) -> None:
    """Take the operators of a backend out again, or all."""
    for name in [name for name, found in BROUGHT.items() if backend in (None, found.backend)]:
        del BROUGHT[name], _WHERE[name]


def __getattr__(name: str) -> OpSpec[Any, Any]:
    if name not in BROUGHT:
        raise AttributeError(f"no plugin that is loaded brings the operator {name!r}")
    return BROUGHT[name].spec
