"""Waivers: clauses that a backend is known not to keep, each with an issue and a day on which it expires.

    [[waiver]]
    clause = "LP-13"
    backend = "acme"
    issue = "https://example.com/acme/issues/7"
    expires = 2027-01-31
    reason = "gradients of -inf logits are NaN on sm80"

A waived clause stands in the report as waived, never as held. The reference has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from rlkernel_conformance.harness import Outcome
from rlkernel_core.decision import PLAIN_TORCH
from rlkernel_core.documents import read_toml, short
from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_core.spec import OPERATORS


@dataclass(frozen=True)
class Waiver:
    """One clause of one backend that may fail for a while."""

    clause: str
    backend: str
    issue: str
    expires: date  # the last day on which it counts
    reason: str


def read(path: Path, backend: str, known: Collection[str], today: date) -> tuple[Waiver, ...]:
    """The waivers of a backend in a file.

    Args:
        path: TOML with one [[waiver]] table each.
        backend: whose waivers are wanted; those of others are looked at, too.
        known: names of backends that may stand there.
        today: day that expiry is held against.

    Raises:
        FileError: no such file, or not TOML.
        ConfigError: a table is malformed; a waiver is expired, given twice, or of the reference.
        UnknownNameError: no such clause or backend.
    """
    content = read_toml(path, {str: object}, "It holds a [[waiver]] table for each clause that may fail for a while.")
    if set(content) - {"waiver"} or not isinstance(content.get("waiver", []), list):
        raise ConfigError(f"{path} holds {short(sorted(content))}; it may hold [[waiver]] tables and nothing else")
    found = [_waiver(path, table) for table in content.get("waiver", [])]
    clauses = {c.id for spec in OPERATORS.values() for c in spec.clauses}
    for waiver in found:
        if waiver.clause not in clauses:
            raise UnknownNameError("clause", waiver.clause, _like(waiver.clause, clauses))
        if waiver.backend not in known:
            raise UnknownNameError("backend", waiver.backend, known)
        if waiver.backend == PLAIN_TORCH:
            raise ConfigError(f"{path} waives {waiver.clause} for {PLAIN_TORCH}, which keeps every clause")
        if waiver.expires < today:
            text = f"the waiver of {waiver.clause} for {waiver.backend} expired on {waiver.expires}"
            raise ConfigError(f"{path}: {text}; see {waiver.issue}, then mend the backend or renew the waiver")
    mine = [w for w in found if w.backend == backend]
    twice = sorted({w.clause for w in mine if [v.clause for v in mine].count(w.clause) > 1})
    if twice:
        raise ConfigError(f"{path} waives {', '.join(twice)} for {backend} more than once")
    return tuple(mine)


def needless(waivers: Iterable[Waiver], outcomes: Iterable[Outcome]) -> list[str]:
    """Complaints about waivers of clauses that this run carried out and that did not fail."""
    status = {o.clause: o.status for o in outcomes if not o.failed and o.status != "not_run"}
    return [
        f"the waiver of {w.clause} for {w.backend} ({w.issue}) is needless: the clause is {status[w.clause]}; delete it"
        for w in waivers
        if w.clause in status
    ]


def _waiver(path: Path, table: Any) -> Waiver:
    kinds = {"expires": date}
    names = {f.name: kinds.get(f.name, str) for f in fields(Waiver)}
    if not isinstance(table, dict) or set(table) != set(names):
        raise ConfigError(f"{path}: a waiver has the keys {', '.join(names)}; got {short(table)}")
    for name, kind in names.items():
        if type(table[name]) is not kind or not str(table[name]).strip():
            wanted = "a day, such as 2027-01-31" if kind is date else "text that is not empty"
            raise ConfigError(f"{path}: {name} of a waiver is {wanted}; got {short(table[name])}")
    return Waiver(**table)


def _like(clause: str, clauses: Iterable[str]) -> list[str]:
    """The clauses of the same operator; of none, the first of each operator."""
    return [c for c in clauses if c[:3] == clause[:3]] or [c for c in clauses if c.endswith("-01")]
