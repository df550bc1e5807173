"""verl: our advantage estimators and policy losses in its registries, under names of our own; its own stay as they are.

    algorithm.adv_estimator=rlkernel_grpo
    actor_rollout_ref.actor.policy_loss.loss_mode=rlkernel_vanilla

verl imports `rlkernel.integrations.verl_plugin` by its entry-point group `verl.plugins`, in every process of a run;
that calls `register()`. `rlkernel_X` takes the numbers of verl's configuration that verl's own X takes, and gives its
results. `verl_engine` puts `linear_logprob` under the fused kernels of its engines, where asked for.

Legend: B sequences · T response length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from packaging.version import Version

from rlkernel.integrations.host import Active, Host, Symbol, asked_of, registered
from rlkernel_core.errors import HostError
from rlkernel_core.spec.advantage_presets import advantage_preset
from rlkernel_core.spec.policy_presets import policy_loss_preset

if TYPE_CHECKING:
    from torch import Tensor

CORE: Final = "verl.trainer.ppo.core_algos"
_LOSS: Final = "old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights"

HOST: Final = Host(
    name="verl",
    distribution="verl",
    versions=">=0.9.0,<0.10",
    tested="0.9.1",
    does="advantage and policy_loss in its registries as rlkernel_*; linear_logprob as its fused kernel",
    symbols=(
        Symbol(CORE, "register_policy_loss", "name"),
        Symbol(CORE, "register_adv_est", "name_or_enum"),
        Symbol(CORE, "compute_policy_loss_vanilla", _LOSS),
        Symbol(
            CORE,
            "compute_grpo_outcome_advantage",
            "token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo, config",
        ),
    ),
)

# verl's name of a loss -> the preset, and which options of ActorConfig take the place of its numbers.
LOSSES: Final = {
    "vanilla": ("verl_ppo", ("clip", "dual_clip")),
    "gspo": ("verl_gspo", ("clip",)),
    "sapo": ("verl_sapo", ("tau",)),
    "cispo": ("verl_cispo", ("clip",)),
    "geo_mean": ("verl_geo_mean", ("clip",)),
    "dppo_tv": ("verl_dppo_tv", ("clip", "ratio_cap")),
    "dppo_kl": ("verl_dppo_kl", ("clip", "ratio_cap")),
    "dro": ("verl_dro", ("dro_beta",)),
    "gpg": ("verl_gpg", ()),
}
FORCED: Final = ("sapo", "geo_mean")  # their aggregation is not loss_agg_mode
NOT_WEIGHTED: Final = ("geo_mean", "dro")  # not linear in the advantage
ADVANTAGES: Final = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
)
TOKEN_LEVEL: Final = ("reinforce_plus_plus", "remax")  # rewards per token


def register(*, force: bool = False) -> Active:
    """Add our names to verl's registries, in this process and for its life; again is no change.

    Raises:
        HostError: verl is absent, of a version that this was not made for, or has changed.
    """
    found = HOST.require(force=force)
    core = import_module(CORE)
    entry = registered(HOST, found, "register_policy_loss: rlkernel_*", "register_adv_est: rlkernel_*")
    for name in LOSSES:
        if f"rlkernel_{name}" not in core.POLICY_LOSS_REGISTRY:
            core.register_policy_loss(f"rlkernel_{name}")(partial(_counted, entry, "policy_loss", loss, name))
    for name in ADVANTAGES:
        if f"rlkernel_{name}" not in core.ADV_ESTIMATOR_REGISTRY:
            core.register_adv_est(f"rlkernel_{name}")(partial(_counted, entry, "advantage", estimate, name))
    return entry


def _counted(entry: Active, op: str, run: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    entry.calls[op] += 1
    return run(name, *args, **kwargs)


def loss(
    name: str,
    old_log_prob: Tensor,  # [B, T]
    log_prob: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,  # [B, T]
) -> tuple[Tensor, dict[str, Any]]:
    """The policy loss that verl has under this name, by `rlkernel.policy_loss`, with its metrics.

    Raises:
        HostError: rollout weights with a loss that is not linear in the advantage.
    """
    import torch

    import rlkernel as rlk

    if rollout_is_weights is not None:
        if name in NOT_WEIGHTED:
            raise HostError(f"rlkernel_{name}: rollout_is_weights are not supported; use verl's own {name}")
        advantages = advantages * rollout_is_weights
    known, times = _arguments(name, response_mask, loss_agg_mode, config)
    result = rlk.policy_loss(log_prob, old_log_prob, advantages, mask=response_mask.bool(), **known)
    if name == "gpg":
        return result.loss * times, {}
    said = asked_of("policy_loss", "stats", result.stats)
    numbers = [said.approx_kl_k1, said.clip_low + said.clip_high, said.clip_dual]
    kl, clipped, dual = torch.stack([x.float() for x in numbers]).tolist()  # one synchronization
    metrics = {"actor/ppo_kl": kl}
    if name not in NOT_WEIGHTED:  # geo_mean: verl counts clipped tokens by sign, whether they are held or not
        metrics |= {"actor/pg_clipfrac": clipped, "actor/pg_clipfrac_lower": dual}
    return result.loss * times, metrics


def _arguments(name: str, mask: Tensor, mode: str, config: Any) -> tuple[dict[str, Any], float]:
    """Arguments of `policy_loss`, and what its result is multiplied with, for one micro-batch."""
    preset, options = LOSSES[name]
    forced = name in FORCED
    if name == "gspo" and _old():
        preset, forced = "verl_gspo_seq_mean", True
    known = policy_loss_preset(preset)
    low, high = config.clip_ratio_low, config.clip_ratio_high
    numbers: dict[str, Callable[[], Any]] = {
        "clip": lambda: tuple(config.clip_ratio if x is None else x for x in (low, high)),
        "dual_clip": lambda: config.get("clip_ratio_c", 3.0),
        "ratio_cap": lambda: config.get("clip_ratio_c", 20.0),
        "tau": lambda: (config.tau_pos, config.tau_neg),
        "dro_beta": lambda: config.policy_loss.dro_beta,
    }
    known |= {option: numbers[option]() for option in options}
    if name == "geo_mean":
        return known, 1.0
    if not forced:
        known["aggregate"] = mode.replace("-", "_")
    batch = dict(config.global_batch_info)
    ranks = batch.get("dp_size", 1)
    if known["aggregate"] == "token_sum":
        return known, float(ranks)
    count = batch.get("batch_num_tokens" if known["aggregate"] == "token_mean" else "global_batch_size")
    if count is not None:
        known["denominator"] = count / ranks if not hasattr(count, "dtype") else (count / ranks).float()
    elif ranks > 1:
        raise HostError(f"rlkernel_{name}: {mode} over {ranks} ranks needs the global counts in global_batch_info")
    if known["aggregate"] == "seq_mean_token_sum_norm":
        known["horizon"] = float(batch.get("loss_scale_factor") or mask.shape[-1])
    return known, 1.0


@cache
def _old() -> bool:
    """Whether verl is 0.9.0, whose gspo takes the mean over sequences whatever loss_agg_mode says."""
    found = HOST.installed
    return found is not None and Version(found) < Version("0.9.1")


def estimate(
    name: str,
    token_level_rewards: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]
    index: Any = None,  # [B] the group of each sequence, any values
    reward_baselines: Tensor | None = None,  # [B]
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The advantages and returns that verl has under this name, both [B, T], by `rlkernel.advantage`."""
    import torch

    import rlkernel as rlk

    by_std = config is None or config.get("norm_adv_by_std_in_grpo", True)
    preset = advantage_preset("verl", "dr_grpo" if name == "grpo" and not by_std else name)
    if name == "grpo_passk" and not by_std:
        preset |= {"scale": "none"}
    given: dict[str, Any] = {}
    if index is not None and name not in TOKEN_LEVEL:
        known: dict[Any, int] = {}
        ids = [known.setdefault(i, len(known)) for i in index]
        given["group"] = torch.tensor(ids, device=token_level_rewards.device)
    if name == "remax":
        given["baseline"] = reward_baselines
    if name == "reinforce_plus_plus":
        given["gamma"] = float(config.gamma)
    rewards = token_level_rewards if name in TOKEN_LEVEL else token_level_rewards.sum(dim=-1)
    out = rlk.advantage(rewards, mask=response_mask.bool(), output="token", **given, **preset)
    return out.advantages, out.advantages if out.returns is None else out.returns
