"""Trials in processes of their own, several at a time, each with limits on time and memory.

A server imports torch and the suite once and forks every trial, so that a trial starts in milliseconds and imports
nothing but the copy that it is about.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, Final

from rlkernel.discover import brief, guarded
from rlkernel.outcomes import cache_folder
from rlkernel_conformance import address_space
from rlkernel_conformance.clauses import MODULES

_MEMORY: Final = 16 << 30  # address space of a trial, as of a worker of the suite
_START_S: Final = 240.0  # for the first message: the server imports torch for the first trial
_WARM: Final = (
    "rlkernel_conformance.source_mutants.differences",
    *(f"rlkernel_conformance.clauses.{op}" for op in MODULES),
)

Send = Callable[[str, Any], None]  # what a trial says: the name of a step that it begins, or "found", and a value


@dataclass(frozen=True)
class Trial:
    """Something to do in a process: `run(send, *args)`."""

    name: str
    run: Callable[..., None]
    args: tuple[Any, ...]
    limits: Mapping[str, float] = field(default_factory=dict)  # seconds by step
    limit_s: float = 60.0  # of the other steps


@dataclass
class Answer:
    """What a trial said."""

    found: list[Any] = field(default_factory=list)
    step: str = ""  # the last one that began
    ended: str = "done"  # or "timeout", or how the process ended, or what was raised


def carried_out(trials: Iterable[Trial], jobs: int) -> Iterator[tuple[Trial, Answer]]:
    """The answer of each trial as it ends, `jobs` of them at a time; `trials` is read as processes become free."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_WARM))
    due, running = iter(trials), dict[Connection, _Running]()
    try:
        while True:
            while len(running) < jobs and (trial := next(due, None)) is not None:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_in_process, args=(theirs, trial.run, trial.args), daemon=True)
                process.start()
                theirs.close()
                running[ours] = _Running(trial, process, time.monotonic() + _START_S)
            if not running:
                return
            soon = min(r.until for r in running.values()) - time.monotonic()
            said = wait(list(running), timeout=max(0.0, soon))
            late = [c for c, r in running.items() if c not in said and r.until <= time.monotonic()]
            for channel in [c for c in running if c in said or c in late]:
                r = running[channel]
                if channel in late:
                    r.answer.ended = "timeout"
                elif r.heard(channel):
                    continue
                r.end()
                del running[channel]
                channel.close()
                yield r.trial, r.answer
    finally:
        for r in running.values():
            r.end()


@dataclass
class _Running:
    trial: Trial
    process: ForkServerProcess
    until: float
    answer: Answer = field(default_factory=Answer)

    def heard(self, channel: Connection) -> bool:
        """Take a message in; whether the process may say more."""
        message, gone = guarded(channel.recv)  # EOFError where the process has ended, anything where it was killed
        if gone is not None or message is None:
            self.process.join(5.0)
            self.answer.ended = f"ended with {self.process.exitcode}"
            return False
        kind, value = message
        if kind == "found":
            self.answer.found.append(value)
        elif kind == "end":
            self.answer.ended = value
            return False
        else:
            self.answer.step = kind
            self.until = time.monotonic() + self.trial.limits.get(kind, self.trial.limit_s)
        return True

    def end(self) -> None:
        """End the process and what it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def _in_process(channel: Connection, run: Callable[..., None], args: tuple[Any, ...]) -> None:
    import torch

    os.setsid()
    address_space.bound(_MEMORY)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(cache_folder() / "hypothesis")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    torch.set_num_threads(1)  # a mutant each core; and no pool of threads lives on in a forked process
    _, error = guarded(lambda: run(lambda kind, value=None: channel.send((kind, value)), *args))
    channel.send(("end", "done" if error is None else brief(error)))
