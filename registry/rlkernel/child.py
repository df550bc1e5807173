"""Foreign code in a process of its own: what it wrote to a file, and how the process ended.

Files and not pipes: what the code has started may keep them open, and it may say any amount. Whatever it started in
its session ends with it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

_TAIL: Final = 4096  # bytes of stderr that are read
# Pydantic reads the entry points of all distributions for plugins of its own, and raises where one is malformed.
QUIET_PYDANTIC: Final = {"PYDANTIC_DISABLE_PLUGINS": "__all__"}
_MOST: Final = 1 << 24  # bytes of an answer that are read


class Ended(NamedTuple):
    """A process that is gone."""

    said: bytes  # what it wrote to its file
    how: str  # "the process ended with status -11 (SIGSEGV): last line of stderr"
    timed_out: bool


def run(code: str, arguments: Iterable[str], limit_s: float) -> Ended:
    """Run Python code in a process with this one's modules; its first argument is the file to write to.

    Args:
        code: source of the program.
        arguments: its further arguments.
        limit_s: seconds after which it is ended, with all that it has started in its session.

    Raises:
        OSError: no process can be started here.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RLKERNEL_")}
    environ |= {"PYTHONPATH": _path(), **QUIET_PYDANTIC}
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(  # noqa: S603 our own interpreter and source
            [sys.executable, "-P", "-c", code, str(said.fileno()), *arguments],
            pass_fds=(said.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environ,
            start_new_session=True,
        )
        try:
            timed_out = _timed_out(child, limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said.seek(0)
        stderr.seek(-min(stderr.seek(0, os.SEEK_END), _TAIL), os.SEEK_END)
        last = stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        return Ended(said.read(_MOST), _how(child.returncode) + (f": {last[0]}" if last else ""), timed_out)


def restrict(limit_s: float) -> None:
    """Limits of this process, before it runs foreign code: time, memory, no core file; the first to go without memory.

    The caller ends it in time; the alarm is for a caller that is gone.
    """
    signal.alarm(int(limit_s) + 5)
    with contextlib.suppress(OSError, ValueError):  # a limit that is lower already
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        resource.setrlimit(resource.RLIMIT_DATA, (half, half))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _timed_out(child: subprocess.Popen[bytes], limit_s: float) -> bool:
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return True
    return False


def _how(status: int) -> str:
    """`the process ended with status -11 (SIGSEGV)`."""
    known = {-s.value: f" ({s.name})" for s in signal.Signals}
    return f"the process ended with status {status}{known.get(status, '')}"


def _path() -> str:
    """Where this process finds its modules; "" is the working folder."""
    return os.pathsep.join(p or os.curdir for p in sys.path)
