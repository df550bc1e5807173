"""The form of a report's file: what every reader of one may rely on.

A report has a hash against edits, which anyone can compute: what a file says is looked at whole before it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rlkernel_conformance.report import REFUTED, STATUSES, VERDICTS
from rlkernel_core.documents import formed
from rlkernel_core.errors import FileError

REMEDY: Final = "Write it with rlkernel conformance run BACKEND --report FOLDER."
_TEXT: Final = (str, None)
_ENVIRONMENT: Final = {
    **dict.fromkeys(("python", "torch"), str),
    **dict.fromkeys(("device_arch", "device_name"), _TEXT),
    "packages": {str: str},
    "variables": {str: str},
    "device_driver?": (None, [_TEXT]),
    "board?": {"name": str, "jetpack": _TEXT, "power_mode": _TEXT},
}
_RESULT: Final = {  # of a clause, in any schema
    **dict.fromkeys(("clause", "title", "message", "reproduce"), str),
    "status": frozenset(STATUSES),
    "fault": _TEXT,
    "executed": int,
    "measures": {str: (float, str)},
    "call?": _TEXT,
    "waiver?": {"issue": str, "expires": str, "reason": str},
}
_CLAUSE: Final = {
    **_RESULT,
    **dict.fromkeys(("run", "date"), str),
    **dict.fromkeys(("sources", "attack?"), _TEXT),
    "features": [str],
    "seconds": float,
}
_OPERATOR: Final = {
    **{key: [str] for key in ("implementations", "claims", "unproved_claims", "problems")},
    **dict.fromkeys(("tolerances", "profile"), str),
    "verdict": frozenset(VERDICTS),
    "clauses": [_CLAUSE],
    "orders?": [({"hash": str, "arch": str, "size": str}, {"why": str})],
}
_RUN: Final = {
    "profile": {"name": str, "examples": int, "limit_s": float, "thorough": bool, "sanitizer?": _TEXT},
    "provider": str,
    "environment": _ENVIRONMENT,
}
FORM: Final = {
    **dict.fromkeys(("backend", "device", "profile", "created", "hash"), str),
    "manifest": _TEXT,
    "operators": {str: _OPERATOR},
    "runs": {str: _RUN},
    "problems": [str],
    "summary": {"cases": int},
    "verdict": frozenset(VERDICTS),
    "seconds": float,
}
# Schema 1, of which `rlkernel_conformance.report.upgraded` makes the one of today.
FIRST: Final = {
    **dict.fromkeys(("backend", "device", "profile", "created", "provider"), str),
    "environment": {str: object},
    "operators": {str: {"claims": [str], "unproved_claims": [str], "clauses": [_RESULT]}},
}


def checked(content: dict[str, Any], file: Path) -> dict[str, Any]:
    """A report whose parts are of the form, and whose clauses name runs that it has.

    Raises:
        FileError: one is not; the message has its place.
    """
    formed(content, FORM, file, REMEDY)
    if not content["runs"]:
        raise FileError(file, "runs", "names no run", REMEDY)
    for op, found in content["operators"].items():
        for i, clause in enumerate(found["clauses"]):
            place = f"operators.{op}.clauses[{i}]"
            if clause["run"] not in content["runs"]:
                raise FileError(file, place, f"is of run {clause['run'][:40]!r}, which the report has not", REMEDY)
            if clause["status"] in REFUTED and clause["fault"] is None:
                raise FileError(file, place, "is refuted without a fault", REMEDY)
    return content
