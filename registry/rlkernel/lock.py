"""rlkernel.lock: which implementation and version each operator may use, for every process of a run.

A trainer writes it, a rollout engine reads it: an operator that has pins runs nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from rlkernel_core.decision import Decision
from rlkernel_core.documents import read_json
from rlkernel_core.files import read_bytes, write_text

__all__ = ["content", "differences", "read", "write"]

VERSION: Final = 1
MOST: Final = 1 << 20  # bytes
_FORM: Final = {"version": frozenset({VERSION}), "operators": {str: [{"target": str, "provider": str}]}}
_REMEDY: Final = "Write it with `rlkernel lock --force`, or remove `lock` from the configuration."


def read(path: str) -> Mapping[str, frozenset[tuple[str, str]]]:
    """What the lock file at `path` pins: operator id -> allowed (target, provider).

    Raises:
        FileError: no such file, or not a lock file of this version.
    """
    found = read_json(path, _FORM, _REMEDY, MOST)
    return {op: frozenset((pin["target"], pin["provider"]) for pin in pins) for op, pins in found["operators"].items()}


def content(decisions: Iterable[Decision]) -> dict[str, Any]:
    """The lock that pins what these decisions chose."""
    operators: dict[str, set[tuple[str, str, str]]] = {}
    for d in decisions:
        if d.backend and d.target and d.version:
            operators.setdefault(d.call.op, set()).add((d.backend, d.target, d.version))
    pins = {
        op: [{"backend": b, "target": t, "provider": p} for b, t, p in sorted(found)]
        for op, found in sorted(operators.items())
    }
    return {"version": VERSION, "operators": pins}


def write(path: str | Path, decisions: Iterable[Decision]) -> dict[str, Any]:
    """Write the lock file of `decisions` to `path`; returns its content.

    Raises:
        FileError: it cannot be written.
    """
    pins = content(decisions)
    write_text(path, _text(pins))
    return pins


def is_of(path: str | Path, decisions: Iterable[Decision]) -> bool:
    """Whether a file is the very lock that `write` would make of these decisions."""
    return Path(path).is_file() and read_bytes(path, _REMEDY) == _text(content(decisions)).encode()


def _text(pins: Mapping[str, Any]) -> str:
    return json.dumps(pins, indent=2) + "\n"


def differences(
    pinned: Mapping[str, frozenset[tuple[str, str]]], decisions: Iterable[Decision]
) -> dict[str, tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]]]:
    """Where a lock and `decisions` differ: operator id -> (pinned, now), each a set of (target, provider)."""
    now = {
        op: frozenset((pin["target"], pin["provider"]) for pin in pins)
        for op, pins in content(decisions)["operators"].items()
    }
    empty: frozenset[tuple[str, str]] = frozenset()
    both = {op: (pinned.get(op, empty), now.get(op, empty)) for op in sorted({*pinned, *now})}
    return {op: (old, new) for op, (old, new) in both.items() if old != new}
