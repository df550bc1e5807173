"""What judged code can still do, tried from inside; the level that is reported is the one in force."""

from __future__ import annotations

import os
import time

import pytest
import torch

from rlkernel.discover import guarded
from rlkernel_core.errors import ConfigError
from rlkernel_judge import sandbox
from rlkernel_judge.worker_client import CandidateError, Worker, WorkerLost
from rlkernel_judge.workloads import defaults

SANDBOX = sandbox.choose()
STRONG = SANDBOX.level != "limits"
needs_namespaces = pytest.mark.skipif(not STRONG, reason="this machine grants neither user namespaces nor bubblewrap")

# Tries what it is told and answers in numbers: 1 done, 0 refused.
TRIES = """
import os, socket, resource, sys, torch

def done(what):
    try:
        what()
    except (OSError, ValueError):
        return 0.0
    return 1.0

def reached(port):
    with socket.create_connection(("127.0.0.1", port), timeout=2):
        pass

def whiten(x, port=0, outside="", parent=0):
    tried = {
        "network": done(lambda: reached(%(port)d)),
        "outside": done(lambda: open(%(outside)r, "w")),
        "home": done(lambda: open(os.path.expanduser("~/mine"), "w")),
        "kill": done(lambda: os.kill(%(pid)d, 0)),
        "root": float(os.geteuid() == 0),
        "secret": float("RLKERNEL_TEST_SECRET" in os.environ),
        "cores": float(resource.getrlimit(resource.RLIMIT_CORE)[1]),
        "files": float(resource.getrlimit(resource.RLIMIT_FSIZE)[1]),
        "memory": float(resource.getrlimit(resource.RLIMIT_AS)[1]),
    }
    return {"values": torch.tensor(list(tried.values())), "stats": None}
"""
NAMES = ("network", "outside", "home", "kill", "root", "secret", "cores", "files", "memory")


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """What a judged function could do."""
    import socket

    os.environ["RLKERNEL_TEST_SECRET"] = "x"
    outside = tmp_path_factory.mktemp("outside")
    outside.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = {"port": server.getsockname()[1], "outside": str(outside / "written"), "pid": os.getpid()}
        with Worker(SANDBOX, "whiten", "cpu", sandbox.Limits()) as worker:
            ready, _, _ = worker.ask("ready")
            worker.ask("load", source=TRIES % words, impls=(), op="whiten", compile=False)
            _, blocks, _ = worker.ask(
                "call", given={"x": torch.ones(3)}, defaults=defaults("whiten"), grad=False, fresh=None
            )
    del os.environ["RLKERNEL_TEST_SECRET"]
    values = torch.frombuffer(blocks[0], dtype=torch.float32).tolist()
    return dict(zip(NAMES, values, strict=True)), ready["facts"]


def test_what_is_reported_is_what_was_found_inside(tried) -> None:
    found, facts = tried
    assert (bool(found["network"]), bool(found["outside"])) == (facts["network"], facts["writes_outside"])


@needs_namespaces
def test_with_namespaces_there_is_no_network_and_nothing_outside_can_be_written(tried) -> None:
    found, facts = tried
    assert [found[name] for name in ("network", "outside", "kill", "root")] == [0, 0, 0, 0]
    assert (facts["capabilities"], facts["own_processes"]) == (False, True)


def test_a_private_folder_can_be_written(tried) -> None:
    assert tried[0]["home"] == 1


def test_nothing_of_our_environment_is_seen(tried) -> None:
    assert tried[0]["secret"] == 0


def test_the_limits_are_in_force_at_every_level(tried) -> None:
    found, limits = tried[0], sandbox.Limits()
    assert (found["cores"], found["files"], found["memory"]) == (0, limits.file_bytes, limits.memory)


@pytest.mark.parametrize("level", sandbox.LEVELS)
def test_a_level_that_is_asked_for_works_or_is_refused(level) -> None:
    found, error = guarded(lambda: sandbox.choose(level))
    if error is None:
        assert found.level == level
    else:
        assert (type(error), "does not work on this machine" in str(error)) == (ConfigError, True)


def test_a_device_that_cannot_be_used_inside_gets_the_next_level_that_works(monkeypatch) -> None:
    tried = []
    monkeypatch.setattr(sandbox, "_works", lambda c: tried.append(c.level) or c.level == "limits")
    first = sandbox.Sandbox("namespaces", as_nobody=False)
    assert (sandbox.weaker(first), tried) == (sandbox.Sandbox("limits", as_nobody=False), ["bubblewrap", "limits"])
    assert sandbox.weaker(sandbox.Sandbox("limits", as_nobody=False)) is None


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose auto"):
        sandbox.choose("tight")


def test_the_private_folder_is_gone_afterwards() -> None:
    with sandbox.private_folder(SANDBOX) as scratch:
        (scratch / "x").write_text("x")
    assert not scratch.parent.exists()


LEFT = """
import os, time
def whiten(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    return {"values": x.clone()}
"""


def test_a_child_that_left_its_session_ends_with_the_worker() -> None:
    with Worker(SANDBOX, "whiten", "cpu", sandbox.Limits()) as worker:
        worker.ask("load", source=LEFT, impls=(), op="whiten", compile=False)
        worker.ask("call", given={"x": torch.ones(3)}, defaults=defaults("whiten"), grad=False, fresh=None)
        marker = worker.scratch
    assert sandbox.processes_of(marker) == []


BOMB = """
import os
def whiten(x):
    while True:
        try:
            os.fork()
        except OSError:
            pass
"""


@pytest.mark.skipif(
    not (SANDBOX.level == "namespaces" or (SANDBOX.as_nobody or os.geteuid() != 0)),
    reason="root is bound by no limit on processes, and this machine grants no namespaces",
)
def test_a_fork_bomb_ends_within_its_limits() -> None:
    limits = sandbox.Limits(processes=40)
    with Worker(SANDBOX, "whiten", "cpu", limits) as worker:
        worker.ask("load", source=BOMB, impls=(), op="whiten", compile=False)
        worker.deadline = time.monotonic() + 2
        with pytest.raises(WorkerLost) as caught:
            worker.ask("call", given={"x": torch.ones(3)}, defaults=defaults("whiten"), grad=False, fresh=None)
        marker = worker.scratch
    assert (caught.value.fault in {"killed", "timeout"}, sandbox.processes_of(marker)) == (True, [])


HOARD = "def whiten(x):\n    return {'values': x.new_ones(1 << 40)}\n"
FILE = "def whiten(x):\n    open('big', 'wb').truncate(1 << 40)\n"


def test_more_than_its_share_is_an_error_of_the_candidate() -> None:
    with Worker(SANDBOX, "whiten", "cpu", sandbox.Limits()) as worker:
        for source, words in ((FILE, "large"), (HOARD, "memory")):
            worker.ask("load", source=source, impls=(), op="whiten", compile=False)
            with pytest.raises(CandidateError, match=f"(?i){words}"):
                worker.ask("call", given={"x": torch.ones(3)}, defaults=defaults("whiten"), grad=False, fresh=None)
