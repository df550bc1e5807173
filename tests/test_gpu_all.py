"""What one call on a machine with a GPU runs, and what of it comes back."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest
from rlkernel_bench.results import read

from rlkernel_conformance import documents
from rlkernel_conformance.evidence import Evidence
from rlkernel_conformance.report import content_hash, only

ROOT = Path(__file__).parents[1]


def gpu_all():
    spec = importlib.util.spec_from_file_location("gpu_all", ROOT / "tools" / "gpu_all.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_backends_for_other_hardware_take_no_time_of_a_gpu(monkeypatch) -> None:
    folders = {"triton": "t", "cuda": "c", "rocm": "r", "aiter": "r"}
    monkeypatch.setattr("rlkernel.probe.arch_of", lambda device: "sm90")
    assert gpu_all().made_for(folders, "cuda:0") == ["triton", "cuda"]


def test_the_backends_of_a_clone_are_found_as_our_own_without_an_installation(tmp_path) -> None:
    folders = gpu_all().distributions(tmp_path)
    assert {"torch", "triton", "cuda"} <= set(folders)
    found = {
        e.name: (d.name, e.value) for d in distributions(path=[str(tmp_path)]) for e in d.entry_points
        if e.group == "rlkernel.backends"
    }  # fmt: skip
    assert found["triton"] == ("rlkernel-triton", "rlkernel_triton:backend")
    assert found["torch"] == ("rlkernel", "rlkernel_torch:backend")


def test_suites_that_share_backends_share_a_process() -> None:
    found = gpu_all().groups(["logprob", "sample", "linear_logprob", "capture"], ["triton", "torch"])
    assert found == [
        (["triton", "torch"], ["logprob", "sample"]),
        (["triton"], ["linear_logprob"]),
        (["triton", "torch"], ["capture"]),
    ]


def put(folder: Path, backend: str, **changes) -> None:
    """A report whose results are of sources that nobody knows, with what a committed one says of `whiten`."""
    content = only(documents.read(ROOT / "conformance" / "reports" / backend), ["whiten@1"])
    content = {**content, **changes}
    for clause in content["operators"]["whiten@1"]["clauses"]:
        clause["sources"] = None
    documents.write({**content, "hash": content_hash(content)}, folder)


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A session over a clone with reports of plain torch and a simulator on a CPU and of sm_87 code on a GPU."""
    module = gpu_all()
    for name in ("torch", "rocm-simulated-gfx942", "orin-ptx"):
        put(tmp_path / "conformance" / "reports" / name, name)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    environ = {"PYTHONPATH": "clone"}
    made = module.Session(tmp_path, tmp_path / "work", time.monotonic() + 60, environ, {}, io.StringIO())
    ran = []
    monkeypatch.setattr(made, "run", lambda name, command, limit, **more: ran.append((name, command, more)))
    return module, made, ran


