"""TRL's trainers with rlkernel inside: a callback, and a GRPO trainer that takes advantages and losses from presets.

Derived from TRL's classes when asked for, since this module may not import TRL when it is imported.

Legend: B sequences of this rank · T completion length.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rlkernel import record
from rlkernel.integrations.host import Symbol, asked_of
from rlkernel.integrations.trl_head import HEAD, HOST, Wanted, enabled
from rlkernel_core.errors import HostError
from rlkernel_core.spec.advantage_presets import advantage_preset
from rlkernel_core.spec.policy_presets import policy_loss_preset

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel_core.spec.policy_loss import LossStats

# loss_type -> the preset; the numbers of a preset that GRPOConfig has an option for are taken from there.
LOSSES: Final = {
    "grpo": "trl_grpo",
    "bnpo": "trl_bnpo",
    "dr_grpo": "trl_dr_grpo",
    "dapo": "trl_dapo",
    "luspo": "trl_luspo",
    "cispo": "trl_cispo",
    "sapo": "trl_sapo",
}
CLIPPED: Final = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
GLOBAL: Final = ("cispo", "dapo")  # divided by the tokens of the whole generation batch
IMAGES: Final = (  # what a vision model's forward takes beside tokens, by the names of the batch
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
# What grpo_trainer overrides and calls beside.
GRPO: Final = replace(
    HOST,
    symbols=(
        *HOST.symbols,
        Symbol("trl.trainer.utils", "_use_triton", "device"),
        *(
            Symbol("trl.trainer.grpo_trainer", f"GRPOTrainer.{name}", f"self, {takes}")
            for name, takes in {
                "_compute_loss": "model, inputs",
                "_generate_and_score_completions": "inputs",
                "_calculate_rewards": "inputs, prompts, completions, completion_ids_list",
                "_get_per_token_logps_and_entropies": "model, input_ids, attention_mask, logits_to_keep, batch_size, "
                f"compute_entropy, compute_aux_loss, {', '.join(IMAGES)}",
            }.items()
        ),
    ),
)
ADVANTAGES: Final = {"group": "grpo", "batch": "grpo_batch", "none": "dr_grpo"}  # by scale_rewards


def loss_arguments(trainer: Any) -> dict[str, Any]:
    """Arguments of `policy_loss` that give the loss of a `GRPOTrainer` as it is configured.

    Raises:
        HostError: an option that no preset reproduces.
    """
    args, kind = trainer.args, trainer.loss_type
    refused = {
        f"loss_type={kind!r}": kind not in LOSSES,
        "loss_type='luspo' at token level": kind == "luspo" and trainer.importance_sampling_level != "sequence",
        "delta below 1 + epsilon_high": args.delta is not None and args.delta < 1 + trainer.epsilon_high,
        "top_entropy_quantile": trainer.top_entropy_quantile < 1.0,
        "off_policy_mask_threshold": trainer.off_policy_mask_threshold is not None,
        "use_adaptive_entropy": trainer.use_adaptive_entropy,
        "use_vllm": trainer.use_vllm,
        "a router loss": trainer.aux_loss_enabled,
    }
    if any(refused.values()):
        said = ", ".join(name for name, there in refused.items() if there)
        raise HostError(
            f"grpo_trainer: no preset reproduces {said}; change it, or keep TRL's own trainer inside "
            "rlkernel.integrations.trl.enabled(), which replaces the log-probabilities alone"
        )
    names = [LOSSES[kind], *(["trl_kl"] if trainer.beta else []), *(["trl_entropy"] if trainer.entropy_coef else [])]
    found = policy_loss_preset(*names) | {"level": trainer.importance_sampling_level}
    if kind in CLIPPED:
        found["clip"] = (trainer.epsilon_low, trainer.epsilon_high)
        found |= {} if args.delta is None else {"dual_clip": args.delta}
    elif kind == "cispo":  # TRL's epsilon_high is the bound itself
        found["clip"] = (found["clip"][0], trainer.epsilon_high - 1)
    else:
        found["tau"] = (args.sapo_temperature_pos, args.sapo_temperature_neg)
    if kind == "dr_grpo":
        found["horizon"] = float(trainer.max_completion_length)
    if trainer.beta:
        found |= {"kl_coef": trainer.beta, "kl_importance": bool(args.use_bias_correction_kl)}
    if trainer.entropy_coef:
        found["entropy_coef"] = trainer.entropy_coef
    return found


def advantages(trainer: Any, rewards: Tensor) -> Tensor:
    """Advantages of all ranks' completions, as the trainer is configured; rewards [B_all, K], NaN where there is none.

    Raises:
        HostError: a way to combine rewards that no preset reproduces.
    """
    import rlkernel as rlk

    group = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    weights = trainer.reward_weights.to(rewards.device)
    if trainer.multi_objective_aggregation == "normalize_then_sum":
        preset = advantage_preset("trl", "gdpo")
        return rlk.advantage(rewards, group=group, reward_weights=weights, **preset).advantages
    scale = trainer.scale_rewards
    if scale not in ADVANTAGES or trainer.multi_objective_aggregation != "sum_then_normalize":
        raise HostError(f"grpo_trainer: no preset for scale_rewards={scale!r}, use one of {', '.join(ADVANTAGES)}")
    scored = (rewards * weights).nansum(dim=1)
    scored[rewards.isnan().all(dim=1)] = float("nan")
    return rlk.advantage(scored, group=group, **advantage_preset("trl", ADVANTAGES[scale])).advantages


def loss(trainer: Any, model: Any, inputs: dict[str, Any], *, fused: bool) -> Tensor:
    """The loss of one micro-batch by rlkernel, with TRL's entropy, KL and clip metrics logged."""
    import torch

    import rlkernel as rlk

    mode = "train" if trainer.model.training else "eval"
    counted = inputs["completion_mask"].bool()
    mask = counted & inputs["tool_mask"].bool() if "tool_mask" in inputs else counted  # [B, T]
    accumulated = float(trainer.current_gradient_accumulation_steps) if mode == "train" else 1.0
    known, whole = loss_arguments(trainer), trainer.loss_type in GLOBAL
    if whole:
        share = accumulated / trainer.args.steps_per_generation if mode == "train" else 1.0
        items = inputs["num_items_in_batch"].clamp(min=1.0)
        known["denominator"] = (items / trainer.accelerator.num_processes * share).float()
    if trainer.entropy_coef and whole:
        known["entropy_denominator"] = (mask.sum().clamp(min=1) * accumulated).float()
    old, adv = inputs.get("old_per_token_logps"), inputs["advantages"]
    reference = inputs["ref_per_token_logps"] if trainer.beta else None
    if fused and torch.is_grad_enabled():
        head = HEAD.find()
        packed = import_module(HEAD.module)._use_triton(mask.device)
        per_token = {"old_logprob": old, "advantages": adv, "ref_logprob": reference}
        with head.fusing(wanted := Wanted(counted, mask, per_token, known, packed)):
            logprob, entropy = _scored(trainer, model, inputs)
        result = wanted.result
        if result is None:
            raise HostError("grpo_trainer: the model did not come through TRL's fused head; use fused=False")
    else:
        logprob, entropy = _scored(trainer, model, inputs)
        known["entropy"] = entropy if trainer.entropy_coef else None
        result = rlk.policy_loss(logprob, old, adv, mask=mask, ref_logprob=reference, **known)
        trainer.rlkernel.calls["policy_loss"] += 1
    with torch.no_grad():
        op = "linear_policy_loss" if fused and torch.is_grad_enabled() else "policy_loss"
        _log(trainer, mode, asked_of(op, "stats", result.stats), logprob, entropy, mask, inputs)
    return result.loss if whole else result.loss / accumulated


