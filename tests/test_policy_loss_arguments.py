"""Every argument of policy_loss has an effect or is refused."""

import math

import numpy as np
import pytest
import torch

from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.spec import policy_loss as spec
from rlkernel_core.spec.policy_kinds import AGGREGATES, KLS
from rlkernel_core.spec.policy_loss import KINDS, Correction, GammaGate, Rejection
from rlkernel_torch.direct import policy_loss
from tests.policy_batches import REQUIRED, batch, tensor

B = batch(1, B=5, T=8, spread=0.5, empty=True)
T64 = {n: tensor(getattr(B, n)) for n in ("old", "ref", "roll", "entropy", "adv")}
MASK = torch.tensor(B.mask)
ROLLED = {"rollout_logprob": T64["roll"]}
REF = {"ref_logprob": T64["ref"], "kl_coef": 0.2}
BONUS = {"entropy": T64["entropy"], "entropy_coef": 0.1}

# argument -> (what else the call has, one value, another). `...`: the argument is left out.
EFFECTS = {
    "old_logprob": ({}, T64["old"], T64["old"] - 0.1),
    "advantages": ({}, T64["adv"], T64["adv"] * 2),
    "mask": ({}, MASK, MASK & (torch.arange(8) != 2)),
    "kind": ({}, "grpo", "ppo"),
    "level": ({}, "token", "sequence"),
    "clip": ({}, ..., (0.01, 0.02)),
    "dual_clip": ({}, ..., 1.01),
    "log_ratio_limit": ({}, ..., 0.1),
    "tau": ({"kind": "sapo"}, ..., (2.0, 3.0)),
    "gamma": ({"kind": "vespo"}, ..., GammaGate(k_pos=1.0, k_neg=1.0)),
    "ratio_cap": ({"kind": "dppo_tv", "clip": (0.5, 0.5)}, ..., 1.01),
    "dro_beta": ({"kind": "dro"}, 0.1, 0.2),
    "aggregate": ({}, ..., "token_sum"),
    "denominator": ({}, ..., 3.0),
    "horizon": ({"kind": "dr_grpo"}, ..., 3.0),
    "count_empty": ({}, ..., True),
    "ref_logprob": ({}, ..., T64["ref"]),
    "kl": (REF, ..., "k2"),
    "kl_coef": ({"ref_logprob": T64["ref"]}, ..., 0.1),
    "kl_clamp": (REF | {"kl": "low_var"}, ..., (0.1, 0.01)),
    "kl_importance": (REF, ..., True),
    "entropy": ({}, ..., T64["entropy"]),
    "entropy_coef": ({"entropy": T64["entropy"]}, ..., 0.1),
    "entropy_aggregate": (BONUS, ..., "token_mean"),
    "entropy_denominator": (BONUS | {"entropy_aggregate": "token_mean"}, ..., 3.0),
    "rollout_logprob": ({}, ..., T64["roll"]),
    "correction": (ROLLED, ..., Correction("token", "truncate", high=1.1)),
    "rejection": (ROLLED, ..., Rejection("k1", "token", high=1.1)),
}


def outcome(given):
    """Loss, statistics and gradient, as one list of numbers."""
    lp = tensor(B.lp, grad=True)
    arguments = {"old_logprob": T64["old"], "advantages": T64["adv"], "mask": MASK, **given}
    result = policy_loss(lp, **{k: v for k, v in arguments.items() if v is not ...})
    result.loss.backward()
    stats = [-1.0 if v is None else v.item() for v in vars(result.stats).values()]
    return [result.loss.item(), *stats, *lp.grad.flatten().tolist()]


@pytest.mark.parametrize("argument", EFFECTS)
def test_changing_one_argument_changes_the_outcome(argument):
    others, one, two = EFFECTS[argument]
    assert outcome({**others, argument: one}) != outcome({**others, argument: two})


def test_no_argument_is_missing_from_the_table():
    # logprob and cu_seqlens are the batch itself; test_policy_loss_layouts.py has them.
    assert spec.SPEC.parameters.keys() - {"logprob", "cu_seqlens"} == EFFECTS.keys()


@pytest.mark.parametrize(
    "a,b",
    [
        (Correction("token", high=1.1), Correction("sequence", high=1.1)),
        (Correction("sequence", high=1.1), Correction("geometric", high=1.1)),
        (Correction("token", high=1.1), Correction("token", "mask", high=1.1)),
        (Correction("token", high=1.1), Correction("token", high=1.2)),
        (Correction("token", high=1.1), Correction("token", low=0.9, high=1.1)),
        (Correction("token", high=1.1), Correction("token", high=1.1, normalize=True)),
    ],
)
def test_every_field_of_a_correction_has_an_effect(a, b):
    assert outcome(ROLLED | {"correction": a}) != outcome(ROLLED | {"correction": b})


@pytest.mark.parametrize(
    "a,b",
    [
        (Rejection("k2", "token", high=0.1), Rejection("k3", "token", high=0.1)),
        (Rejection("k1", "token", high=1.1), Rejection("k1", "sequence", high=1.1)),
        (Rejection("k1", "geometric", low=0.99), Rejection("k1", "any", low=0.99)),
        (Rejection("k1", "token", high=1.1), Rejection("k1", "token", low=0.9, high=1.1)),
        (Rejection("k1", "token", high=1.1), Rejection("k1", "token", high=1.3)),
    ],
)
def test_every_field_of_a_rejection_has_an_effect(a, b):
    assert outcome(ROLLED | {"rejection": a}) != outcome(ROLLED | {"rejection": b})