def asked(*words: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu_all.py", "--missing", *words])
        return gpu_all().options()


def renewed(session, *words: str, arch: str) -> list[tuple[str, list[str], dict]]:
    """What is run to renew the reports of the clone on a machine."""
    module, made, ran = session
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlkernel.probe.arch_of", lambda device: arch)
        patch.setattr(module, "cards", lambda: ["4", "7"] if "cuda" in words else [])
        for job in module.renewals(made, asked(*words), time.monotonic() + 60):
            job()
    return ran


def test_a_run_of_what_is_missing_begins_with_what_the_committed_report_says_of_the_operator(session) -> None:
    found = renewed(session, "--device", "cpu", "--ops", "whiten", arch="x86_64")
    [(name, command, _)] = found
    assert name == "conformance of torch whiten"
    assert command[1:7] == ["-m", "rlkernel", "conformance", "run", "torch", "--op"]
    assert "--missing" in command
    assert command[command.index("--jobs") + 1] == str(session[0].JOBS)  # nothing else is to be renewed
    into = Path(command[command.index("--report") + 1])
    assert into == session[1].work / "conformance" / "torch" / "whiten"
    assert list(documents.read(into)["operators"]) == ["whiten@1"]


def test_reports_of_other_hardware_are_not_renewed(session, capsys) -> None:
    assert renewed(session, "--device", "cuda", arch="sm80") == []
    assert capsys.readouterr().out.startswith("nothing to renew on cuda (sm80) in ")


def test_the_gpus_are_those_that_the_caller_may_use(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert gpu_all().cards() == ["2", "5"]


@pytest.mark.parametrize(
    "words", [("--reports", "triton"), ("--missing", "--backends", "triton"), ("--missing", "--profile", "quick,deep")]
)
def test_options_that_would_have_no_effect_are_errors(words, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_all.py", *words])
    with pytest.raises(SystemExit):
        gpu_all().options()
    assert f"error: {words[-2]}: " in capsys.readouterr().err


def test_a_report_that_is_not_there_is_an_error_that_names_those_that_are(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_all.py", "--missing", "--reports", "triton,tritom"])
    with pytest.raises(SystemExit):
        gpu_all().options()
    assert "--reports: no tritom in conformance/reports; there are aot-sm90, " in capsys.readouterr().err


def test_reports_over_bundles_are_renewed_with_a_bundle_and_their_tool_on_one_of_the_gpus(session) -> None:
    first, second = renewed(session, "--device", "cuda", "--ops", "whiten,glu", "--profile", "toy", arch="sm90")[:2]
    work = session[1].work
    assert first[0] == "a bundle"
    assert [w for w in first[1] if w.startswith("sm_")] == ["sm_87", "sm_90"]
    _, command, more = second
    assert command[command.index("--manifest") + 1] == "aot_compile_missing:backend"
    assert command[command.index("--profile") + 1] == "toy"
    into = command[command.index("--report") + 1]
    assert more["variables"] == {
        "PYTHONPATH": f"backends/triton/tools{os.pathsep}clone",
        "AOT_MISSING": f"{into}/missing.jsonl",
        "AOT_CODE": "ptx",
        "XDG_DATA_HOME": str(work / "data"),
        "CUDA_VISIBLE_DEVICES": "4",
    }
    assert gpu_all().bundle(work).is_relative_to(work / "data")


def test_an_operator_that_nobody_timed_is_expected_to_take_what_it_took_in_another_report() -> None:
    timed, elsewhere, nowhere = (
        Evidence("orin-ptx", "orin-ptx", op, "missing", 1, seconds, "")
        for op, seconds in (("glu@1", 3.0), ("whiten@1", 0.0), ("rope@1", 0.0))
    )
    reports = [
        {"operators": {"whiten@1": {"clauses": [{"seconds": 4.0}, {"seconds": 5.0}]}}},
        {"operators": {"whiten@1": {"clauses": [{"seconds": 0.0}]}}},
    ]
    took = gpu_all().weights([timed, elsewhere, nowhere], reports)
    assert took == {timed: 3.0, elsewhere: 9.0, nowhere: 6.0}


def test_what_was_renewed_comes_back_by_the_name_of_the_report(session) -> None:
    module, made, _ = session
    for op in ("whiten", "glu"):
        content = only(documents.read(ROOT / "conformance" / "reports" / "torch"), [f"{op}@1"])
        documents.write(content, made.work / "conformance" / "torch" / op)
    found = module.conformance_reports(made)
    assert {name: sorted(content["operators"]) for name, content in found.items()} == {"torch": ["glu@1", "whiten@1"]}


@pytest.mark.slow  # the longest test of results
def test_one_call_brings_benchmarks_home_from_a_machine(tmp_path) -> None:
    command = [sys.executable, "tools/gpu_all.py", "--out", str(tmp_path), "--device", "cpu", "--size", "toy"]
    command += ["--only", "bench", "--suites", "policy_loss", "--backends", "torch", "--peers", "none"]
    done = subprocess.run([*command, "--seconds", "0.001"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [r["suite"] for r in read(tmp_path / "bench")["results"]] == ["policy_loss", "policy_loss"]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"][0]["rc"] == 0
