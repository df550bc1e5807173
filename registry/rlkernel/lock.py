"""rlkernel.lock: which implementation and version each operator may use, for every process of a run.

A trainer writes it, a rollout engine reads it: an operator that has pins runs nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from rlkernel_core.decision import Decision
from rlkernel_core.errors import ConfigError
from rlkernel_core.paths import missing

__all__ = ["content", "differences", "read", "write"]

VERSION: Final = 1


def read(path: str) -> Mapping[str, frozenset[tuple[str, str]]]:
    """What the lock file at `path` pins: operator id -> allowed (target, provider).

    Raises:
        ConfigError: no such file, or not a lock file of this version.
    """
    if not Path(path).is_file():
        raise ConfigError(
            f"lock: {missing(path)}; write it with `rlkernel lock`, or remove `lock` from the configuration"
        )
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        version = content["version"]
        pins = {
            op: frozenset((pin["target"], pin["provider"]) for pin in found)
            for op, found in (content["operators"].items() if version == VERSION else ())
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"lock: {path} is not a lock file: {error!r}; write a new one with `rlkernel lock --force`"
        ) from error
    except OSError as error:
        raise ConfigError(f"lock: {path} cannot be read: {error.strerror}") from error
    if version != VERSION:
        raise ConfigError(f"lock: {path} has version {version}, this rlkernel reads {VERSION}")
    return pins


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
    """Write the lock file of `decisions` to `path`; returns its content."""
    pins = content(decisions)
    Path(path).write_text(_text(pins), encoding="utf-8")
    return pins


def is_of(path: str | Path, decisions: Iterable[Decision]) -> bool:
    """Whether a file is the very lock that `write` would make of these decisions."""
    file = Path(path)
    return file.is_file() and file.read_bytes() == _text(content(decisions)).encode()


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
