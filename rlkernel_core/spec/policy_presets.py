"""How TRL and verl spell the policy losses: keyword arguments that reproduce theirs, defaults included.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.spec.policy_kinds import Correction, GammaGate

_INF: Final = math.inf


def _trl(kind: str, aggregate: str, **options: Any) -> Mapping[str, Any]:
    counted = {"count_empty": True} if aggregate.startswith("seq_") else {}
    return {"kind": kind, "aggregate": aggregate, "log_ratio_limit": _INF, **counted, **options}


def _verl(kind: str, aggregate: str = "token_mean", **options: Any) -> Mapping[str, Any]:
    return {"kind": kind, "aggregate": aggregate, "log_ratio_limit": 20.0, **options}


# trl_*: TRL 1.16.0 trl/trainer/grpo_trainer.py:GRPOTrainer._compute_loss with the defaults of grpo_config.py: no clamp
# on the log-ratio, sequence means over all rows, empty ones included. In cispo, dapo and vespo the sum is divided by
# num_items_in_batch / num_processes, in training times gradient_accumulation_steps / steps_per_generation: pass that
# as `denominator`.
# verl_*: verl 0.9.1 verl/trainer/ppo/core_algos.py:compute_policy_loss_<name> (1dda039 is the same but for gspo) with
# the defaults of verl/workers/config/actor.py: token mean unless the loss forces another, log-ratio within +-20, dual
# clip 3, sequence means over non-empty rows. Its KL and entropy terms are aggregated by loss_agg_mode in any case.
# tests/test_peer_losses.py holds the losses and gradients that these functions computed.
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "trl_grpo": _trl("grpo", "seq_mean_token_mean", clip=(0.2, 0.2)),
        "trl_bnpo": _trl("grpo", "token_mean", clip=(0.2, 0.2)),
        # TRL divides by max_completion_length: pass it as `horizon`.
        "trl_dr_grpo": _trl("dr_grpo", "seq_mean_token_sum_norm", clip=(0.2, 0.2)),
        # TRL's default loss.
        "trl_dapo": _trl("dapo", "token_mean", clip=(0.2, 0.2)),
        # importance_sampling_level="sequence" with loss_type="grpo"; its documentation's epsilons.
        "trl_gspo": _trl("gspo", "seq_mean_token_mean", clip=(3e-4, 4e-4)),
        # importance_sampling_level="sequence" too, which TRL recommends for it; its default is "token".
        "trl_luspo": _trl("luspo", "seq_mean_token_sum", clip=(0.2, 0.2)),
        # TRL's epsilon_high is the bound itself; 5.0 is the value it recommends, without it the bound is epsilon, 0.2.
        # Here bounds are 1 - low and 1 + high.
        "trl_cispo": _trl("cispo", "token_mean", clip=(_INF, 4.0)),
        "trl_sapo": _trl("sapo", "seq_mean_token_mean", tau=(1.0, 1.05)),
        # get_gamma_weights.
        "trl_vespo": _trl("vespo", "token_mean", gamma=GammaGate(), log_ratio_limit=20.0),
        # beta > 0: k3 times the importance ratio (use_bias_correction_kl, the default since 1.16); pass `kl_coef`.
        "trl_kl": {"kl": "k3", "kl_importance": True},
        # entropy_coef > 0: the bonus is a token mean whatever the loss type; pass `entropy` and `entropy_coef`.
        "trl_entropy": {"entropy_aggregate": "token_mean"},
        # _generate_and_score_completions: vllm_importance_sampling_mode="sequence_mask", clip_max=3.0, the defaults;
        # pass `rollout_logprob`.
        "trl_rollout": {"correction": Correction("sequence", "mask", high=3.0)},
        # compute_policy_loss_vanilla.
        "verl_ppo": _verl("ppo", clip=(0.2, 0.2), dual_clip=3.0),
        # verl clamps log s from above only, at 10: the same wherever log s >= -10.
        "verl_gspo": _verl("gspo_token", clip=(0.2, 0.2), log_ratio_limit=10.0),
        # At b178a3c and 1dda039 it forces seq_mean_token_mean; 0.9.1 takes loss_agg_mode.
        "verl_gspo_seq_mean": _verl("gspo_token", "seq_mean_token_mean", clip=(0.2, 0.2), log_ratio_limit=10.0),
        # It forces seq_mean_token_mean.
        "verl_sapo": _verl("sapo", "seq_mean_token_mean", tau=(1.0, 1.05)),
        "verl_cispo": _verl("cispo", clip=(0.2, 0.2)),
        # The mean over all rows, empty ones included.
        "verl_geo_mean": _verl("gmpo", "seq_mean_token_mean", clip=(0.2, 0.2), count_empty=True, log_ratio_limit=_INF),
        # clip_ratio_c of the actor config (3.0) caps the ratio; the paper recommends 20.
        "verl_dppo_tv": _verl("dppo_tv", clip=(0.2, 0.2), ratio_cap=3.0),
        "verl_dppo_kl": _verl("dppo_kl", clip=(0.2, 0.2), ratio_cap=3.0),
        # Pass `dro_beta`.
        "verl_dro": {"kind": "dro", "aggregate": "token_mean"},
        # compute_policy_loss_reinforce, of bypass_mode with loss_type="reinforce": pass old_logprob=None,
        # rollout_logprob and a `correction`.
        "verl_reinforce": {"kind": "reinforce", "aggregate": "token_mean"},
        "verl_gpg": {"kind": "reinforce", "aggregate": "token_mean"},
        # core_algos.kl_penalty: use_kl_loss with kl_loss_type="low_var_kl" (what verl calls k3 is clamped too).
        "verl_kl": {"kl": "low_var", "kl_coef": 0.001, "kl_clamp": (20.0, 10.0)},
        # verl/trainer/ppo/rollout_corr_helper.py:compute_rollout_correction_weights with rollout_is_threshold=2.0, the
        # default; IcePop with those of verl/trainer/config/algorithm.py:RolloutCorrectionConfig.decoupled_token_icepop.
        "verl_rollout_token": {"correction": Correction("token", "truncate", high=2.0)},
        "verl_rollout_sequence": {"correction": Correction("sequence", "truncate", high=2.0)},
        "verl_rollout_icepop": {"correction": Correction("token", "mask", low=0.5, high=5.0)},
    }
)


def policy_loss_preset(*names: str) -> dict[str, Any]:
    """Keyword arguments of policy_loss that reproduce a framework's loss, KL, entropy or rollout correction.

    Several names are merged: `policy_loss_preset("trl_grpo", "trl_kl")`.

    Raises:
        UnknownNameError: no such preset.
        ArgumentError: two presets give the same argument.
    """
    merged: dict[str, Any] = {}
    for name in names:
        if name not in PRESETS:
            raise UnknownNameError("policy loss preset", name, PRESETS)
        twice = merged.keys() & PRESETS[name].keys()
        if twice:
            raise ArgumentError("names", names, f"several give {', '.join(sorted(twice))}", "Choose one of them.")
        merged.update(PRESETS[name])
    return merged
