"""What the compiler makes of products of quantised weights on Hopper, without a GPU."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import compile_gate as gate

from rlkernel_triton.quant import block_builds, builds

# One of every kernel that decodes weights in a loop, where its sums would be kept from step to step.
LOOPS = {
    "tile_product": "mxfp4, M <= 256, wide",
    "word_product": "int4_g128, M <= 512, wide",
    "byte_product": "fp8_channel",
    "block_product": "mxfp8, M <= 16",
}
FOUND = [b for m in (builds, block_builds) for b in m.builds("sm90") if LOOPS.get(b.kernel.__name__) == b.label]


@pytest.mark.parametrize("build", FOUND, ids=lambda b: b.kernel.__name__)
def test_no_matrix_instruction_runs_on_into_the_step_that_decodes_its_operand_anew(build, monkeypatch) -> None:
    compiled, made = gate.triton.compile, []
    monkeypatch.setattr(gate.triton, "compile", lambda *a, **k: made.append(compiled(*a, **k)) or made[-1])
    gate.compiled(build, "sm90")
    assert re.findall(r"warp_group_dot_wait.*pendings = [1-9]", made[0].asm["ttgir"]) == []


def test_each_of_those_kernels_is_among_the_builds() -> None:
    assert sorted(b.kernel.__name__ for b in FOUND) == sorted(LOOPS)
