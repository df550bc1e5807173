"""What a bundle serves beyond the calls that it was recorded of, and what it says of the others before they run."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlkernel_core.spec.advantage import AdvantageCall
from rlkernel_core.spec.linear import LinearCall
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_triton.aot.backend import BundleBackend
from rlkernel_triton.aot.bundle import Bundle, NoBuildError
from rlkernel_triton.aot.bundle_launcher import argument_of
from rlkernel_triton.aot.command import build
from rlkernel_triton.aot.compiling import compiled, specializations, with_specializations
from rlkernel_triton.aot.configuration_recorder import ConfigurationRecorder
from rlkernel_triton.aot.configurations import Argument
from rlkernel_triton.aot.dry_run import call_signature
from tests.aot_calls import Recording, builds, bundle_of, drawn, of_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A bundle of log-probabilities of bf16 rows, forward, specialized and not."""
    folder = tmp_path_factory.mktemp("with_specializations")
    bundle_of(folder / "rows.zip", of_rows())
    return folder


@pytest.fixture
def served(rows, monkeypatch):
    monkeypatch.setattr("rlkernel_triton.aot.driver.Driver", Recording)
    return BundleBackend(lambda: [rows])


def test_rows_of_any_size_and_alignment_run(served) -> None:
    assert served("logprob_fits")(drawn(torch.randn(2, 32000).bfloat16())) is None
    assert served("logprob_fits")(drawn(torch.randn(2, 32001).bfloat16()[:, 1:])) is None
    call = drawn(torch.randn(3, 1, 1001).bfloat16())
    assert served("logprob")(call)(call).logprob.shape == (3, 1)


@pytest.mark.parametrize(
    ("options", "lacks"),
    [({"softcap": 30.0}, "HAS_CAP=True"), ({"entropy": True}, "MOMENT=True"), ({}, "logprob.kernels:softmax_backward")],
)
def test_what_a_bundle_lacks_is_a_reason_before_anything_runs(served, options, lacks) -> None:
    logits = torch.randn(2, 32000).bfloat16().requires_grad_(not options)
    reason = served("logprob_fits")(drawn(logits, **options))
    assert (reason.slug, lacks in reason.text) == ("shape/unsupported", True)
    assert "AOT_MISSING=FILE" in reason.fix


def test_a_bundle_of_other_kernels_is_a_reason_with_the_line_that_makes_a_new_one(served, monkeypatch) -> None:
    monkeypatch.setattr("rlkernel_triton.aot.bundle_launcher.source", lambda _: "of now")
    said = served("logprob_fits")(drawn(torch.zeros(4, 1000, dtype=torch.bfloat16)))
    assert (said.slug, "was built from another rlkernel_triton.logprob.kernels:partial_softmax" in said.text) == (
        "shape/unsupported", True,
    )  # fmt: skip
    assert said.fix == "rlkernel aot build --target sm_87 --out rows.zip"


def test_a_wrong_call_is_left_to_the_operator_to_refuse(served) -> None:
    call = LogprobCall(torch.randn(2, 100).bfloat16(), torch.zeros(3, dtype=torch.int64))
    assert served("logprob_fits")(call) is None


HEAD = LinearLogprobCall(torch.zeros(2, 16), torch.zeros(64, 16), torch.arange(2))
REWARDS = AdvantageCall(torch.zeros(2, 8), kind="returns")


@pytest.mark.parametrize(
    ("op", "call", "name"), [("linear_logprob", HEAD, "group"), ("advantage", REWARDS, "process_group")]
)
def test_calls_over_several_ranks_are_not_planned_as_planning_would_speak_to_them(served, op, call, name) -> None:
    assert served(f"{op}_fits")(call).slug == "shape/unsupported"
    assert served(f"{op}_fits")(call.of(call, **{name: object()})) is None


def test_what_is_missing_is_written_down_and_can_be_built(served, tmp_path, monkeypatch) -> None:
    file = tmp_path / "missing.jsonl"
    monkeypatch.setenv("AOT_MISSING", str(file))
    served("logprob_fits")(drawn(torch.randn(2, 32000).bfloat16(), softcap=30.0))
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (line["op"], line["target"], line["constants"]["HAS_CAP"]) == ("logprob", "sm_87", True)
    made = build(["sm_87"], ["logprob"], out=str(tmp_path / "more.zip"), configurations=str(file), jobs=1)
    assert made["builds"] == 2  # for aligned rows, and for all


