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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from rlkernel.integrations.host import Active, Host, Symbol, replaced

if TYPE_CHECKING:
    from collections import Counter

HEAD: Final = Symbol("trl.trainer.utils", "_ChunkedLogProbFunction")

HOST: Final = Host(
    name="trl",
    distribution="trl",
    versions=">=1.16.0,<1.17",
    tested="1.16.0",
    does="linear_logprob under GRPO, RLOO, DPO, KTO and SFT; advantage and policy_loss in grpo_trainer()",
    symbols=(
        HEAD,
        Symbol(
            "trl.trainer.utils",
            "_ChunkedLogProbFunction.forward",
            (
                "ctx",
                "hidden",
                "weight",
                "bias",
                "targets",
                "temperature",
                "chunk_size",
                "final_logit_softcapping",
                "logit_scale",
                "outputs",
            ),
        ),
        Symbol("trl.trainer.utils", "add_fused_lm_head", ("model", "temperature", "cast_lm_head_to_fp32", "outputs")),
    ),
)

# What grpo_trainer overrides and calls beside.
GRPO: Final = replace(
    HOST,
    symbols=(
        *HOST.symbols,
        Symbol("trl.trainer.utils", "_use_triton", ("device",)),
        *(
            Symbol("trl.trainer.grpo_trainer", f"GRPOTrainer.{name}", ("self", *parameters))
            for name, parameters in {
                "_compute_loss": ("model", "inputs"),
                "_generate_and_score_completions": ("inputs",),
                "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
                "_get_per_token_logps_and_entropies": (
                    "model",
                    "input_ids",
                    "attention_mask",
                    "logits_to_keep",
                    "batch_size",
                    "compute_entropy",
                    "compute_aux_loss",
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
                ),
            }.items()
        ),
    ),
)


@contextmanager
def enabled(*, force: bool = False) -> Iterator[Active]:
    """TRL's trainers score tokens by `rlkernel.linear_logprob` inside the block; which kernel that is, policy says.

    Args:
        force: take a version of TRL outside the window, too, if its symbols are what they were.

    Raises:
        HostError: TRL is absent, of a version that this was not made for, or has changed.
    """

    def make(_: Any, calls: Counter[str]) -> Any:
        from rlkernel.integrations.trl_head import LinearHead

        return LinearHead(calls)

    with replaced(HOST, HEAD, make, force=force) as entry:
        yield entry


def callback(*, force: bool = False) -> Any:
    """A `transformers.TrainerCallback` that is `enabled()` from the first step to the last, and writes decisions.json.

    Where training fails in between, the replacement stays until `close()`: `with trl.enabled()` has no such gap.

    Raises:
        HostError: as `enabled`.
    """
    HOST.require(force=force)
    from rlkernel.integrations import trl_trainers

    return trl_trainers.callback(force=force)


def grpo_trainer(base: Any = None, *, fused: bool = False, force: bool = False) -> Any:
    """A subclass of `GRPOTrainer` whose log-probabilities, advantages and losses are rlkernel's, by TRL's presets.

    Args:
        base: the class to derive from; TRL's own by default.
        fused: head and loss in one by `linear_policy_loss`, with the gradient made in the forward pass.
        force: as in `enabled`.

    Raises:
        HostError: as `enabled`; on construction, also for an option of `GRPOConfig` that no preset reproduces.
    """
    GRPO.require(force=force)
    from rlkernel.integrations import trl_trainers

    return trl_trainers.grpo(base, fused=fused, force=force)
