"""Laws of policy_loss: what must hold whatever the numbers are."""

import math

import numpy as np
import pytest
import torch

from rlkernel_core.spec.policy_loss import KINDS, Correction, Rejection
from rlkernel_torch.direct import policy_loss
from tests.policy_batches import KIND_LEVELS, REQUIRED, batch, run, same

CLIPPED = [k for k, v in KINDS.items() if v.surrogate == "clip"]


@pytest.mark.parametrize("kind", CLIPPED)
def test_on_policy_the_gradient_is_minus_omega_times_the_advantage(kind):
    b = batch(1, spread=0.0)
    b.old = b.lp
    _, gradient, _ = run(b, kind=kind, aggregate="seq_mean_token_mean")
    n_i = b.mask.sum(1, keepdims=True)
    same(gradient, torch.tensor(np.where(b.mask, -b.adv[:, None] / n_i / len(b.adv), 0.0)))


def test_token_mean_on_policy_is_minus_a_over_n():
    b = batch(1, spread=0.0, per_token=True)
    b.old = b.lp
    _, gradient, _ = run(b, kind="grpo", aggregate="token_mean")
    same(gradient, torch.tensor(np.where(b.mask, -b.adv / b.mask.sum(), 0.0)))


def test_dapo_is_grpo_with_a_higher_upper_bound_and_a_token_mean():
    b = batch(2, B=12, T=12, spread=0.6)
    dapo, g, _ = run(b, kind="dapo")
    grpo, h, _ = run(b, kind="grpo", clip=(0.2, 0.28), aggregate="token_mean")
    assert (dapo.loss, dapo.stats) == (grpo.loss, grpo.stats)
    assert torch.equal(g, h)
    assert not torch.equal(g, run(b, kind="ppo")[1])


def test_gspo_token_is_gspo_with_one_advantage_per_sequence():
    b = batch(3, spread=1e-3)
    one, g, _ = run(b, kind="gspo")
    two, h, _ = run(b, kind="gspo_token")
    same(one.loss, two.loss)
    same(g, h)
    b = batch(3, spread=1e-3, per_token=True)
    assert not torch.allclose(run(b, kind="gspo")[1], run(b, kind="gspo_token")[1])


def test_sequence_level_of_a_one_token_sequence_is_the_token_level():
    b = batch(4, T=1)
    same(run(b, kind="grpo", level="sequence")[1], run(b, kind="grpo", level="token")[1])


def test_clip_bounds_each_side_of_the_advantage_only():
    lp = torch.tensor([[0.5, 0.5, -0.5, -0.5]], dtype=torch.float64) - 2
    old = torch.full((1, 4), -2.0, dtype=torch.float64)
    adv = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    lp.requires_grad_()
    result = policy_loss(lp, old, adv, kind="ppo", clip=(0.1, 0.3), aggregate="token_sum")
    result.loss.backward()
    up, down = math.exp(0.5), math.exp(-0.5)
    same(result.loss.detach(), torch.tensor(-1.3 + up - down + 0.9, dtype=torch.float64))
    same(lp.grad, torch.tensor([[0.0, up, -down, 0.0]], dtype=torch.float64))
    assert (result.stats.clip_high.item(), result.stats.clip_low.item()) == (0.25, 0.25)


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    lp = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    old, adv = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[-1.5]], dtype=torch.float64)
    result = policy_loss(lp, old, adv, kind="ppo", dual_clip=3.0)
    result.loss.backward()
    assert (result.loss.item(), lp.grad.item(), result.stats.clip_dual.item()) == (4.5, 0.0, 1.0)


def test_trl_two_sided_delta_is_dual_clip():
    # -min(min(r, delta) A, clip(r) A), for delta >= 1 + high (INTELLECT-2).
    b = batch(5, B=6, T=8, spread=1.2)
    r, a = np.exp(b.lp - b.old), b.adv[:, None]
    want = -np.minimum(np.minimum(r, 1.6) * a, np.clip(r, 0.8, 1.2) * a)[b.mask].mean()
    got = run(b, kind="ppo", dual_clip=1.6, log_ratio_limit=math.inf)[0].loss.item()
    assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("kind,level", KIND_LEVELS)
@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
def test_losses_of_ranks_add_up(kind, level, average):
    b = batch(6, B=6, T=5, empty=True)
    aggregate = KINDS[kind].aggregate
    options = {"kind": kind, "level": level, "ref": True, "kl_coef": 0.1, **REQUIRED.get(kind, {})}
    if aggregate == "seq_mean_token_sum_norm":
        options["horizon"] = 7.0
    whole, gradient, _ = run(b, **options)
    count = float(b.mask.sum() if aggregate == "token_mean" else b.mask.any(1).sum())
    parts = [slice(0, 2), slice(2, 3), slice(3, 6)]
    losses, gradients = [], []
    for part in parts:
        rank = type(b)(**{n: getattr(b, n)[part] for n in vars(b)})
        given = torch.tensor(count / 3, dtype=torch.float64) if average else count
        result, g, _ = run(rank, denominator=given, **options)
        losses.append(result.loss.detach() / (3 if average else 1))
        gradients.append(g / (3 if average else 1))
    same(sum(losses), whole.loss.detach(), atol=1e-12)
    same(torch.cat(gradients), gradient, atol=1e-12)