def test_threads_that_read_at_once_get_what_they_asked_for(rows) -> None:
    bundle = Bundle(rows / "rows.zip")
    places = sorted({at for code in bundle.codes for at in code.files.values()})
    alone = [bundle.read(at) for at in places]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(bundle.read, places * 20))
    assert together == alone * 20


def partial_softmax():
    """The build that reads rows of bf16 logits."""
    return [b for b in of_rows() if b.kernel.endswith(":partial_softmax")]


def test_the_type_of_what_code_never_reads_does_not_matter(rows) -> None:
    ((code, _),) = compiled(partial_softmax(), "sm_87")
    assert "mask" in code.unread
    arguments = {n: Argument(kind, divisible=True, one=True) for n, kind in code.configuration.types}
    assert code.serves({**arguments, "mask": Argument("*bf16")})
    assert not code.serves({**arguments, "logits": Argument("*fp16", divisible=True)})


def test_what_workloads_keep_is_specialized_and_nothing_else() -> None:
    hidden, weight = (torch.zeros(n, 64).bfloat16().requires_grad_() for n in (17000, 1000))  # more than one block
    every = builds("sm_87", "linear_logprob", hidden=hidden, weight=weight, ids=torch.zeros(17000, dtype=torch.int64))
    product = [b for b in every if b.kernel.endswith("linear_logprob.kernels:head_matmul")][:1]
    made = [b for alike in with_specializations(product) for b in alike]
    ones = {tuple(n for n, v in b.constants if v == 1 and n.endswith(("stride", "step"))) for b in made}
    assert ones == {("a_step", "b_step"), ("a_stride", "b_step"), ("a_step", "b_stride"), ()}  # the third: LoRA
    assert [b.divisible for b in made if b.specialization == min(b.specialization for b in made)] == [()]
    assert [c.spilled for c, _ in compiled([b for b in made if b.divisible], "sm_87")] == [0, 0, 0]


IN_INFERENCE_MODE = """
import torch
with torch.inference_mode():
    from rlkernel_triton.aot.compiling import specializations
    print(len(specializations()))
"""


def test_what_workloads_keep_is_found_in_inference_mode_too() -> None:
    """In a process of its own: whoever asks first makes the tensors of the table."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", IN_INFERENCE_MODE]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{len(specializations())}\n"), done.stderr


def test_builds_that_differ_in_what_is_never_read_are_compiled_once(tmp_path) -> None:
    (one,) = partial_softmax()
    table = tmp_path / "twice.jsonl"
    lines = []
    for kind in ("*i64", "*u1"):
        document = {**one.document(), "types": {**dict(one.types), "mask": kind}}
        lines.append(json.dumps({"op": "logprob", "target": "sm_87", **document}) + "\n")
    table.write_text("".join(lines))
    assert build(["sm_87"], out=str(tmp_path / "x.zip"), configurations=str(table), jobs=1)["builds"] == 2


def test_calls_are_told_apart_as_host_code_and_compilers_tell_them_apart() -> None:
    x = torch.zeros(64, 128)
    assert call_signature(x) == call_signature(torch.zeros(50 + 14, 128))
    assert call_signature(torch.zeros(100, 128)) == call_signature(torch.zeros(101, 128))
    different = [x, x[:63], torch.zeros(65, 128), torch.zeros(64, 129), x.t(), x.half(), x[:, :127], x[1:2]]
    assert len({call_signature(other) for other in different}) == len(different)
    assert call_signature(17, "seed") == call_signature(2**30 + 1, "seed") != call_signature(16, "seed")


def test_a_launch_that_hoppers_copy_engine_reads_for_is_in_no_bundle() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    recorder = ConfigurationRecorder("sm_90")
    x, weight = (torch.zeros(n, 1024, dtype=torch.bfloat16, device="meta") for n in (4096, 4096))
    recorder.planned("linear")(LinearCall(x, weight))
    assert recorder.seen == set()
    with pytest.raises(NoBuildError, match=r'copy engine.*order = \["triton"\]'):
        argument_of(TensorDescriptor.from_tensor(x, [128, 64]))
