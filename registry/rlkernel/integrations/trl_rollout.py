"""What GRPOTrainer calls for completions: `Exact.generate`, whose log-probabilities have the bits of TRL's own scores.

TRL scores completions by `linear_logprob` inside `trl.enabled()`; an exact model's hidden states are those of the
rollout, padded as TRL pads them. So the ratio of an update's first step is 1, and importance sampling corrects nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from rlkernel.integrations.host import Symbol
from rlkernel.integrations.trl_head import HOST
from rlkernel_core.errors import HostError

SEEDS: Final = 2**31  # that `generate` takes
# What a rollout meets of TRL; nothing is replaced.
ROLLOUT: Final = replace(
    HOST,
    does="completions for GRPO by Exact.generate",
    symbols=(
        Symbol("trl.trainer.grpo_trainer", "GRPOTrainer._tokenize_prompts", "self, prompts"),
        Symbol("trl.trainer.grpo_trainer", "GRPOTrainer._generate", "self, prompts"),
    ),
)


def rollout(exact: Any, **how: Any) -> Callable[[list[Any], Any], dict[str, Any]]:
    """See `rlkernel.integrations.trl.exact_rollout`."""
    calls = 0

    def drawn(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        nonlocal calls
        args, accelerator = trainer.args, trainer.accelerator
        _check(exact, trainer)
        ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise HostError("trl: an exact rollout knows no images; leave out rollout_func for prompts that have some")
        seed = (args.seed + calls * accelerator.num_processes + accelerator.process_index) % SEEDS
        calls += 1
        made = exact.generate(
            ids,
            max_new_tokens=trainer.max_completion_length,
            seed=seed,
            temperature=trainer.temperature,
            top_k=trainer.top_k or None,
            top_p=trainer.top_p if trainer.top_p < 1 else None,
            min_p=trainer.min_p,
            stop_ids=list(trainer.eos_token_ids),
            **how,
        )
        lengths = made.lengths.tolist()
        return {
            "prompt_ids": ids,
            "completion_ids": [x[:n] for x, n in zip(made.ids.tolist(), lengths, strict=True)],
            "logprobs": [x[:n] for x, n in zip(made.logprob.tolist(), lengths, strict=True)],
        }

    return drawn


def _check(exact: Any, trainer: Any) -> None:
    """Refuse what a rollout would leave out.

    Raises:
        HostError: the trainer has another model, another way to generate, casts between rollout and scores, tools, or
            draws that `generate` cannot make.
    """
    args, accelerator = trainer.args, trainer.accelerator
    refused = {
        "another model than exact() was called with": accelerator.unwrap_model(trainer.model) is not exact.model,
        f"mixed precision {accelerator.mixed_precision!r} (pass bf16=False, fp16=False)": (
            accelerator.mixed_precision != "no"
        ),
        "cast_lm_head_to_fp32, which changes the head that scores": args.cast_lm_head_to_fp32,
        "use_vllm": args.use_vllm,
        "cache_implementation": args.cache_implementation is not None,
        "tools": bool(trainer.tools),
        f"repetition_penalty={args.repetition_penalty}": args.repetition_penalty != 1.0,
        "generation_kwargs": bool(args.generation_kwargs),
    }
    if any(refused.values()):
        said = ", ".join(name for name, there in refused.items() if there)
        raise HostError(f"trl: an exact rollout has no form for {said}; change it, or leave out rollout_func")
