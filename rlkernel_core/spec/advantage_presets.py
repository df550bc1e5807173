"""What other frameworks compute, as arguments of `advantage`: one row per framework and its name of an estimator.

`rlkernel.advantage(rewards, group=g, **advantage_preset("verl", "grpo"))` gives verl's numbers, quirks included.
Hyper-parameters that a framework leaves to its user (gamma, lam, weights) are not part of a preset, nor are KL in the
reward and clipping. Where the framework whitens only when asked to, the preset whitens and its source or note says so.
Masked positions are 0 unless a preset says `masked_out`; in several frameworks they hold numbers that the loss masks.

Longer than 300 lines because it is one table, with a source beside each row. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from rlkernel_core.errors import UnknownNameError


@dataclass(frozen=True)
class Preset:
    """One estimator of one framework."""

    kind: str
    source: str  # version or commit, file and function, option where the name is not theirs
    args: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""  # the quirk, in a few words

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments for `advantage`."""
        return {"kind": self.kind, **self.args}


# Each source names the version or commit that was read; tests/test_peer_advantages.py holds what it computed.
_VERL: Final = "verl 0.9.1 (and 1dda039) verl/trainer/ppo/core_algos.py:compute_"
_VERL_JAN: Final = "verl b178a3c (0.8.0.dev) verl/trainer/ppo/core_algos.py:compute_"
_VERL_AGENT: Final = "verl-agent 2716b30 gigpo/core_gigpo.py:compute_gigpo_outcome_advantage, "
_TRL: Final = "TRL 1.16.0 trl/trainer/grpo_trainer.py:GRPOTrainer._generate_and_score_completions, "
_TRL_RLOO: Final = "TRL 1.16.0 trl/trainer/rloo_trainer.py:RLOOTrainer._generate_and_score_completions, "
_OPENRLHF: Final = "OpenRLHF 0.11.2 openrlhf/trainer/ppo_utils/experience_maker.py:RemoteExperienceMaker."
_SLIME: Final = "slime 624b824 slime/"
_NEMO: Final = "NeMo-RL 7ea279a nemo_rl/algorithms/advantage_estimator.py:"
_AREAL: Final = "AReaL cbff54d areal/utils/data.py:Normalization"
_AREAL_GAE: Final = "AReaL cbff54d areal/trainer/ppo/gae.py:_compute_token_level_gae"
_MILES: Final = "miles 31f1ca9 miles/"
_ROLL: Final = "ROLL 8eb27cc roll/utils/functionals.py:"
_SKYRL: Final = "SkyRL a956457 skyrl/backends/skyrl_train/utils/ppo_utils.py:compute_"
_TRITONFORGE: Final = "TritonForge b61331a SLIME/slime_plugins/rollout_buffer/generator/utils/default_func.py:"

# Where a constant group gets the rounding noise of its mean over eps, and a group of one its raw reward.
_LEAKS: Final = {"singleton": "raw", "constant": "peer"}
# rsqrt(var + 1e-8) with the unbiased variance, over tokens.
_MASKED_WHITEN: Final = {"whiten": "global", "whiten_ddof": 1, "whiten_eps": 1e-8, "whiten_eps_mode": "var_add"}
# rsqrt(max(var, 1e-8)) with the biased variance, over tokens.
_CLAMPED_WHITEN: Final = {"whiten": "global", "whiten_ddof": 0, "whiten_eps": 1e-8, "whiten_eps_mode": "var_clamp"}
# (A - mean) / (std + 1e-4) with the unbiased std, over sequences.
_TRL_WHITEN: Final = {"whiten": "global", "whiten_level": "sequence", "whiten_eps": 1e-4, "whiten_eps_mode": "std_add"}
_REFUSES_ONE: Final = {"singleton": "error", "constant": "peer"}

