"""A process between runner and worker: it ends whatever the tested code leaves running, then ends as the worker did.

Where the kernel has them, orphans of the worker become children of the reaper (Linux: a subreaper), so that a child
that forked twice or left the session is found; elsewhere the runner's kill of the whole session is what there is.
Imports nothing outside the standard library: it must hold nothing that tested code could break.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER
_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
_KILLING_S: Final = 5.0  # a child that forks faster than it is killed is left to the kill of the session


class _Reaper:
    """Process id of the reaper, in the process under it."""

    pid: int | None = None


def fork_under_reaper() -> None:
    """Return in a child process; this process waits for it and never returns."""
    _prctl(_DEATH_SIGNAL, signal.SIGTERM)
    _prctl(_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGTERM, _kill_and_exit)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)
        _prefer_oom_kill()
        _Reaper.pid = os.getppid()
        return
    os.closerange(0, 1 << 16)  # the channel closes when the worker has ended
    _, status = os.waitpid(child, 0)
    kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError, ValueError):  # SIGKILL and SIGSTOP have no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def own_descendants() -> list[int]:
    """Processes that this one has started, orphans too where it has a reaper."""
    return descendants(_Reaper.pid or os.getpid())


def descendants(of: int) -> list[int]:
    """Processes started by a process or by one of these, by the table in /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(entry.parent.name))
    found: list[int] = []
    due = [of]
    while due:
        due = [child for pid in due for child in children.get(pid, ())]
        found += due
    return found


def kill_descendants() -> None:
    """End all descendants of this process."""
    until = time.monotonic() + _KILLING_S
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _kill_and_exit(number: int, _: object) -> None:
    kill_descendants()
    os._exit(128 + number)


def _prefer_oom_kill() -> None:
    """Where memory runs out for the whole machine, the worker goes before its neighbors."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
