"""Self-tests, run by probes in processes of their own.

These processes import this module alone: it is light, and so are they.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def passes(device: str) -> None:
    """A self-test that passes, and leaves a trace where RLKERNEL-free environment variable TRACE points to."""
    if trace := os.environ.get("TRACE"):
        with open(trace, "a") as file:
            file.write(device + "\n")


def fails(device: str) -> None:
    """A self-test that finds a wrong result."""
    raise ValueError(f"wrong result on {device}")


def crashes(device: str) -> None:
    """A self-test that takes its process along, after printing a lie."""
    print('{"ok": true}', flush=True)
    os._exit(0)


def hangs(device: str) -> None:
    """A self-test that does not end."""
    while True:
        pass


def forks(device: str) -> None:
    """Leaves a child behind that keeps every file of the process open."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)


def starts_a_daemon(device: str) -> None:
    """Leaves a process behind, as a compile server does, and then waits for ever."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(os.environ["TRACE"]).write_text("started")
    time.sleep(60)


def chatters(device: str) -> None:
    """Writes more than a pipe holds, in both directions."""
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * (1 << 20))
        stream.flush()


def raises_at_length(device: str) -> None:
    """Fails with a message larger than a pipe holds."""
    raise ValueError("y" * (1 << 20))


def raises_oddly(device: str) -> None:
    """Fails with an exception that cannot be printed."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise MuteError


def raises_nothing_to_read(device: str) -> None:
    """Fails with an empty message and a lone surrogate."""
    raise ValueError("\n\udce4")


def exits(device: str) -> None:
    """Ends its process politely, without a verdict of its own."""
    sys.exit(0)


def names_its_modules(device: str) -> None:
    """Fails if a file of the working folder shadows a module."""
    import json

    if not hasattr(json, "dumps"):
        raise ImportError(json.__file__)


def calls_an_operator(device: str) -> None:
    """Calls the front door, whose order names this very backend."""
    import torch

    import rlkernel as rlk

    with open(os.environ["TRACE"], "a") as file:
        file.write("x")
    from tests.implementations import acme

    with rlk.registered(acme(self_test="calls_an_operator")):
        with rlk.use("acme"):
            rlk.logprob(torch.zeros(2, 3), torch.tensor([0, 1]))
