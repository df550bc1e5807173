"""What judged code can still do, tried from inside; the level that is reported is the one in force."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from rlkernel.discover import guarded
from rlkernel_core.errors import ConfigError
from rlkernel_judge import sandbox, supervisor, syscall_filter
from rlkernel_judge.attack_run import attacks
from rlkernel_judge.cli import OPEN, in_force
from rlkernel_judge.private_folder import private_folder, remove_leftovers
from rlkernel_judge.verdict import Isolation
from rlkernel_judge.worker_client import CandidateError, Worker, WorkerLost
from rlkernel_judge.workloads import defaults
from tests import sandboxed
from tools import sandbox_table

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
def test_with_namespaces_no_process_outside_is_seen(tried) -> None:
    found, facts = tried
    assert (found["kill"], found["root"], facts["capabilities"], facts["own_processes"]) == (0, 0, False, True)


def test_at_every_level_there_is_no_network_and_nothing_outside_can_be_written(level) -> None:
    source = "from rlkernel_judge.sandbox import facts\nsay(facts(Path.cwd()))\n"
    found = sandboxed.run(source, level).said
    assert [found[name] for name in ("network", "writes_outside", "writes_proc", "calls_filtered")] == [
        False,
        False,
        False,
        True,
    ]


def test_a_private_folder_can_be_written(tried) -> None:
    assert tried[0]["home"] == 1


def test_nothing_of_our_environment_is_seen(tried) -> None:
    assert tried[0]["secret"] == 0


def test_the_limits_are_in_force_at_every_level(tried) -> None:
    found, limits = tried[0], sandbox.Limits()
    assert (found["cores"], found["files"], found["memory"]) == (0, limits.file_bytes, limits.address_space)


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
    with private_folder(for_nobody=SANDBOX.as_nobody) as scratch:
        (scratch / "x").write_text("x")
    assert not scratch.parent.exists()


def level_of(level: str) -> str:
    """A level, or a skip that names what the machine lacks."""
    _, error = guarded(lambda: sandbox.choose(level))
    if error is not None:
        pytest.skip(f"the level {level} does not work on this machine")
    return level


@pytest.fixture(params=sandbox.LEVELS)
def level(request) -> str:
    return level_of(request.param)


# What stops an attack: no word, where its calls are refused and it goes on; else the bound at which it is ended.
ENDED = {
    "sandbox_daemon": {""},
    "sandbox_fork_bomb": {"tasks"},
    "sandbox_memory_of_children": {"memory"},
    "sandbox_private_folder": {"", "disk"},
    "sandbox_socket_buffers": {"memory"},
}


@pytest.mark.parametrize("attack", attacks(area="sandbox"), ids=lambda attack: attack.name.removeprefix("sandbox_"))
def test_an_attack_on_the_sandbox_reaches_nothing(attack, level) -> None:
    calls = "logprob(1, 2)\n" * 2
    ended = sandboxed.run(f"logprob = lambda *a, **k: None\n{attack.source}\n{calls}say('honest')\n", level)
    assert (ended.said in {"honest", None}, ended.why in ENDED.get(attack.name, {""})) == (True, True), ended
    if ended.said is None:
        assert attack.name in ENDED


def test_a_process_that_left_its_session_and_its_environment_ends_with_the_worker(level) -> None:
    token = f"left-{os.getpid()}-{level}"
    source = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve("/bin/sleep", ["{token}", "600"], {{}})
    os._exit(0)
os.wait()
say("left")
time.sleep(600)
"""
    with sandboxed.started(source, level) as channel:
        assert channel.recv(64) == b'"left"'
        assert sandboxed.until_some(token) != []
    assert sandboxed.processes_with(token) == []


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_judge_that_is_ended_leaves_no_process_and_no_folder(how, tmp_path) -> None:
    for place in (level_of(SANDBOX.level), "limits"):
        token = f"orphan-{os.getpid()}-{how}-{place}"
        source = f"import os, time\nif os.fork() == 0:\n    os.setsid()\nsay('up')\ntime.sleep(600)  # {token}\n"
        code = f"""
import signal
import socket
from tests import sandboxed
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores both
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with sandboxed.started({source!r}, {place!r}) as channel:
    channel.recv(4)
    print("up", flush=True)
    channel.recv(1 << 10)
    channel.recv(1 << 10)
"""
        environ = {**os.environ, "TMPDIR": str(tmp_path)}
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
        ) as judge:
            assert judge.stdout.readline() == b"up\n"
            judge.send_signal(getattr(signal, how))
        assert (sandboxed.until_none(token), sandboxed.until_empty(tmp_path)) == ([], [])


