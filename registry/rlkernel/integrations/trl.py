"""TRL: the log-probabilities of its trainers through `linear_logprob`, by the one global that all of them use.

    from rlkernel.integrations import trl

    with trl.enabled():
        GRPOTrainer(...).train()

TRL 1.16 scores tokens in one place, `add_fused_lm_head`, whose tiles are a global of `trl.trainer.utils` that is
looked up at every call: so GRPO, RLOO, DPO, KTO and SFT all go through rlkernel inside the block, whenever the trainer
was made. `callback()` is the same as a callback, `grpo_trainer()` also takes advantages and losses from rlkernel.
`exact_rollout()` draws completions whose log-probabilities have the bits of the trainer's. Two functions have the
names and parameters of TRL's, and replace nothing.

What differs from TRL: logits keep fp32 accumulators (TRL rounds them to bf16 for bf16 models), and the gradient of the
head under autocast is rounded once to the type of the matmuls, as torch's own linear layers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlkernel.integrations import trl_rollout, trl_trainers
from rlkernel.integrations.trl_functions import selective_log_softmax, selective_log_softmax_and_entropy
from rlkernel.integrations.trl_head import HEAD, HOST, enabled

__all__ = [
    "HEAD", "HOST", "callback", "enabled", "exact_rollout", "grpo_trainer", "selective_log_softmax",
    "selective_log_softmax_and_entropy",
]  # fmt: skip


def callback(*, backward: str = "auto", force: bool = False) -> Any:
    """A `transformers.TrainerCallback` that is `enabled()` from the first step to the last, and writes decisions.json.

    `force` takes a version of TRL outside the window, too.
    Where training fails in between, the replacement stays until `close()`: `with trl.enabled()` has no such gap.

    Args:
        backward: as in `enabled`.
        force: as in `enabled`.

    Raises:
        HostError: as `enabled`.
    """
    HOST.require(force=force)
    return trl_trainers.callback(backward=backward, force=force)


def grpo_trainer(base: Any = None, *, fused: bool = False, backward: str = "auto", force: bool = False) -> Any:
    """A subclass of `GRPOTrainer` whose log-probabilities, advantages and losses are rlkernel's, by TRL's presets.

    Args:
        base: the class to derive from; TRL's own by default.
        fused: head and loss in one by `linear_policy_loss`, with the gradient made in the forward pass.
        backward: as in `enabled`; not for what `fused` computes.
        force: as in `enabled`.

    Raises:
        HostError: as `enabled`; on construction, also for an option of `GRPOConfig` that no preset reproduces.
    """
    trl_trainers.GRPO.require(force=force)
    return trl_trainers.grpo(base, fused=fused, backward=backward, force=force)


def exact_rollout(
    exact: Any, *, max_length: int | None = None, page: int = 16, check_every: int = 32, force: bool = False
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A `rollout_func` for `GRPOTrainer`: completions by `exact.generate`, in the process that trains, by its weights.

        exact = rlkernel.exact(model)
        trainer = GRPOTrainer(model, ..., rollout_func=trl.exact_rollout(exact))
        with trl.enabled():
            trainer.train()

    Temperature, top_k, top_p, min_p and lengths are the trainer's. Rows draw by `args.seed`, the rank and how many
    rollouts there were, so a run draws the same tokens again. TRL gets `logprobs` in the bits of its own scores inside
    `enabled()`. Casts in between change them and are refused: pass `bf16=False`, and the model in its dtype.

    Args:
        exact: what `rlkernel.exact` returned for the trainer's model.
        max_length: of a prompt with its completion: pages are made once for as many, and one graph serves all steps.
        page: as in `exact.generate`.
        check_every: as in `exact.generate`.
        force: as in `enabled`.

    Raises:
        HostError: as `enabled`; in a rollout, also for another model, mixed precision, `cast_lm_head_to_fp32`, vLLM,
            `cache_implementation`, tools, images, a repetition penalty or `generation_kwargs`.
    """
    trl_rollout.ROLLOUT.require(force=force)
    return trl_rollout.rollout(exact, max_length=max_length, page=page, check_every=check_every)
