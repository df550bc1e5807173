"""Orders of sums, derived from AMD machine code: the same rules as for PTX, and comparable with it."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "triton" / "tests" / "orders"))

import numpy as np
import sum_kernels as toy

from rlkernel_core.errors import UnknownNameError
from rlkernel_rocm.simulated.launcher import SimulatorLauncher
from rlkernel_rocm.simulated.orders import AmdOrderLauncher
from rlkernel_triton.orders.errors import DataDependentError, NoCertificateError
from rlkernel_triton.orders.expressions import leaf
from rlkernel_triton.orders.launcher import OrderLauncher

V = 300


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def summed(kernel, N=3, *, level="bits", seed=0, **how):
    return toy.sums(AmdOrderLauncher("gfx942", level), kernel, drawn(N, V, seed=seed), **how)


def test_names_do_not_count_and_blocks_and_warps_do() -> None:
    first = summed(toy.row_sum)[1]
    assert first.tolist() == summed(toy.renamed)[1].tolist()
    assert first[0] != summed(toy.row_sum, block=128)[1][0]
    wide = [summed(toy.row_sum, block=256, warps=warps)[1][0] for warps in (1, 4)]
    assert wide[0] != wide[1]


def test_equal_hashes_give_equal_bits_and_other_orders_other_bits() -> None:
    ways = [(toy.row_sum, {}), (toy.renamed, {}), (toy.row_sum, {"block": 128}), (toy.row_sum, {"warps": 2})]
    runs = [summed(kernel, 8, **how) for kernel, how in ways]
    equal = [[a[1][0] == b[1][0] for b in runs] for a in runs]
    assert equal == [[a[0].tolist() == b[0].tolist() for b in runs] for a in runs]
    assert sum(map(sum, equal)) == 10  # a second wave of 64 lanes only repeats what the first adds


def test_an_order_that_depends_on_the_batch_and_a_number_of_another_row_are_found() -> None:
    assert summed(toy.row_sum, 4)[1][0] == summed(toy.row_sum, 5)[1][0]
    assert summed(toy.sum_by_batch, 4)[1][0] != summed(toy.sum_by_batch, 5)[1][0]
    assert len({summed(toy.row_sum, row=row)[1][row] for row in range(3)}) == 1
    assert len({summed(toy.sum_with_neighbor, row=row)[1][row] for row in range(3)}) == 3


def test_what_depends_on_data_or_on_arrival_has_no_certificate() -> None:
    with pytest.raises(DataDependentError, match="sum_until_negative, `"):
        summed(toy.sum_until_negative)
    with pytest.raises(NoCertificateError, match="sum_by_arrival, `.*atomic"):
        summed(toy.sum_by_arrival)


def test_hashes_change_no_bit_of_the_simulation() -> None:
    x, out = drawn(3, V), torch.zeros(3)
    SimulatorLauncher("gfx942").bind(toy.row_sum, num_warps=2, N=3, V=V, BLOCK=64)((3, 1, 1), x, out)
    assert summed(toy.row_sum, warps=2)[0].tolist() == out.tolist()


def product(launcher):
    launcher_out = torch.zeros(32, 32)
    a, b = drawn(32, 64).half(), drawn(32, 64, seed=1).half()
    for name, x in (("a", a), ("b", b)):
        launcher.memory.name(x, leaf(name, np.arange(x.numel()).reshape(x.shape), 1))
    options = {"matrix_instr_nonkdim": 16} if isinstance(launcher, AmdOrderLauncher) else {}
    launcher.bind(toy.products, num_warps=4, options=options, K=64, M=32)((1, 1, 1), a, b, launcher_out)
    return launcher_out, launcher.memory.hashes(launcher_out)[..., 0], (a, b)


def test_a_product_adds_in_one_order_on_two_architectures_of_steps_of_16() -> None:
    out, amd, (a, b) = product(AmdOrderLauncher("gfx942", "order"))
    _, nvidia, _ = product(OrderLauncher("sm_80", "order"))
    torch.testing.assert_close(out, a.float() @ b.float().T, atol=1e-4, rtol=1e-4)
    assert amd.tolist() == nvidia.tolist()
    assert len(set(amd.ravel().tolist())) == 32 * 32


def test_the_instruction_counts_at_the_level_of_bits() -> None:
    assert product(AmdOrderLauncher("gfx942", "bits"))[1][0, 0] != product(OrderLauncher("sm_80", "bits"))[1][0, 0]


def test_an_architecture_that_is_not_simulated_is_named() -> None:
    with pytest.raises(UnknownNameError, match="gfx1100"):
        AmdOrderLauncher("gfx1100", "bits")
