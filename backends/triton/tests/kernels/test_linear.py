"""linear on programs that own whole sums and on programs that own a chunk; which columns a chunk has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
