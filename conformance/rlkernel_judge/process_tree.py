"""All processes that descend from one: stop them, let them go on, count their tasks and the time they computed.

A judged process may start threads and processes, and those may leave their session, change their name and outlive
their parent. They cannot leave the tree: in a process space of its own the first process of that space inherits
orphans; elsewhere the judge does, once it called `adopt_orphans`. Linux, standard library only.

    freeze   SIGSTOP to every process of the tree until two looks in a row find every task stopped
    thaw     SIGCONT to every process of the tree
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from typing import Final, NamedTuple

from rlkernel_core.errors import RLKernelError

_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
_STOPPED: Final = frozenset("Tt")  # states of /proc: stopped, stopped by a tracer
_ENDED: Final = frozenset("ZX")  # only a number is left
_SESSION, _BEGAN = 3, 19  # proc(5): of /proc/PID/stat, counted from the state
_LOOKS: Final = 2  # in a row that must find every task stopped: one that is on its way may wake another
_FREEZE_S: Final = 30.0  # on a busy machine a process may wait that long for its turn to stop

_adopting = False
_roots: set[int] = set()  # of the trees of this process


class NotStoppedError(RLKernelError):
    """Some process of the tree could not be stopped in time."""


class Task(NamedTuple):
    """One thread of a process."""

    process: int
    thread: int


def adopt_orphans() -> None:
    """Become the parent of orphans of this process's trees, for a process that starts nothing but workers."""
    global _adopting  # noqa: PLW0603 it is a property of the process
    _adopting = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


class ProcessTree:
    """A process and all that descend from it; without the process itself where it is `spared`, as a supervisor is."""

    def __init__(self, root: int, *, spared: bool = False) -> None:
        self.root, self.spared = root, spared
        self.known: list[int] = [] if spared else [root]  # processes at the last look, parents first
        _roots.add(root)
        self.began = int(_fields(root)[_BEGAN])

    def close(self) -> None:
        """The root has ended: its number may be another's soon."""
        _roots.discard(self.root)

    def tasks(self) -> dict[Task, str]:
        """Every thread of every process, and its state as /proc says it."""
        states: dict[Task, str] = {}
        found = _look(self.root, states)
        if _adopting:
            _, children = _threads(os.getpid())
            for orphan in children:
                if orphan not in _roots and orphan not in found and self._may_be_of_it(orphan):
                    found += _look(orphan, states)
        if self.spared:
            found.remove(self.root)
            states = {task: state for task, state in states.items() if task.process != self.root}
        self.known = found
        return states

    def _may_be_of_it(self, orphan: int) -> bool:
        """Whether a child of ours came from a tree: in no session of ours, and begun after the root."""
        with suppress(OSError):
            fields = _fields(orphan)
            foreign = int(fields[_SESSION]) != os.getsid(0)
            return orphan in self.known or (foreign and int(fields[_BEGAN]) >= self.began)
        return False

    def freeze(self) -> None:
        """Stop every process of the tree; on return nothing of it runs until `thaw`.

        Raises:
            NotStoppedError: one goes on.
        """
        until, looks = time.monotonic() + _FREEZE_S, 0
        for pid in self.known:
            _send(pid, signal.SIGSTOP)
        while looks < _LOOKS:
            running = {task.process for task, state in self.tasks().items() if state not in _STOPPED}
            looks = 0 if running else looks + 1
            if looks:
                continue
            if time.monotonic() > until:
                raise NotStoppedError(f"{len(running)} processes of the judged code cannot be stopped")
            for pid in running:
                _send(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let every process of the last look go on, children first: the judged process is the root's child."""
        for pid in reversed(self.known):
            _send(pid, signal.SIGCONT)

    def cpu_s(self) -> float:
        """Seconds that the threads which now live have computed; of a stopped tree it cannot change."""
        return sum(_ran(task) for task in self.tasks())


def _send(pid: int, what: signal.Signals) -> None:
    with suppress(OSError):
        os.kill(pid, what)


def _look(root: int, states: dict[Task, str]) -> list[int]:
    """Processes from a root on, parents first; the states of their threads are added to `states`."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop(0)
        threads, children = _threads(pid)
        found.append(pid)
        states.update(threads)
        waiting += children
    return found


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


def _fields(pid: int) -> list[str]:
    """What /proc/PID/stat says after the name: state, parent, group, session, ...

    Raises:
        OSError: there is no such process.
    """
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
