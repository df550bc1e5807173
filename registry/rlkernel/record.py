"""decisions.json: what served each operator in a run, written beside its results and read by `rlkernel status`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from rlkernel.audit import Audited
from rlkernel.integrations import host
from rlkernel.provenance import Planned, Ran, decisions_hash, plans, status
from rlkernel_core import __version__
from rlkernel_core.decision import Call, Decision, OpPolicy, Rejected
from rlkernel_core.errors import ConfigError
from rlkernel_core.paths import missing
from rlkernel_core.reasons import Reason

__all__ = ["content", "planned", "read", "through", "write"]

T = TypeVar("T")

FILE: Final = "decisions.json"
VERSION: Final = 1


def content() -> dict[str, Any]:
    """What has run in this process so far, JSON-ready."""
    decisions = [r.as_dict() for r in status()]
    through = [entry.as_dict() for entry in host.seen()]
    known = {"version": VERSION, "rlkernel": __version__, "hash": decisions_hash(), "decisions": decisions}
    return {**known, "hosts": through, "plans": [p.as_dict() for p in plans()]}


def write(folder: str | Path) -> Path:
    """Write decisions.json into the folder of a run; returns its path."""
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content(), indent=2) + "\n", encoding="utf-8")
    return path


def read(run: str | Path) -> tuple[str, list[Ran]]:
    """The hash of all decisions of a run, and every kind of call with its count.

    Args:
        run: a decisions.json, or the folder it lies in.

    Raises:
        ConfigError: there is none, or it is not one of this version.
    """
    return _read(run, lambda found: (str(found["hash"]), [_ran(r) for r in found["decisions"]]))


def through(run: str | Path) -> list[host.Active]:
    """The host frameworks whose calls a run served; none in a record of before there were any.

    Raises:
        ConfigError: as `read`.
    """
    return _read(
        run,
        lambda found: [
            host.Active(h["host"], h["version"], tuple(h["symbols"]), Counter(h["calls"]))
            for h in found.get("hosts", ())
        ],
    )


def planned(run: str | Path) -> list[Planned]:
    """The plans that a run held when it was recorded; none in a record of before there were any.

    Raises:
        ConfigError: as `read`.
    """
    return _read(run, lambda found: [Planned(**row) for row in found.get("plans", ())])


def _read(run: str | Path, part: Callable[[Any], T]) -> T:
    path = Path(run)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{missing(path)}; a run writes it with rlkernel.record.write(folder)")
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        version = found["version"]
        if version == VERSION:
            return part(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a record of decisions: {error!r}") from error
    raise ConfigError(f"{path} has version {version}, this rlkernel reads {VERSION}")


def _ran(found: Mapping[str, Any]) -> Ran:
    """The inverse of `Ran.as_dict`."""
    call, rules = found["call"], found["policy"]
    rejected = (Rejected(r["backend"], Reason(**r["reason"]), r["target"]) for r in found["rejected"])
    decision = Decision(
        Call(**{**call, "features": frozenset(call["features"])}),
        OpPolicy(**{**rules, "order": tuple(rules["order"]), "need": frozenset(rules["need"])}),
        found["backend"],
        found["target"],
        found["version"],
        tuple(rejected),
        found["fell_back_from"],
        tuple(found["ambiguous"]),
        found["source"],
    )
    audit = found.get("audit")
    return Ran(decision, int(found["calls"]), Audited.of(audit) if audit is not None else None)
