"""A judged process without torch: python -m tests.sandboxed LEVEL SCRATCH SOCKET LIMITS SOURCE.

It enters the sandbox as a worker does, runs a source, and sends what became of it as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from rlkernel_judge import sandbox
from rlkernel_judge.private_folder import private_folder

LIMITS = sandbox.Limits(memory=256 << 20, processes=60)
_ENDS_S = 60.0


class Ended(NamedTuple):
    """How a sandboxed process ended."""

    said: object  # None: nothing
    why: str  # of its supervisor


@contextmanager
def started(source: str, level: str, limits: sandbox.Limits = LIMITS, **more: str) -> Iterator[socket.socket]:
    """The socket on which a sandboxed process answers, while it runs."""
    box = boxed(level)
    with private_folder(for_nobody=box.as_nobody) as scratch:
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(_ENDS_S)
            arguments = (str(theirs.fileno()), json.dumps(asdict(limits)), source)
            process = box.start("tests.sandboxed", scratch, *arguments, limits=limits, keep=(theirs.fileno(),), **more)
            theirs.close()
            try:
                yield ours
            finally:
                sandbox.kill(process)


def run(source: str, level: str, limits: sandbox.Limits = LIMITS) -> Ended:
    """Run a source to its end."""
    box = boxed(level)
    with private_folder(for_nobody=box.as_nobody) as scratch:
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(_ENDS_S)
            arguments = (str(theirs.fileno()), json.dumps(asdict(limits)), source)
            process = box.start("tests.sandboxed", scratch, *arguments, limits=limits, keep=(theirs.fileno(),))
            theirs.close()
            try:
                said = ours.recv(1 << 16)
                process.wait(_ENDS_S)
                return Ended(json.loads(said) if said else None, sandbox.cause(process))
            finally:
                sandbox.kill(process)


def boxed(level: str) -> sandbox.Sandbox:
    """A sandbox of this level as this machine has it."""
    return sandbox.choose(level)


def processes_with(text: str) -> list[int]:
    """Processes whose arguments hold a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            held = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in held and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def until_some(text: str, limit_s: float = 20.0) -> list[int]:
    """Processes whose arguments hold a text, once there are some or the time is over."""
    until = time.monotonic() + limit_s
    while not (found := processes_with(text)) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def until_empty(folder: Path, limit_s: float = 20.0) -> list[Path]:
    """What a folder holds, once that is nothing or the time is over."""
    until = time.monotonic() + limit_s
    while (found := list(folder.iterdir())) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def until_none(text: str, limit_s: float = 20.0) -> list[int]:
    """Processes whose arguments hold a text, once there are none or the time is over."""
    until = time.monotonic() + limit_s
    while (found := processes_with(text)) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def main(level: str, scratch: str, descriptor: str, limits: str, source: str) -> None:
    """Enter, run, report."""
    sandbox.enter(level, Path(scratch), sandbox.Limits(**json.loads(limits)))
    with socket.socket(fileno=int(descriptor)) as to:
        names: dict[str, object] = {"say": lambda what: to.sendall(json.dumps(what).encode()), "Path": Path}
        try:
            exec(source, names)
        except RuntimeError as error:  # how attacks say that they escaped
            to.sendall(json.dumps(str(error)).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
