"""Workers are forked from one process that has imported what they need, and are as good as ones started anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlkernel_conformance import fork_server
from rlkernel_conformance.isolation import attack_in_processes
from rlkernel_conformance.leak_check import attacks_with_leak_check
from rlkernel_conformance.process_reaper import descendants, own_descendants
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are started anew")

LOAD_S = 120.0
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"


def held() -> list[str]:
    """What becomes of a clause that plain torch keeps."""
    attack = attacks_with_leak_check("logprob")["LP-05"]
    return [o.status for o in attack_in_processes(Subject("torch", "logprob"), [attack], Profile("test", 1, 30))]


def servers() -> list[int]:
    return [server.process.pid for server in fork_server._servers.values()]


def ended(pid: int) -> bool:
    """Whether a process ends within seconds."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if (
            not Path(f"/proc/{pid}").exists()
            or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        ):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(autouse=True)
def next_test_has_a_server_of_its_own():
    yield
    fork_server._servers.clear()


def test_workers_of_a_run_are_forked_from_one_process_and_leave_it_alone() -> None:
    assert held() == ["held"]
    (first,) = servers()
    assert held() == ["held"]
    assert servers() == [first]
    assert descendants(first) == []
    os.kill(first, signal.SIGKILL)
    assert held() == ["held"]  # by a worker that is started anew


def test_a_server_with_a_second_thread_forks_nothing_and_workers_are_started_anew(tmp_path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(THREAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TORCH_OF_THIS_TEST", "1")
    before = set(own_descendants())
    assert held() == ["held"]
    assert [server.process.wait() for server in fork_server._servers.values()] == [0]
    assert set(own_descendants()) <= before


def test_a_server_ends_with_its_runner_and_its_workers_with_it() -> None:
    code = f"""
import os, signal, time
from rlkernel_conformance import fork_server
server = fork_server.server(dict(os.environ), {LOAD_S})
job, more = os.pipe()  # a job that never comes
worker = server.fork(job, more, more)
print(server.process.pid, worker.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        pids = [int(word) for word in runner.stdout.readline().split()]
        assert len(pids) == 2
        runner.kill()
    assert [ended(pid) for pid in pids] == [True, True]
