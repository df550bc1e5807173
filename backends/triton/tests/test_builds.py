"""The tables of offline compilation: whole for some targets, fitting every target, and made anew in part here."""

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import compile_gate as gate

from rlkernel_triton.claims import CLAIMS
from rlkernel_triton.launchers import Build
from rlkernel_triton.recorded import Recorded, recorded
from rlkernel_triton.workloads import WORKLOADS

# What is launched most: nothing may be spilled.
HOT = {
    ("partial_softmax", "bf16, entropy"),
    ("merge_softmax", "bf16, entropy (2)"),
    ("softmax_backward", "bf16, entropy (3)"),
}
WHOLE = ("sm80", "sm90", "gfx90a", "gfx942", "gfx950")  # targets for which every build was compiled; of others, some
TABLES = [arch for arch in gate.TARGETS if gate.path_of(arch).exists()]


@pytest.mark.parametrize("arch", WHOLE)
def test_a_table_has_what_every_build_needs(arch) -> None:
    lacking = [(r.op, r.recorded.kernel, r.recorded.label) for r in gate.rows(archs=[arch]) if r.needs is None]
    assert lacking == [], f"run: python backends/triton/tools/compile_gate.py {arch}"


@pytest.mark.parametrize("arch", TABLES)
def test_a_table_has_nothing_that_is_not_launched(arch) -> None:
    keys = {gate.key(r.recorded.build) for r in gate.rows(archs=[arch])}
    assert set(gate.table(arch)) - keys == set(), "run: python backends/triton/tools/compile_gate.py none"


@pytest.mark.parametrize("arch", TABLES)
def test_every_build_fits_its_target(arch) -> None:
    assert gate.problems(gate.rows(archs=[arch])) == []


def test_there_is_no_table_of_anything_else() -> None:
    assert {gate.path_of(arch) for arch in TABLES} == set(gate.FOLDER.glob("*.json"))


@pytest.mark.parametrize("arch", WHOLE)
def test_hot_kernels_spill_nothing(arch) -> None:
    found = [r for r in gate.rows(["logprob"], [arch]) if (r.recorded.kernel, r.recorded.label) in HOT]
    assert {(r.recorded.kernel, r.recorded.label) for r in found} == HOT
    assert [r for r in found if r.needs.spilled] == []


@pytest.mark.parametrize("arch", WHOLE)
def test_a_kernel_compiles_to_what_its_table_says(arch, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    row = next(r for r in gate.rows(["logprob"], [arch]) if r.recorded.label == "bf16, entropy")
    made = gate.compiled(row.recorded.build, arch)
    assert made.shared <= gate.TARGETS[arch].shared
    if json.loads(gate.path_of(arch).read_text())["triton"] == gate.triton.__version__:
        assert made == row.needs


def test_a_build_that_does_not_fit_is_a_problem() -> None:
    needs = gate.Needs(registers=32, spilled=0, shared=(64 << 10) + 1)
    row = gate.Row("op", "gfx942", Recorded("k", "b", None), needs)
    assert len(gate.problems([row])) == 1
    assert gate.problems([row._replace(arch="sm90"), row._replace(needs=None)]) == []


def test_every_operator_with_kernels_has_workloads() -> None:
    assert set(WORKLOADS) == {op for op, claim in CLAIMS.items() if claim.kernels}


@pytest.mark.parametrize("op", WORKLOADS)
def test_every_workload_adds_a_build_on_a_target(op) -> None:
    found = {r.label.rpartition(" (")[0] or r.label for arch in gate.TARGETS for r in gate.shipped(op, arch)}
    assert found == set(WORKLOADS[op])


@pytest.mark.parametrize("op", WORKLOADS)
def test_no_build_is_listed_twice(op) -> None:
    found = recorded(op, "sm_90")
    assert len(found) == len({r.build for r in found}) == len({r.label for r in found})


KERNEL = '''
import triton
import triton.language as tl

SIZE = tl.constexpr(4)

@triton.jit
def twice(x):
    """Twice a number."""
    return x * 2  # exact

@triton.jit
def kernel(x, out):
    """Writes."""
    at = tl.arange(0, SIZE)
    tl.store(out + at, twice(x=tl.load(x + at)))
'''


def meaning(folder, name, text=KERNEL, kernel="kernel"):
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return gate.meaning(getattr(module, kernel).fn)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("# exact", "# in fp32"), ("Twice a number.", "2 x."), ("Writes.", "Reads too.")),
        *((r"\btwice\b", "doubled"), (r"\bat\b", "column"), (r"\bx\b", "value")),
    ],
    ids=("comment", "docstring", "kernel's docstring", "function", "variable", "parameter"),
)
def test_a_table_is_not_stale_for_what_computes_the_same(tmp_path, old, new) -> None:
    assert meaning(tmp_path, "before") == meaning(tmp_path, "after", re.sub(old, new, KERNEL))


def test_a_renamed_kernel_in_a_renamed_module_makes_no_table_stale(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    keys = []
    for module, name in (("first_kernels", "kernel"), ("second_kernels", "written")):
        (tmp_path / f"{module}.py").write_text(KERNEL.replace("def kernel", f"def {name}"))
        build = Build(f"{module}:{name}", (("x", "*fp32"), ("out", "*fp32")), (), ("x", "out"), (), 4, None, ())
        keys += [gate.key(build), gate.key(replace(build, divisible=()))]
    assert keys[:2] == keys[2:]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(("old", "new"), [("x * 2", "x * 3"), ("constexpr(4)", "constexpr(8)"), ("out + at", "out")])
def test_a_table_is_stale_when_what_is_computed_changes(tmp_path, old, new) -> None:
    assert meaning(tmp_path, "before") != meaning(tmp_path, "after", KERNEL.replace(old, new))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "FOLDER", tmp_path)
    return tmp_path


def test_what_another_version_of_triton_compiled_is_missing(folder) -> None:
    builds = {gate.key(r.build): gate.Needs(32, 0, 0) for r in recorded("whiten", "sm_90")}
    assert len(gate.missing(["whiten"], ["sm90"])) == len(builds) > 1
    gate.store("sm90", builds)
    assert (gate.missing(["whiten"], ["sm90"]), gate.table("sm90")) == ([], builds)
    stored = {**json.loads((folder / "sm90.json").read_text()), "triton": "2.0.0"}
    (folder / "sm90.json").write_text(json.dumps(stored))
    assert len(gate.missing(["whiten"], ["sm90"])) == len(builds)


def test_a_build_of_two_operators_is_compiled_once(folder) -> None:
    assert folder
    alone = [gate.key(b) for _, b in gate.missing(["logprob"], ["sm90"])]
    both = [gate.key(b) for _, b in gate.missing(["logprob", "linear_policy_loss", "logprob"], ["sm90"])]
    assert len(both) == len(set(both)) > len(alone)


def test_what_nothing_launches_any_more_is_forgotten(folder) -> None:
    assert folder
    kept = {gate.key(recorded("whiten", "sm_90")[0].build): gate.Needs(32, 0, 0)}
    gate.store("sm90", {**kept, "0123456789ab": gate.Needs(64, 0, 0)})
    gate.tidy("sm90")
    assert gate.table("sm90") == kept
