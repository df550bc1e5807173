"""decisions.json: what served each operator in a run, written beside its results and read by `rlkernel status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from rlkernel.audit import Audited
from rlkernel.integrations import host
from rlkernel.provenance import Planned, Ran, decisions_hash, plans, status
from rlkernel_core import __version__
from rlkernel_core.decision import Call, Decision, OpPolicy, Rejected
from rlkernel_core.documents import read_json
from rlkernel_core.errors import FileError
from rlkernel_core.files import make_folder, write_json
from rlkernel_core.reasons import CODES, Reason

__all__ = ["content", "planned", "read", "through", "write"]

FILE: Final = "decisions.json"
VERSION: Final = 1
_TEXT: Final = (str, None)
_PLAN: Final = {"op": str, "plans": int, "made": int, "evicted": int}
_AUDIT: Final = {"calls": int, "differing": int, "failed": int, "worst": (float, None)}
_REASON: Final = {"stage": str, "code": str, "text": str, "fix?": str}
_DECISION: Final = {
    "call": {"op": str, "device": str, "dtype?": _TEXT, "grad?": bool, "features": [str], "arch?": _TEXT},
    "policy": {
        "order": [str],
        "fallback?": str,
        "need": [str],
        "profile?": bool,
        "audit?": int,
        "max_workspace_bytes?": (int, None),
    },
    **dict.fromkeys(("backend", "target", "version", "fell_back_from"), _TEXT),
    "rejected": [{"backend": str, "reason": _REASON, "target": _TEXT}],
    "ambiguous": [str],
    "source": str,
    "sums?": _TEXT,
    "made_of?": _TEXT,
    "calls": int,
    "audit?": (None, _AUDIT),
}
_FORM: Final = {
    "version": frozenset({VERSION}),
    "hash": str,
    "decisions": [_DECISION],
    "hosts?": [{"host": str, "version": str, "symbols": [str], "calls": {str: int}}],
    "plans?": [_PLAN],
}
_REMEDY: Final = "A run writes it with rlkernel.record.write(folder)."


def content() -> dict[str, Any]:
    """What has run in this process so far, JSON-ready."""
    decisions = [r.as_dict() for r in status()]
    through = [entry.as_dict() for entry in host.seen()]
    known = {"version": VERSION, "rlkernel": __version__, "hash": decisions_hash(), "decisions": decisions}
    return {**known, "hosts": through, "plans": [p.as_dict() for p in plans()]}


def write(folder: str | Path) -> Path:
    """Write decisions.json into the folder of a run; returns its path.

    Raises:
        FileError: it cannot be written.
    """
    path = Path(folder) / FILE
    make_folder(path.parent)
    write_json(path, content(), indent=2)
    return path


def read(run: str | Path) -> tuple[str, list[Ran]]:
    """The hash of all decisions of a run, and every kind of call with its count.

    Args:
        run: a decisions.json, or the folder it lies in.

    Raises:
        FileError: there is none, or it is not one of this version.
    """
    found = _read(run)
    return found["hash"], [_ran(r) for r in found["decisions"]]


def through(run: str | Path) -> list[host.Active]:
    """The host frameworks whose calls a run served; none in a record of before there were any.

    Raises:
        FileError: as `read`.
    """
    return [
        host.Active(h["host"], h["version"], tuple(h["symbols"]), Counter(h["calls"]))
        for h in _read(run).get("hosts", ())
    ]


def planned(run: str | Path) -> list[Planned]:
    """The plans that a run held when it was recorded; none in a record of before there were any.

    Raises:
        FileError: as `read`.
    """
    return [Planned(**{name: row[name] for name in _PLAN}) for row in _read(run).get("plans", ())]


def _read(run: str | Path) -> Any:
    path = Path(run)
    path = path / FILE if path.is_dir() else path
    found = read_json(path, _FORM, _REMEDY)
    for i, ran in enumerate(found["decisions"]):
        for j, rejected in enumerate(ran["rejected"]):
            reason = "{stage}/{code}".format_map(rejected["reason"])
            if reason not in CODES:
                place = f"decisions[{i}].rejected[{j}].reason"
                raise FileError(path, place, f"is {reason!r}, which this rlkernel does not know", _REMEDY)
    return found


def _ran(found: Mapping[str, Any]) -> Ran:
    """The inverse of `Ran.as_dict`."""
    call, rules = found["call"], found["policy"]
    rejected = (Rejected(r["backend"], Reason(**_known(Reason, r["reason"])), r["target"]) for r in found["rejected"])
    decision = Decision(
        Call(**{**_known(Call, call), "features": frozenset(call["features"])}),
        OpPolicy(**{**_known(OpPolicy, rules), "order": tuple(rules["order"]), "need": frozenset(rules["need"])}),
        found["backend"],
        found["target"],
        found["version"],
        tuple(rejected),
        found["fell_back_from"],
        tuple(found["ambiguous"]),
        found["source"],
        sums=found.get("sums"),
        made_of=found.get("made_of"),
    )
    audit = found.get("audit")
    return Ran(decision, int(found["calls"]), Audited.of(audit) if audit is not None else None)


def _known(cls: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that a record has."""
    return {f.name: found[f.name] for f in fields(cls) if f.name in found}
