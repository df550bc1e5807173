"""A tree of processes is stopped as a whole, and what it computed is the kernel's account."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlkernel_judge.process_tree import ProcessTree

# Two busy processes, one of which left its session, and a thread in each, below one that waits; a byte once each runs.
FAMILY = """
import os, threading
if os.fork():
    while True:
        os.wait()
def spin():
    while True:
        pass
if os.fork() == 0:
    os.setsid()
threading.Thread(target=spin, daemon=True).start()
os.write(1, b"x")
spin()
"""


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    """A family that runs."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE) as root:
        assert root.stdout is not None
        assert (root.stdout.read(1), root.stdout.read(1)) == (b"x", b"x")
        found = ProcessTree(root.pid)
        found.tasks()
        yield found
        root.kill()
        for pid in found.known:
            os.kill(pid, signal.SIGKILL)


def test_a_supervisor_goes_on_while_what_is_below_it_is_stopped(tree) -> None:
    """One that was stopped would not see its judge end."""
    tree.freeze()
    state = Path(f"/proc/{tree.supervisor}/stat").read_text().rpartition(")")[2].split()[0]
    states = set(tree.tasks().values())
    tree.thaw()
    assert (states, state != "T") == ({"T"}, True)


def test_threads_and_processes_that_left_their_session_are_counted(tree) -> None:
    tasks = tree.tasks()
    assert (len({t.process for t in tasks}), len(tasks)) == (2, 4)


def test_a_stopped_tree_computes_nothing_and_goes_on_when_it_may(tree) -> None:
    tree.freeze()
    before = tree.cpu_s()
    time.sleep(0.05)
    stopped = tree.cpu_s() - before
    tree.thaw()
    while tree.cpu_s() == before:
        time.sleep(0.001)
    assert stopped == 0


def test_a_stopped_process_goes_on_though_later_looks_missed_it(tree) -> None:
    tree.freeze()
    tree.known.clear()
    tree.thaw()
    while "R" not in tree.tasks().values():
        time.sleep(0.001)
    assert tree.halted == {}
