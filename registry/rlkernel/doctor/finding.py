"""One line of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from rlkernel_core.visible import visible

# severity -> what it says
SEVERITIES: Final[Mapping[str, str]] = {
    "ok": "as it should be",
    "note": "worth knowing; nothing is lost",
    "warning": "works, and costs speed, memory or certainty",
    "problem": "something does not work, or is not what it seems",
}


@dataclass(frozen=True)
class Finding:
    """What was found, what it costs, and what fixes it."""

    severity: str  # one of SEVERITIES
    code: str  # stable: "torch/cpu-build"
    text: str
    cost: str = ""
    fix: str = ""  # a line to run or write

    def __post_init__(self) -> None:
        for name in ("text", "cost", "fix"):  # plugins, files and tools of the machine have their words in it
            lines = getattr(self, name).splitlines()
            object.__setattr__(self, name, "\n".join(visible(line) for line in lines))

    def as_dict(self) -> dict[str, str]:
        """JSON-ready form."""
        return asdict(self)


def ok(code: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", code, text)


def note(code: str, text: str, cost: str = "", fix: str = "") -> Finding:
    """Worth knowing."""
    return Finding("note", code, text, cost, fix)


def warning(code: str, text: str, cost: str, fix: str) -> Finding:
    """Works, at a cost."""
    return Finding("warning", code, text, cost, fix)


def problem(code: str, text: str, cost: str, fix: str) -> Finding:
    """Does not work."""
    return Finding("problem", code, text, cost, fix)
