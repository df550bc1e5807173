"""What every shipped kernel needs on AMD GPUs, as the tables of offline compilation have it."""

import importlib
import json
import re
from pathlib import Path

import pytest

from rlkernel_rocm.architectures import ARCHITECTURES
from rlkernel_triton import head_builds
from rlkernel_triton.builds import MODULES
from rlkernel_triton.head_tiles import compiler_options
from rlkernel_triton.recorded import recorded
from rlkernel_triton.workloads import WORKLOADS

TABLES = Path(__file__).parents[2] / "triton" / "builds"
COMPILED = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
CDNA = ("gfx90a", "gfx942", "gfx950")
MATRIX = json.loads((Path(__file__).parent / "matrix_instructions.json").read_text())
ROWS = [row for path in sorted(TABLES.glob("*.json")) for row in json.loads(path.read_text())["rows"]]


@pytest.mark.parametrize("arch", COMPILED)
def test_every_build_is_within_the_lds_of_a_workgroup(arch) -> None:
    rows = [r for r in ROWS if r["arch"] == arch]
    assert rows
    assert [r for r in rows if r["shared"] > ARCHITECTURES[arch].lds] == []


@pytest.mark.parametrize("arch", CDNA)
def test_no_build_spills_to_scratch_on_cdna(arch) -> None:
    assert [(r["kernel"], r["build"]) for r in ROWS if r["arch"] == arch and r["spilled"]] == []


@pytest.mark.parametrize("arch", COMPILED)
def test_no_workgroup_has_more_than_1024_threads(arch) -> None:
    builds = [b for m in MODULES for b in importlib.import_module(m).builds(arch)]
    found = [(b.kernel.__name__, b.label, b.num_warps) for b in builds]
    found += [(r.kernel, r.label, r.build.num_warps) for op in WORKLOADS for r in recorded(op, arch)]
    assert [b for b in found if b[-1] * ARCHITECTURES[arch].wave > 1024] == []


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "sm90"])
def test_options_of_the_amd_compiler_are_for_amd_and_by_architecture(arch) -> None:
    options = compiler_options(arch)
    cdna = {"matrix_instr_nonkdim", "kpack", "waves_per_eu"}
    assert set(options) == (set() if arch == "sm90" else cdna if arch in CDNA else {"waves_per_eu"})


@pytest.mark.parametrize("arch", COMPILED)
def test_products_are_compiled_as_they_are_launched(arch) -> None:
    builds = [b for b in head_builds.builds(arch) if b.kernel.__name__ != "join"]
    assert [dict(b.options) for b in builds] == [compiler_options(arch)] * len(builds)


# what multiplies bf16, int8 and fp32 matrices, by kind of matrix instruction; RDNA has nothing for fp32
KINDS = {
    "mfma": (r"f32_\d+x\d+x\d+_?bf16(_1k)?", r"i32_\d+x\d+x\d+_?i8", r"f32_\d+x\d+x\d+_?f32"),
    "wmma": (r"f32_16x16x16_bf16", r"i32_16x16x16_iu8", None),
}
PRODUCTS = ("head_sweep", "head_gradient", "head_logits", "product", "word_product", "byte_product")


def multiplied(build):
    """The kind of matrices, as a place in `KINDS`, that a build is expected to multiply; None for none."""
    kernel, label = build.kernel.__name__, build.label
    if kernel not in PRODUCTS or (kernel == "head_gradient" and "saved" in label):
        return None
    return 2 if label.startswith("fp32") else 1 if label.startswith("int8_w8a8") else 0


@pytest.mark.parametrize("arch", COMPILED)
def test_products_use_the_matrix_instruction_of_their_operands(arch) -> None:
    for build in (b for m in MODULES for b in importlib.import_module(m).builds(arch)):
        kind, names = multiplied(build), MATRIX[arch].get(f"{build.kernel.__name__}: {build.label}")
        if kind is None or names is None:  # a build that is newer than the record
            continue
        unit = ARCHITECTURES[arch].matrix
        want = KINDS[unit][kind]
        right = [re.fullmatch(f"v_{unit}_{want}(_w32)?", name) is not None for name in names] if want else [not names]
        assert (build.kernel.__name__, build.label, right and all(right)) == (build.kernel.__name__, build.label, True)


@pytest.mark.parametrize("arch", COMPILED)
def test_no_build_has_a_flavour_of_fp8_in_its_matrix_instructions(arch) -> None:
    """8-bit floats are multiplied as the bf16 numbers they stand for, the same on every architecture."""
    names = {name for found in MATRIX[arch].values() for name in found}
    assert names
    assert [name for name in sorted(names) if re.search("fp8|bf8|f8f6f4", name)] == []


@pytest.mark.parametrize(("arch", "instruction"), [("gfx942", "v_mfma_f32_32x32x8_bf16"), ("gfx950", "32x32x16_bf16")])
def test_products_use_the_matrix_instruction_of_the_architecture(arch, instruction) -> None:
    import toy_kernels as toy

    made = toy.compiled(arch, toy.product, {"a": "*bf16", "b": "*bf16", "c": "*fp32"}, {"M": 64, "K": 64})
    assert instruction in made.asm["amdgcn"]