def _scored(trainer: Any, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy [B, T] of the completions."""
    import torch

    logprob, entropy, _ = trainer._get_per_token_logps_and_entropies(
        model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        inputs["completion_ids"].shape[1],
        compute_entropy=True,
        **{name: inputs[name] for name in IMAGES if inputs.get(name) is not None},
    )
    return logprob, entropy


def _log(
    trainer: Any, mode: str, stats: LossStats, logprob: Tensor, entropy: Tensor, mask: Tensor, inputs: dict[str, Any]
) -> None:
    import torch

    said = {"entropy": (entropy * mask).sum() / mask.sum().clamp(min=1)}
    if trainer.beta:
        said["kl"] = _kl(trainer, logprob, inputs, mask)
    if trainer.loss_type in CLIPPED:
        said["clip_ratio/low_mean"], said["clip_ratio/high_mean"] = stats.clip_low, stats.clip_high
        said["clip_ratio/region_mean"] = stats.clip_low + stats.clip_high
    for name, mean in said.items():  # means over the tokens of all ranks
        totals = trainer.accelerator.reduce(torch.stack([mean * stats.tokens, stats.tokens.to(mean.dtype)]), "sum")
        trainer._metrics[mode][name].append((totals[0] / totals[1].clamp(min=1.0)).item())


def _kl(trainer: Any, logprob: Tensor, inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """The mean of TRL's KL term, which is logged with its importance ratio; `kl_ref` of the operator is without."""
    gap = inputs["ref_per_token_logps"] - logprob
    kl = gap.exp() - gap - 1
    old = inputs.get("old_per_token_logps")
    if old is not None and trainer.args.use_bias_correction_kl:
        d = (logprob - old) * mask
        if trainer.importance_sampling_level == "sequence":
            d = d.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        kl = kl * d.exp()
    mean: Tensor = (kl * mask).sum() / mask.sum().clamp(min=1)
    return mean


def grpo(base: Any, *, fused: bool, backward: str, force: bool) -> Any:
    """The class of `trl.grpo_trainer`."""
    parent = import_module("trl").GRPOTrainer if base is None else base

    class RLKernelGRPOTrainer(parent):  # type: ignore[misc, valid-type]
        """GRPOTrainer whose log-probabilities, advantages and losses come from rlkernel."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            loss_arguments(self)

        def train(self, *args: Any, **kwargs: Any) -> Any:
            with enabled(backward=backward, force=force) as self.rlkernel:
                return super().train(*args, **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            with enabled(backward=backward, force=force) as self.rlkernel:
                return super().evaluate(*args, **kwargs)

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            self._rewards = super()._calculate_rewards(*args, **kwargs)
            return self._rewards

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            mine = slice(
                self.accelerator.process_index * len(inputs), (self.accelerator.process_index + 1) * len(inputs)
            )
            found["advantages"] = advantages(self, self._rewards)[mine]
            self.rlkernel.calls["advantage"] += 1
            return found

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return loss(self, model, inputs, fused=fused)

    return RLKernelGRPOTrainer


def callback(*, backward: str, force: bool) -> Any:
    """An instance of the class of `trl.callback`."""
    parent = import_module("transformers").TrainerCallback

    class RLKernelCallback(parent):  # type: ignore[misc, valid-type]
        """`trl.enabled()` from the first step to the last, and decisions.json in the output folder."""

        def __init__(self) -> None:
            self.stack = ExitStack()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 theirs
            self.close()  # a training that failed before
            self.stack.enter_context(enabled(backward=backward, force=force))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 theirs
            self.close()
            if state.is_world_process_zero:
                record.write(args.output_dir)

        def close(self) -> None:
            """Put TRL's own function back."""
            self.stack.close()

    return RLKernelCallback()
