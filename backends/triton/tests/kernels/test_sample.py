"""sample on Triton against the float64 reference: laws, edits, rows that go wrong, the quick way and the exact one."""

import random

import pytest
import torch
import triton
import triton.language as tl

import rlkernel as rlk
from rlkernel import policy as policies
from rlkernel_core.spec.sampling import LogitBias, Penalties, Status, TokenLists
from rlkernel_torch.direct import sample as definition
from rlkernel_triton.common.gumbel_noise import exponential_bound, uniform
from rlkernel_triton.sample import launch as call
from rlkernel_triton.sample.plan import Shape

# Small cuts, so that a toy vocabulary has many tiles, groups, candidates and blocks.
SMALL = Shape(TILE=64, GROUP=16, K=8, C=32, GATHERED=16, BLOCK=256)
RESULTS = (
    "token", "logprob", "log_kept_mass", "kept_count", "status", "threshold", "threshold_id", "raw_logprob",
    "entropy", "kept_ids", "top_ids", "top_logprobs", "rank",
)  # fmt: skip


@triton.jit
def bounds(words, low, N: tl.constexpr):
    """`early` of words."""
    i = tl.arange(0, N)
    tl.store(low + i, exponential_bound(uniform(tl.load(words + i).to(tl.uint32))))


@pytest.fixture
def small(monkeypatch) -> None:
    monkeypatch.setattr(call, "SHAPE", SMALL)
    (policies.SCOPE.get() or policies.base()).forget()  # plans of the other shape


def rows(g: random.Random, N: int, V: int) -> torch.Tensor:
    """[N, V] logits of a kind that may go wrong."""
    torch.manual_seed(g.randrange(2**31))
    x = torch.randn(N, V) * g.choice([0.1, 1, 5])
    kind = g.choice(["normal", "ties", "holes", "equal", "posinf", "nan", "nothing"])
    if kind == "ties":
        x = x.round()
    elif kind == "holes":
        x[torch.rand(N, V) < 0.5] = -torch.inf
    elif kind == "equal":
        x[:] = 1.25
    elif kind == "posinf":
        x[0, torch.rand(V) < 0.2] = torch.inf
    elif kind == "nan":
        x[0, 0] = torch.nan
    elif kind == "nothing":
        x[0] = -torch.inf
    return x.to(g.choice([torch.float32, torch.bfloat16, torch.float16]))


