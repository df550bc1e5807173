"""Tables of configurations: read as written, and recorded from what calls and their gradients launch."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkernel_triton.aot import recording, tables
from rlkernel_triton.aot.backend import OPERATORS
from rlkernel_triton.aot.targets import TARGETS

TABLE = tables.read()


def test_tables_are_read_as_they_were_written(tmp_path) -> None:
    tables.write(TABLE, tmp_path / "table.json")
    assert tables.read(tmp_path / "table.json") == TABLE
    assert (tmp_path / "table.json").read_text() == tables.TABLE.read_text()


def test_a_recording_is_a_table(tmp_path) -> None:
    one = next(iter(TABLE))
    line = json.dumps({"op": "logprob", "target": "sm_87", **one.document()})
    (tmp_path / "run.jsonl").write_text(f"{line}\n{line.replace('sm_87', 'sm_90')}\n")
    assert tables.read(tmp_path / "run.jsonl") == {one: {"logprob": frozenset({"sm_87", "sm_90"})}}


def test_lines_of_several_processes_do_not_mix(tmp_path, monkeypatch) -> None:
    written = []

    class Raw(io.FileIO):
        def write(self, data) -> int:
            written.append(len(data))
            return super().write(data)

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering=-1, **_: Raw(path, mode.replace("b", "")))
    build = max(TABLE, key=lambda b: len(b.text))
    recording._write(tmp_path / "run.jsonl", OPERATORS, "sm_87", build)
    monkeypatch.undo()
    assert written == [(tmp_path / "run.jsonl").stat().st_size]
    assert written[0] > io.DEFAULT_BUFFER_SIZE
    assert tables.read(tmp_path / "run.jsonl") == {build: dict.fromkeys(OPERATORS, frozenset({"sm_87"}))}


def test_a_recording_names_what_gradients_launch(tmp_path) -> None:
    code = (
        "import torch\n"
        "from rlkernel_core.spec.logprob import LogprobCall\n"
        "from rlkernel_triton.aot import recording\n"
        "x = torch.randn(2, 100, requires_grad=True)\n"
        "out = recording.logprob(LogprobCall(x, torch.arange(2), entropy=True))\n"  # with what losses ask for
        "torch.autograd.grad(out.lse, x, torch.ones(2), retain_graph=True)\n"  # begins at one of several results
        "(out.logprob + out.lse + out.entropy).sum().backward()\n"
        "print(bool(x.grad.abs().sum() > 0))\n"  # the reference's
    )
    file = tmp_path / "run.jsonl"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AOT_RECORDING": f"{file}:sm_87"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == "True"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["kernel"].rpartition(":")[2] for line in lines} == {"sweep", "law", "gradient"}
    flags = [line["constants"] for line in lines if line["kernel"].endswith(":gradient")]
    found = {(f["G"], f["G_LSE"], f["G_ENTROPY"]) for f in flags}
    assert found == {(True, False, False), (True, False, True), (False, True, False), (True, True, True)}


@pytest.mark.parametrize("target", ["sm_87", "sm_110"])
def test_boards_are_planned_for_with_three_stages_at_most(target) -> None:
    assert {b.num_stages for b in tables.chosen(TABLE, target)} <= {1, 2, 3}
    assert TARGETS[target].planned in range(4, 21)  # multiprocessors


def test_the_shipped_table_has_what_clauses_launch(tmp_path) -> None:
    file = tmp_path / "launches.jsonl"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AOT_RECORDING": f"{file}:sm_87"}
    command = [
        sys.executable,
        "-m",
        "rlkernel",
        "conformance",
        "run",
        "recorded",
        "--op",
        "logprob",
        "--profile",
        "quick",
    ]
    command += ["--manifest", "rlkernel_triton.aot.recording:backend", "--json"]
    subprocess.run(command, capture_output=True, check=True, env=environ)
    launched = set(tables.read(file))
    assert len(launched) > 30
    assert launched <= set(tables.chosen(TABLE, "sm_87", ("logprob",)))
