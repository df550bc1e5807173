"""All processes that descend from a supervisor: stop them, let them go on, count their tasks and their CPU time.

A judged process may start threads and processes, and those may leave their session, change their name and outlive
their parent. They cannot leave the tree: orphans become children of the supervisor (`supervisor.py`), or of the first
process of their own process space, which is below it. Linux, standard library only.

    freeze   SIGSTOP to every process of the tree until two looks in a row find every task stopped
    thaw     SIGCONT to every process that was sent a SIGSTOP

A look can miss a process: the kernel's list of children leaves one out if another ends while it is read. A process that
was stopped is therefore let go on whether or not later looks find it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from rlkernel_core.errors import RLKernelError

_STOPPED: Final = frozenset("Tt")  # states of /proc: stopped, stopped by a tracer
_ENDED: Final = frozenset("ZX")  # only a number is left
_LOOKS: Final = 2  # in a row that must find every task stopped: one that is on its way may wake another
_FREEZE_S: Final = 30.0  # on a busy machine a process may wait that long for its turn to stop


class NotStoppedError(RLKernelError):
    """Some process of the tree could not be stopped in time."""


class Task(NamedTuple):
    """One thread of a process."""

    process: int
    thread: int


class ProcessTree:
    """All processes below one, which itself goes on: a supervisor that was stopped would not see its judge end."""

    def __init__(self, supervisor: int) -> None:
        self.supervisor = supervisor
        self.known: list[int] = []  # processes at the last look, parents first
        self.halted: dict[int, None] = {}  # processes that were sent a SIGSTOP and not yet a SIGCONT, in that order

    def tasks(self) -> dict[Task, str]:
        """Every thread of every process, and its state as /proc says it."""
        states: dict[Task, str] = {}
        self.known = []
        _, waiting = _threads(self.supervisor)
        while waiting:
            pid = waiting.pop(0)
            threads, children = _threads(pid)
            self.known.append(pid)
            states.update(threads)
            waiting += children
        return states

    def freeze(self) -> None:
        """Stop every process of the tree; on return nothing of it runs until `thaw`.

        Raises:
            NotStoppedError: one goes on.
        """
        until, looks = time.monotonic() + _FREEZE_S, 0
        self._halt(self.known)
        while looks < _LOOKS:
            running = {task.process for task, state in self.tasks().items() if state not in _STOPPED}
            looks = 0 if running else looks + 1
            if looks:
                continue
            if time.monotonic() > until:
                raise NotStoppedError(f"{len(running)} processes of the judged code cannot be stopped")
            self._halt(running)

    def thaw(self) -> None:
        """Let every process that was stopped go on, children before their parents."""
        for pid in reversed(self.halted):
            _send(pid, signal.SIGCONT)
        self.halted.clear()

    def _halt(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self.halted[pid] = None
            _send(pid, signal.SIGSTOP)

    def cpu_s(self) -> float:
        """Seconds that the threads which now live have computed; of a stopped tree it cannot change."""
        return sum(_ran(task) for task in self.tasks())


def _send(pid: int, what: signal.Signals) -> None:
    with suppress(OSError):
        os.kill(pid, what)


def _threads(pid: int) -> tuple[dict[Task, str], list[int]]:
    """States of a process's threads, and the children of all of them."""
    states: dict[Task, str] = {}
    children: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 half the time of a Path, in every timed call
            with suppress(OSError):
                children += map(int, _text(f"/proc/{pid}/task/{thread}/children").split())
                state = _text(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split(None, 1)[0]
                if state not in _ENDED:
                    states[Task(pid, int(thread))] = state
    return states, children


def _ran(task: Task) -> float:
    try:
        return int(_text(f"/proc/{task.process}/task/{task.thread}/schedstat").split(None, 1)[0]) / 1e9
    except OSError:
        return 0.0


def _text(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16).decode(errors="replace")
    finally:
        os.close(descriptor)