def request(g: random.Random, N: int, V: int) -> dict:
    """Arguments of a draw."""

    def each(values: list) -> torch.Tensor:
        return torch.tensor([g.choice(values) for _ in range(N)])

    asked = {"temperature": g.choice([1.0, 0.0, 0.7, 2.0, each([0.0, 0.5, 1.3, -1.0])])}
    asked |= {"seed": torch.arange(N) + g.randrange(99), "step": g.choice([0, 5, 2**40])}
    if g.random() < 0.6:
        asked["top_k"] = g.choice([1, 3, 5, 50, V, each([0, 2, 8])])
    if g.random() < 0.6:
        asked["top_p"] = g.choice([0.9, 0.5, 0.95, 0.0, each([1.0, 0.3, 0.8, torch.nan])])
    if g.random() < 0.4:
        asked["min_p"] = g.choice([0.05, 0.3, 0.001, 2.0])
    asked["filter_order"] = g.choice(["topk_topp", "joint", "topp_topk"])
    asked["tie"] = g.choice(["lowest_id", "lowest_id", "keep_all"])
    if g.random() < 0.3:
        asked["allowed"] = torch.randint(-(2**31), 2**31 - 1, (N, (V + 31) // 32), dtype=torch.int32)
    if g.random() < 0.2:
        asked["slot"] = torch.tensor([g.choice([-1, 0]), *range(1, N)])
    asked |= {"raw_logprob": g.random() < 0.4, "entropy": g.random() < 0.4, "kept_capacity": g.choice([0, 0, 4, V])}
    asked |= {"top_n": min(V, g.choice([0, 0, 3])), "top_n_from": g.choice(["raw", "processed"])}
    return asked | {"rank": g.random() < 0.3, "stream": g.choice([0, 1]), "invalid_token": -7}


def edits(g: random.Random, N: int, V: int) -> dict:
    """Bias, banned ids and penalties."""
    ids, offsets = torch.randint(0, V, (2 * N,)), torch.arange(N + 1) * 2
    history = torch.randint(-1, V, (N, 3))
    penalties = Penalties(repetition=g.choice([1.3, torch.full((N,), 0.8)]), frequency=0.4, output_ids=history)
    return {
        "bias": LogitBias(ids, torch.randn(2 * N), offsets),
        "banned": TokenLists(ids.flip(0), offsets),
        "penalties": penalties,
    }


def agree(x: torch.Tensor, asked: dict, device: str) -> None:
    """Every result of the kernels against the reference on the CPU."""
    from rlkernel_conformance.sampling_batches import to

    want = definition(x, **asked)
    found = rlk.sample(x.to(device), **to(device, asked))
    for name in RESULTS:
        mine, theirs = getattr(found, name), getattr(want, name)
        if theirs is None:
            assert mine is None, name
        elif theirs.is_floating_point():
            close = {"atol": 4e-6, "rtol": 4e-6, "equal_nan": True}
            torch.testing.assert_close(mine.cpu(), theirs, **close, msg=lambda m, n=name: f"{n}: {m}")
        else:
            known = ~Status.FALLBACK.value if name == "status" else -1
            assert theirs.tolist() == (mine.cpu() & known).tolist(), name


@pytest.mark.parametrize("seed", range(24))
def test_any_request_is_answered_as_defined(small, device, seed) -> None:
    g = random.Random(seed)
    N, V = g.choice([1, 3]), g.choice([1, 5, 33, 64, 65, 200, 500])
    agree(rows(g, N, V), request(g, N, V), device)


@pytest.mark.parametrize("seed", range(5))
def test_edits_come_before_the_filters(small, device, seed) -> None:
    g = random.Random(seed)
    N, V = 3, g.choice([5, 65, 200])
    agree(rows(g, N, V), request(g, N, V) | edits(g, N, V), device)


@pytest.mark.parametrize("V", [33, 1100])
def test_a_filter_that_says_off_changes_no_bit(device, V) -> None:
    # On an H200 a mask that forbids nothing moved an entropy's last bit: its build fused a product into a difference
    g = torch.Generator().manual_seed(V)
    x = (torch.randn(8, V, generator=g) * torch.tensor([0.1, 1, 3, 0.3, 1, 2, 30, 1])[:, None]).to(device)
    x = x[:3] if device == "cpu" else x  # an interpreted row takes half a second
    N = x.shape[0]
    asked = {"temperature": 0.7, "seed": torch.arange(N, device=device), "step": 3}
    asked |= {"entropy": True, "raw_logprob": True, "rank": True, "top_n": 3, "kept_capacity": 5}
    bare = rlk.sample(x, **asked)
    every = torch.full((N, -(-V // 32)), -1, dtype=torch.int32, device=device)
    for off in ({"allowed": every}, {"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}):
        out = rlk.sample(x, **asked, **off)
        assert [n for n in RESULTS if not torch.equal(getattr(bare, n), getattr(out, n))] == []


@pytest.mark.parametrize(("k", "p", "fallback"), [(8, 1.0, False), (0, 0.3, False), (9, 1.0, True), (0, 0.999, True)])
def test_what_the_candidates_do_not_tell_is_searched_for(small, device, k, p, fallback) -> None:
    x = 3 * torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    asked = {"top_k": k, "top_p": p, "seed": torch.arange(2), "step": 0}
    agree(x, asked, device)
    out = rlk.sample(x.to(device), **{n: v.to(device) if n == "seed" else v for n, v in asked.items()})
    assert [fallback] * 2 == ((out.status & Status.FALLBACK.value) != 0).tolist()


@pytest.mark.parametrize("order", ["topk_topp", "joint", "topp_topk"])
def test_a_min_p_that_keeps_more_than_the_candidates_leaves_the_other_filters_theirs(small, device, order) -> None:
    x = 0.1 * torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    asked = {"top_k": 3, "top_p": 0.9, "min_p": 0.05, "filter_order": order}
    agree(x, {**asked, "seed": torch.arange(2), "step": 0, "kept_capacity": 4}, device)


def test_ties_across_groups_go_to_the_lowest_ids(small, device) -> None:
    x = torch.zeros(1, 640)
    x[0, [600, 300, 20]] = 1.0  # best, each in a tile of its own; all others tie
    agree(x, {"top_k": 6, "seed": 3, "step": 1, "kept_capacity": 6}, device)


@pytest.mark.parametrize("asked", [{}, {"top_k": 8, "top_p": 0.9}, {"temperature": 1e-30}], ids=str)
def test_logits_and_temperatures_at_the_ends_of_fp32(small, device, asked) -> None:
    x = 3 * torch.randn(3, 100, generator=torch.Generator().manual_seed(7))
    x[0] = 3e38 * x[0].sign()
    x[1] *= 1e-40
    x[2] += 1e5  # logits of one row differ by less than a rounding of their products with 1 / T
    agree(x, {**asked, "seed": torch.arange(3), "step": 2, "entropy": True, "raw_logprob": True}, device)


def test_the_race_is_decided_by_a_bound_of_the_exponential(device) -> None:
    words = torch.cat([torch.arange(2048), torch.randint(0, 2**32, (6144,)), 2**32 - 1 - torch.arange(8192)])
    low = torch.empty(2**14, device=device)
    bounds[(1,)](words.to(torch.int64).to(device), low, 2**14)
    exact = -torch.log1p(-(words.double() + 0.5) / 2**32)
    assert (low.cpu().double() <= exact * (1 + 2**-22)).all()


def test_a_row_has_the_same_bits_in_any_batch_and_layout(device) -> None:
    x = (4 * torch.randn(5, 3000, generator=torch.Generator().manual_seed(1))).to(device)
    asked = {"temperature": 0.7, "top_p": 0.9, "entropy": True}
    seed = torch.arange(5, device=device)
    want = rlk.sample(x, seed=seed, step=4, **asked)
    back = torch.tensor([4, 2, 0, 1, 3, 4, 4], device=device)
    wide = torch.zeros(7, 3100, device=device)[:, 50:3050]
    wide.copy_(x[back])
    found = rlk.sample(wide, seed=seed[back], step=4, **asked)
    for name in ("token", "logprob", "log_kept_mass", "entropy", "threshold"):
        assert getattr(want, name)[back].tolist() == getattr(found, name).tolist(), name


def test_a_full_vocabulary_with_the_shipped_cuts(device) -> None:
    x = 3 * torch.randn(2, 32000, generator=torch.Generator().manual_seed(3))
    agree(x, {"top_k": 50, "top_p": 0.95, "seed": torch.arange(2), "step": 0, "raw_logprob": True}, device)
    agree(x, {"temperature": 0.8, "seed": torch.arange(2), "step": 0, "entropy": True}, device)


def test_a_number_and_a_tensor_of_it_mean_the_same(small, device) -> None:
    x = (3 * torch.randn(1, 300, generator=torch.Generator().manual_seed(5))).to(device)
    numbers = {"temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 2**64 - 1, "step": 2**40}
    tensors = {n: torch.tensor([v if v < 2**63 else v - 2**64], device=device) for n, v in numbers.items()}
    one, other = rlk.sample(x, **numbers), rlk.sample(x, **tensors)
    for name in ("token", "logprob", "log_kept_mass", "threshold", "threshold_id"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name


def test_an_integer_stands_for_a_number(small, device) -> None:
    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(6)).to(device)
    one, other = rlk.sample(x, temperature=1, top_p=1, seed=1, step=1), rlk.sample(x, seed=1, step=1)
    assert (one.token.item(), one.logprob.item()) == (other.token.item(), other.logprob.item())


def test_a_call_that_was_checked_lets_no_other_pass(small, device) -> None:
    x = torch.randn(2, 40, device=device)
    asked = {"seed": torch.arange(2, device=device), "step": 1}
    rlk.sample(x, **asked, top_n=3)
    for wrong in ({"top_n": 41}, {"top_n": True}, {"temperature": -1.0}, {"step": -1}, {"seed": 5}, {"top_p": [0.5]}):
        with pytest.raises(rlk.RLKernelError):
            rlk.sample(x, **{**asked, **wrong})


@triton.jit
def powers(out, N: tl.constexpr):
    """2^-i of whole i."""
    i = tl.arange(0, N)
    tl.store(out + i, tl.exp2(0.0 - i.to(tl.float32)))


def test_powers_of_two_are_exact(device) -> None:
    out = torch.empty(64, device=device)
    powers[(1,)](out, N=64)

    assert out.tolist() == [2.0**-i for i in range(64)]


def test_no_log_probability_is_above_0_where_one_token_has_all_the_mass(device) -> None:
    N = 64 if device == "cpu" else 4096
    g = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(N, 1, generator=g)).to(device)
    T = (torch.rand(N, generator=g) * 2 + 0.05).to(device)
    drawn = rlk.sample(x, seed=torch.arange(N, device=device), step=0, temperature=T, top_k=1)
    assert drawn.logprob.tolist() == [0.0] * N
    assert drawn.log_kept_mass.tolist() == [0.0] * N


def test_a_token_that_alone_was_kept_has_a_log_probability_of_0(device) -> None:
    x = torch.tensor([[0.0, -43.0, -44.0]], device=device)
    drawn = rlk.sample(x, seed=0, step=0, top_k=1)
    assert drawn.logprob.item() == 0.0
    assert drawn.log_kept_mass.item() == rlk.logprob(x, drawn.token).logprob.item() < 0.0


@pytest.mark.parametrize(
    "law", [{}, {"temperature": 0.7, "top_p": 0.95}, {"temperature": 1.3, "top_k": 100}, {"top_k": 1}], ids=str
)
def test_a_draw_states_the_trainers_number(law, device) -> None:
    N, V = (6, 1500) if device == "cpu" else (2048, 128256)
    torch.manual_seed(0)
    x = 4 * torch.randn(N, V, device=device)
    drawn = rlk.sample(x, seed=torch.arange(N, device=device), step=0, raw_logprob=True, **law)
    trainer = rlk.logprob(x, drawn.token, temperature=law.get("temperature", 1.0)).logprob
    raw = rlk.logprob(x, drawn.token).logprob

    assert int((drawn.logprob + drawn.log_kept_mass != trainer).sum()) == 0
    assert int((drawn.raw_logprob != raw).sum()) == 0
