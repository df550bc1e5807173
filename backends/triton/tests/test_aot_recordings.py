"""Tables of configurations: read as written, and recorded from what calls and their gradients launch."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlkernel_core.errors import RLKernelError
from rlkernel_triton.aot import recordings
from rlkernel_triton.aot.configuration_recorder import launched
from rlkernel_triton.launchers.targets import TARGETS
from rlkernel_triton.recorded import recorded
from tests.aot_calls import of_rows


def test_a_recording_is_a_table(tmp_path) -> None:
    one = of_rows()[0]
    line = json.dumps({"op": "logprob", "target": "sm_87", **one.document()})
    (tmp_path / "run.jsonl").write_text(f"{line}\n{line.replace('sm_87', 'sm_90')}\n")
    assert recordings.read(tmp_path / "run.jsonl") == {one: {"logprob": frozenset({"sm_87", "sm_90"})}}


def test_lines_of_several_processes_do_not_mix(tmp_path, monkeypatch) -> None:
    written = []

    class Raw(io.FileIO):
        def write(self, data) -> int:
            written.append(len(data))
            return super().write(data)

    monkeypatch.setattr(Path, "open", lambda path, mode, buffering=-1, **_: Raw(path, mode.replace("b", "")))
    (build, *_) = of_rows()
    long = replace(build, constants=tuple((f"NAME_{i}", i) for i in range(1000)))
    recordings.append(tmp_path / "run.jsonl", "logprob", long, "sm_87")
    monkeypatch.undo()
    assert written == [(tmp_path / "run.jsonl").stat().st_size]
    assert written[0] > io.DEFAULT_BUFFER_SIZE
    assert recordings.read(tmp_path / "run.jsonl") == {long: {"logprob": frozenset({"sm_87"})}}


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
    assert {line["kernel"].rpartition(":")[2] for line in lines} == {
        "partial_softmax",
        "merge_softmax",
        "softmax_backward",
    }
    flags = [line["constants"] for line in lines if line["kernel"].endswith(":softmax_backward")]
    found = {(f["G"], f["G_LSE"], f["G_ENTROPY"]) for f in flags}
    assert found == {(True, False, False), (True, False, True), (False, True, False), (True, True, True)}


def test_what_is_no_recording_is_refused(tmp_path) -> None:
    (tmp_path / "run.jsonl").write_text('{"op": "logprob"}')
    with pytest.raises(RLKernelError, match=r"run\.jsonl.* Record the configurations again"):
        recordings.read(tmp_path / "run.jsonl")


@pytest.mark.parametrize("target", ["sm_87", "sm_110"])
def test_boards_are_planned_for_with_three_stages_at_most(target) -> None:
    assert {b.num_stages for b in launched(target, ["logprob"])} <= {1, 2, 3}
    assert TARGETS[target].planned in range(4, 21)  # multiprocessors


def test_a_bundle_has_what_the_table_of_workloads_launches() -> None:
    mine = launched("sm_87", ["sample"])
    gate = [r.build for r in recorded("sample", "sm_87")]
    lacking = [
        r
        for r in gate
        if not any(
            b.kernel == r.kernel and b.num_warps == r.num_warps and set(b.constants) <= set(r.constants) for b in mine
        )
    ]
    assert gate
    assert lacking == []


def test_conformance_is_recorded_by_the_backend_that_answers_with_the_reference(tmp_path) -> None:
    file = tmp_path / "launches.jsonl"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AOT_RECORDING": f"{file}:sm_87"}
    command = ["-m", "rlkernel", "conformance", "run", "recorded", "--op", "dequantize", "--profile", "quick", "--json"]
    command = [sys.executable, *command, "--manifest", "rlkernel_triton.aot.recording:backend"]
    subprocess.run(command, capture_output=True, check=True, env=environ)
    found = recordings.read(file)
    assert len(found) > 30
    assert {op for uses in found.values() for op in uses} == {"dequantize"}
