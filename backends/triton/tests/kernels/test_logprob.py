"""logprob on Triton at the borders of its tiles, and rows that start anywhere; the rest: test_clauses.py."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_torch.direct import logprob as definition

RESULTS = ("logprob", "lse", "entropy", "log_kept_mass")


def rows(N, V, device, dtype=torch.float32, seed=0):
    """Logits [N, V] of standard deviation 3, some ids far above the rest, and ids [N]."""
    g = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(N, V, generator=g)
    ids = torch.randint(0, V, (N,), generator=g)
    x[torch.arange(0, N, 3), ids[::3]] += 14.0
    return x.to(device, dtype), ids.to(device)


def total(out):
    """A sum with another weight for every result."""
    found = [getattr(out, n) for n in RESULTS if getattr(out, n) is not None]
    return sum((x.nan_to_num() * weights(x) * (i + 1)).sum() for i, x in enumerate(found))


def weights(x):
    return torch.linspace(-1, 1, x.numel(), device=x.device, dtype=x.dtype).view(x.shape)


def agree(x, ids, **options):
    """Results and gradient against the reference in float64; returns what was found."""
    mine, theirs = x.detach().clone().requires_grad_(), x.detach().double().requires_grad_()
    out, want = rlk.logprob(mine, ids, **options), definition(theirs, ids, **options)
    for name in RESULTS:
        if getattr(want, name) is not None:
            close = {"atol": 2e-5, "rtol": 2e-6, "equal_nan": True}
            torch.testing.assert_close(getattr(out, name).double(), getattr(want, name), **close)
    assert out.invalid.tolist() == want.invalid.tolist()
    total(out).backward()
    total(want).backward()
    bound = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[x.dtype]
    scale = 10 * theirs.grad.abs().amax().clamp_min(1e-30)
    torch.testing.assert_close(mine.grad.double() / scale, theirs.grad / scale, atol=bound / 10, rtol=bound)
    return out, mine.grad


@pytest.mark.parametrize("V", [2048, 2049, 16384, 16385, 40001])
def test_sizes_at_the_borders_of_tiles_and_chunks(device, V) -> None:
    agree(*rows(2, V, device), entropy=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_dtype_with_every_option(device, dtype) -> None:
    x, ids = rows(6, 3000, device, dtype)
    support = rlk.Support(torch.arange(600, device=device) * 5, torch.arange(7, device=device) * 100)
    T = torch.tensor([0.5, 0.7, 1.0, 1.3, 2.0, 1.0], device=device)
    mask = torch.tensor([True, True, False, True, True, True], device=device)
    ids[4] = 3000
    agree(x, ids, entropy=True, temperature=T, softcap=20.0, mask=mask, support=support)


def test_rows_far_from_zero(device) -> None:
    """A largest logit that starts at 0 would underflow every exponential of a row far below."""
    x, ids = rows(2, 2000, device)
    agree((x * 64).round() / 64 - 1e5, ids, entropy=True)


@pytest.mark.parametrize("value", [-1e9, -1e10, -1e30, -2e38, torch.finfo(torch.float32).min])
def test_ids_that_are_masked_by_a_number_weigh_nothing(device, value) -> None:
    x, _ = rows(3, 200, device)
    x[:, :130] = value  # two groups of 64, and a part of the third
    x[2] = value  # a law of equals
    agree(
        x,
        torch.tensor([150, 5, 150], device=device),
        entropy=True,
        temperature=torch.tensor([1.0, 1.1, 1.0], device=device),
    )


@pytest.mark.parametrize("value", [-1e10, torch.finfo(torch.float32).min])
def test_a_listed_id_that_is_masked_by_a_number_has_a_finite_log_probability(device, value) -> None:
    x, _ = rows(2, 200, device)
    x[:, 3:] = value
    agree(x, torch.tensor([[1, 150], [150, 2]], device=device))
    best = rlk.logprob(x, torch.tensor([1, 0], device=device), top_logprobs=5).top_logprobs
    assert torch.equal(best[:, 3:], torch.full((2, 2), value, device=device))


def test_a_temperature_without_meaning_spoils_its_own_row(device) -> None:
    x, ids = rows(4, 100, device)
    T = torch.tensor([1.0, 0.0, torch.inf, torch.nan], device=device)
    assert rlk.logprob(x, ids, temperature=T).logprob.isnan().tolist() == [False, True, True, True]


def test_a_kept_id_out_of_range_flags_its_row_and_leaves_its_entropy(device) -> None:
    x, ids = rows(3, 500, device)
    support = rlk.Support(torch.tensor([1, 2, 500, 3, 4], device=device), torch.tensor([0, 2, 3, 5], device=device))
    out, want = rlk.logprob(x, ids, support=support, entropy=True), rlk.logprob(x, ids, entropy=True)
    assert out.invalid.tolist() == [False, True, False]
    assert out.log_kept_mass.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(out.entropy, want.entropy, atol=1e-6, rtol=1e-6)
    assert torch.equal(out.lse, want.lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_start_anywhere_give_the_same_bits(device, dtype) -> None:
    """Triton loads them otherwise, and must add them in the same order."""
    x, ids = rows(3, 2600, device, dtype)
    shifted = torch.zeros(1 + x.numel(), device=device, dtype=dtype)
    shifted[1:] = x.view(-1)
    want, found = (rlk.logprob(v, ids, entropy=True) for v in (x, shifted[1:].view(3, 2600)))
    for result in ("logprob", "lse", "entropy"):
        assert torch.equal(getattr(found, result), getattr(want, result)), result


def test_shifted_batches_are_read_where_they_lie(device) -> None:
    x, ids = rows(12, 900, device)
    batch, chosen = x.view(3, 4, 900), ids.view(3, 4)
    out, grad = agree(batch[:, :-1], chosen[:, 1:], entropy=True)
    assert out.logprob.shape == (3, 3)
    assert grad.shape == (3, 3, 900)
    agree(batch.permute(1, 0, 2), chosen.t())
    agree(x.view(2, 3, 2, 900)[:, :2, :1], ids.view(2, 3, 2)[:, :2, :1])
    agree(x[0], ids[0])


def test_the_best_come_first_and_ties_go_to_the_lowest_id(device) -> None:
    x, ids = rows(4, 2500, device)
    x[1] = (x[1] / 4).round()
    x[2, ::2], x[2, 1::2] = 0.0, -0.0
    mask = torch.tensor([True, True, True, False], device=device)
    out = rlk.logprob(x, ids, top_logprobs=9, mask=mask, temperature=0.7)
    want = definition(x.double(), ids, top_logprobs=9, mask=mask, temperature=0.7)
    assert out.top_ids.tolist() == want.top_ids.tolist()
    torch.testing.assert_close(out.top_logprobs.double(), want.top_logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("K", [1, 3, 65])
def test_several_ids_of_a_row_are_those_of_plain_torch(device, K) -> None:
    """Repeated and absent ids, ids out of range, and masked rows, with every option that goes with a list."""
    x, _ = rows(5, 2100, device)
    ids = torch.randint(0, 2100, (5, K), generator=torch.Generator().manual_seed(1)).to(device)
    ids[1, K // 2], ids[2, -1], ids[3] = -1, 2100, ids[3, :1]
    x[4, ids[4, 0]] += 30.0
    mask = torch.tensor([False, True, True, True, True], device=device)
    T = torch.tensor([0.5, 0.7, 1.0, 1.3, 1.0], device=device)
    out, _ = agree(x, ids, entropy=True, temperature=T, softcap=40.0, mask=mask)
    assert (out.logprob.shape, out.lse.shape) == ((5, K), (5,))


def test_one_id_in_a_list_has_the_bits_of_that_id_alone(device) -> None:
    x, ids = rows(6, 3000, device)
    one, alone = (x.clone().requires_grad_() for _ in range(2))
    first, second = rlk.logprob(one, ids[:, None]), rlk.logprob(alone, ids)
    assert torch.equal(first.logprob[:, 0], second.logprob)
    first.logprob.sum().backward()
    second.logprob.sum().backward()
    assert torch.equal(one.grad, alone.grad)


def test_lists_of_batches_that_lie_anyhow(device) -> None:
    x, _ = rows(12, 900, device)
    ids = torch.randint(0, 900, (4, 3, 7), generator=torch.Generator().manual_seed(2)).to(device)
    agree(x.view(3, 4, 900).transpose(0, 1)[:, :2], ids[:, :2, ::2].int())
    agree(x[0], ids[0, 0])


def test_lists_of_any_length_are_read_whatever_their_strides(device) -> None:
    x, _ = rows(4, 300, device)
    ids, offsets = 7 * torch.arange(10, device=device), torch.tensor([0, 3, 3, 8, 10], device=device)
    apart = [t.repeat_interleave(2)[::2] for t in (ids, offsets)]
    first, second = (x.clone().requires_grad_() for _ in range(2))
    found, want = rlk.logprob(first, rlk.TokenLists(*apart)), rlk.logprob(second, rlk.TokenLists(ids, offsets))
    assert torch.equal(found.logprob, want.logprob)
    found.logprob.square().sum().backward()
    want.logprob.square().sum().backward()
    assert torch.equal(first.grad, second.grad)


def test_a_second_derivative_is_refused(device) -> None:
    x, ids = rows(2, 9, device)
    leaf = x.requires_grad_()
    with pytest.raises(rlk.RLKernelError, match="no second derivative"):
        torch.autograd.grad(rlk.logprob(leaf, ids).logprob.sum(), leaf, create_graph=True)


def test_ids_of_any_integer_type_at_any_address(device) -> None:
    """int64 labels that do not start at a multiple of 16 bytes, and narrower ones."""
    x, ids = rows(5, 120, device)
    want = rlk.logprob(x, ids).logprob
    late = torch.cat((ids[:1], ids))[1:]
    for other in (late, ids.int(), ids.to(torch.uint8), ids.short()):
        assert torch.equal(rlk.logprob(x, other).logprob, want)


def test_as_many_rows_and_numbers_as_there_are(device) -> None:
    """65536 rows and 2.6e9 logits: the last rows are what they are alone."""
    if device == "cpu":
        pytest.skip("5 GB of logits are for a GPU")
    x = torch.randn(65536, 40000, device=device, dtype=torch.bfloat16).requires_grad_()
    ids = torch.randint(0, 40000, (65536,), device=device)
    last = x.detach()[-3:].clone().requires_grad_()
    out, alone = rlk.logprob(x, ids, entropy=True), rlk.logprob(last, ids[-3:], entropy=True)
    assert [torch.equal(getattr(out, n)[-3:], getattr(alone, n)) for n in ("logprob", "lse", "entropy")] == [True] * 3
    (out.logprob + out.entropy).sum().backward()
    (alone.logprob + alone.entropy).sum().backward()
    assert torch.equal(x.grad[-3:], last.grad)


def test_a_forbidden_kept_id_has_no_gradient_where_nothing_of_the_support_is_left(device) -> None:
    x, ids = rows(2, 300, device)
    kept = torch.tensor([7, 9, 7, 9], device=device)
    x[:, kept[:2]] = -torch.inf
    ids[0] = 300
    agree(x, ids, softcap=1.5, support=rlk.Support(kept, torch.tensor([0, 2, 4], device=device)))
