"""The tables of offline compilation: made from these sources, fitting every target, and made anew in part here."""

import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import compile_gate as gate

from rlkernel_triton.builds import MODULES

TABLES = {m: gate.path_of(m) for m in MODULES}
# What is launched most: nothing may be spilled.
HOT = {("sweep", "bf16, entropy"), ("gradient", "bf16, entropy"), ("law", "8 parts")}


@pytest.mark.parametrize("module", TABLES)
def test_a_table_was_made_from_these_sources(module) -> None:
    stored = json.loads(TABLES[module].read_text())["fingerprints"]
    now = {arch: gate.fingerprint(builds) for arch, builds in gate.shipped(module).items()}
    assert now == stored, f"run: python backends/triton/tools/compile_gate.py {module}"


@pytest.mark.parametrize("module", TABLES)
def test_every_build_fits_its_target(module) -> None:
    assert gate.problems(json.loads(TABLES[module].read_text())["rows"]) == []


def test_hot_kernels_spill_nothing() -> None:
    rows = json.loads(TABLES["rlkernel_triton.logprob_kernels"].read_text())["rows"]
    assert [r for r in rows if (r["kernel"], r["build"]) in HOT and r["spilled"]] == []


@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942"])
def test_a_kernel_compiles_to_what_its_table_says(arch, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    module = importlib.import_module("rlkernel_triton.logprob_kernels")
    build = next(b for b in module.builds(arch) if b.label == "bf16, entropy")
    stored = json.loads(TABLES["rlkernel_triton.logprob_kernels"].read_text())
    row = next(r for r in stored["rows"] if (r["kernel"], r["build"], r["arch"]) == ("sweep", build.label, arch))
    made = gate.compiled(build, arch)
    assert made["shared"] <= gate.TARGETS[arch].shared
    if stored["triton"] == gate.triton.__version__:
        assert made == row


def test_a_build_that_does_not_fit_is_a_problem() -> None:
    row = {"kernel": "k", "build": "b", "arch": "gfx942", "shared": (64 << 10) + 1}
    assert len(gate.problems([row])) == 1
    assert gate.problems([{**row, "arch": "sm90"}]) == []
