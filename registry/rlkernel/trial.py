"""A third party's plugin is imported in a process of its own before this one: it may crash, exit or never return.

One process imports the entry point, judges the manifest, and imports every function that the manifest names. If the
process crashes or hangs, the function that it was importing is blamed, and a new process tries the others. A good
outcome is kept until the plugin's version or files change, or anything that is installed beside it.

This finds carelessness, not malice: what passes is imported here. Imports no sibling that loads plugins.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlkernel import child, outcomes
from rlkernel_core import __version__
from rlkernel_core.reasons import CODES, Reason

TIMEOUT_S: Final = 120.0  # for the whole of a plugin: a first import of torch from a cold disk is slow
CODE: Final = "from rlkernel.trial_child import main; main()"  # what the process runs, with file and question
MANIFEST: Final = ""  # the name of the manifest among the functions that it names


class Plugin(NamedTuple):
    """An entry point and who provides it, as may be printed."""

    group: str
    name: str
    value: str
    dist: str
    version: str


class Tried(NamedTuple):
    """What importing a plugin did."""

    reason: Reason | None  # why it may not be loaded
    broken: Mapping[str, Reason]  # functions that it names -> why they cannot be used


class _Here:
    """Whether this is the process of a trial: it imports what it is asked about, and starts no other."""

    child = False


def inside() -> bool:
    """Whether this process tries a plugin."""
    return _Here.child


def enter() -> None:
    """From now on this process tries a plugin."""
    _Here.child = True


def tried(plugin: Plugin, record: str = "", *, cache: Path | None = None) -> Tried:
    """Import a plugin in another process, or recall what that did.

    Args:
        plugin: what is asked about.
        record: the list of its distribution's files with their digests, as the installer wrote it; "" without one.
        cache: folder of remembered outcomes; None for the user's cache folder.
    """
    facts = _facts(plugin, record)
    path = outcomes.file_of("plugin", facts, cache)
    known = _recall(path)
    if known is None:
        try:
            known = _asked(plugin)
        except OSError:  # no process can be started here: nothing can be found out before the import
            return Tried(None, {})
        if _worth_remembering(known):
            outcomes.remember(path, {**facts, "verdicts": {name: as_json(r) for name, r in known.items()}})
    return Tried(known.get(MANIFEST), {name: r for name, r in known.items() if name != MANIFEST and r is not None})


def forget(cache: Path | None = None) -> int:
    """Delete remembered outcomes; returns how many there were."""
    return outcomes.forget("plugin", cache)


def _asked(plugin: Plugin) -> dict[str, Reason | None]:
    """What is to be said against the manifest and each function that it names."""
    verdicts: dict[str, Reason | None] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        ended = child.run(CODE, (json.dumps([plugin, [n for n in verdicts if n != MANIFEST], left]),), left)
        at, copied = MANIFEST, set[str]()
        names: list[object] = []
        for line in _lines(ended.said):
            at = str(line.get("at", at))
            if line.get("copied") is True:
                copied.add(at)
                how = "it forked, and the copy went on as the program that imports it"
                verdicts[at] = _ended(plugin, at, child.Ended(b"", how, timed_out=False))
            if "verdict" in line and at not in copied:
                verdicts[at] = _reason(plugin, line["verdict"])
            names = line["names"] if isinstance(line.get("names"), list) else names
            if line.get("end") is True:
                return verdicts
        verdicts[at] = _ended(plugin, at, ended)
        if at == MANIFEST:
            return verdicts
        if ended.timed_out:  # and no time is left for the others
            return {**dict.fromkeys(map(str, names), verdicts[at]), **verdicts}


def _lines(said: bytes) -> Iterator[dict[str, Any]]:
    """What the process wrote, as far as it is what `trial_child` writes; a plugin could write there too."""
    for line in said.splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(found, dict):
            return
        yield found


def _ended(plugin: Plugin, at: str, ended: child.Ended) -> Reason:
    """The reason that a process is which did not come to its end."""
    what = f"importing {at or plugin.value}"
    fix = f"pip install -U {plugin.dist}, or uninstall it; rlkernel doctor --probe tries it again"
    if ended.timed_out:
        return Reason("load", "import-timeout", f"{what} did not finish within {TIMEOUT_S:g} s", fix)
    return Reason("load", "import-crashed", f"{what}: {ended.how}", fix)


def as_json(reason: Reason | None) -> list[str] | None:
    """A verdict as lists and texts, which `_reason` reads back."""
    return None if reason is None else [reason.stage, reason.code, reason.text, reason.fix]


def _reason(plugin: Plugin, words: Any) -> Reason | None:
    """A verdict read back; whatever is none counts against the plugin, which alone can have written it."""
    if words is None:
        return None
    if isinstance(words, list) and len(words) == 4 and all(isinstance(w, str) for w in words):
        stage, code, text, fix = words
        if f"{stage}/{code}" in CODES:
            return Reason(stage, code, text, fix)
    return _ended(plugin, MANIFEST, child.Ended(b"", "its answer cannot be read", timed_out=False))


def _worth_remembering(verdicts: Mapping[str, Reason | None]) -> bool:
    """A manifest that merely raises is asked each time: that is quick, and what it waits for may have come."""
    manifest = verdicts.get(MANIFEST)
    return manifest is None or manifest.code in {"import-crashed", "import-timeout"}


def _recall(path: Path) -> dict[str, Reason | None] | None:
    """A remembered outcome; what is not good is believed for a while."""
    known, age = outcomes.recall(path)
    verdicts = known.get("verdicts") if known is not None else None
    if not isinstance(verdicts, dict) or MANIFEST not in verdicts:
        return None
    nobody = Plugin("", "", "", "", "")
    found = {name: _reason(nobody, words) for name, words in verdicts.items()}
    good = all(reason is None for reason in found.values())
    return found if good or age < outcomes.FAILURE_BELIEVED_S else None


def _facts(plugin: Plugin, record: str) -> dict[str, Any]:
    """Everything that an outcome depends on, but for the environment's variables."""
    beside = sorted({p.name for folder in sys.path for p in _infos(folder)})
    return {
        "plugin": list(plugin),
        "rlkernel": __version__,
        "python": [sys.version, sys.prefix],
        "beside": sha256("\n".join(beside).encode()).hexdigest(),
        "files": sha256(record.encode() + b"".join(_files(plugin.value))).hexdigest(),
    }


def _infos(folder: str) -> list[Path]:
    """Folders named after the installed distributions and their versions."""
    try:
        return [p for p in Path(folder or ".").iterdir() if p.suffix in {".dist-info", ".egg-info"}]
    except OSError:
        return []


def _files(value: str) -> Iterator[bytes]:
    """The sources of the package that an entry point leads to, and the dates of its libraries; nothing is imported."""
    try:
        spec = find_spec(value.partition(":")[0].partition(".")[0].strip())
    except (ImportError, ValueError):
        return
    if spec is None:
        return
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [f for place in places for f in sorted(place.rglob("*"))] or [Path(spec.origin or "")]
    for file in files:
        try:
            if file.suffix == ".py":
                yield file.name.encode() + file.read_bytes()
            elif file.suffix in {suffix[suffix.rindex(".") :] for suffix in EXTENSION_SUFFIXES}:
                about = file.stat()
                yield f"{file.name} {about.st_size} {about.st_mtime_ns}".encode()
        except OSError:
            continue
