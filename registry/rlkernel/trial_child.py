"""The process of a trial: import a plugin as its caller would, and write down what happens as it happens.

A line of JSON before each import and one after it, so that the caller knows where the process ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import EntryPoint
from typing import Any, Final

from rlkernel import child, policy, trial
from rlkernel.discover import GROUP, Candidate, guarded, imported, raised
from rlkernel.targets import named
from rlkernel_core.reasons import Reason
from rlkernel_core.spec import OPERATORS

_COPY_S: Final = 1.0  # seconds that a copy of the process has to come back


def main() -> None:
    """Answer the question on the command line; the process ends at once, whatever threads the plugin has left."""
    file = int(sys.argv[1])
    plugin, skipped, limit_s = json.loads(sys.argv[2])
    child.restrict(limit_s)
    trial.enter()
    _Copies.pid = os.getpid()
    os.register_at_fork(after_in_parent=_count)
    with policy.PROCESS.lock:  # as the caller will have it: what waits for another thread's call waits for ever
        _try(file, trial.Plugin(*plugin), skipped)
    _say(file, end=True)
    os._exit(0)


def _try(file: int, plugin: trial.Plugin, skipped: list[str]) -> None:
    entry = EntryPoint(plugin.name, plugin.value, plugin.group)
    found = Candidate(plugin.name, plugin.dist, plugin.version)
    _say(file, at=trial.MANIFEST)
    if plugin.group != GROUP:
        _, error = guarded(entry.load)
        _alone(file)
        _say(file, verdict=trial.as_json(None if error is None else raised(found, plugin.value, error)))
        return
    found = imported(found, entry)
    _alone(file)
    _say(file, verdict=trial.as_json(found.reason))
    impls = found.manifest.impls if found.manifest else ()
    asked = {name: load for impl in impls for name, load in named(impl, OPERATORS[impl.op.partition("@")[0]])}
    _say(file, names=list(asked))
    for name, load in asked.items():
        if name not in skipped:
            _say(file, at=name)
            answer, error = guarded(load)
            _alone(file)
            answer = raised(found, name, error) if error is not None else answer
            _say(file, verdict=trial.as_json(answer if isinstance(answer, Reason) else None))


class _Copies:
    """Copies that this process has made of itself by os.fork: one that comes back is a second caller."""

    pid = made = 0


def _count() -> None:
    _Copies.made += 1


def _alone(file: int) -> None:
    """End here, with a line that says so, if this is a forked copy; the original waits a moment for its copies."""
    if os.getpid() != _Copies.pid:
        _say(file, copied=True)
        os._exit(0)
    deadline = time.monotonic() + _COPY_S
    while _Copies.made and time.monotonic() < deadline:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not ended:
            time.sleep(0.01)
    _Copies.made = 0


def _say(file: int, **line: Any) -> None:
    os.write(file, json.dumps(line).encode() + b"\n")
