"""Trainings of TRL that need no network: a Qwen2 of 20 thousand random numbers, words of its own, data in memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

WORDS = ["<pad>", "<eos>", *(chr(c) for c in range(ord("a"), ord("z") + 1)), *(str(d) for d in range(10))]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def model(folder):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    made = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), **sizes, **heads, **ends))
    with torch.no_grad():  # far enough from uniform that rewards, ratios and entropies differ
        made.lm_head.weight.mul_(8)
    made.save_pretrained(folder / "model")  # a reference model is loaded by name
    return Qwen2ForCausalLM.from_pretrained(folder / "model")


def settings(folder, **options: Any) -> dict[str, Any]:
    quiet = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True}
    return {"output_dir": str(folder), "seed": 3, "lr_scheduler_type": "constant", "bf16": False, **quiet, **options}


def vowels(completions, **_: Any) -> list[float]:
    """Reward: how often a word is a vowel."""
    return [sum(text.count(v) for v in "aeiou") / 4 for text in completions]


GROUPS = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}


def grpo(folder, *, inside=nullcontext, trainer: Any = None, callback: Any = None, steps: int = 2, **options: Any):
    """Train by GRPO; returns the trainer, with the gradients of its steps kept."""
    import trl

    config = trl.GRPOConfig(**settings(folder, learning_rate=1e-3, max_steps=steps, **GROUPS, **options))
    return trained(
        trainer or trl.GRPOTrainer,
        folder,
        config,
        inside,
        prompts(),
        reward_funcs=vowels,
        callbacks=[callback] if callback else [],
    )


def train(kind: str, folder, *, inside=nullcontext, steps: int = 2, **options: Any):
    """Train by another of TRL's trainers: "RLOO", "DPO", "KTO" or "SFT"."""
    import trl
    from datasets import Dataset

    asked = [f"{a} {b} {a}" for a in "abcd" for b in "xyz"]
    data = {
        "SFT": {"text": [f"{p} {p[::-1]} e i" for p in asked]},
        "DPO": {"prompt": asked, "chosen": [" a e i o"] * 12, "rejected": [" x y", " z"] * 6},
        "KTO": {"prompt": asked, "completion": [" a e i", " x y", " u o e i"] * 4, "label": [True, False, True] * 4},
    }
    own = GROUPS if kind == "RLOO" else {"per_device_train_batch_size": 4, "max_length": 16}
    config = getattr(trl, f"{kind}Config")(**settings(folder, learning_rate=1e-3, max_steps=steps, **own, **options))
    rewards = {"reward_funcs": vowels} if kind == "RLOO" else {}
    table = prompts() if kind == "RLOO" else Dataset.from_dict(data[kind])
    return trained(getattr(trl, f"{kind}Trainer"), folder, config, inside, table, **rewards)


def prompts():
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"{a} {b} {a}" for a in "abcdefgh" for b in "xyz"]})


def trained(make, folder, config, inside, data, **rest: Any):
    made = make(model(folder), args=config, train_dataset=data, processing_class=tokenizer(), **rest)
    made.add_callback(kept := gradients())
    made.gradients = kept
    with inside():
        made.train()
    return made


def gradients():
    from transformers import TrainerCallback

    class Kept(TrainerCallback):
        """The gradients of every step, as one vector each, after clipping."""

        def __init__(self):
            self.steps: list[torch.Tensor] = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            self.steps.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    return Kept()


def logged(trainer, name: str = "loss") -> list[float]:
    """What TRL logged under a name, step by step."""
    return [row[name] for row in trainer.state.log_history if name in row]
