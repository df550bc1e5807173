"""Orders of sums, derived from PTX: equal where kernels add alike, else different, and refused where unknown."""

import numpy as np
import pytest
import sum_kernels as toy
import torch

from rlkernel_core.errors import UnknownNameError
from rlkernel_core.spec import OPERATORS
from rlkernel_torch import direct
from rlkernel_triton.orders.errors import DataDependentError, NoCertificateError, UnknownPtxError
from rlkernel_triton.orders.expressions import leaf
from rlkernel_triton.orders.launcher import OrderLauncher
from rlkernel_triton.orders.ptx import read_ptx
from rlkernel_triton.orders.trace import Trace

V = 300


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def summed(kernel, N=3, *, target="sm_90", level="bits", seed=0, x=None, **how):
    return toy.sums(OrderLauncher(target, level), kernel, drawn(N, V, seed=seed) if x is None else x, **how)


def test_names_of_kernels_and_variables_do_not_count() -> None:
    assert summed(toy.row_sum)[1].tolist() == summed(toy.renamed)[1].tolist()


@pytest.mark.parametrize("how", [{"block": 128}, {"warps": 2}])
def test_another_block_or_number_of_warps_is_another_order(how) -> None:
    assert summed(toy.row_sum)[1][0] != summed(toy.row_sum, **how)[1][0]


def test_equal_hashes_give_equal_bits_and_other_orders_other_bits() -> None:
    ways = [(toy.row_sum, {}), (toy.renamed, {}), (toy.row_sum, {"block": 128}), (toy.row_sum, {"warps": 2})]
    bits, hashes = [], []
    for kernel, how in ways:
        runs = [summed(kernel, 8, seed=seed, **how) for seed in range(3)]
        bits.append(torch.cat([out for out, _ in runs]).tolist())
        hashes.append(int(runs[0][1][0]))
    equal = [[a == b for b in hashes] for a in hashes]
    assert equal == [[a == b for b in bits] for a in bits]
    assert sum(map(sum, equal)) == 6  # the first two are equal, and no others


def test_an_order_that_depends_on_the_batch_is_found() -> None:
    assert summed(toy.row_sum, 4)[1][0] == summed(toy.row_sum, 5)[1][0]
    assert summed(toy.sum_by_batch, 4)[1][0] != summed(toy.sum_by_batch, 5)[1][0]


def test_a_number_of_another_row_is_found() -> None:
    alone, mixed = (
        [summed(kernel, 3, row=row)[1][row] for row in range(3)] for kernel in (toy.row_sum, toy.sum_with_neighbor)
    )
    assert len(set(alone)) == 1
    assert len(set(mixed)) == 3


def test_every_element_of_a_row_is_in_its_hash() -> None:
    launcher = OrderLauncher("sm_90", "bits")
    whole = summed(toy.row_sum, V)[1][0]
    x = drawn(V, V)
    names = np.array(leaf("x", np.broadcast_to(np.arange(V), (V, V)), 2))
    names[np.arange(V), np.arange(V)] = leaf("another", np.zeros(V), 2)  # row i: element i has another name
    launcher.memory.name(x, names)
    out = torch.zeros(V)
    launcher.bind(toy.row_sum, num_warps=1, N=V, V=V, BLOCK=64)((V, 1, 1), x, out)
    found = launcher.memory.hashes(out)[:, 0].tolist()
    assert len({whole, *found}) == V + 1


def test_a_loop_that_depends_on_data_has_no_certificate() -> None:
    with pytest.raises(DataDependentError, match="sum_until_negative, `@.*bra"):
        summed(toy.sum_until_negative)


def test_a_sum_in_the_order_of_arrival_has_no_certificate() -> None:
    with pytest.raises(NoCertificateError, match=r"sum_by_arrival, `.*(red|atom)\."):
        summed(toy.sum_by_arrival)


def test_an_instruction_that_is_not_modeled_is_named() -> None:
    with pytest.raises(UnknownPtxError, match="the PTX holds no kernel"):
        read_ptx(".version 9.0")
    text = (
        ".target sm_90a\n.visible .entry k(\n.param .u64 k_param_0\n)\n.reqntid 32\n{\n.reg .b32 %r<2>;\nvote.x %r1;\n}"
    )
    from rlkernel_triton.orders.instructions import bind
    from rlkernel_triton.orders.machine import Machine
    from rlkernel_triton.orders.memory import GlobalMemory

    with pytest.raises(UnknownPtxError, match=r"k, `vote\.x %r1`: this instruction is not modeled"):
        Machine(read_ptx(text), bind, 0).launch((1, 1, 1), {}, GlobalMemory())


def test_ptxas_may_fuse_an_addition_with_its_product_and_that_is_counted() -> None:
    head = ".target sm_90a\n.visible .entry k(\n.param .u64 k_param_0\n)\n.reqntid 32\n{\n.reg .b32 %r<9>;\n"
    free = read_ptx(f"{head}mul.f32 %r3, %r1, %r2;\nadd.f32 %r4, %r3, %r1;\nret;\n}}")
    rounded = read_ptx(f"{head}mul.rn.f32 %r3, %r1, %r2;\nadd.rn.f32 %r4, %r3, %r1;\nret;\n}}")
    assert (free.fusable, rounded.fusable) == (1, 0)


