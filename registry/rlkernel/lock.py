"""rlkernel.lock: which implementation, version and order of sums each operator may use, for every process of a run.

A trainer writes it, a rollout engine reads it: an operator that has pins runs nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from rlkernel_core.decision import Decision, Pin
from rlkernel_core.documents import read_json
from rlkernel_core.files import read_bytes, write_text

__all__ = ["content", "differences", "read", "write"]

VERSION: Final = 1
MOST: Final = 1 << 20  # bytes
_FORM: Final = {
    "version": frozenset({VERSION}),
    "operators": {str: [{"target": str, "provider": str, "sums?": str, "made_of?": str}]},
}
_REMEDY: Final = "Write it with `rlkernel lock --force`, or remove `lock` from the configuration."


def read(path: str) -> Mapping[str, frozenset[Pin]]:
    """What the lock file at `path` pins: operator id -> what it may run. Pins without `sums` are of what names none.

    Raises:
        FileError: no such file, or not a lock file of this version.
    """
    found = read_json(path, _FORM, _REMEDY, MOST)
    return _pins(found["operators"])


def content(decisions: Iterable[Decision]) -> dict[str, Any]:
    """The lock that pins what these decisions chose."""
    operators: dict[str, set[tuple[str, Pin]]] = {}
    for d in decisions:
        if d.backend and d.target and d.version:
            operators.setdefault(d.call.op, set()).add(
                (d.backend, Pin(d.target, d.version, d.sums or "", d.made_of or ""))
            )
    pins = {
        op: [{"backend": b, **{k: v for k, v in pin._asdict().items() if v}} for b, pin in sorted(found)]
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


def _pins(operators: Mapping[str, Any]) -> dict[str, frozenset[Pin]]:
    """What the operators of a lock may run."""
    return {
        op: frozenset(Pin(pin["target"], pin["provider"], pin.get("sums", ""), pin.get("made_of", "")) for pin in pins)
        for op, pins in operators.items()
    }


def differences(
    pinned: Mapping[str, frozenset[Pin]], decisions: Iterable[Decision]
) -> dict[str, tuple[frozenset[Pin], frozenset[Pin]]]:
    """Where a lock and `decisions` differ: operator id -> (pinned, now)."""
    now = _pins(content(decisions)["operators"])
    empty: frozenset[Pin] = frozenset()
    both = {op: (pinned.get(op, empty), now.get(op, empty)) for op in sorted({*pinned, *now})}
    return {op: (old, new) for op, (old, new) in both.items() if not _same(old, new)}


def _same(pinned: frozenset[Pin], now: frozenset[Pin]) -> bool:
    """Whether pins, some of them without `made_of`, are those of now."""
    return all(any(pin.admits(n) for pin in pinned) for n in now) and all(any(p.admits(n) for n in now) for p in pinned)
