"""Kernels that Triton compiled for AMD GPUs, run in the simulator; and kernels that were damaged on purpose."""

import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import toy_kernels as toy

from cdna_simulator import (
    HangError,
    Kernel,
    Machine,
    OutOfBoundsError,
    SimulationError,
    UnknownInstructionError,
    UnsupportedKernelError,
    read,
)
from cdna_simulator.assembly import instruction
from cdna_simulator.machine import bind

ARCHS = ("gfx90a", "gfx942", "gfx950")
V = 700


def softmax(arch, change=lambda text: text, order="step", out=None):
    """The error of a row's softmax, its assembly changed first."""
    made = toy.compiled(arch, toy.softmax, {"x": "*fp32", "out": "*fp32", "V": "i32"}, {"BLOCK": 1024})
    x = np.random.default_rng(0).standard_normal((2, V)).astype(np.float32)
    out = np.zeros_like(x) if out is None else out
    machine = Machine(read(change(made.asm["amdgcn"]), made.metadata.name), lds=made.metadata.shared, warps=4)
    machine.launch((2, 1, 1), [x, out, V], order)
    want = np.exp(x - x.max(axis=1, keepdims=True).astype(np.float64))
    return float(np.abs(out - want / want.sum(axis=1, keepdims=True))[: len(out)].max())


@pytest.mark.parametrize("order", ["step", 0, 1])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_reduction_is_right_in_every_order_of_waves(arch, order) -> None:
    assert softmax(arch, order=order) < 1e-7


def test_a_removed_barrier_shows_when_waves_run_one_after_another() -> None:
    def without_barriers(text):
        return re.sub(r"^\ts_barrier$", "\ts_nop 0", text, flags=re.MULTILINE)

    errors = [softmax("gfx942", without_barriers, order=seed) for seed in range(3)]
    assert not any(e < 1e-3 for e in errors)  # NaN: LDS that nobody has written


def test_a_wrong_dpp_shift_shows() -> None:
    def shifted(text):  # of the sum: a wrong maximum would cancel out
        return re.sub(r"(v_add_f32_dpp.*)row_shr:4", r"\g<1>row_shr:3", text)

    assert softmax("gfx942", shifted) > 1e-4


def test_a_short_buffer_shows() -> None:
    with pytest.raises(OutOfBoundsError, match=r"softmax.*store.*nearest argument"):
        softmax("gfx942", out=np.zeros((2, V), np.float32)[:1])


def test_lds_that_is_too_small_shows() -> None:
    made = toy.compiled("gfx942", toy.softmax, {"x": "*fp32", "out": "*fp32", "V": "i32"}, {"BLOCK": 1024})
    machine = Machine(read(made.asm["amdgcn"], made.metadata.name), lds=8, warps=4)
    x = np.zeros((2, V), np.float32)
    with pytest.raises(OutOfBoundsError, match="8 bytes of LDS"):
        machine.launch((2, 1, 1), [x, x.copy(), V])


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(UnknownInstructionError, match="v_wishful_f32"):
        softmax("gfx942", lambda text: text.replace("v_exp_f32", "v_wishful_f32", 1))


def test_every_instruction_of_every_shipped_build_is_known() -> None:
    lines = (Path(__file__).parent / "instructions.txt").read_text().splitlines()
    kernel = Kernel("recorded", "gfx950", (), defaultdict(int), {}, (), 512)
    for line in lines:
        bind(instruction(line), kernel)
    assert len(lines) > 500


def test_a_kernel_that_does_not_end_is_stopped(monkeypatch) -> None:
    monkeypatch.setattr("cdna_simulator.machine.LIMIT", 5000)
    with pytest.raises(HangError, match="5000 instructions"):
        softmax("gfx942", lambda text: text.replace("\ts_endpgm", ".Lagain:\n\ts_branch .Lagain", 1))


