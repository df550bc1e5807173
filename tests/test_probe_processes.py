"""The process of a self-test: what it leaves behind, how much it says, and where it finds its modules."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlkernel import outcomes
from rlkernel import probe as probing
from rlkernel.discover import Candidate
from rlkernel.probe import forget, probe
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires

ROOT = Path(__file__).parents[1]


def candidate(self_test: str, *, version: str = "1.0", packages: tuple[str, ...] = ()) -> Candidate:
    impl = Impl(op="logprob@1", target="a:b", requires=Requires(device="cpu", packages=packages))
    manifest = Backend(name="acme", api=API_VERSION, impls=(impl,), self_test=f"tests.self_tests:{self_test}")
    return Candidate("acme", "rlkernel-acme", version, manifest)


def outcome(self_test: str, cache: Path) -> str | None:
    reason = probe(candidate(self_test), "cpu", "subprocess", cache=cache)
    return None if reason is None else f"{reason.slug}: {reason.text}"


def alive(marker: str) -> list[int]:
    """Processes whose command line holds a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_child_that_outlives_the_self_test_is_not_waited_for(tmp_path) -> None:
    start = time.monotonic()
    assert outcome("forks", tmp_path) is None
    assert time.monotonic() - start < 30


def test_what_a_self_test_started_ends_with_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(probing, "TIMEOUT_S", 8.0)
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    before = set(alive("time.sleep(60)"))
    start = time.monotonic()
    assert "probe/timeout" in str(outcome("starts_a_daemon", tmp_path))
    assert time.monotonic() - start < 30
    assert (tmp_path / "trace").read_text() == "started"
    time.sleep(0.2)
    assert set(alive("time.sleep(60)")) <= before


@pytest.mark.parametrize(
    ("self_test", "said"),
    [
        ("chatters", None),
        ("raises_at_length", "probe/failed: self-test of rlkernel-acme 1.0: ValueError: yyy"),
        ("raises_oddly", "probe/failed: self-test of rlkernel-acme 1.0: MuteError"),
        ("raises_nothing_to_read", "probe/failed: self-test of rlkernel-acme 1.0: ValueError"),
        ("exits", "probe/failed: self-test of rlkernel-acme 1.0: SystemExit: 0"),
        (
            "absent",
            "probe/failed: self-test of rlkernel-acme 1.0: tests.self_tests:absent cannot be imported: AttributeError",
        ),
    ],
)
def test_whatever_it_says_the_verdict_is_short_and_right(tmp_path, self_test, said) -> None:
    found = outcome(self_test, tmp_path)
    assert found == said if said is None else found.startswith(said)
    assert len(found or "") < 1000


def test_files_of_the_working_folder_shadow_nothing(tmp_path, monkeypatch) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('shadow')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *(p for p in sys.path if p not in {"", "."})])
    assert outcome("names_its_modules", tmp_path / "cache") is None


def test_the_working_folder_counts_where_it_counts_here(tmp_path, monkeypatch) -> None:
    (tmp_path / "local_kernels.py").write_text("def fine(device): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    local = Backend(name="acme", api=API_VERSION, impls=(), self_test="local_kernels:fine")
    assert probe(Candidate("acme", "rlkernel-acme", "1.0", local), "cpu", "subprocess", cache=tmp_path) is None


def test_a_self_test_that_calls_an_operator_starts_no_other(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probing, "TIMEOUT_S", 40.0)
    assert outcome("calls_an_operator", tmp_path) is None
    assert (tmp_path / "trace").read_text() == "x"


def test_an_interrupt_ends_the_self_test(tmp_path) -> None:
    code = (
        "from tests.test_probe_processes import outcome; from pathlib import Path; import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a run in the background may ignore interrupts
        "print('ready', flush=True)\n"
        f"outcome('starts_a_daemon', Path({str(tmp_path)!r}))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TRACE": str(tmp_path / "trace")}
    before = set(alive("starts_a_daemon"))
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environ, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "trace").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=20)
    assert b"KeyboardInterrupt" in said
    time.sleep(0.2)
    assert set(alive("starts_a_daemon")) <= before
    assert list(tmp_path.glob("probe-*")) == []


def test_the_outcome_belongs_to_everything_that_could_change_it(tmp_path, monkeypatch) -> None:
    facts = {"device": "cuda", "arch": "sm90", "torch": "2.11", "name": "H200", "driver": "570"}
    monkeypatch.setattr(probing, "device_facts", lambda device: dict(facts))
    ran: list[str] = []
    monkeypatch.setattr(probing, "_run_child", lambda test, device: ran.append(test) or {"ok": True})

    def runs(**how: object) -> bool:
        before = len(ran)
        probe(candidate("forks", **how), "cuda:0", "subprocess", cache=tmp_path)
        return len(ran) > before

    assert [runs(), runs()] == [True, False]
    for name in facts:
        monkeypatch.setitem(facts, name, "another")
        assert [runs(), runs()] == [True, False]
    assert [runs(version="1.1"), runs(version="1.1")] == [True, False]
    versions = {"flashinfer-python": "0.7"}
    monkeypatch.setattr(probing, "PackageVersions", lambda: versions)
    assert runs(packages=("flashinfer-python>=0.5",))
    assert not runs(packages=("flashinfer-python>=0.5",))
    versions["flashinfer-python"] = "0.8"
    assert runs(packages=("flashinfer-python>=0.5",))


def test_a_failure_is_believed_for_a_while_a_success_for_good(tmp_path, monkeypatch) -> None:
    said = [{"ok": False, "code": "failed", "error": "out of memory"}, {"ok": True}]
    monkeypatch.setattr(probing, "_run_child", lambda test, device: said[0])
    assert "out of memory" in str(outcome("forks", tmp_path))
    said.pop(0)
    assert "out of memory" in str(outcome("forks", tmp_path))
    (file,) = tmp_path.glob("probe-*.json")
    then = time.time() - outcomes.FAILURE_BELIEVED_S - 1
    os.utime(file, (then, then))
    assert outcome("forks", tmp_path) is None
    os.utime(file, (then, then))
    said[0] = {"ok": False, "code": "failed", "error": "never asked"}
    assert outcome("forks", tmp_path) is None
    assert json.loads(file.read_text())["ok"] is True
    assert forget(tmp_path) == 1


def test_two_processes_that_probe_at_once_leave_one_whole_outcome(tmp_path) -> None:
    threads = [threading.Thread(target=outcome, args=("chatters", tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [json.loads(f.read_text())["ok"] for f in tmp_path.iterdir()] == [True]
