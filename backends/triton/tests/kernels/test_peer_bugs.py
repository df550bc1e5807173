"""One regression test for each defect that users of other libraries reported of log-probabilities and policy losses.

The number of an issue is of the project that had it. What is proved at length by a clause is shown here at one size.
"""

import inspect

import pytest
import torch

import rlkernel as rlk
from rlkernel_torch.direct import linear_logprob as linear_definition
from rlkernel_torch.direct import logprob as definition
from rlkernel_triton.affine_suffix_scan import kernels as scan_kernels
from rlkernel_triton.linear_logprob import launch as linear_logprob
from rlkernel_triton.linear_policy_loss import launch as linear_policy_loss
from rlkernel_triton.logprob import kernels as logprob_kernels
from rlkernel_triton.logprob import launch as logprob
from rlkernel_triton.policy_loss import batch as loss_batch
from rlkernel_triton.policy_loss import launch as policy_loss

CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def rows(N, V, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(N, V, generator=g).to(device), torch.randint(0, V, (N,), generator=g).to(device)


@pytest.mark.parametrize("remainder", [257, 1669, 1936 - 1024, 64, 1])  # of V = 50257, 151669, 151936 … by the tiles
def test_columns_beyond_the_vocabulary_take_no_part(device, remainder) -> None:
    """verl #2656, #2899: a V that is no multiple of the tile let zeros of the padding into the sum."""
    hidden, ids = rows(3, 8, device)
    weight = torch.full((1024 + remainder, 8), -5.0, device=device)  # where a zero would be the largest logit
    hidden = hidden.abs()
    found = rlk.linear_logprob(hidden, weight, ids)
    torch.testing.assert_close(
        found.logprob.double(), linear_definition(hidden.double(), weight.double(), ids).logprob, **CLOSE
    )


@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_logits_far_below_zero_keep_their_law(device, shift) -> None:
    """verl #7439, SkyRL #2141: a running maximum that begins with 0 underflows where all logits are negative."""
    x, ids = rows(4, 3000, device)
    x = (x * 8).round() / 8  # so that the shift is exact
    torch.testing.assert_close(rlk.logprob(x + shift, ids).logprob, rlk.logprob(x, ids).logprob, **CLOSE)


def test_forbidden_ids_make_no_nan_in_entropy_or_its_gradient(device) -> None:
    """VeOmni #720: p log p of a forbidden id is 0, not NaN."""
    x, ids = rows(3, 500, device)
    x[:, ::2], ids = -torch.inf, ids // 2 * 2 + 1
    leaf = x.requires_grad_()
    rlk.logprob(leaf, ids.clamp(max=499), entropy=True).entropy.sum().backward()
    assert torch.isfinite(leaf.grad).all()
    assert not leaf.grad[:, ::2].any()


def test_entropy_is_of_the_tempered_law(device) -> None:
    """OpenRLHF #1319: entropy of softmax(z), log-probability of softmax(z / T)."""
    x, ids = rows(3, 700, device)
    p = torch.softmax(x.double() / 0.6, -1)
    found = rlk.logprob(x, ids, temperature=0.6, entropy=True).entropy
    torch.testing.assert_close(found.double(), -(p * p.log()).sum(-1), **CLOSE)


def test_the_heads_gradient_adds_up_in_fp32(device) -> None:
    """TRL, Liger #1391, CCE #14: 16-bit sums over chunks lose what many rows add; here each adds 1/1024."""
    N, D, V = 1024, 16, 32
    hidden = torch.ones(N, D, device=device, dtype=torch.float16) / 16
    weight = torch.zeros(V, D, device=device, dtype=torch.float16).requires_grad_()
    ids = torch.zeros(N, dtype=torch.int64, device=device)
    rlk.linear_logprob(hidden, weight, ids, max_workspace_bytes=408_000).logprob.sum().backward()
    want = torch.full((V, D), -N / V / 16, dtype=torch.float64)
    want[0] += N / 16
    torch.testing.assert_close(weight.grad.double().cpu(), want, atol=0, rtol=2**-10)


def test_one_build_serves_every_number_of_rows() -> None:
    """Liger's GRPO: token counts as constants of the kernel compile it anew for every batch."""
    kernels = (logprob_kernels.partial_softmax, logprob_kernels.softmax_backward, scan_kernels.scan_kernel)
    constant = [{n for n, p in inspect.signature(k.fn).parameters.items() if "constexpr" in str(p)} for k in kernels]
    assert [names & {"N", "B", "C", "V", "sequences"} for names in constant] == [set()] * len(kernels)
    assert all("BLOCK" in names or "TILE" in names or "COLUMNS" in names or "J" in names for names in constant)


def test_rows_are_found_beyond_two_to_the_31(device) -> None:
    """RL-Kernel, Liger: offsets in 32 bits. The second row lies 2^31 elements after the first."""
    x, ids = rows(2, 40, device)
    x = x.half()
    far = torch.empty(2**31 + 40, dtype=torch.float16, device=device).as_strided((2, 40), (2**31, 1))
    far.copy_(x)
    assert torch.equal(rlk.logprob(far, ids).logprob, rlk.logprob(x, ids).logprob)


def test_masked_cells_may_hold_nan(device) -> None:
    """unsloth, TRL: exp before the mask lets the NaN of padding into the loss and its gradient."""
    old = torch.full((2, 6), -2.0, device=device)
    mask = torch.ones(2, 6, dtype=torch.bool, device=device)
    mask[:, 4:] = False
    new, A = old + 0.1, torch.ones(2, 6, device=device)
    want = rlk.policy_loss(new, old, A, mask=mask).loss
    for x in (new, old, A):
        x[:, 4:] = torch.nan
    leaf = new.requires_grad_()
    found = rlk.policy_loss(leaf, old, A, mask=mask).loss
    found.backward()
    assert found.item() == want.item()
    assert leaf.grad[:, 4:].tolist() == [[0.0, 0.0]] * 2


def test_a_python_number_of_64_bits_is_taken_in_32(device) -> None:
    """TRL: under torch.compile a float arrives as float64; the kernels compute in fp32 whatever it is."""
    x, ids = rows(3, 300, device)
    exact = rlk.logprob(x, ids, temperature=float(torch.tensor(0.7)))
    assert torch.equal(rlk.logprob(x, ids, temperature=0.7).logprob, exact.logprob)


def test_ids_may_lie_at_any_address(device) -> None:
    """flash-attention: labels of 64 bits at an odd multiple of 8 bytes."""
    x, ids = rows(5, 300, device)
    room = torch.empty(6, dtype=torch.int64, device=device)
    room[1:] = ids
    assert torch.equal(rlk.logprob(x, room[1:]).logprob, rlk.logprob(x, ids).logprob)


def test_the_loss_is_written_once() -> None:
    """Liger #1082, TRL #7063: two copies of the same formulas drift apart."""
    assert "policy_loss.batch" in inspect.getsource(policy_loss)
    assert "policy_loss.batch" in inspect.getsource(linear_policy_loss)


def test_inputs_are_what_they_were_after_forward_and_backward(device) -> None:
    """SkyRL #2141: a backward pass in place, autotuned, ran several times over its own output."""
    x, ids = rows(4, 900, device)
    leaf = x.clone().requires_grad_()
    out = rlk.logprob(leaf, ids, entropy=True)
    first = torch.autograd.grad(out.logprob.sum(), leaf, retain_graph=True)[0]
    second = torch.autograd.grad(out.logprob.sum(), leaf)[0]
    assert torch.equal(first, second)
    assert torch.equal(leaf.detach(), x)


def test_no_value_is_read_back() -> None:
    """verl, Liger: `.item()` on the way stalls the host; kernels flag a bad id instead."""
    for module in (logprob, linear_logprob, policy_loss, linear_policy_loss, loss_batch):
        source = inspect.getsource(module)
        assert [word for word in (".item()", ".tolist()", ".cpu()", ".nonzero()") if word in source] == []


def test_with_and_without_gradients_the_bits_are_the_same(device) -> None:
    """unsloth: the ratio of a policy to itself must be exactly one."""
    x, ids = rows(4, 2100, device)
    with torch.no_grad():
        old = rlk.logprob(x, ids).logprob
    assert torch.equal(rlk.logprob(x.clone().requires_grad_(), ids).logprob, old)


def test_what_trainers_asked_for_beside_the_log_probability(device) -> None:
    """slime, unsloth, Liger: kept ids (top-p), entropy, logsumexp and the likeliest ids in one call."""
    x, ids = rows(2, 300, device)
    support = rlk.Support(torch.arange(200, device=device) % 100, torch.tensor([0, 100, 200], device=device))
    out = rlk.logprob(x, ids % 100, entropy=True, top_logprobs=3, support=support)
    want = definition(x.double(), ids % 100, entropy=True, top_logprobs=3, support=support)
    for name in ("logprob", "entropy", "lse", "top_logprobs", "log_kept_mass"):
        torch.testing.assert_close(getattr(out, name).double(), getattr(want, name), **CLOSE)
    assert torch.equal(out.top_ids, want.top_ids)


def test_an_id_outside_the_vocabulary_is_flagged_and_harms_no_other_row(device) -> None:
    """verl #3723, SkyRL #1765: targets beyond a shard or in padding; shards of any offset: test_vocab_parallel.py."""
    x, ids = rows(4, 300, device)
    bad = ids.clone()
    bad[2] = 300
    out, want = rlk.logprob(x, bad), rlk.logprob(x, ids)
    assert out.invalid.tolist() == [False, False, True, False]
    keep = [0, 1, 3]
    assert torch.equal(out.logprob[keep], want.logprob[keep])
