"""What processes that tried foreign code found out, remembered on disk: a JSON file by all that it depends on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from rlkernel_core.documents import read_json
from rlkernel_core.environment import path_in
from rlkernel_core.errors import FileError
from rlkernel_core.files import make_folder, write_json

FAILURE_BELIEVED_S: Final = 3600.0  # a device may have been busy, or a library on its way


def cache_folder() -> Path:
    """Where outcomes are remembered: `rlkernel` in the user's cache folder."""
    return (path_in("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlkernel"


def file_of(kind: str, facts: Mapping[str, Any], cache: Path | None = None) -> Path:
    """The file of an outcome, by everything that it depends on."""
    name = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return (cache or cache_folder()) / f"{kind}-{name}.json"


def recall(path: Path) -> tuple[dict[str, Any] | None, float]:
    """What was remembered, and seconds since; None where nothing was, or what is there is no outcome."""
    try:
        known: dict[str, Any] = read_json(path, {str: object}, "")
        return known, time.time() - path.stat().st_mtime
    except (OSError, FileError):
        return None, 0.0


def remember(path: Path, outcome: Mapping[str, Any]) -> None:
    """Write it whole: a reader in another process never sees half a file."""
    with suppress(FileError):  # a read-only home costs a repeated trial, nothing else
        make_folder(path.parent)
        write_json(path, outcome)


def forget(kind: str, cache: Path | None = None) -> int:
    """Delete the remembered outcomes of a kind; returns how many there were."""
    files = list((cache or cache_folder()).glob(f"{kind}-*.json"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)
