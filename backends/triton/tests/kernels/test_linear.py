"""linear on programs that own whole sums and on programs that own a chunk; which columns a chunk has."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkernel_conformance.clauses.linear import SHARED
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.linear import LinearCall
from rlkernel_triton.claims import CLAIMS
from rlkernel_triton.launchers import planning_for
from rlkernel_triton.linear.launch import CHUNKS, GRAIN, chunk_of, linear

MANY = 1100  # rows: more tiles than a Jetson has multiprocessors, so that a program owns whole sums there


def whole_numbers(device, K, *, more):
    """A call whose sums are whole numbers that fp32 holds, so that every order gives one result; and that result."""
    g = torch.Generator().manual_seed(K)
    sizes = {"x": (MANY, K), "weight": (20, K), **({"bias": (20,), "residual": (MANY, 20)} if more else {})}
    exact = {n: torch.randint(-8, 9, size, generator=g).double() for n, size in sizes.items()}
    y = exact["x"] @ exact["weight"].t() + exact.get("bias", 0.0) + exact.get("residual", 0.0)
    return {n: x.float().to(device) for n, x in exact.items()}, y.float()


def test_the_order_of_sums_is_named_by_its_step_and_its_chunks() -> None:
    assert CLAIMS["linear"].sums == f"mma{GRAIN}/c{CHUNKS}/f32"


@given(st.integers(1, 1 << 18))
def test_chunks_are_multiples_of_a_step_and_cover_a_sum(K) -> None:
    chunk = chunk_of(K)
    assert (chunk % GRAIN, CHUNKS * chunk >= K, CHUNKS * (chunk - GRAIN) < K) == (0, True, True)


@given(st.integers(1, 1 << 10))
def test_eight_ranks_may_each_own_a_chunk_of_a_multiple_of_128(n) -> None:
    assert CHUNKS * chunk_of(128 * n) == 128 * n


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("K", [7, 300, 1024])
def test_every_product_counts_once_whoever_adds(K, more, device) -> None:
    arguments, want = whole_numbers(device, K, more=more)
    with planning_for("sm_87"):
        assert torch.equal(linear(LinearCall(**arguments)).cpu(), want)
    few = {n: x[:3] if n in {"x", "residual"} else x for n, x in arguments.items()}
    assert torch.equal(linear(LinearCall(**few)).cpu(), want[:3])


@pytest.mark.parametrize("split", ["row", "column"])
def test_a_share_of_one_rank_is_the_plain_call(split, device) -> None:
    call = LinearCall(**whole_numbers(device, 128, more=False)[0])
    call = replace(call, x=call.x[:3], weight=call.weight.new_ones(128, 128))
    assert torch.equal(linear(replace(call, split=split)), linear(call))


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("split", ["row", "column"])
def test_every_product_counts_once_over_ranks(split, ranks, device) -> None:
    """Sums and gradients of whole numbers, which every order gives exactly."""
    g = torch.Generator().manual_seed(0)
    sizes = {"x": (3, 256), "weight": (384, 256), "bias": (384,), "residual": (3, 384), "up": (3, 384)}
    given = {n: torch.randint(-8, 9, size, generator=g).float().to(device) for n, size in sizes.items()}
    up = given.pop("up")

    def on_rank(rank, group):
        def mine(name, x):
            return x.chunk(ranks, SHARED[split][name])[rank] if name in SHARED[split] else x

        leaf = {n: mine(n, x).clone().requires_grad_() for n, x in given.items()}
        y = linear(LinearCall(**leaf, split=split, group=group))
        y.backward(mine("y", up))
        found = {"y": y.detach(), **{n: x.grad for n, x in leaf.items()}}
        return {n: torch.equal(x, mine(n, want[n])) for n, x in found.items()}

    want = {"y": given["x"] @ given["weight"].t() + given["bias"] + given["residual"]}
    want |= {"x": up @ given["weight"], "weight": up.t() @ given["x"], "bias": up.sum(0), "residual": up}
    subject = Subject("triton" if device == "cuda" else "triton-interpreter", "linear", device)
    assert on_ranks(subject, ranks, on_rank) == [dict.fromkeys(want, True)] * ranks
