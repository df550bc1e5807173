"""linear_policy_loss against policy_loss on log-probabilities that torch makes from the whole logits."""

import pytest
import torch

from rlkernel_core.spec.policy_loss import Correction, Rejection
from rlkernel_torch.direct import linear_logprob, linear_policy_loss
from tests.linear_loss_cases import HEAD, Case, agree
from tests.policy_batches import KIND_LEVELS, REQUIRED, same


@pytest.mark.parametrize("kind,level", KIND_LEVELS)
def test_equals_the_plain_operators(kind, level):
    agree(
        Case(1),
        kind=kind,
        level=level,
        ref=True,
        kl_coef=0.1,
        kl_importance=True,
        entropy=True,
        entropy_coef=0.05,
        roll=True,
        correction=Correction("sequence" if kind == "gmpo" else "token", "truncate", high=1.2),
        rejection=Rejection("k1", "geometric", low=0.8, high=1.2),
        **REQUIRED.get(kind, {}),
    )


@pytest.mark.parametrize("old", [True, False], ids=["old", "on-policy"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"roll": True},
        {"roll": True, "correction": Correction("sequence", "mask", high=3.0)},
        {"roll": True, "rejection": Rejection("k3", "any", high=0.2)},
        {"aggregate": "token_mean", "denominator": 40.0},
        {"entropy": True},
        {"ref": True},
    ],
)
def test_equals_the_plain_operators_with_and_without_old_log_probabilities(old, options):
    agree(Case(2), old=old, **options)


def test_returns_the_log_probabilities_and_entropies_it_made():
    case = Case(3)
    result = case.fused(entropy=True)
    lp, H = case.torch_logprob(**HEAD)
    same(result.logprob, torch.where(case.mask, lp, 0.0).detach(), rtol=1e-10)
    same(result.entropy, torch.where(case.mask, H, 0.0).detach(), rtol=1e-10)
    assert not result.logprob.requires_grad
    assert case.fused().entropy is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_second_call_on_the_same_weights_has_a_ratio_of_exactly_one(dtype, level):
    case = Case(4, dtype=dtype)
    first = case.fused(old=False)
    again = linear_policy_loss(
        case.hidden, case.weight, case.ids, first.logprob, case.adv, bias=case.bias, mask=case.mask, level=level, **HEAD
    )
    assert (again.stats.ratio_min.item(), again.stats.ratio_max.item()) == (1.0, 1.0)
    with torch.no_grad():
        old = linear_logprob(case.hidden, case.weight, case.ids, bias=case.bias, mask=case.mask, **HEAD).logprob
    assert torch.equal(old, first.logprob)


@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("hidden", "bias"), ("weight", "bias")])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_frozen_operands_get_no_gradient_and_change_no_other(frozen, level):
    every, some = Case(5), Case(5, frozen=frozen)
    full = dict(zip(("hidden", "weight", "bias"), every.gradients(every.fused(level=level).loss), strict=True))
    left = [n for n in full if n not in frozen]
    loss = some.fused(level=level).loss
    loss.backward()
    for name in left:
        same(getattr(some, name).grad, full[name])
    assert all(getattr(some, name).grad is None for name in frozen)


def test_without_a_gradient_wanted_the_loss_is_the_same():
    case = Case(6)
    with torch.no_grad():
        silent = case.fused(entropy=True, entropy_coef=0.1)
    loud = case.fused(entropy=True, entropy_coef=0.1)
    assert (silent.loss, silent.stats) == (loud.loss.detach(), loud.stats)
    assert not silent.loss.requires_grad
