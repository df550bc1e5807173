"""TRL: the log-probabilities of its trainers through `linear_logprob`, by the one global that all of them use.

    from rlkernel.integrations import trl

    with trl.enabled():
        GRPOTrainer(...).train()

TRL 1.16 scores tokens in one place, `add_fused_lm_head`, whose tiles are a global of `trl.trainer.utils` that is
looked up at every call: so GRPO, RLOO, DPO, KTO and SFT all go through rlkernel inside the block, whenever the trainer
was made. `callback()` is the same as a callback, `grpo_trainer()` also takes advantages and losses from rlkernel.

What differs from TRL: logits keep fp32 accumulators (TRL rounds them to bf16 for bf16 models), and the gradient of the
head under autocast is rounded once to the type of the matmuls, as torch's own linear layers do.
"""

from __future__ import annotations

from typing import Any

from rlkernel.integrations import trl_trainers
from rlkernel.integrations.trl_head import HEAD, HOST, enabled

__all__ = ["HEAD", "HOST", "callback", "enabled", "grpo_trainer"]


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
