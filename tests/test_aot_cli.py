"""`rlkernel aot`: bundles built and listed from the shell, and what is said where that cannot be done."""

from __future__ import annotations

import json
import sys

import pytest
import torch

pytest.importorskip("triton")

from tests.aot_calls import builds


@pytest.fixture
def recording(tmp_path):
    """One configuration of a small kernel, as a run wrote it down."""
    made = builds("sm_87", "advantage", rewards=torch.zeros(8, 16), kind="reinforce_pp")
    build = next(b for b in made if b.kernel.endswith(":summary_kernel"))
    file = tmp_path / "run.jsonl"
    file.write_text(json.dumps({"op": "advantage", "target": "sm_87", **build.document()}) + "\n")
    return file


def test_a_bundle_is_built_where_backends_look_and_listed(cli, recording, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    forgotten = []
    monkeypatch.setattr("rlkernel.cli.aot.forget", lambda: forgotten.append(True))
    made = cli("aot", "build", "--target", "sm_87", "--configurations", str(recording), "--jobs", "1", "--json")
    assert (made.exit_code, forgotten) == (0, [True]), made.output  # a self-test that failed for want of it runs again
    found = json.loads(made.stdout)
    path = tmp_path / "rlkernel" / "bundles" / "sm_87.zip"
    assert (found["path"], found["targets"], found["failed"]) == (str(path), {"sm_87": ["cubin", "ptx"]}, [])
    told = cli("aot", "list", str(path))
    assert told.exit_code == 0
    assert f"{found['builds']} builds" in told.stdout
    assert "common.moments:summary_kernel" in told.stdout


def test_what_does_not_compile_is_left_out_and_told_where_that_is_asked_for(cli, recording, tmp_path) -> None:
    line = json.loads(recording.read_text())
    other = {**line, "types": {**line["types"], "gone": "i32"}}
    recording.write_text(f"{json.dumps(line)}\n{json.dumps(other)}\n")
    words = ("aot", "build", "--target", "sm_87", "--configurations", str(recording), "--jobs", "1")
    out = ("--out", str(tmp_path / "x.zip"))
    refused = cli(*words, *out)
    assert (refused.exit_code, "has changed since it was recorded: gone" in refused.stderr) == (2, True), refused.output
    assert not (tmp_path / "x.zip").exists()
    made = cli(*words, *out, "--keep-going")
    assert (made.exit_code, "has changed since it was recorded: gone" in made.stderr) == (1, True), made.output
    assert (tmp_path / "x.zip").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("make",), "unknown action 'make'"),
        (("list",), "Name one: rlkernel aot list FILE"),
        (("list", "gone.zip"), "there is no bundle at gone.zip: gone.zip does not exist. Make it again"),
        (("build",), "Add --target sm_87"),
        (("build", "x.zip", "--target", "sm_87"), "Write --out x.zip"),
        (("build", "--target", "sm_78"), "unknown architecture of cuda 'sm_78'; did you mean"),
    ],
)
def test_wrong_words_are_refused_with_the_right_ones(cli, words, said) -> None:
    found = cli("aot", *words)
    assert (found.exit_code, said in found.stderr) == (2, True), found.output


def test_without_the_package_that_makes_and_reads_them_the_lines_that_install_it_are_told(cli, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rlkernel_triton.aot.command", None)
    found = cli("aot", "list", "x.zip")
    assert found.exit_code == 2
    assert "pip install 'rlkernel[triton]' (on Jetson or ROCm: pip install rlkernel-triton)" in found.stderr


def test_without_a_recording_a_bundle_is_built_of_what_workloads_launch(cli, tmp_path) -> None:
    words = ("aot", "build", "--target", "sm_87", "--op", "prepack", "--out", str(tmp_path / "x.zip"))
    made = cli(*words, "--jobs", "1", "--json")
    assert made.exit_code == 0, made.output
    kernels = {row["kernel"]: row["builds"] for row in json.loads(made.stdout)["kernels"]}
    assert kernels["rlkernel_triton.quant.dequantize_kernels:repack_kernel"] >= 2  # with promises and without
