"""Our names in verl's registries against verl's own functions: the same losses, gradients and advantages."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rlkernel as rlk
from rlkernel.integrations import active, verl_engine
from rlkernel.integrations import verl as ours

core = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


@pytest.fixture(scope="module", autouse=True)
def names():
    return ours.register()


def actor(mode: str, batch: dict, **options):
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    made = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=4,
        use_dynamic_bsz=True,
        clip_ratio_low=0.15,
        clip_ratio_high=0.3,
        loss_agg_mode=mode,
        tau_pos=1.1,
        tau_neg=1.2,
        policy_loss=PolicyLossConfig(dro_beta=0.05),
        **options,
    )
    made.global_batch_info.update(batch)
    return made


def batch():
    torch.manual_seed(0)
    lengths = torch.tensor([[7], [3], [0], [5]])
    return SimpleNamespace(
        mask=(torch.arange(7) < lengths).float(),
        old=-torch.rand(4, 7) * 4,
        new=None,
        adv=torch.randn(4, 7),
        weights=torch.rand(4, 7) * 2,
    )


@pytest.mark.parametrize(
    "info", [{}, {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 9, "loss_scale_factor": 11}]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ours.LOSSES)
def test_a_loss_has_verls_value_gradient_and_metrics(name, mode, info) -> None:
    b = batch()
    weights = None if name in ours.NOT_WEIGHTED else b.weights
    adv = b.adv[:, :1].expand(4, 7) if name == "geo_mean" else b.adv
    results = []
    for chosen in (name, f"rlkernel_{name}"):
        torch.manual_seed(1)
        logp = (b.old + 0.4 * torch.randn(4, 7)).requires_grad_()
        loss, metrics = core.get_policy_loss_fn(chosen)(
            b.old, logp, adv, b.mask, loss_agg_mode=mode, config=actor(mode, info), rollout_is_weights=weights
        )
        loss.backward()
        results.append((loss.detach(), logp.grad, metrics))
    (theirs, their_grad, their_metrics), (mine, my_grad, my_metrics) = results
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(my_grad, their_grad, rtol=1e-5, atol=1e-6)
    assert their_grad.abs().sum() > 0
    if name == "geo_mean":  # its clip counts are not ours
        their_metrics = {"actor/ppo_kl": their_metrics["actor/ppo_kl"]}
    assert my_metrics == pytest.approx(their_metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("name", ours.ADVANTAGES)
def test_an_estimator_has_verls_advantages_and_returns(name, by_std) -> None:
    from verl.trainer.config import AlgoConfig

    torch.manual_seed(0)
    mask = (torch.arange(6) < torch.tensor([6, 4, 2, 5, 6, 3, 1, 4])[:, None]).float()
    rewards = torch.zeros(8, 6)
    rewards[torch.arange(8), mask.sum(-1).long() - 1] = torch.randn(8)
    given = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": np.array(["b", "a", "b", "c", "a", "b", "c", "a"], dtype=object),
        "config": AlgoConfig(gamma=0.97, norm_adv_by_std_in_grpo=by_std),
        **({"reward_baselines": torch.randn(8)} if name == "remax" else {}),
    }
    if name == "grpo":
        given["norm_adv_by_std_in_grpo"] = by_std
    if name in ours.TOKEN_LEVEL:
        del given["index"]
    theirs = core.get_adv_estimator_fn(name)(**{k: v.clone() if torch.is_tensor(v) else v for k, v in given.items()})
    mine = core.get_adv_estimator_fn(f"rlkernel_{name}")(**given)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-5)
    assert theirs[0].abs().sum() > 0


def test_verls_own_names_are_untouched_and_ours_are_there() -> None:
    assert core.POLICY_LOSS_REGISTRY["vanilla"] is core.compute_policy_loss_vanilla
    assert core.ADV_ESTIMATOR_REGISTRY["grpo"] is core.compute_grpo_outcome_advantage
    before = dict(core.POLICY_LOSS_REGISTRY)
    entry = ours.register()
    assert before == core.POLICY_LOSS_REGISTRY
    assert entry in active()


def test_importing_verl_registers_by_its_entry_point() -> None:
    code = "import verl, verl.trainer.ppo.core_algos as c; print('rlkernel_gspo' in c.POLICY_LOSS_REGISTRY)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


def test_weights_with_a_loss_that_is_not_linear_in_the_advantage_are_refused() -> None:
    b = batch()
    with pytest.raises(rlk.HostError, match="rlkernel_dro: rollout_is_weights"):
        ours.loss("dro", b.old, b.old, b.adv, b.mask, config=actor("token-mean", {}), rollout_is_weights=b.weights)


def test_the_fused_head_of_the_engines_is_linear_logprob_inside_the_block() -> None:
    import verl.utils.kernel.linear_cross_entropy as module

    before = module.linear_cross_entropy
    hidden, weight = torch.randn(1, 9, 16), torch.randn(50, 16)
    ids = torch.randint(0, 50, (1, 9))
    with verl_engine.enabled() as entry:
        logp, entropy = module.linear_cross_entropy(hidden, weight, ids, 0.7, "none")
    law = (hidden @ weight.T / 0.7).log_softmax(-1)[0]
    torch.testing.assert_close(logp, law.gather(-1, ids[0, :, None])[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, -(law.exp() * law).sum(-1), rtol=1e-4, atol=1e-5)
    assert entry.calls == {"linear_logprob": 1}
    assert module.linear_cross_entropy is before