@pytest.mark.parametrize("kind", KINDS)
def test_an_option_that_a_kind_lacks_is_refused(kind):
    options = {
        "clip": (0.2, 0.2),
        "dual_clip": 3.0,
        "log_ratio_limit": 5.0,
        "tau": (1.0, 1.0),
        "gamma": GammaGate(),
        "ratio_cap": 3.0,
        "dro_beta": 0.5,
    }
    for name, value in options.items():
        given = {"kind": kind, **REQUIRED.get(kind, {}), name: value}
        if name in KINDS[kind].options:
            outcome(given)
        else:
            with pytest.raises(ArgumentError, match=f"^{name}: "):
                outcome(given)


REFUSED = {
    "kind": {"kind": "grop"},
    "level": {"kind": "gspo", "level": "token"},
    "clip": {"kind": "dppo_tv"},
    "dro_beta": {"kind": "dro"},
    "clip[0]": {"clip": (-0.1, 0.2)},
    "clip[1]": {"clip": (0.1, math.nan)},
    "tau[1]": {"kind": "sapo", "tau": (1.0, 0.0)},
    "dual_clip": {"dual_clip": 1.0},
    "log_ratio_limit": {"log_ratio_limit": 0.0},
    "aggregate": {"aggregate": "mean"},
    "denominator": {"aggregate": "token_sum", "denominator": 3.0},
    "denominator ": {"denominator": 0.0},
    "horizon": {"horizon": 3.0},
    "count_empty": {"kind": "ppo", "count_empty": True},
    "count_empty ": {"count_empty": True, "denominator": 4.0},
    "kl": {"kl": "k2"},
    "kl ": {**REF, "kl": "k4"},
    "kl  ": {**REF, "kl": "k2+"},
    "kl_coef": {"kl_coef": 0.1},
    "kl_coef ": {"ref_logprob": T64["ref"], "kl_coef": torch.ones(2)},
    "kl_clamp": {**REF, "kl_clamp": (20.0, 10.0)},
    "kl_importance": {"kl_importance": True},
    "entropy_coef": {"entropy_coef": 0.1},
    "entropy_aggregate": {"entropy_aggregate": "token_mean"},
    "entropy_denominator": {**BONUS, "entropy_denominator": 3.0},
    "correction": {"correction": Correction()},
    "correction ": {**ROLLED, "kind": "gmpo", "correction": Correction()},
    "correction  ": {**ROLLED, "kind": "vespo", "correction": Correction("sequence")},
    "correction   ": {**ROLLED, "correction": 2.0},
    "rejection": {"rejection": Rejection(high=2.0)},
    "mask": {"mask": MASK.float()},
    "mask ": {"mask": MASK[:, :3]},
    "advantages": {"advantages": torch.zeros(8)},
    "old_logprob": {"old_logprob": T64["old"].clone().requires_grad_()},
    "ref_logprob": {"ref_logprob": T64["ref"][:3]},
    "cu_seqlens": {"cu_seqlens": torch.tensor([0, 8])},
}


@pytest.mark.parametrize("argument", REFUSED)
def test_bad_arguments_are_refused_by_name(argument):
    with pytest.raises(ArgumentError) as refusal:
        outcome(REFUSED[argument])
    assert refusal.value.argument == argument.strip()


@pytest.mark.parametrize(
    "make,argument",
    [
        (lambda: Correction("tokens"), "correction.level"),
        (lambda: Correction(mode="drop"), "correction.mode"),
        (lambda: Correction(low=2.0, high=1.0), "correction.low"),
        (lambda: Correction(high=-1.0), "correction.high"),
        (lambda: Correction(mode="mask", high=None), "correction.high"),
        (Rejection, "rejection.high"),
        (lambda: Rejection("k2", low=0.1, high=0.2), "rejection.low"),
        (lambda: Rejection("k4", high=1.0), "rejection.statistic"),
        (lambda: GammaGate(k_pos=0.0), "gamma.k_pos"),
    ],
)
def test_malformed_rules_are_refused_when_made(make, argument):
    with pytest.raises(ArgumentError) as refusal:
        make()
    assert refusal.value.argument == argument


def test_integer_log_probabilities_are_a_type_error():
    with pytest.raises(ArgumentTypeError, match="logprob"):
        policy_loss(torch.zeros(2, 3, dtype=torch.int64), None, torch.zeros(2))


def test_coefficients_may_live_on_the_device():
    numbers = {**REF, **BONUS}
    tensors = numbers | {"kl_coef": torch.tensor(0.2).double(), "entropy_coef": torch.tensor(0.1, dtype=torch.float64)}
    np.testing.assert_allclose(outcome(tensors), outcome(numbers), rtol=1e-6)


def test_every_feature_that_a_call_can_need_is_declared():
    names = spec.SPEC.feature_names
    bound = spec.SPEC.call
    for kind in KINDS:
        for aggregate in (None, *AGGREGATES):
            for kl in (None, *KLS):
                call = bound(1, None, 1, kind=kind, aggregate=aggregate, kl=kl, ref_logprob=1, entropy=1)
                assert spec.SPEC.needs(call) <= names
    assert spec.SPEC.needs(bound(1, 1, 1)) == {"kind:grpo", "aggregate:seq_mean_token_mean"}
