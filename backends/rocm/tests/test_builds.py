"""What every shipped kernel needs on AMD GPUs, as the tables of offline compilation have it."""

import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "triton" / "tools"))

import compile_gate as gate

from rlkernel_rocm.architectures import ARCHITECTURES
from rlkernel_triton.common.matmul_tiles import compiler_options

COMPILED = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
CDNA = ("gfx90a", "gfx942", "gfx950")
MATRIX = json.loads((Path(__file__).parent / "matrix_instructions.json").read_text())


@cache
def shipped(arch):
    """Every build for a target, with what it needs there where it was compiled."""
    return list(gate.rows(archs=[arch]))


def compiled(arch):
    return [r for r in shipped(arch) if r.needs is not None]


def named(row):
    return row.op, row.recorded.kernel, row.recorded.label


@pytest.mark.parametrize("arch", COMPILED)
def test_every_build_is_within_the_lds_of_a_workgroup(arch) -> None:
    assert compiled(arch)
    assert [named(r) for r in compiled(arch) if r.needs.shared > ARCHITECTURES[arch].lds] == []


@pytest.mark.parametrize("arch", CDNA)
def test_no_build_spills_to_scratch_on_cdna(arch) -> None:
    assert [named(r) for r in compiled(arch) if r.needs.spilled] == []


@pytest.mark.parametrize("arch", COMPILED)
def test_no_workgroup_has_more_than_1024_threads(arch) -> None:
    wave = ARCHITECTURES[arch].wave
    assert [named(r) for r in shipped(arch) if r.recorded.build.num_warps * wave > 1024] == []


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "sm90"])
def test_options_of_the_amd_compiler_are_for_amd_and_by_architecture(arch) -> None:
    options = compiler_options(arch)
    cdna = {"matrix_instr_nonkdim", "kpack", "waves_per_eu"}
    assert set(options) == (set() if arch == "sm90" else cdna if arch in CDNA else {"waves_per_eu"})


@pytest.mark.parametrize("arch", COMPILED)
def test_products_are_compiled_as_they_are_launched(arch) -> None:
    kernels = ("head_partial_softmax", "head_dlogits", "head_matmul")
    builds = [r.recorded.build for r in shipped(arch) if r.recorded.kernel in kernels]
    assert builds
    want = {"enable_fp_fusion": True, **compiler_options(arch)}
    assert [dict(b.options) for b in builds] == [want] * len(builds)


# what multiplies bf16, int8 and fp32 matrices, by kind of matrix instruction; RDNA has nothing for fp32
KINDS = {
    "mfma": (r"f32_\d+x\d+x\d+_?bf16(_1k)?", r"i32_\d+x\d+x\d+_?i8", r"f32_\d+x\d+x\d+_?f32"),
    "wmma": (r"f32_16x16x16_bf16", r"i32_16x16x16_iu8", None),
}
PRODUCTS = (
    *("head_partial_softmax", "head_dlogits", "head_logits", "head_matmul"),
    *("w4_product_kernel", "canonical_product_kernel"),
)


def multiplied(recorded):
    """The kind of matrices, as a place in `KINDS`, that a build is expected to multiply; None for none."""
    constants, types = dict(recorded.build.constants), dict(recorded.build.types)
    if recorded.kernel not in PRODUCTS or constants.get("FROM_SAVED"):
        return None
    return 2 if constants.get("OPERAND") == "tl.float32" else 1 if types.get("x") == "*i8" else 0


@pytest.mark.parametrize("arch", COMPILED)
def test_products_use_the_matrix_instruction_of_their_operands(arch) -> None:
    products = [(multiplied(r.recorded), r) for r in compiled(arch)]
    products = [(kind, r) for kind, r in products if kind is not None]
    assert products
    for kind, row in products:
        unit = ARCHITECTURES[arch].matrix
        names, want = MATRIX[arch][gate.key(row.recorded.build)], KINDS[unit][kind]
        right = [re.fullmatch(f"v_{unit}_{want}(_w32)?", name) is not None for name in names] if want else [not names]
        assert (named(row), right and all(right)) == (named(row), True)


@pytest.mark.parametrize("arch", COMPILED)
def test_no_build_has_a_flavour_of_fp8_in_its_matrix_instructions(arch) -> None:
    """8-bit floats are multiplied as the bf16 numbers they stand for, the same on every architecture."""
    names = {name for r in compiled(arch) for name in MATRIX[arch][gate.key(r.recorded.build)]}
    assert names
    assert [name for name in sorted(names) if re.search("fp8|bf8|f8f6f4", name)] == []


@pytest.mark.parametrize(("arch", "instruction"), [("gfx942", "v_mfma_f32_32x32x8_bf16"), ("gfx950", "32x32x16_bf16")])
def test_products_use_the_matrix_instruction_of_the_architecture(arch, instruction) -> None:
    import toy_kernels as toy

    made = toy.compiled(arch, toy.product, {"a": "*bf16", "b": "*bf16", "c": "*fp32"}, {"M": 64, "K": 64})
    assert instruction in made.asm["amdgcn"]
