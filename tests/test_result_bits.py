"""rlkernel bench bits: equal code gives equal files, what differs is listed, what fails is a record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlkernel import cli as command_line

ROWS = "logprob: logprob 32x1000 float32 forward entropy"
BACKWARD = "logprob: logprob 32x1000 bfloat16 forward+backward entropy"
WEIGHT = "quantize: quantize 64x128 bfloat16 forward format=nf4"


def recorded(out: Path) -> Path:
    """The bits of an operator with and without gradients, and of one that returns packed weights, by a new process."""
    words = ["--suite", "logprob", "--suite", "quantize", "--backend", "torch", "--out", str(out)]
    command = [sys.executable, "-m", "rlkernel", "bench", "bits", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def compared(*files: Path) -> tuple[int, str]:
    """Exit code and words of the comparison."""
    done = CliRunner().invoke(command_line.app(), ["bench", "bits", *map(str, files)])
    return done.exit_code, done.stdout


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return recorded(tmp_path_factory.mktemp("bits") / "bits.json")


def workloads(file: Path) -> dict:
    return json.loads(file.read_text())["workloads"]


def calls(file: Path) -> int:
    """How many calls the file has: one a workload and backend."""
    return sum(map(len, workloads(file).values()))


def test_every_output_and_gradient_has_a_digest(file) -> None:
    record = workloads(file)[BACKWARD]["reference"]
    assert set(record["bits"]) == {"logprob", "entropy", "grad_logits"}
    assert {len(digest) for digest in record["bits"].values()} == {64}
    assert "unstable" not in record


def test_the_same_code_gives_the_same_bits(file, tmp_path) -> None:
    code, said = compared(file, recorded(tmp_path / "again.json"))
    assert (code, said.splitlines()[-1].split(";")[0]) == (0, f"{calls(file)} and {calls(file)} calls, 0 differences")


def test_what_differs_is_listed_by_name(file, tmp_path) -> None:
    content = json.loads(file.read_text())
    calls = content["workloads"]
    calls[BACKWARD]["reference"]["bits"]["grad_logits"] = "0" * 64
    calls[ROWS]["reference"] = {"error": "ResolutionError", "error says": "nobody"}
    del calls[WEIGHT]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    code, said = compared(file, other)
    assert code == 1
    assert said.splitlines()[:-1] == [
        f"{ROWS}, reference: error None -> ResolutionError (nobody)",
        f"{BACKWARD}, reference: grad_logits differs",
        f"{WEIGHT}, reference: only in the first",
    ]


def test_what_differs_within_a_run_is_not_compared(file, tmp_path) -> None:
    content = json.loads(file.read_text())
    content["workloads"][ROWS]["reference"] |= {"unstable": ["entropy"]}
    content["workloads"][ROWS]["reference"]["bits"]["entropy"] = "0" * 64
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    assert compared(file, other) == (
        0,
        f"{calls(file)} and {calls(file)} calls, 0 differences; 1 calls with unstable outputs, left out\n",
    )
