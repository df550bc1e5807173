"""Loss and gradient of every policy loss against a float64 oracle: kind x level x aggregation x correction x KL."""

import itertools
import math

import numpy as np
import pytest
import torch

from rlkernel_core.spec.policy_kinds import AGGREGATES, KLS
from rlkernel_core.spec.policy_loss import KINDS, Correction, Rejection
from tests.policy_batches import KIND_LEVELS, REQUIRED, batch, oracle_gradient, oracle_loss, run

CORRECTIONS = (
    None,
    Correction("token", "truncate", high=1.2),
    Correction("token", "mask", low=0.7, high=1.4),
    Correction("sequence", "truncate", low=0.8, high=1.3),
    Correction("sequence", "mask", high=1.5),
    Correction("geometric", "truncate", high=1.1),
    Correction("token", "truncate", high=1.2, normalize=True),
    Correction("sequence", "mask", low=0.2, high=2.0, normalize=True),
)
REJECTIONS = (
    Rejection("k1", "token", low=0.7, high=1.3),
    Rejection("k1", "sequence", low=0.5, high=1.6),
    Rejection("k1", "geometric", low=0.9, high=1.1),
    Rejection("k1", "any", low=0.55),
    Rejection("k2", "token", high=0.05),
    Rejection("k3", "geometric", high=0.08),
    Rejection("k3", "any", high=0.2),
)


def agree(b, **options):
    result, dlogprob, dentropy = run(b, **options)
    np.testing.assert_allclose(result.loss.item(), oracle_loss(b, **options), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(dlogprob.numpy(), oracle_gradient(b, **options), rtol=1e-10, atol=1e-12)
    return result, dentropy


def takes(kind, correction):
    if correction is None:
        return True
    if kind == "vespo":
        return correction.level == "token" and not correction.normalize
    return kind != "gmpo" or correction.level != "token"


@pytest.mark.parametrize("kind,level", KIND_LEVELS)
def test_every_aggregation_and_correction_matches_imaginary_steps(kind, level):
    kls = itertools.cycle(itertools.product(KLS, (False, True)))
    for seed, (aggregate, correction) in enumerate(itertools.product(AGGREGATES, CORRECTIONS)):
        if not takes(kind, correction):
            continue
        kl, importance = next(kls)
        b = batch(seed, B=3, T=4, per_token=seed % 2 == 1, empty=seed % 3 == 0)
        agree(
            b,
            kind=kind,
            level=level,
            aggregate=aggregate,
            roll=correction is not None,
            correction=correction,
            ref=True,
            kl=kl,
            kl_coef=0.3,
            kl_importance=importance,
            entropy=True,
            entropy_coef=0.1,
            **REQUIRED.get(kind, {}),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kl_estimator_with_and_without_importance(kind):
    for seed, (kl, importance) in enumerate(itertools.product(KLS, (False, True))):
        options = {"kl_clamp": (0.6, 0.15)} if kl.startswith("low_var") else {}
        agree(
            batch(seed, B=2, T=4),
            kind=kind,
            ref=True,
            kl=kl,
            kl_coef=0.5,
            kl_importance=importance,
            **options,
            **REQUIRED.get(kind, {}),
        )


@pytest.mark.parametrize("rejection", REJECTIONS, ids=str)
def test_rejections_leave_the_loss_and_its_denominators(rejection):
    for seed, kind in enumerate(("grpo", "ppo", "gspo", "dr_grpo", "gmpo", "vespo")):
        for correction in (None, Correction("geometric", "truncate", high=1.1)):
            if takes(kind, correction):
                agree(
                    batch(seed, per_token=seed % 2 == 0),
                    kind=kind,
                    roll=True,
                    rejection=rejection,
                    correction=correction,
                    ref=True,
                    kl_coef=0.1,
                    entropy=True,
                    entropy_coef=0.1,
                    entropy_aggregate="token_mean",
                )


@pytest.mark.parametrize("kind,level", KIND_LEVELS)
def test_without_old_log_probabilities_the_ratio_is_one_and_keeps_its_gradient(kind, level):
    correction = None if kind in {"vespo", "gmpo"} else Correction("token", "truncate", high=1.2)
    options = {"kind": kind, "level": level, "roll": True, "correction": correction, **REQUIRED.get(kind, {})}
    result, _ = agree(batch(3), old=False, **options)
    assert result.stats.ratio_max.item() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_entropy_bonus_and_its_gradient(aggregate):
    b = batch(5, empty=True)
    options = {"kind": "grpo", "aggregate": "token_mean", "entropy": True, "entropy_coef": 0.25}
    _, dentropy = agree(b, **options, entropy_aggregate=aggregate)
    total = math.fsum(-(dentropy.numpy() * b.entropy)[b.mask])
    without = oracle_loss(b, **{**options, "entropy": False, "entropy_coef": 0.0})
    assert oracle_loss(b, **options, entropy_aggregate=aggregate) == pytest.approx(without - total, rel=1e-12)
    assert dentropy[~torch.tensor(b.mask)].abs().max().item() == 0


@pytest.mark.parametrize("kind", [k for k, v in KINDS.items() if "log_ratio_limit" in v.options])
def test_log_ratio_limit_stops_the_gradient(kind):
    agree(batch(7, spread=1.0), kind=kind, log_ratio_limit=0.2, **REQUIRED.get(kind, {}))


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_dual_clip(kind):
    agree(batch(8, spread=1.5), kind=kind, clip=(0.2, 0.2), dual_clip=1.3)
    agree(batch(8, spread=1.5), kind=kind, clip=(0.2, 0.4), dual_clip=1.1)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "sapo", "gmpo", "dro", "reinforce"])
def test_autograd_agrees_that_the_gradient_is_the_derivative(kind):
    b = batch(9)
    from rlkernel_torch.direct import policy_loss

    def f(lp, h):
        return policy_loss(
            lp,
            torch.tensor(b.old),
            torch.tensor(b.adv),
            mask=torch.tensor(b.mask),
            kind=kind,
            entropy=h,
            entropy_coef=0.2,
            ref_logprob=torch.tensor(b.ref),
            kl="k3",
            kl_coef=0.2,
            kl_importance=True,
            **REQUIRED.get(kind, {}),
        ).loss

    inputs = torch.tensor(b.lp, requires_grad=True), torch.tensor(b.entropy, requires_grad=True)
    assert torch.autograd.gradcheck(f, inputs)


@pytest.mark.parametrize("kind,level", KIND_LEVELS)
def test_fp32_is_close_to_float64(kind, level):
    options = {"kind": kind, "level": level, "ref": True, "kl_coef": 0.1, **REQUIRED.get(kind, {})}
    b = batch(11, B=8, T=33)
    exact, gradient, _ = run(b, **options)
    single, gradient32, _ = run(b, dtype=torch.float32, **options)
    assert single.loss.dtype == torch.float32
    np.testing.assert_allclose(single.loss.item(), exact.loss.item(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient32.numpy(), gradient.numpy(), rtol=2e-5, atol=1e-8)