_VERL_TABLE: Final = {
    "gae": Preset(
        "gae",
        _VERL + "gae_advantage_return",
        {"masked_out": "carry", **_MASKED_WHITEN},
        "masked positions carry the next advantage and are whitened too: not 0",
    ),
    "grpo": Preset("grpo", _VERL + "grpo_outcome_advantage", {"eps": 1e-6, **_LEAKS}, "a group of one leaks"),
    "grpo_vectorized": Preset(
        "grpo", _VERL + "grpo_vectorized_outcome_advantage", {"eps": 1e-6, **_LEAKS}, "a group of one leaks"
    ),
    "dr_grpo": Preset("dr_grpo", _VERL + "grpo_outcome_advantage, norm_adv_by_std_in_grpo=False", _LEAKS),
    "grpo_passk": Preset(
        "passk", _VERL + "grpo_passk_outcome_advantage", {"eps": 1e-6, "singleton": "error"}, "raises for one"
    ),
    "rloo": Preset("rloo", _VERL + "rloo_outcome_advantage", _LEAKS, "a group of one leaks"),
    "rloo_vectorized": Preset("rloo", _VERL + "rloo_vectorized_outcome_advantage", {}, "a group of one gets 0"),
    "opo": Preset("opo", _VERL + "opo_outcome_advantage", _LEAKS),
    "gpg": Preset("gpg", _VERL + "gpg_outcome_advantage", _LEAKS, "its argument alpha has no effect"),
    "gdpo": Preset(
        "gdpo",
        _VERL + "gdpo_outcome_advantage",
        {"eps": 1e-6, "whiten_level": "token", **_LEAKS, **_MASKED_WHITEN},
    ),
    "remax": Preset("remax", _VERL + "remax_outcome_advantage"),
    "reinforce_plus_plus": Preset("reinforce_pp", _VERL + "reinforce_plus_plus_outcome_advantage", _MASKED_WHITEN),
    "reinforce_plus_plus_baseline": Preset(
        "reinforce_pp_baseline",
        _VERL + "reinforce_plus_plus_baseline_outcome_advantage",
        {"whiten_level": "token", **_LEAKS, **_MASKED_WHITEN},
    ),
}
# The same code in both versions, but for gdpo and grpo_vectorized, which January has not or has with a floor of the
# variance, and for what differs below.
_SAME_IN_JANUARY: Final = {
    name: Preset(row.kind, row.source.replace(_VERL, _VERL_JAN), row.args, row.note)
    for name, row in _VERL_TABLE.items()
    if name not in ("gdpo", "grpo_vectorized", "reinforce_plus_plus")
}