def test_missing_rollout_log_probabilities_weigh_one_and_are_reported():
    # An engine that cannot score a token reports NaN; the loss must not become NaN with it.
    b = batch(14)
    b.roll[:, 0] = math.nan
    result, gradient, _ = run(b, kind="ppo", roll=True, correction=Correction("token", "truncate", high=1.1))
    b.roll[:, 0] = b.old[:, 0]
    want, want_gradient, _ = run(b, kind="ppo", roll=True, correction=Correction("token", "truncate", high=1.1))
    same(result.loss, want.loss)
    same(gradient, want_gradient)
    assert result.stats.rollout_missing.item() == pytest.approx(4 / b.mask.sum())


def test_a_masked_out_weight_keeps_the_denominator_and_a_rejection_does_not():
    b = batch(15, spread=0.0, per_token=True)
    b.old = b.lp
    b.roll = b.old.copy()
    b.roll[0, 0] = b.old[0, 0] - 3
    kept = b.mask.copy()
    kept[0, 0] = False
    n = b.mask.sum()
    weight = run(b, kind="ppo", roll=True, correction=Correction("token", "mask", high=2.0))[0]
    reject = run(b, kind="ppo", roll=True, rejection=Rejection("k1", "token", high=2.0))[0]
    assert weight.loss.item() == pytest.approx(-b.adv[kept].sum() / n, rel=1e-12)
    assert reject.loss.item() == pytest.approx(-b.adv[kept].sum() / (n - 1), rel=1e-12)
    assert (weight.stats.tokens.item(), reject.stats.tokens.item()) == (n, n - 1)
    assert weight.stats.correction_clipped.item() == pytest.approx(1 / n)
    assert reject.stats.rejected.item() == pytest.approx(1 / n)


def test_kl_with_importance_has_the_gradient_of_the_reverse_kl():
    b = batch(16)
    b.adv[:] = 0
    _, gradient, _ = run(b, kind="ppo", ref=True, kl="k3", kl_coef=1.0, kl_importance=True)
    r, q = np.exp(b.lp - b.old), b.lp - b.ref
    same(gradient, torch.tensor(np.where(b.mask, r * q / b.mask.sum(), 0.0)))


@pytest.mark.parametrize("kind,level", KIND_LEVELS)
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_huge_log_ratios_stay_finite(kind, level, gap):
    for limit in ({}, {"log_ratio_limit": math.inf}):
        if limit and ("log_ratio_limit" not in KINDS[kind].options or (gap > 0 and KINDS[kind].surrogate != "clip")):
            continue
        for sign in (1.0, 0.0) if limit else (1.0, 0.0, -1.0):
            lp = torch.full((2, 3), -1.0, requires_grad=True)
            result = policy_loss(
                lp,
                torch.full((2, 3), -1.0 - gap),
                torch.full((2,), sign),
                kind=kind,
                level=level,
                **limit,
                **REQUIRED.get(kind, {}),
            )
            result.loss.backward()
            assert math.isfinite(result.loss.item())
            assert torch.isfinite(lp.grad).all()


def test_mean_statistics_are_their_formulas():
    b = batch(17, B=6, T=7, spread=0.5)
    result, _, _ = run(
        b,
        kind="ppo",
        clip=(0.1, 0.3),
        dual_clip=1.8,
        ref=True,
        kl="k2",
        entropy=True,
        roll=True,
        correction=Correction("token", "truncate", high=1.2),
    )
    m, a = b.mask, np.broadcast_to(b.adv[:, None], b.mask.shape)[b.mask]
    d, q, x = (b.lp - b.old)[m], (b.lp - b.ref)[m], (b.old - b.roll)[m]
    r, w = np.exp(d), np.minimum(np.exp(x), 1.2)
    held = np.where((a < 0) & (r > 1.8), 1.8, r)
    loss = -w * np.minimum(held * a, np.clip(r, 0.9, 1.3) * a)
    want = {
        "tokens": m.sum(),
        "sequences": 6,
        "policy_loss": loss.mean(),
        "ratio_mean": r.mean(),
        "ratio_min": r.min(),
        "ratio_max": r.max(),
        "clip_low": ((a < 0) & (r < 0.9)).mean(),
        "clip_high": ((a > 0) & (r > 1.3)).mean(),
        "clip_dual": ((a < 0) & (r > 1.8)).mean(),
        "approx_kl_k1": -d.mean(),
        "approx_kl_k3": (r - 1 - d).mean(),
        "effective_sample_size": (r * w).sum() ** 2 / len(r) / ((r * w) ** 2).sum(),
        "entropy": b.entropy[m].mean(),
        "kl_ref": (q**2 / 2).mean(),
        "rollout_kl": (np.exp(x) - 1 - x).mean(),
        "rollout_missing": 0.0,
        "correction_mean": w.mean(),
        "correction_clipped": (np.exp(x) > 1.2).mean(),
    }
    got = {name: value.item() for name, value in vars(result.stats).items() if value is not None}
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-14), name
    assert not any(v.requires_grad or v.dim() for v in vars(result.stats).values() if v is not None)


def test_bfloat16_log_probabilities_get_a_bfloat16_gradient_of_an_fp32_loss():
    lp = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    result = policy_loss(lp, None, torch.tensor([3.0]))
    result.loss.backward()
    assert (result.loss.dtype, lp.grad.dtype) == (torch.float32, torch.bfloat16)
    assert lp.grad.tolist() == [[-1.5, -1.5]]
