"""policy_loss: the defaults of kinds, and layouts that its clauses do not draw."""

import pytest
import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_torch.direct import policy_loss
from tests.policy_batches import batch, run, same, tensor


def test_dapo_is_grpo_with_a_higher_upper_bound_and_a_token_mean():
    b = batch(2, B=12, T=12, spread=0.6)
    dapo, g, _ = run(b, kind="dapo")
    grpo, h, _ = run(b, kind="grpo", clip=(0.2, 0.28), aggregate="token_mean")
    assert (dapo.loss, dapo.stats) == (grpo.loss, grpo.stats)
    assert torch.equal(g, h)
    assert not torch.equal(g, run(b, kind="ppo")[1])


def test_bfloat16_log_probabilities_get_a_bfloat16_gradient_of_an_fp32_loss():
    lp = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    result = policy_loss(lp, None, torch.tensor([3.0]))
    result.loss.backward()
    assert (result.loss.dtype, lp.grad.dtype) == (torch.float32, torch.bfloat16)
    assert lp.grad.tolist() == [[-1.5, -1.5]]


def test_a_bag_of_tokens_needs_no_sequences():
    b = batch(9, per_token=True)
    lp, old, adv = (tensor(x).flatten() for x in (b.lp, b.old, b.adv))
    got = policy_loss(lp, old, adv, mask=torch.tensor(b.mask).flatten(), kind="dapo")
    same(got.loss, run(b, kind="dapo")[0].loss.detach())
    assert got.stats.sequences is None
    for options in ({"kind": "grpo"}, {"kind": "ppo", "level": "sequence"}):
        with pytest.raises(ArgumentError, match="cu_seqlens"):
            policy_loss(lp, None, adv, **options)


def test_horizon_defaults_to_the_padded_length():
    b = batch(13)
    same(run(b, kind="dr_grpo")[0].loss, run(b, kind="dr_grpo", horizon=5.0)[0].loss)
    with pytest.raises(ArgumentError, match="horizon"):
        policy_loss(torch.zeros(3), None, torch.zeros(3), kind="dr_grpo", cu_seqlens=torch.tensor([0, 3]))


def test_coefficients_may_live_on_the_device():
    b = batch(1, B=5, T=8, spread=0.5, empty=True)
    numbers = {"kl_coef": 0.2, "entropy_coef": 0.1}
    tensors = {"kl_coef": torch.tensor(0.2).double(), "entropy_coef": torch.tensor(0.1, dtype=torch.float64)}
    (one, *grads), (other, *others) = (run(b, ref=True, entropy=True, **given) for given in (numbers, tensors))
    for want, found in zip((one.loss.detach(), *grads), (other.loss.detach(), *others), strict=True):
        same(found, want, rtol=1e-6)