def test_a_loop_with_a_barrier_in_it_is_stopped(monkeypatch) -> None:
    monkeypatch.setattr("cdna_simulator.machine.LIMIT", 5000)
    with pytest.raises(HangError, match="5000 instructions"):
        softmax(
            "gfx942",
            lambda text: text.replace("\ts_endpgm", ".Lagain:\n\ts_barrier\n\ts_branch .Lagain", 1),
        )


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_is_told_how_many_programs_there_are(arch) -> None:
    made = toy.compiled(arch, toy.strided, {"x": "*i32", "N": "i32"}, {})
    x = np.zeros(10, np.int32)
    machine = Machine(read(made.asm["amdgcn"], made.metadata.name), lds=made.metadata.shared, warps=4)
    machine.launch((3, 1, 1), [x, 10])
    assert x.tolist() == [i % 3 + 1 for i in range(10)]


def test_scratch_and_narrow_waves_are_refused() -> None:
    with pytest.raises(UnsupportedKernelError, match="spills 64 bytes .* not simulated on gfx90a"):
        softmax("gfx90a", lambda text: text.replace("private_segment_fixed_size 0", "private_segment_fixed_size 64", 1))
    made = toy.compiled("gfx1100", toy.softmax, {"x": "*fp32", "out": "*fp32", "V": "i32"}, {"BLOCK": 1024}, wave=32)
    with pytest.raises(UnsupportedKernelError, match="gfx1100; only waves of 64"):
        read(made.asm["amdgcn"], made.metadata.name)


def test_too_many_arguments_are_refused() -> None:
    made = toy.compiled("gfx942", toy.softmax, {"x": "*fp32", "out": "*fp32", "V": "i32"}, {"BLOCK": 1024})
    with pytest.raises(SimulationError, match="takes 5 arguments, 6 were given"):
        Machine(read(made.asm["amdgcn"], made.metadata.name), lds=64, warps=4).launch((1, 1, 1), [0] * 6)


@pytest.mark.parametrize(
    ("arch", "fnuz", "instruction"), [("gfx942", True, "mfma_f32_32x32x16_fp8"), ("gfx950", False, "f8f6f4")]
)
def test_an_fp8_product_with_the_tables_swapped_is_wrong_by_a_factor_of_four(arch, fnuz, instruction) -> None:
    from cdna_simulator.formats import FP8, encode, values

    types = dict.fromkeys("ab", "*fp8e4b8" if fnuz else "*fp8e4nv") | {"c": "*fp32"}
    made = toy.compiled(arch, toy.product, types, {"M": 32, "K": 64})
    assert instruction in made.asm["amdgcn"]
    x = np.random.default_rng(0).standard_normal((2, 32, 64)).astype(np.float32)
    a, b = encode(x, FP8[fnuz], saturate=True).astype(np.uint8)
    a[a == 0x80] = b[b == 0x80] = 0  # a zero in one flavour, NaN in the other
    found = []
    for name in (arch, {"gfx942": "gfx950", "gfx950": "gfx942"}[arch]):
        c = np.zeros((32, 32), np.float32)
        text = re.sub(rf"(amdgcn_target .*-){arch}", rf"\g<1>{name}", made.asm["amdgcn"])
        Machine(read(text, made.metadata.name), lds=made.metadata.shared, warps=4).launch((1, 1, 1), [a, b, c])
        found.append(c)
    table = values(FP8[fnuz]).astype(np.float64)
    np.testing.assert_allclose(found[0], table[a] @ table[b].T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], found[0] * (4 if fnuz else 0.25), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
def test_random_bits_sorting_scans_and_atomics_agree_with_numpy(arch) -> None:
    made = toy.compiled(arch, toy.assorted, {"x": "*fp32", "out": "*fp32", "count": "*i32", "seed": "i32"}, {"N": 256})
    x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    out, count = np.zeros((3, 256), np.float32), np.zeros(4, np.int32)
    machine = Machine(read(made.asm["amdgcn"], made.metadata.name), lds=made.metadata.shared, warps=4)
    machine.launch((1, 1, 1), [x, out, count, 42], order=0)
    assert out[0].tolist() == np.sort(x).tolist()
    np.testing.assert_allclose(out[1], np.cumsum(x, dtype=np.float64), rtol=1e-5, atol=1e-5)
    assert out[2].tolist() == toy.uniforms(42, 256).tolist()
    assert count.tolist() == np.bincount(np.arange(256) * 7 % 4, minlength=4).tolist()
