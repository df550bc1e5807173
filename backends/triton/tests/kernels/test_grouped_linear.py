"""grouped_linear: which tiles of rows a program finds by `ends`, and that it adds what linear adds."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkernel_core.spec.grouped_linear import GroupedLinearCall
from rlkernel_core.spec.linear import LinearCall
from rlkernel_triton.claims import CLAIMS
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.grouped_linear.kernels import rows_of_expert, rows_of_tile
from rlkernel_triton.grouped_linear.launch import grouped_linear
from rlkernel_triton.launchers import planning_for
from rlkernel_triton.linear.launch import linear

BM = 16


@triton.jit
def tiles_found(ends, out, M, E, EB: tl.constexpr, ROWS: tl.constexpr):
    """Expert, first row and end of each tile."""
    tile = tl.program_id(0)
    expert, first, stop = rows_of_tile(tile, ends, M, E, EB, ROWS)
    tl.store(out + 3 * tile, expert)
    tl.store(out + 3 * tile + 1, first)
    tl.store(out + 3 * tile + 2, stop)


@triton.jit
def spans_found(ends, out, M, E, EB: tl.constexpr):
    """First row and end of each expert."""
    expert = tl.program_id(0)
    first, stop = rows_of_expert(expert, ends, M, E, EB)
    tl.store(out + 2 * expert, first)
    tl.store(out + 2 * expert + 1, stop)


def right(ends, M):
    """Where rows of each expert, and of none, begin and end: ends that never fall nor exceed M, and M."""
    last = [0]
    for end in ends:
        last.append(max(last[-1], min(max(end, 0), M)))
    return list(pairwise([*last, M]))


ENDS = st.lists(st.integers(-3, 90), min_size=1, max_size=9)


@given(ends=ENDS, M=st.integers(1, 80))
def test_tiles_cover_every_row_once_with_its_expert(ends, M, device) -> None:
    E = len(ends)
    n = M // BM + min(M, E + 1)
    out = torch.full((n, 3), -1, dtype=torch.int32, device=device)
    given_ends = torch.tensor(ends, dtype=torch.int32, device=device)
    tiles_found[(n,)](given_ends, out, M, E, triton.next_power_of_2(E + 1), BM)
    found = [(e, row) for e, first, stop in out.tolist() if e <= E for row in range(first, min(first + BM, stop))]
    assert found == [(e, row) for e, (a, b) in enumerate(right(ends, M)) for row in range(a, b)]


@given(ends=ENDS, M=st.integers(1, 80))
def test_an_experts_rows_are_found(ends, M, device) -> None:
    E = len(ends)
    out = torch.full((E, 2), -1, dtype=torch.int32, device=device)
    given_ends = torch.tensor(ends, dtype=torch.int32, device=device)
    spans_found[(E,)](given_ends, out, M, E, triton.next_power_of_2(E + 1))
    assert [list(span) for span in right(ends, M)[:-1]] == out.tolist()


def test_the_order_of_sums_is_that_of_linear() -> None:
    assert CLAIMS["grouped_linear"].sums == CLAIMS["linear"].sums


def whole_numbers(device, sizes, K, N, rest):
    """A call whose sums are whole numbers that fp32 holds, so that every order gives one result."""
    g = torch.Generator().manual_seed(K)
    E, T = len(sizes), sum(sizes) + rest
    shapes = {"x": (T, K), "weight": (E, N, K), "bias": (E, N), "up": (T, N)}
    given = {n: torch.randint(-8, 9, shape, generator=g).float().to(device) for n, shape in shapes.items()}
    return given | {"ends": torch.tensor(sizes, device=device).cumsum(0).int()}


SIZES = (((1, 0, 3), 2), ((0, 70, 65, 0), 0), ((0, 0), 3))


@pytest.mark.parametrize("K, sizes, rest", [*((K, *of) for K in (7, 300, 1024) for of in SIZES), (7, (2,) * 40, 1)])
def test_every_product_counts_once(sizes, rest, K, device) -> None:
    """Result and gradients of x, weight and bias."""
    given = whole_numbers(device, sizes, K, 20, rest)
    up, leaf = given.pop("up"), {n: x.clone().requires_grad_(n != "ends") for n, x in given.items() if n != "ends"}
    with planning_for("sm_87"):
        y = grouped_linear(GroupedLinearCall(**leaf, ends=given["ends"]))
        y.backward(up)
    want = {"y": torch.zeros_like(up), **{n: torch.zeros_like(x) for n, x in leaf.items()}}
    start = 0
    for e, size in enumerate(sizes):
        rows, start = slice(start, start + size), start + size
        x, g, weight = given["x"][rows], up[rows], given["weight"][e]
        want["y"][rows], want["x"][rows] = x @ weight.t() + given["bias"][e], g @ weight
        want["weight"][e], want["bias"][e] = g.t() @ x, g.sum(0)
    found = {"y": y.detach(), **{n: x.grad for n, x in leaf.items()}}
    assert {n: torch.equal(found[n], w) for n, w in want.items()} == dict.fromkeys(want, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_weight_has_the_bits_of_linear(dtype, device) -> None:
    if INTERPRETED:
        pytest.skip("NumPy sums a product by the place of a row")
    sizes, N, K = (300, 0, 17, 1), 320, 272
    g = torch.Generator(device).manual_seed(0)
    x, up = (torch.randn(sum(sizes), n, generator=g, device=device, dtype=torch.float32).to(dtype) for n in (K, N))
    weight = torch.randn(len(sizes), N, K, generator=g, device=device).to(dtype).requires_grad_()
    ends = torch.tensor(sizes, device=device).cumsum(0).int()
    grouped_linear(GroupedLinearCall(x, weight, ends)).backward(up)
    start = 0
    for e, size in enumerate(sizes):
        rows, start = slice(start, start + size), start + size
        leaf = weight.detach()[e].clone().requires_grad_()
        linear(LinearCall(x[rows], leaf)).backward(up[rows])
        assert torch.equal(weight.grad[e], leaf.grad)
