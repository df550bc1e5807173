"""The tables of offline compilation: made from these sources, fitting every target, and made anew in part here."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import compile_gate as gate

from rlkernel_triton.recorded import recorded
from rlkernel_triton.workloads import WORKLOADS

# What is launched most: nothing may be spilled.
HOT = {("sweep", "bf16, entropy"), ("gradient", "bf16, entropy"), ("law", "bf16, entropy")}


ALWAYS = {"sm80", "sm90", "gfx942"}  # targets that every table has; others may wait for the next run of the gate


def rows(name):
    return gate.table(name)["rows"]


def named(build):
    return (build.kernel if isinstance(build.kernel, str) else build.kernel.__name__), build.label


@pytest.mark.parametrize("name", gate.TABLES)
def test_a_table_was_made_from_these_sources(name) -> None:
    stored = gate.table(name)["fingerprints"]
    now = {arch: gate.fingerprint(gate.shipped_for(name, arch)) for arch in stored}
    assert now == stored, f"run: python backends/triton/tools/compile_gate.py {name}"
    assert set(stored) >= ALWAYS


@pytest.mark.parametrize("name", gate.TABLES)
def test_a_table_has_a_row_for_every_build(name) -> None:
    stored = [(r["arch"], r["kernel"], r["build"]) for r in rows(name)]
    shipped = {arch: gate.shipped_for(name, arch) for arch in gate.table(name)["fingerprints"]}
    assert [(arch, *named(b)) for arch, builds in shipped.items() for b in builds] == stored
    assert len(stored) == len(set(stored))


@pytest.mark.parametrize("name", gate.TABLES)
def test_every_build_fits_its_target(name) -> None:
    assert gate.problems(rows(name)) == []


def test_there_is_no_table_of_anything_else() -> None:
    assert {gate.path_of(name) for name in gate.TABLES} == set(gate.FOLDER.glob("*.json"))


def test_hot_kernels_spill_nothing() -> None:
    found = [r for r in rows("logprob") if (r["kernel"], r["build"]) in HOT]
    assert {(r["kernel"], r["build"]) for r in found} == HOT
    assert [r for r in found if r["spilled"]] == []


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_a_kernel_compiles_to_what_its_table_says(arch, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    build = next(b for b in gate.shipped_for("logprob", arch) if b.label == "bf16, entropy")
    stored = gate.table("logprob")
    row = next(r for r in stored["rows"] if (r["kernel"], r["build"], r["arch"]) == ("sweep", build.label, arch))
    made = gate.compiled(build, arch)
    assert made["shared"] <= gate.TARGETS[arch].shared
    if stored["triton"] == gate.triton.__version__:
        assert made == row


def test_a_build_that_does_not_fit_is_a_problem() -> None:
    row = {"kernel": "k", "build": "b", "arch": "gfx942", "shared": (64 << 10) + 1}
    assert len(gate.problems([row])) == 1
    assert gate.problems([{**row, "arch": "sm90"}]) == []


@pytest.mark.parametrize("op", WORKLOADS)
def test_every_workload_adds_a_build_on_every_target(op) -> None:
    for arch in gate.TARGETS:
        found = {r.label.rpartition(" (")[0] or r.label for r in gate.shipped_for(op, arch)}
        assert found == set(WORKLOADS[op])


def test_no_build_is_listed_twice() -> None:
    found = [r.build for r in recorded("advantage", "sm_90")]
    assert len(found) == len(set(found))


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
    tl.store(out + at, twice(tl.load(x + at)))
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
    [("# exact", "# in fp32"), ("Twice a number.", "2 x."), ("Writes.", "Reads too."), ("twice(", "doubled(")],
)
def test_a_table_is_not_stale_for_what_computes_the_same(tmp_path, old, new) -> None:
    assert meaning(tmp_path, "before") == meaning(tmp_path, "after", KERNEL.replace(old, new))


def test_a_renamed_kernel_makes_no_table_stale(tmp_path) -> None:
    renamed = KERNEL.replace("def kernel", "def written")
    assert meaning(tmp_path, "before") == meaning(tmp_path, "after", renamed, "written")


@pytest.mark.parametrize(("old", "new"), [("x * 2", "x * 3"), ("constexpr(4)", "constexpr(8)"), ("out + at", "out")])
def test_a_table_is_stale_when_what_is_computed_changes(tmp_path, old, new) -> None:
    assert meaning(tmp_path, "before") != meaning(tmp_path, "after", KERNEL.replace(old, new))


def test_what_another_version_of_triton_compiled_is_stale(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gate, "FOLDER", tmp_path)
    assert gate.stale(["whiten"], ["sm90"]) == [("whiten", "sm90")]
    gate.store("whiten", "sm90", [])
    assert gate.stale(["whiten"], ["sm90"]) == []
    stored = {**gate.table("whiten"), "triton": "2.0.0"}
    gate.path_of("whiten").write_text(json.dumps(stored))
    assert gate.stale(["whiten"], ["sm90"]) == [("whiten", "sm90")]
