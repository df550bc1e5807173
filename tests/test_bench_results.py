"""What is made of measurements: files that cannot be edited, comparisons with an exit status, reports."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from rlkernel_bench.compare import compare
from rlkernel_bench.plots import curves, draw
from rlkernel_bench.report import as_csv, markdown, summary
from rlkernel_bench.results import read, read_all, seal, write

from rlkernel_conformance import documents
from rlkernel_core.errors import ConfigError

ROOT = Path(__file__).parents[1]


def candidate(name="triton", us=100.0, **more) -> dict:
    spread = {"median": us, "low": 0.99 * us, "high": 1.01 * us, "n": 9}
    known = {"name": name, "kind": "backend", "version": "1", "status": "measured", "message": "", "eager": spread}
    return {**known, **more}


def peer(name="torch", us=100.0, **more) -> dict:
    return candidate(name, us, kind="peer", adapter_ran="never", **more)


def content(*candidates, device="H200", works=1) -> dict:
    """Results of some workloads that all went the same way."""
    result = {
        "suite": "logprob", "op": "logprob", "sizes": {"N": 1}, "dtype": "bfloat16", "task": "forward", "options": {},
        "why": "a test", "clock": "device", "ruler": None, "floor": {"bytes": "N", "flops": "0", "us": 50.0},
        "goals": [], "input_sets": 2, "gpu": None, "candidates": list(candidates),
    }  # fmt: skip
    env = {"device_name": device, "torch": "2", "triton": "3", "python": "3", "rlkernel": "0", "commit": "abc"}
    ceilings = {"copy": 4e12, "read": 4e12, "cached": 4e12, "flops": {"bfloat16": 8e14}, "cache_bytes": 1}
    about = {"size": "full", "device": "cuda", "suites": ["logprob"], "environment": env, "gpu": None}
    return seal({**about, "ceilings": ceilings, "results": [{**result, "work": f"w{i}"} for i in range(works)]})


def test_results_come_back_as_they_were_written(tmp_path) -> None:
    kept = content(candidate())
    assert read(write(kept, tmp_path)) == kept
    assert read(tmp_path) == kept
    assert read_all(tmp_path) == [kept]


def test_edited_results_are_refused(tmp_path) -> None:
    file = write(content(candidate()), tmp_path)
    file.write_text(file.read_text().replace('"median": 100.0', '"median": 90.0'))
    with pytest.raises(ConfigError, match="changed after it was written"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{}", "no results"), ("nonsense", "no results"), ('{"schema": 9, "hash": ""}', "schema 9")]
)
def test_other_files_are_refused(tmp_path, text, message) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


def verdicts(old, new, threshold=0.05) -> list[str]:
    return [c.verdict for c in compare(content(old), content(new), threshold)]


def test_a_difference_counts_beyond_the_threshold() -> None:
    assert verdicts(candidate(us=100.0), candidate(us=104.0)) == ["same"]
    assert verdicts(candidate(us=100.0), candidate(us=110.0)) == ["slower"]
    assert verdicts(candidate(us=100.0), candidate(us=90.0)) == ["faster"]


def test_a_difference_within_the_noise_is_none() -> None:
    wide = {"median": 110.0, "low": 95.0, "high": 150.0, "n": 9}
    assert verdicts(candidate(us=100.0), candidate(eager=wide)) == ["same"]


def test_what_has_a_ruler_is_compared_by_its_ratio() -> None:
    def at(ratio, us):
        return candidate(us=us, times_ruler={"median": ratio, "low": ratio, "high": ratio, "n": 9})

    assert verdicts(at(1.0, 100.0), at(1.0, 130.0)) == ["same"]  # the card was slower, not the code
    assert verdicts(at(1.0, 100.0), at(1.2, 100.0)) == ["slower"]


def test_a_backend_that_went_wrong_or_away_is_a_regression() -> None:
    broken = {k: v for k, v in candidate(status="wrong").items() if k != "eager"}
    changes = compare(content(candidate()), content(broken), 0.05)
    assert [(c.verdict, c.regressed) for c in changes] == [("broken", True)]
    gone = compare(content(candidate()), content(), 0.05)
    assert [(c.verdict, c.regressed) for c in gone] == [("gone", True)]


def test_more_memory_is_a_regression() -> None:
    old, new = (candidate(memory={"extra_bytes": mib << 20}) for mib in (10, 20))
    assert verdicts(old, new) == ["same", "larger"]


def test_peers_do_not_regress() -> None:
    assert compare(content(peer(us=100.0)), content(peer(us=300.0)), 0.05) == []


def test_runs_of_different_devices_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="different devices, 'H200' and 'H100'"):
        compare(content(candidate()), content(candidate(), device="H100"), 0.05)


def test_comparing_exits_with_1_where_something_regressed(cli, tmp_path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(content(candidate(us=100.0)), old)
    write(content(candidate(us=150.0)), new)
    assert cli("bench", "compare", str(old), str(old)).exit_code == 0
    result = cli("bench", "compare", str(old), str(new))
    assert (result.exit_code, "1.500" in result.stdout) == (1, True)
    assert cli("bench", "compare", str(old), str(new), "--threshold", "60%").exit_code == 0
    assert cli("bench", "compare", str(old), str(new), "--threshold", "much").exit_code == 2


def test_the_summary_counts_what_is_wrong_as_not_fast() -> None:
    fast = candidate("fast", 50.0, speedup_over_torch=2.5)
    wrong = {**candidate("wrong", status="wrong"), "eager": None}
    found = summary([content(fast, wrong, peer("torch", 125.0, speedup_over_torch=1.0), works=4)])
    assert found["fast"] == {
        "workloads": 4, "right": 4, "compared": 4, "geometric_mean": pytest.approx(2.5), "fast_1": 1.0,
        "fast_1.5": 1.0, "fast_2": 1.0,
    }  # fmt: skip
    assert found["wrong"] == {"workloads": 4, "right": 0, "compared": 4}
    assert found["torch"]["fast_1"] == 0.0


def test_the_report_says_status_floor_and_what_is_untested() -> None:
    absent = {k: v for k, v in peer("cce", status="absent", message="not installed: cce").items() if k != "eager"}
    text = markdown([content(candidate(percent_of_floor=50.0), peer(status="coarse"), absent)])
    for part in (
        "Floor 50 us",
        "| triton | measured, older | 100 |",
        "adapter never seen working before) | coarse",
        "- cce: not",
    ):
        assert part in text


def test_a_row_of_the_table_is_a_row_of_the_csv() -> None:
    lines = as_csv([content(candidate(), peer(), works=3)]).splitlines()
    assert len(lines) == 1 + 6
    assert lines[1].startswith("logprob,logprob,w0,triton,backend,1,measured,100.0,99.0,101.0,9,eager")


def test_the_pictures_are_drawn(tmp_path) -> None:
    names = draw([content(candidate(gb_s=2000.0, tflop_s=0.0), peer(gb_s=900.0, tflop_s=400.0))], tmp_path)
    assert names == ["roofline.png", "bars-logprob.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_workloads_of_a_sweep_that_differ_in_one_size_are_lines_and_no_bars(tmp_path) -> None:
    kept = content(candidate(), peer(), works=5)
    for n, result in enumerate(kept["results"]):
        result["sizes"] = {"M": 2**n, "K": 8} if n < 4 else {"M": 1, "K": 16}
        result["options"] = {"format": "nf4"}
    [(name, panel)] = curves(kept["results"]).items()
    assert (name, [r["work"] for r in panel]) == ("K 8, bfloat16, forward", ["w0", "w1", "w2", "w3"])
    assert draw([kept], tmp_path) == ["roofline.png", "bars-logprob.png"]
    assert draw([kept | {"size": "sweep"}], tmp_path) == ["roofline.png", "curves-logprob.png", "bars-logprob.png"]
    assert (tmp_path / "curves-logprob.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_on_the_command_line_leaves_results_and_a_report(cli, tmp_path) -> None:
    folder = tmp_path / "out"
    arguments = ("--suite", "policy_loss", "--backend", "reference", "--peers", "none", "--seconds", "0.001")
    result = cli("bench", "run", *arguments, "--out", str(folder), "--json")
    assert (result.exit_code, json.loads(result.stdout)["suites"]) == (0, ["policy_loss"])
    assert read(folder)["results"][0]["candidates"][0]["name"] == "reference"
    assert cli("bench", "report", str(folder)).exit_code == 0
    assert "policy_loss" in (folder / "report.md").read_text()


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


def test_a_run_of_what_is_missing_begins_with_what_the_committed_report_says_of_the_operator(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("rlkernel.probe.arch_of", lambda device: "x86_64")
    assert gpu_all().committed("torch", "whiten", "cpu", tmp_path / "whiten") == ["--missing"]
    assert list(documents.read(tmp_path / "whiten")["operators"]) == ["whiten@1"]
    monkeypatch.setattr("rlkernel.probe.arch_of", lambda device: "another")
    gpu_all().committed("torch", "whiten", "cpu", tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_one_call_brings_benchmarks_home_from_a_machine(tmp_path) -> None:
    command = [sys.executable, "tools/gpu_all.py", "--out", str(tmp_path), "--device", "cpu", "--size", "toy"]
    command += ["--only", "bench", "--suites", "policy_loss", "--backends", "torch", "--peers", "none"]
    done = subprocess.run([*command, "--seconds", "0.001"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [r["suite"] for r in read(tmp_path / "bench")["results"]] == ["policy_loss", "policy_loss"]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"][0]["rc"] == 0
