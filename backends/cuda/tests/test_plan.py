"""How calls are cut and what memory they are said to take: pure functions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_cuda.linear_logprob import plan
from rlkernel_cuda.linear_logprob.plan import COLS, MOST, PREFERRED, ROWS, Size, choose, least, plans

GIB = 1 << 30
SIZES = st.builds(
    Size,
    N=st.integers(1, 100_000),
    V=st.integers(1, 300_000),
    D=st.integers(1, 8192),
    of_hidden=st.booleans(),
    of_weight=st.booleans(),
    masked=st.booleans(),
)


@given(SIZES, st.sampled_from(["auto", "save", "recompute"]), st.integers(1, 1 << 34))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_plan_keeps_the_limit_or_there_is_none(size, mode, limit) -> None:
    found = choose(size, mode=mode, backward=True, limit=limit)
    smallest = least(size, mode=mode, backward=True)
    if found is None:
        assert smallest.bytes > limit
    else:
        assert found.bytes <= limit
    assert choose(size, mode=mode, backward=True, limit=smallest.bytes) is not None


@given(SIZES)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_recompute_without_a_limit_is_bounded_whatever_the_rows(size) -> None:
    found = choose(size, mode="recompute", backward=True, limit=None)
    assert found is not None
    assert found.working <= MOST + 2 * plan.UNIT + plan.rounded(size.N, size.D)


@given(SIZES)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_slices_and_blocks_fit_the_kernels(size) -> None:
    for found in plans(size, mode="recompute", backward=True):
        assert found.width % COLS == 0
        assert found.block % ROWS == 0
        assert found.forward_rows % ROWS == 0


@pytest.mark.parametrize("N, D, V", [(8192, 4096, 128256), (16384, 2048, 151936)])
def test_recompute_stays_below_the_goal_at_the_measured_shapes(N, D, V) -> None:
    found = choose(Size(N, V, D), mode="recompute", backward=True, limit=None)
    assert found is not None
    assert found.bytes <= 0.35 * GIB + plan.PER_ROW * N
    assert found.working <= PREFERRED
    assert not found.apart


def test_rows_of_a_small_call_do_not_change_its_memory() -> None:
    few, many = (choose(Size(n, 1024, 8), mode="recompute", backward=True, limit=None) for n in (128, 384))
    assert few is not None
    assert many is not None
    assert (many.bytes - few.bytes) / 256 < 1024 * 4 / 10


def test_auto_saves_where_that_fits_and_recomputes_otherwise() -> None:
    size = Size(8192, 128256, 4096)
    assert choose(size, mode="auto", backward=True, limit=3 * GIB).save
    assert not choose(size, mode="auto", backward=True, limit=GIB).save
    assert not choose(size, mode="auto", backward=True, limit=None).save


def test_a_tight_limit_costs_a_fifth_matmul_rather_than_a_refusal() -> None:
    size = Size(65536, 128256, 4096)
    assert not choose(size, mode="recompute", backward=True, limit=2 * GIB).apart
    assert choose(size, mode="recompute", backward=True, limit=GIB // 2).apart


def test_operands_that_want_nothing_take_nothing() -> None:
    fastest = [
        next(plans(Size(8192, 128256, 4096, of_hidden=h), mode="recompute", backward=True)) for h in (True, False)
    ]
    assert fastest[0].bytes - fastest[1].bytes == 4 * 8192 * 4096
