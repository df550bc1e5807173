"""NVIDIA's compute-sanitizer around a worker: what its tool finds while a clause is attacked is a fault of the clause.

rlkernel conformance run cuda --device cuda --profile memcheck

Each clause gets a process of its own, whose log is read once the process has ended: a finding belongs to one clause.
Messages: docs.nvidia.com/compute-sanitizer/ComputeSanitizer, sections "Memcheck Tool" to "Synccheck Tool".
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlkernel_core.environment import variable
from rlkernel_core.errors import ConfigError
from rlkernel_core.spec.form import Clause

EXECUTABLE: Final = "compute-sanitizer"
# tool -> the fault that its findings are.
TOOLS: Final[Mapping[str, str]] = {
    "memcheck": "illegal_access",
    "racecheck": "race",
    "initcheck": "uninitialized_read",
    "synccheck": "bad_barrier",
}
_SHOWN: Final = 3  # findings that a message holds, each kernel's once
_LINE: Final = re.compile(r"^========= ?(?P<text>.*)$")
_PLACE: Final = re.compile(r"^(?:at|and \w+ access at) (?P<where>.+)$")
# First lines that are no finding: about the tool, the process, or the summary.
_ABOUT: Final = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target application")
_END: Final = re.compile(r"^(?:ERROR|RACECHECK) SUMMARY: ")


def executable() -> str:
    """Path of compute-sanitizer: on PATH, or of the CUDA toolkit that CUDA_HOME names.

    Raises:
        ConfigError: it is not here.
    """
    home = variable("CUDA_HOME") or "/usr/local/cuda"
    found = shutil.which(EXECUTABLE) or shutil.which(EXECUTABLE, path=str(Path(home) / "bin"))
    if found is None:
        raise ConfigError(
            f"{EXECUTABLE} is not on PATH nor in {home}/bin: it comes with the CUDA toolkit; "
            "set CUDA_HOME, or choose another profile"
        )
    return found


def command(tool: str, log: Path) -> list[str]:
    """The beginning of the command of a worker: `tool` runs it and writes into `log`."""
    # A worker forks under its reaper; errors of API calls are no kernel's, and torch provokes some on purpose.
    options = ("--target-processes", "all", "--report-api-errors", "no", "--log-file", str(log))
    return [executable(), "--tool", tool, *options]


def variables(op: str, clause: Clause) -> dict[str, str]:
    """The environment of a worker that attacks a clause of an operator.

    torch's cache hands out parts of large blocks: what is written beyond one lies inside the block, and nobody sees it.
    So the cache is off, but where graphs are captured, which allocate from it alone.
    """
    captures = op == "capture" or clause.judges == "capture" or clause.feature == "capturable"
    return {} if captures else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def findings(log: str) -> list[str]:
    """What the tool found, once a kind and place: "Invalid __global__ write of size 4 bytes at fill(int*)+0x70"."""
    found: list[str] = []
    head: str | None = None
    for line in log.splitlines():
        text = match["text"] if (match := _LINE.match(line)) else ""
        if text and not text.startswith(" "):
            head = None if text.startswith(_ABOUT) else text
        elif head is not None and (place := _PLACE.match(text.strip())):
            said = head.removeprefix("Error: ").rstrip(".")
            found.append(said if " at " in said else f"{said} at {place['where']}")
            head = None
    return list(dict.fromkeys(found))


def message(found: list[str], log: str) -> str:
    """The findings in one line, and how many errors there were in all."""
    shown = "; ".join(found[:_SHOWN])
    more = f"; {len(found) - _SHOWN} more places" if len(found) > _SHOWN else ""
    return f"{shown}{more} ({summary(log)})"


def summary(log: str) -> str | None:
    """The tool's last line; None where it wrote none, because it was ended or could not look at the process."""
    texts = [match["text"] for line in log.splitlines() if (match := _LINE.match(line))]
    return next((text for text in reversed(texts) if _END.match(text)), None)


def complaint(log: str) -> str:
    """Why there is no summary: what the tool said last."""
    texts = [match["text"] for line in log.splitlines() if (match := _LINE.match(line)) and match["text"].strip()]
    return texts[-1] if texts else "it wrote nothing"
