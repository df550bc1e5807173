"""A tree of processes is stopped as a whole, and what it computed is the kernel's account."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rlkernel_judge.process_tree import ProcessTree

# Two busy processes, one of which left its session, and a thread in each; a line once all run.
FAMILY = """
import os, threading
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
        found.close()
        for pid in found.known[1:]:
            subprocess.run(["kill", "-9", str(pid)], check=True)
        root.kill()


def test_a_supervisor_goes_on_while_what_is_below_it_is_stopped(tree) -> None:
    """One that was stopped would not see its judge end."""
    below = ProcessTree(tree.root, spared=True)
    below.freeze()
    states = {task.process == tree.root: state for task, state in tree.tasks().items()}
    below.thaw()
    assert (tree.root in below.known, states[False], states[True] != "T") == (False, "T", True)


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


# A judge that adopts orphans, and a process of it whose grandchild left its session and lost its parent.
JUDGE = """
import os, subprocess, sys
from rlkernel_judge.process_tree import ProcessTree, adopt_orphans
adopt_orphans()
lost = '''
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(1, b"x")
else:
    os.wait()
time.sleep(60)
'''
root = subprocess.Popen([sys.executable, "-c", lost], stdout=subprocess.PIPE, start_new_session=True)
root.stdout.read(1)
tree = ProcessTree(root.pid)
tree.freeze()
print(len(tree.known), {state for state in tree.tasks().values()})
for pid in tree.known:
    os.kill(pid, 9)
"""


def test_an_orphan_stays_in_the_tree_of_a_judge_that_adopts_it() -> None:
    done = subprocess.run([sys.executable, "-c", JUDGE], capture_output=True, text=True, check=True)
    assert done.stdout == "2 {'T'}\n"
