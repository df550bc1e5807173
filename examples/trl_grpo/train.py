"""GRPO with TRL and rlkernel inside, without a network: a Qwen2 of random weights learns to say vowels.

python examples/trl_grpo/train.py --steps 60                # stock TRL
python examples/trl_grpo/train.py --steps 60 --rlkernel     # the same, and what ran in runs/trl_grpo
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlkernel import record
from rlkernel.integrations import trl
from rlkernel_core.files import write_json

WORDS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]


def words() -> PreTrainedTokenizerFast:
    """One token a letter."""
    letters = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def policy() -> Qwen2ForCausalLM:
    """Two layers of random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), **sizes, **ends))


def vowels(completions: list[str], **_: Any) -> list[float]:
    """Reward: the share of vowels."""
    return [sum(text.count(v) for v in "aeiou") / 8 for text in completions]


def main() -> None:
    """Train, and print the reward of the first and the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rlkernel", action="store_true", help="log-probabilities, advantages and losses by rlkernel")
    parser.add_argument("--out", default="runs/trl_grpo")
    asked = parser.parse_args()

    config = GRPOConfig(
        output_dir=asked.out,
        max_steps=asked.steps,
        learning_rate=3e-3,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=8,
        num_iterations=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        seed=1,
    )
    prompts = Dataset.from_dict({"prompt": [f"{a} {b}" for a in "bcdfgh" for b in "klmnpq"]})
    kind = trl.grpo_trainer() if asked.rlkernel else GRPOTrainer
    trainer = kind(policy(), args=config, train_dataset=prompts, reward_funcs=vowels, processing_class=words())
    with trl.enabled() if asked.rlkernel else nullcontext():
        trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}")
    write_json(Path(asked.out) / "log.json", trainer.state.log_history)
    if asked.rlkernel:
        print(f"wrote {record.write(asked.out)}: rlkernel status {asked.out}")


if __name__ == "__main__":
    main()