def test_folders_of_judges_that_are_gone_are_removed_and_those_of_others_stay(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with private_folder(for_nobody=SANDBOX.as_nobody) as held:
        (tmp_path / "rlkernel-judge-gone" / "scratch").mkdir(parents=True)
        (tmp_path / "rlkernel-judge-link").symlink_to(tmp_path / "rlkernel-judge-gone")
        remove_leftovers()
        assert {p.name for p in tmp_path.iterdir()} == {"rlkernel-judge-link", held.parent.name}


@pytest.mark.skipif(SANDBOX.as_nobody or os.geteuid() != 0, reason="judged code does not run as root here")
def test_root_outside_is_told(tried) -> None:
    isolation = Isolation(level=SANDBOX.level, as_nobody=False, facts=tried[1])
    assert (tried[1]["root_outside"], "ROOT OUTSIDE" in in_force(isolation)) == (True, True)


def test_the_printed_line_names_what_is_open_and_nothing_else(tried) -> None:
    closed = dict.fromkeys(OPEN, False) | {"calls_filtered": True}
    said = {name: in_force(Isolation(level="limits", as_nobody=False, facts={**closed, name: True})) for name in OPEN}
    assert in_force(Isolation(level="limits", as_nobody=False, facts=closed)) == "limits"
    assert said == {name: f"limits, {text}" for name, text in OPEN.items()}
    assert set(OPEN) <= tried[1].keys()


def test_every_call_that_is_refused_has_its_number_on_both_machines() -> None:
    for machine, column in (("x86_64", 0), ("aarch64", 1)):
        program = syscall_filter.program(machine, gpu=False)
        compared = {operand for code, _, _, operand in program if code == syscall_filter.EQUAL}
        refused = syscall_filter.REFUSED | syscall_filter.WITHOUT_GPU
        wanted = {numbers[column] for numbers in refused.values()} - {None}
        assert (wanted - compared, len(program) < 4096) == (set(), True)  # BPF_MAXINSNS


HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


@pytest.mark.skipif(not HEADER.exists(), reason="the kernel's headers for x86_64 are not installed")
def test_the_numbers_of_refused_calls_are_those_of_the_kernel() -> None:
    text = HEADER.read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", text)}
    refused = syscall_filter.REFUSED | syscall_filter.WITHOUT_GPU
    assert {name: known[name] for name in refused if name in known} == {
        name: x86 for name, (x86, _) in refused.items() if name in known
    }


def cgroup_folder(root: Path, controllers: str) -> Path:
    root.mkdir(parents=True)
    (root / "cgroup.subtree_control").write_text(controllers)
    return root


def test_a_cgroup_is_made_below_the_nearest_group_that_hands_on_memory(tmp_path) -> None:
    cgroup_folder(tmp_path / "cg", "memory pids")
    cgroup_folder(tmp_path / "cg" / "user", "cpu memory")
    cgroup_folder(tmp_path / "cg" / "user" / "shell", "")
    (tmp_path / "own").write_text("4:memory:/x\n0::/user/shell\n")
    bounds = supervisor.Bounds(memory=1 << 20, tasks=9, disk=1)
    with supervisor.cgroup(bounds, tmp_path / "cg", tmp_path / "own") as group:
        assert group is not None
        found = {name: (group / name).read_text() for name in ("memory.max", "memory.oom.group", "memory.swap.max")}
        assert (group.parent, found) == (
            tmp_path / "cg" / "user",
            {"memory.max": "1048576", "memory.oom.group": "1", "memory.swap.max": "0"},
        )
    (tmp_path / "own").write_text("4:memory:/x\n")
    with supervisor.cgroup(bounds, tmp_path / "cg", tmp_path / "own") as group:
        assert group is None


def test_with_a_cgroup_the_kernel_counts_the_memory_of_the_whole_tree() -> None:
    with supervisor.cgroup(supervisor.Bounds(memory=1 << 30, tasks=99, disk=1)) as group:
        if group is None:
            pytest.skip("this machine grants no cgroup of version 2 with the memory controller")
    (attack,) = attacks(only=["sandbox_memory_of_children"])
    source = "import os\nsay('memory.max' in os.listdir(os.environ['JUDGE_CGROUP']))\n"
    ended = sandboxed.run(f"logprob = lambda *a, **k: None\n{attack.source}\nlogprob(1, 2)\n", SANDBOX.level)
    assert (sandboxed.run(source, SANDBOX.level).said, ended) == (True, (None, "memory"))


# What CUDA does as it starts (it fails with error 304 where it may not), and what must stay closed nevertheless.
CUDA = """
import os, threading
from concurrent.futures import ThreadPoolExecutor
def name():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write("cuda")
with ThreadPoolExecutor(1) as pool:
    pool.submit(name).result()  # a thread alone would end in silence
os.memfd_create("cuda")
import errno, socket
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC) as daemon:
        assert daemon.connect_ex("\\0cuda") == errno.ECONNREFUSED
from rlkernel_judge.sandbox import facts
found = facts(Path.cwd())
say([name for name in ("network", "writes_outside", "writes_proc", "capabilities") if found[name]])
"""


def test_where_a_gpu_is_used_its_driver_can_start_and_the_rest_stays_closed(level) -> None:
    limits = dataclasses.replace(sandboxed.LIMITS, gpu=True)
    assert sandboxed.run(CUDA, level, limits) == ([], "")


# Families and types of sockets that can be made, and what comes of asking a server for a connection.
SOCKETS = """
import errno, itertools, os, socket
made = []
for family, kind in itertools.product(range(1, 46), (1, 2, 3, 5)):
    try:
        made.append((family, kind, socket.socket(family, kind))[:2])
    except OSError:
        pass
say([made, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect_ex(SERVER) == errno.ECONNREFUSED])
"""


def test_where_a_gpu_is_used_no_socket_reaches_a_server(level) -> None:
    limits = dataclasses.replace(sandboxed.LIMITS, gpu=True)
    name = f"\0rlkernel-{os.getpid()}"  # abstract: whoever sees its network may ask it
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        source = SOCKETS.replace("SERVER", repr(name))
        assert sandboxed.run(source, level, limits).said == [[[1, 1], [1, 5]], True]


def test_memory_files_are_counted_where_a_gpu_needs_them(level) -> None:
    (attack,) = attacks(only=["sandbox_memory_files"])
    limits = dataclasses.replace(sandboxed.LIMITS, gpu=True)
    source = f"logprob = lambda *a, **k: None\n{attack.source}\nlogprob(1, 2)\n"
    assert sandboxed.run(source, level, limits) == (None, "memory")


def test_the_page_has_a_row_for_every_attack_and_no_other() -> None:
    page = (Path(__file__).parents[1] / "docs" / "judge.md").read_text()
    rows = re.findall(
        r"^\| (.+?) \|", page.partition(sandbox_table.BEGIN)[2].partition(sandbox_table.END)[0], re.MULTILINE
    )
    assert rows == ["Attack", *(attack.tries for attack in attacks(area="sandbox"))], (
        "python tools/sandbox_table.py docs/judge.md"
    )


def test_children_are_found_without_the_kernels_list_of_them() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in supervisor.children_by_parent()[os.getpid()]
        child.communicate(b"\n")


def test_memory_over_the_bound_is_named_so_in_the_verdict() -> None:
    source = "def whiten(x):\n    kept = [bytes(64 << 20) for _ in range(64)]\n    return {'values': x}\n"
    source = source.replace("bytes(64 << 20)", "b'x' * (64 << 20)")
    with Worker(SANDBOX, "whiten", "cpu", sandbox.Limits(memory=1 << 30)) as worker:
        worker.ask("load", source=source, impls=(), op="whiten", compile=False)
        with pytest.raises(WorkerLost) as caught:
            worker.ask("call", given={"x": torch.ones(3)}, defaults=defaults("whiten"), grad=False, fresh=None)
    assert caught.value.fault == "out_of_memory"


HOARD = "def whiten(x):\n    return {'values': x.new_ones(1 << 40)}\n"
FILE = "def whiten(x):\n    open('big', 'wb').truncate(1 << 40)\n"


def test_more_than_its_share_is_an_error_of_the_candidate() -> None:
    with Worker(SANDBOX, "whiten", "cpu", sandbox.Limits()) as worker:
        for source, words in ((FILE, "large"), (HOARD, "memory")):
            worker.ask("load", source=source, impls=(), op="whiten", compile=False)
            with pytest.raises(CandidateError, match=f"(?i){words}"):
                worker.ask("call", given={"x": torch.ones(3)}, defaults=defaults("whiten"), grad=False, fresh=None)