PRESETS: Final[Mapping[str, Mapping[str, Preset]]] = MappingProxyType(
    {
        "verl": _VERL_TABLE,
        "verl_jan26": {
            **_SAME_IN_JANUARY,
            "reinforce_plus_plus": Preset(
                "reinforce_pp",
                _VERL_JAN + "reinforce_plus_plus_outcome_advantage",
                {"masked_time": "reset", **_MASKED_WHITEN},
                "the return restarts at every masked token (verl#6376)",
            ),
            # Since then the default handle_zero_tail=True gives the tail of the one longest member no baseline.
            "optimal_token_baseline": Preset("otb", _VERL_JAN + "optimal_token_baseline_advantage", {"eps": 1e-8}),
        },
        "verl_agent": {
            "gigpo": Preset(
                "gigpo",
                _VERL_AGENT + "mode='mean_norm' (the default)",
                {"scale": "none", "step_weight": 1.0, **_LEAKS},
                "statistics over all steps of the group: longer episodes count more",
            ),
            "gigpo_std": Preset(
                "gigpo",
                _VERL_AGENT + "mode='mean_std_norm'",
                {"scale": "group", "eps": 1e-6, "step_weight": 1.0, **_LEAKS},
            ),
        },
        "trl": {
            "grpo": Preset(
                "grpo",
                _TRL + "scale_rewards='group' (the default)",
                {"eps": 1e-4, "constant": "peer"},
                "eps 1e-4 damps small spreads",
            ),
            "grpo_batch": Preset(
                "grpo", _TRL + "scale_rewards='batch'", {"scale": "batch", "eps": 1e-4, "constant": "peer"}
            ),
            "dr_grpo": Preset("dr_grpo", _TRL + "scale_rewards='none'", {"constant": "peer"}),
            "gdpo": Preset(
                "gdpo",
                _TRL + "multi_objective_aggregation='normalize_then_sum'",
                {"eps": 1e-4, "constant": "peer", **_TRL_WHITEN},
            ),
            "rloo": Preset("rloo", _TRL_RLOO + "normalize_advantages=False (the default)", {"constant": "peer"}),
            "rloo_normalized": Preset(
                "rloo",
                _TRL_RLOO + "normalize_advantages=True",
                {"constant": "peer", **_TRL_WHITEN},
                "the one scored member of a group counts in the whitening here, not there: leave it out by in_stats",
            ),
            "ppo": Preset(
                "gae",
                "TRL f2cd577 (1.10.0.dev0; gone in 1.16) trl/experimental/ppo/ppo_trainer.py:PPOTrainer.train",
                _MASKED_WHITEN,
                "score and one more value stand behind the last token: bootstrap = (1 - lam) * value + lam * score",
            ),
        },
        # By default it clips what is left of the rewards after the baseline to +-10 (reward.clip_range); not done here.
        "openrlhf": {
            "gae": Preset(
                "gae",
                _OPENRLHF + "get_advantages_and_returns",
                {"masked_time": "step", **_CLAMPED_WHITEN},
                "masked tokens are steps without reward and value",
            ),
            "reinforce": Preset(
                "reinforce_pp",
                _OPENRLHF + "get_cumulative_returns",
                {"masked_time": "step", **_CLAMPED_WHITEN},
                "gamma decays over masked tokens",
            ),
            "reinforce_baseline": Preset(
                "reinforce_pp_baseline",
                _OPENRLHF + "compute_advantages_and_returns",
                {"whiten_level": "token", **_REFUSES_ONE, **_CLAMPED_WHITEN},
            ),
            "rloo": Preset("rloo", _OPENRLHF + "compute_advantages_and_returns", _REFUSES_ONE, "not whitened"),
            "group_norm": Preset(
                "grpo",
                _OPENRLHF + "compute_advantages_and_returns",
                {"eps": 1e-9, **_REFUSES_ONE},
                "eps 1e-9 amplifies rounding noise; not whitened",
            ),
            "dr_grpo": Preset("dr_grpo", _OPENRLHF + "compute_advantages_and_returns", _REFUSES_ONE, "not whitened"),
        },
        "slime": {
            "grpo": Preset(
                "grpo",
                _SLIME + "ray/rollout.py:RolloutManager._post_process_rewards",
                {"eps": 1e-6, "constant": "peer"},
                "for groups of one size; others it normalizes as one group",
            ),
            "dr_grpo": Preset(
                "dr_grpo",
                _SLIME + "ray/rollout.py:RolloutManager._post_process_rewards, grpo_std_normalization=False",
            ),
            "ppo": Preset(
                "gae",
                _SLIME + "utils/ppo_utils.py:get_advantages_and_returns_batch, normalize_advantages=True",
                _MASKED_WHITEN,
                "GAE ignores the loss mask: where tokens are masked, lengths and whiten='none', then `whiten` by mask",
            ),
            "reinforce_plus_plus": Preset(
                "reinforce_pp",
                _SLIME + "utils/ppo_utils.py:get_reinforce_plus_plus_returns",
                {"masked_time": "step", **_MASKED_WHITEN},
                "gamma decays over masked tokens",
            ),
            "reinforce_plus_plus_baseline": Preset(
                "reinforce_pp_baseline",
                _SLIME + "utils/ppo_utils.py:get_reinforce_plus_plus_baseline_advantages",
                {"whiten_level": "token", **_MASKED_WHITEN},
            ),
        },
        "nemo_rl": {
            "grpo": Preset(
                "grpo",
                _NEMO + "GRPOAdvantageEstimator",
                {"leave_one_out": True, "low_std": "center", "eps": 1e-6},
                "mean and std of the other members; a std of 0 does not divide (theirs is seldom exactly 0)",
            ),
            "reinforce_plus_plus": Preset(
                "reinforce_pp_baseline",
                _NEMO + "ReinforcePlusPlusAdvantageEstimator, minus_baseline=True (the default)",
                {"whiten_level": "token", **_CLAMPED_WHITEN},
            ),
            "gae": Preset(
                "gae",
                _NEMO + "GeneralizedAdvantageEstimator, normalize_advantages=True",
                _MASKED_WHITEN,
                "its returns are carried into masked positions, its advantages are 0 there",
            ),
        },
        "areal": {
            "grpo": Preset("grpo", _AREAL + ", mean_level=std_level='group'", {"eps": 1e-5}),
            "rloo": Preset("rloo", _AREAL + ", mean_level='group', mean_leave1out=True, std_level=None"),
            "gae": Preset(
                "gae",
                _AREAL_GAE + ", adv_norm=None (the default)",
                {"masked_out": "carry"},
                "bootstrap: the value in the last column where a sequence was cut off, else 0",
            ),
            "gae_normalized": Preset(
                "gae",
                _AREAL_GAE + " and data.py:Normalization, adv_norm at batch level",
                {"whiten": "global", "whiten_eps": 1e-5, "whiten_eps_mode": "std_add"},
                "bootstrap as in gae",
            ),
        },
        "miles": {
            "grpo": Preset(
                "grpo",
                _MILES + "ray/rollout/train_data_conversion.py:_normalize_rewards_by_rollout",
                {"eps": 1e-6, "constant": "peer"},
                "one reward per rollout, however many samples it was cut into",
            ),
            "gae": Preset(
                "gae",
                _MILES + "backends/training_utils/loss_hub/math_utils.py:get_advantages_and_returns_batch",
                {},
                "as the default here",
            ),
        },
        "roll": {
            "grpo": Preset(
                "grpo",
                _ROLL + "reward_norm, norm_mean_type=norm_std_type='group'",
                {"eps": 1e-6, "constant": "peer"},
                "a group of one gets 0 here, NaN there",
            ),
            "reinforce": Preset(
                "returns",
                _ROLL + "compute_reinforce_return",
                {"masked_time": "step"},
                "gamma decays over masked tokens",
            ),
        },
        "skyrl": {
            "grpo": Preset("grpo", _SKYRL + "grpo_outcome_advantage", {"eps": 1e-6, **_LEAKS}, "a group of one leaks"),
            "rloo": Preset("rloo", _SKYRL + "rloo_outcome_advantage", {"constant": "peer"}, "a group of one gets 0"),
            "maxrl": Preset("maxrl", _SKYRL + "maxrl_advantage", {"eps": 1e-6, **_LEAKS}, "a group of one leaks"),
            "reinforce++": Preset(
                "reinforce_pp",
                _SKYRL + "reinforce_plus_plus_outcome_advantage",
                {"masked_time": "reset", **_MASKED_WHITEN},
                "the return restarts at every masked token",
            ),
        },
        "tritonforge": {
            "grpo": Preset(
                "grpo",
                _TRITONFORGE + "default_normalize_group_data",
                {"ddof": 0, "eps": 1e-8, "min_std": 1e-8, "valid_range": (0.0, 1.0), "invalid": "raw"},
                "a reward outside [0, 1] reaches the loss raw",
            ),
        },
    }
)


def advantage_preset(framework: str, estimator: str) -> dict[str, Any]:
    """Arguments of `advantage` that reproduce an estimator of a framework, in a fresh dict.

    Args:
        framework: a key of `PRESETS`.
        estimator: the framework's name of it, a key of `PRESETS[framework]`.

    Raises:
        UnknownNameError: no such framework or estimator; names the near ones.
    """
    if framework not in PRESETS:
        raise UnknownNameError("framework", framework, PRESETS)
    if estimator not in PRESETS[framework]:
        raise UnknownNameError(f"estimator of {framework}", estimator, PRESETS[framework])
    return PRESETS[framework][estimator].kwargs
