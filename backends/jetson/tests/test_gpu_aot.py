"""The script that holds bundles to the contract on a GPU: bundles compiled elsewhere, and who gets how many cores."""

import argparse
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlkernel_triton.aot.backend import OPERATORS
from rlkernel_triton.aot.builds import Build, Code
from rlkernel_triton.aot.bundle import Bundle, written

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_aot.py"
gpu_aot = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
LANES = [("aot", "policy_loss"), ("orin-ptx", "policy_loss"), ("aot", "sample"), ("orin-ptx", "sample")]


def bundle(path, target, kernel="m:kernel", source="s") -> Path:
    """A bundle of one build whose code is its target's and source's name."""
    code = Code(Build(kernel, (), ()), target, "kernel", 0, 0, 1, 0, source, (), {"cubin": ""})
    written(path, [(code, {"cubin": f"{target} {source}".encode()})], {"triton": "3.6.0"})
    return path


@pytest.fixture
def run(tmp_path):
    """A call of the script with folders of its own."""
    out = tmp_path / "out"
    out.mkdir()
    return SimpleNamespace(
        work=tmp_path, out=out, bundles=[], used={}, left=60.0, save=lambda *_: None,
        home=lambda name: tmp_path / "data" / name,
    )  # fmt: skip


def test_lanes_that_are_named_have_their_processes_and_the_others_what_is_left_by_weight() -> None:
    assert gpu_aot.processes(LANES, {"sample-aot": 8}, 38) == [6, 12, 8, 12]
    assert gpu_aot.processes(LANES, {}, 2) == [1, 1, 1, 1]


def test_every_operator_of_bundles_is_held_against_its_clauses() -> None:
    assert set(gpu_aot.OPS) == set(OPERATORS)


def test_a_board_is_asked_no_clause_that_wants_more_memory_than_it_has() -> None:
    asked = gpu_aot.small("advantage")
    assert ("AD-01" in asked, "AD-27" in asked, len(asked)) == (True, False, 33)


def test_processes_are_named_by_operator_and_backend() -> None:
    assert gpu_aot.shares("policy_loss-orin-ptx=16,sample-aot=8") == {"policy_loss-orin-ptx": 16, "sample-aot": 8}


@pytest.mark.parametrize("text", ["sample=8", "sample-aot", "sample-aot=0", "sample-aot=x", "sample-board=8"])
def test_other_words_are_refused_with_an_example(text) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="policy_loss-orin-ptx=16"):
        gpu_aot.shares(text)


def now(kernel) -> str:
    """The source that the kernels of these tests have."""
    return "" if kernel == "m:gone" else "s"


@pytest.fixture(autouse=True)
def _kernels(monkeypatch) -> None:
    monkeypatch.setitem(gpu_aot.given.__globals__, "source_of", now)


def test_bundles_that_were_compiled_elsewhere_are_laid_where_they_are_looked_for(run, tmp_path) -> None:
    run.bundles = [bundle(tmp_path / "a.zip", "sm_90"), bundle(tmp_path / "b.zip", "sm_87")]
    assert gpu_aot.given(run) == ({"sm_87", "sm_90"}, set())
    assert gpu_aot.given(run) == ({"sm_87", "sm_90"}, set())  # by another section
    there = sorted(run.home("first").glob("*.zip"))
    assert [list(Bundle(path).targets) for path in there] == [["sm_90"], ["sm_87"]]


def test_what_one_bundle_has_of_now_is_not_of_old(run, tmp_path) -> None:
    run.bundles = [bundle(tmp_path / "a.zip", "sm_87", source="old"), bundle(tmp_path / "b.zip", "sm_87")]
    assert gpu_aot.given(run) == ({"sm_87"}, set())


def test_of_first_calls_what_named_bundles_lack_is_compiled(run, tmp_path, monkeypatch) -> None:
    built = []
    names = gpu_aot.ready.__globals__
    monkeypatch.setitem(names, "ROOT", tmp_path)
    run.bundles, run.ops, run.environ = [bundle(tmp_path / "a.zip", "sm_87", source="old")], ["logprob"], {}
    run.build = lambda name, targets, table: built.append((targets, table.read_text()))

    def child(command, limit, environ, log) -> None:
        file, target = environ["AOT_RECORDING"].split(":")
        lines = [{"kernel": kernel, "target": target} for kernel in ("m:kernel", "m:other")]
        Path(file).write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    monkeypatch.setitem(names, "child", child)
    gpu_aot.ready(run, {"sm_87", "sm_90"})
    [(targets, text)] = built
    asked = [json.loads(line) for line in text.splitlines()]
    assert targets == ["sm_87", "sm_90"]
    assert {(line["target"], line["kernel"]) for line in asked} == {
        ("sm_87", "m:kernel"), ("sm_90", "m:kernel"), ("sm_90", "m:other"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "there"), [("rlkernel_triton.law_kernel:law", True), ("rlkernel_triton.gone:x", False)]
)
def test_the_source_of_a_kernel_is_that_of_this_tree(kernel, there) -> None:
    assert (gpu_aot.source_of(kernel) != "") == there


def test_of_a_bundle_of_older_kernels_nothing_goes_in_with_what_grew(run, tmp_path) -> None:
    old, other = bundle(tmp_path / "a.zip", "sm_87", source="old"), bundle(tmp_path / "b.zip", "sm_87", "m:other")
    run.bundles = [old, other]
    gpu_aot.given(run)
    bundle(tmp_path / "grown" / "sample-aot" / "1.zip", "sm_87", source="new")
    assert gpu_aot.together(run)
    found = Bundle(run.home("all") / "here.zip")
    assert {c.build.kernel: found.read(c.files["cubin"]) for c in found.codes} == {
        "m:kernel": b"sm_87 new", "m:other": b"sm_87 s",
    }  # fmt: skip
