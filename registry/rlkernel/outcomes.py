"""What processes that tried foreign code found out, remembered on disk: a JSON file by all that it depends on."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

FAILURE_BELIEVED_S: Final = 3600.0  # a device may have been busy, or a library on its way


def cache_folder() -> Path:
    """Where outcomes are remembered: `rlkernel` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rlkernel"


def file_of(kind: str, facts: Mapping[str, Any], cache: Path | None = None) -> Path:
    """The file of an outcome, by everything that it depends on."""
    name = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return (cache or cache_folder()) / f"{kind}-{name}.json"


def recall(path: Path) -> tuple[dict[str, Any] | None, float]:
    """What was remembered, and seconds since; None where nothing was, or what is there is no outcome."""
    try:
        known: Any = json.loads(path.read_text(encoding="utf-8"))
        age = time.time() - path.stat().st_mtime
    except (OSError, ValueError, RecursionError):
        return None, 0.0
    return (known, age) if isinstance(known, dict) else (None, 0.0)


def remember(path: Path, outcome: Mapping[str, Any]) -> None:
    """Write beside and rename, so that a reader in another process never sees half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(outcome, file, indent=1)
        Path(file.name).replace(path)
    except OSError:
        return  # a read-only home costs a repeated trial, nothing else


def forget(kind: str, cache: Path | None = None) -> int:
    """Delete the remembered outcomes of a kind; returns how many there were."""
    files = list((cache or cache_folder()).glob(f"{kind}-*.json"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)
