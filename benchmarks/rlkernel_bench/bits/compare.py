"""What differs between two files of bits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlkernel_core.errors import ConfigError

RENAMED: Final = {"reference": "torch"}  # backends that changed their names; results must not


@dataclass(frozen=True)
class Comparison:
    """Two files beside each other."""

    devices: tuple[str, str]
    calls: tuple[int, int]
    unstable: int  # records with outputs that are not compared
    lines: tuple[str, ...]  # one for whatever differs


def compare(old: Path, new: Path) -> Comparison:
    """Everything that differs, calls that one of the files lacks included.

    Raises:
        ConfigError: one of them is no file of bits.
    """
    files = [read(old), read(new)]
    tables = [file["operators"] for file in files]
    records = [[record for calls in table.values() for record in calls.values()] for table in tables]
    names = [str(file["about"]["device_name"]) for file in files]
    return Comparison(
        (names[0], names[1]),
        (len(records[0]), len(records[1])),
        sum("unstable" in record for found in records for record in found),
        tuple(differences(*tables)),
    )


def read(file: Path) -> dict[str, Any]:
    """A file that `rlkernel bench bits` wrote."""
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        content["about"]["device_name"], content["operators"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} holds no bits; rlkernel bench bits --out {file} writes them: {error!r}") from error
    return content


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """A line for whatever differs between two tables of records."""
    for op in dict.fromkeys((*before, *after)):
        for name in dict.fromkeys((*before.get(op, {}), *after.get(op, {}))):
            was, now = before.get(op, {}).get(name), after.get(op, {}).get(name)
            if was is None or now is None:
                yield f"{op}, {name}: only in the {'second' if was is None else 'first'}"
            else:
                yield from (f"{op}, {name}: {line}" for line in _between(was, now))


def _between(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for part in ("error", "error with gradients"):
        if was.get(part) != now.get(part):
            said = "; ".join(str(x[f"{part} says"]) for x in (was, now) if f"{part} says" in x)
            yield f"{part} {was.get(part)} -> {now.get(part)} ({said})"
    a, b = (RENAMED.get(x.get("backend"), x.get("backend")) for x in (was, now))
    if a != b:
        yield f"backend {a} -> {b}"
    unstable = {*was.get("unstable", ()), *now.get("unstable", ())}
    for part in ("forward", "with gradients", "gradients"):
        if part in was and part in now:
            for path in dict.fromkeys((*was[part], *now[part])):
                one, other = was[part].get(path), now[part].get(path)
                if one != other and f"{part} {path}" not in unstable:
                    verb = "differs" if one and other else "is gone" if one else "is new"
                    yield f"{part}: {path} {verb}"