def test_a_target_that_is_none_of_nvidia_is_named() -> None:
    with pytest.raises(UnknownNameError, match="gfx942"):
        OrderLauncher("gfx942", "bits")


# Reading is right: what the code computes here is what the operator means.


def traced(op, target, **arguments):
    trace = Trace(OrderLauncher(target, "bits"), op)
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            trace.name(x.detach(), leaf(name, np.arange(x.numel()).reshape(x.shape), x.element_size() // 2))
    return trace.run(OPERATORS[op].call(**arguments))


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_matrix_product_and_its_gradient_are_those_of_the_definition(target) -> None:
    x, w = drawn(5, 64, dtype=torch.bfloat16), drawn(300, 64, seed=1, dtype=torch.bfloat16)
    ids = torch.tensor([0, 7, 299, 128, 100])
    mine = [t.clone().requires_grad_() for t in (x, w)]
    theirs = [t.double().requires_grad_() for t in (x, w)]
    out = traced("linear_logprob", target, hidden=mine[0], weight=mine[1], ids=ids)
    want = direct.linear_logprob(*theirs, ids)
    torch.testing.assert_close(out.logprob.double(), want.logprob, atol=1e-4, rtol=1e-5)
    found = torch.autograd.grad(out.logprob.sum(), mine)
    for a, b in zip(found, torch.autograd.grad(want.logprob.sum(), theirs), strict=True):
        torch.testing.assert_close(a.double(), b, atol=0.02, rtol=0.02)


def test_log_probabilities_and_their_gradient_are_those_of_the_definition() -> None:
    x, ids = drawn(4, 900), torch.tensor([0, 899, 500, 31])
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    out, want = (
        traced("logprob", "sm_90", logits=mine, ids=ids, entropy=True),
        direct.logprob(theirs, ids, entropy=True),
    )
    torch.testing.assert_close(out.logprob.double(), want.logprob, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out.entropy.double(), want.entropy, atol=2e-5, rtol=1e-5)
    (a,), (b,) = (torch.autograd.grad(o.logprob.sum(), [t]) for o, t in ((out, mine), (want, theirs)))
    torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=1e-4)


def derived(op, target, given, up):
    """Hashes of the result and of all gradients; every float is (value, index of its name)."""
    trace = Trace(OrderLauncher(target, "bits"), op)
    leaves = {n: x if n == "ends" else x[0].clone().requires_grad_() for n, x in given.items()}
    arriving = up[0].clone()
    for name, x, index in [(n, leaves[n].detach(), given[n][1]) for n in leaves.keys() - {"ends"}]:
        trace.name(x, leaf(name, index, x.element_size() // 2))
    trace.name(arriving, leaf("up", up[1], arriving.element_size() // 2))
    y = trace.run(OPERATORS[op].call(**leaves))
    wanted = [n for n in leaves if n != "ends"]
    grads = torch.autograd.grad(y, [leaves[n] for n in wanted], arriving)
    return {n: trace.hashes(x) for n, x in zip(["y", *wanted], [y.detach(), *grads], strict=True)}


@pytest.mark.parametrize(
    ("sizes", "K", "N", "target"),
    [
        ((3, 0, 2), 144, 48, "sm_80"),
        ((90, 61), 256, 272, "sm_90"),
        pytest.param((200, 1, 60), 144, 48, "sm_90", marks=pytest.mark.slow),
        pytest.param((90, 61), 256, 272, "sm_80", marks=pytest.mark.slow),
    ],
)
def test_rows_of_an_expert_add_as_linear_does(sizes, K, N, target) -> None:
    """Results, and gradients of rows and weights: tiles for few rows of an expert and for many, chunks of any size.

    Chunks of the last are whole steps in the forward pass, whose operands Hopper's copy engine brings.
    """

    def named(*shape, seed):
        return drawn(*shape, seed=seed, dtype=torch.bfloat16), np.arange(int(np.prod(shape))).reshape(shape)

    E, T = len(sizes), sum(sizes) + 1
    x, up, weight = named(T, K, seed=0), named(T, N, seed=1), named(E, N, K, seed=2)
    ends = torch.tensor(sizes).cumsum(0).int()
    found = derived("grouped_linear", target, {"x": x, "weight": weight, "ends": ends}, up)
    for e, end in enumerate(ends.tolist()):
        rows = slice(end - sizes[e], end)
        if sizes[e]:
            one = {"x": [a[rows] for a in x], "weight": [a[e] for a in weight]}
            want = derived("linear", target, one, [a[rows] for a in up])
            mine = {"y": found["y"][rows], "x": found["x"][rows], "weight": found["weight"][e]}
            assert {n: h.tolist() for n, h in mine.items()} == {n: h.tolist() for n, h in want.items()}
    assert not found["y"][ends[-1] :].any()  # rows of no expert are 0, whose bits are known
