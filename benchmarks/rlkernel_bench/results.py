"""Results as a file: JSON with a schema number, everything a reader needs to repeat it, and a hash against edits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from rlkernel_bench.result_form import REMEDY, checked
from rlkernel_core.documents import read_json
from rlkernel_core.errors import ConfigError, FileError
from rlkernel_core.files import make_folder, write_json
from rlkernel_core.paths import missing

SCHEMA: Final = 2  # 1 did not say of which sources a number is
FILE: Final = "results.json"

# status of a candidate -> what it says
STATUSES: Final = {
    "measured": "right by the spec's tolerances, and timed",
    "coarse": "a peer, timed: outside the spec's tolerances, within those of rounded logits",
    "wrong": "outside its tolerances: no number",
    "absent": "not installed, or not importable; the message says what is missing",
    "refused": "does not take this call; the message says why",
    "error": "raised",
    "oom": "out of memory",
    "impossible": "faster than the floor: an error of the benchmark",
}


def content_hash(content: Mapping[str, Any]) -> str:
    """Over everything but the hash itself."""
    rest = {k: v for k, v in content.items() if k != "hash"}
    return sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """With schema, date and hash."""
    content = {"schema": SCHEMA, "created": datetime.now(UTC).isoformat(timespec="seconds"), **content}
    return {**content, "hash": content_hash(content)}


def write(content: Mapping[str, Any], folder: Path) -> Path:
    """Write FOLDER/results.json.

    Raises:
        FileError: it cannot be written.
    """
    make_folder(folder)
    write_json(folder / FILE, content)
    return folder / FILE


def read(path: Path) -> dict[str, Any]:
    """Results from a file or its folder, with the hash checked.

    Raises:
        FileError: no such file, no results of these schemas, or changed after they were written.
    """
    file = path / FILE if path.is_dir() else path
    content: dict[str, Any] = read_json(file, {"schema": frozenset({1, SCHEMA}), "hash": str}, REMEDY)
    if content["hash"] != content_hash(content):
        raise FileError(file, "hash", "does not cover the content: it was changed after it was written", REMEDY)
    return checked(content, file)


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Every results file in a folder and the folders in it, oldest first.

    Raises:
        ConfigError: there is none.
        FileError: one is damaged, or was changed.
    """
    if not folder.exists():
        raise ConfigError(missing(folder))
    files = sorted([*folder.glob(FILE), *folder.glob(f"*/{FILE}"), *folder.glob("*.results.json")])
    if not files:
        raise ConfigError(f"{folder} holds no {FILE}; rlkernel bench run --out {folder} writes one")
    return sorted((read(file) for file in files), key=lambda content: str(content["created"]))


def joined(contents: Sequence[Mapping[str, Any]], ended: Sequence[str] = ()) -> dict[str, Any]:
    """Results of several runs on one kind of device as one, sealed.

    Args:
        contents: of each run, one at least.
        ended: why processes ended before their last workload, besides what the runs say themselves.
    """
    places = {c["device"]: {k: c[k] for k in ("device", "environment", "ceilings", "gpu")} for c in contents}
    whole = {k: v for k, v in contents[0].items() if k not in {"schema", "created", "hash"}}
    said = [str(c["ended"]) for c in contents if c.get("ended")]
    return seal(
        {
            **whole,
            "device": ",".join(places),
            "devices": list(places.values()),
            "suites": list(dict.fromkeys(r["suite"] for c in contents for r in c["results"])),
            "results": [r for c in contents for r in c["results"]],
            "ended": "; ".join([*said, *ended]),
        }
    )


def best(timed: Mapping[str, Any]) -> tuple[str, Mapping[str, float]] | None:
    """The figure a candidate is known by: in a graph where that was measured, else eager; None without a number."""
    for how in ("graph", "host", "process", "eager"):
        if timed.get(how) and "median" in timed[how]:
            return how, timed[how]
    return None
