"""benchmarks/result_bits.py: equal code gives equal files, what differs is listed, what fails is a record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "benchmarks" / "result_bits.py"


def tool(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *map(str, words)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """Two operators with and without gradients, and one that returns packed weights."""
    out = tmp_path_factory.mktemp("bits") / "bits.json"
    done = tool("--small", "--operators", "logprob,whiten,quantize", "--out", out)
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
    assert tool("--small", "--operators", "logprob,whiten,quantize", "--jobs", 2, "--out", out).returncode == 0
    done = tool("--compare", file, out)
    assert (done.returncode, done.stdout.splitlines()[-1].split(";")[0]) == (0, "39 and 39 calls, 0 differences")


def test_what_differs_is_listed_by_name(file, tmp_path) -> None:
    content = json.loads(file.read_text())
    calls = content["operators"]
    calls["logprob"]["plain"]["gradients"]["logits0"] = "0" * 64
    calls["logprob"]["mask"] = {"error": "ResolutionError", "error says": "nobody"}
    calls["whiten"]["plain"]["backend"] = "torch"  # another name of the same
    calls["whiten"]["mask"] |= {"unstable": ["forward y"]}
    calls["whiten"]["mask"]["forward"]["y"] = "0" * 64
    del calls["quantize"]["nf4"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    done = tool("--compare", file, other)
    assert done.returncode == 1
    assert done.stdout.splitlines()[:-1] == [
        "logprob, mask: error None -> ResolutionError (nobody)",
        "logprob, mask: backend torch -> None",
        "logprob, plain: gradients: logits0 differs",
        "quantize, nf4: only in the first",
    ]
