"""rlkernel bench bits: equal code gives equal files, what differs is listed, what fails is a record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def tool(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlkernel", "bench", "bits", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """Two operators with and without gradients, and one that returns packed weights."""
    out = tmp_path_factory.mktemp("bits") / "bits.json"
    done = tool("--op", "logprob", "--op", "whiten", "--op", "quantize", "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def records(file: Path) -> dict:
    return json.loads(file.read_text())["operators"]


def test_every_output_and_gradient_has_a_digest_and_every_call_a_backend(file) -> None:
    plain = records(file)["logprob"]["plain"]
    assert set(plain["forward"]) == {"logprob", "lse", "invalid"}
    assert len(plain["gradients"]) == 1
    assert {len(digest) for digest in plain["forward"].values()} == {64}
    assert plain["forward"]["logprob"] == plain["with gradients"]["logprob"]
    assert plain["backend"] == "torch"
    assert "unstable" not in plain


def test_a_refused_call_is_a_record_with_its_class(file) -> None:
    assert records(file)["logprob"]["refused: ids out of range"]["error"] == "ArgumentError"


def test_parts_in_processes_give_what_one_process_gives(file, tmp_path) -> None:
    out = tmp_path / "parts.json"
    assert tool("--op", "logprob", "--op", "whiten", "--op", "quantize", "--jobs", 2, "--out", out).returncode == 0
    done = tool(file, out)
    assert (done.returncode, "0 differences" in done.stdout.splitlines()[-1]) == (0, True)


def test_what_differs_is_listed_by_name(file, tmp_path) -> None:
    content = json.loads(file.read_text())
    calls = content["operators"]
    calls["logprob"]["plain"]["gradients"]["logits0"] = "0" * 64
    calls["logprob"]["mask"] = {"error": "ResolutionError", "error says": "nobody"}
    calls["whiten"]["plain"]["backend"] = "reference"  # another name of the same
    calls["whiten"]["mask"] |= {"unstable": ["forward y"]}
    calls["whiten"]["mask"]["forward"]["y"] = "0" * 64
    del calls["quantize"]["nf4"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    done = tool(file, other)
    assert done.returncode == 1
    assert done.stdout.splitlines()[:-1] == [
        "logprob, mask: error None -> ResolutionError (nobody)",
        "logprob, mask: backend torch -> None",
        "logprob, plain: gradients: logits0 differs",
        "quantize, nf4: only in the first",
    ]
