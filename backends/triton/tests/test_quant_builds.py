"""What the compiler makes of products of quantized weights on Hopper, without a GPU."""

import re

import pytest

from rlkernel_triton.launchers.offline import compile_recorded
from rlkernel_triton.recorded import recorded

# One of every kernel that decodes weights in a loop, where its sums would be kept from step to step.
LOOPS = {
    "tiled_product_kernel": "mxfp4, 200 tokens, tall",
    "w4_product_kernel": "int4_g128, 400 tokens, tall",
    "canonical_product_kernel": "fp8_channel, 4 tokens",
    "block_product_kernel": "mxfp8, 4 tokens, canonical",
}
FOUND = [r for r in recorded("qmatmul", "sm_90") if LOOPS.get(r.kernel) == r.label]


@pytest.mark.parametrize("recorded", FOUND, ids=lambda r: r.kernel)
def test_no_matrix_instruction_runs_on_into_the_step_that_decodes_its_operand_anew(recorded) -> None:
    made = compile_recorded(recorded.build, "sm90").compiled
    assert re.findall(r"warp_group_dot_wait.*pendings = [1-9]", made.asm["ttgir"]) == []


def test_each_of_those_kernels_is_among_the_builds() -> None:
    assert sorted(r.kernel for r in FOUND) == sorted(LOOPS)
