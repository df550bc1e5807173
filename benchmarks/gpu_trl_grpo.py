"""GRPO by TRL on a model of real shape: stock, with rlkernel's operators, and with an exact rollout; one process.

    python benchmarks/gpu_trl_grpo.py --toy                               # on this CPU, a minute
    python benchmarks/gpu_trl_grpo.py --output trl_grpo.json              # Qwen3-0.6B's shape, random weights, one GPU

The task is arithmetic: the prompt is two numbers, `a` and `b`, and the completion shall be `a+b, a+2b, ...` modulo 100,
one token a number. The reward is the share of numbers that are the one before them plus `b`. Weights start random;
next-token training takes them to where some answers are right (--warm), and every run starts from there, with the same
prompts.

    stock   TRL's GRPOTrainer; completions by transformers' `generate`
    ours    trl.grpo_trainer() inside trl.enabled(): log-probabilities, advantages and losses by rlkernel; the same
            `generate`
    exact   the same with trl.exact_rollout(rlkernel.exact(model)): completions in pages, one captured step

Printed is JSON. Of each step: reward, loss, seconds, and drift: the differences between the log-probabilities that the
rollout states of its draws and those that TRL computes of the same tokens before the step, by the same weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
import trl as stock
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

import rlkernel as rlk
from rlkernel.integrations import trl
from rlkernel_core.files import write_json

WORDS = ["<pad>", "<eos>", *(str(n) for n in range(100))]
NUMBERS = 100
FIRST = WORDS.index("0")
QWEN3_06B = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
TOY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
EXACT = ("linear", "rms_norm", "glu", "attention", "lm_head_sample", "linear_logprob")
FAR = 0.1  # a token whose ratio is further from 1 than this before anything was learned


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What the command line says, with sizes of the toy or of the whole where it says nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--prompts", type=int, help="prompts of a step")
    parser.add_argument("--group", type=int, help="completions of a prompt")
    parser.add_argument("--terms", type=int, default=16, help="tokens of a completion")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--warm", type=float, default=0.5, help="probability of a right term where GRPO starts")
    parser.add_argument("--warm-steps", type=int, default=3000, help="most steps of next-token training")
    parser.add_argument("--warm-lr", type=float)
    parser.add_argument("--runs", default="stock,ours,exact")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(words)
    given.device = "cpu" if given.toy else "cuda"
    given.dtype = "float32" if given.toy else "bfloat16"
    for name, (toy, whole) in {
        "steps": (5, 200),
        "prompts": (4, 8),
        "group": (8, 16),
        "lr": (1e-3, 5e-5),
        "warm_lr": (1e-2, 3e-4),
    }.items():
        if getattr(given, name) is None:
            setattr(given, name, toy if given.toy else whole)
    return given


def terms(prompts: torch.Tensor, count: int) -> torch.Tensor:
    """The right completions [B, count] of numbers [B, 2]."""
    a, b = prompts[:, :1], prompts[:, 1:]
    return (a + b * torch.arange(1, count + 1, device=prompts.device)) % NUMBERS


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a number."""
    pad, eos = WORDS[:2]
    numbers = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token=pad))
    numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=numbers, pad_token=pad, eos_token=eos, padding_side="left"
    )


def warmed(given: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """A model that knows some answers, by plain next-token training in the dtype that trains later."""
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = transformers.Qwen3Config(**(TOY if given.toy else QWEN3_06B), **ends)
    with torch.device(given.device):
        model = transformers.Qwen3ForCausalLM(config).to(getattr(torch, given.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.warm_lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    known = step = 0
    for step in range(1, given.warm_steps + 1):
        rows = torch.randint(NUMBERS, (256, 2), generator=generator).to(given.device)
        answers = terms(rows, given.terms)
        ids = FIRST + torch.cat([rows, answers], 1)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, 1:].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
        if step % 10 == 0:
            with torch.no_grad():
                known = float(logits.softmax(-1).gather(2, ids[:, 2:, None]).mean())
            if step % 100 == 0:
                print(f"warm {step}: probability of a right term {known:.3f}", file=sys.stderr, flush=True)
            if known >= given.warm:
                break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = given.warm_lr * min(1.0, step / 50)
        optimizer.step()
    return model, {"steps": step, "probability_of_a_right_term": known}


def by_transformers(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions as TRL generates them, with the log-probabilities of transformers' own logits."""
    ids = trainer._tokenize_prompts(prompts)[0]  # noqa: SLF001 - as TRL's own way of generation
    model = trainer.accelerator.unwrap_model(trainer.model)
    rows = torch.tensor(ids, device=model.device)  # of one length
    training = model.training
    model.eval()
    with torch.no_grad():
        made = model.generate(
            input_ids=rows,
            attention_mask=torch.ones_like(rows),
            generation_config=trainer.generation_config,
            return_dict_in_generate=True,
            output_logits=True,
        )
    model.train(training)
    drawn = made.sequences[:, rows.shape[1] :]
    law = (torch.stack(made.logits, 1).float() / trainer.temperature).log_softmax(-1)
    said = law.gather(2, drawn[..., None])[..., 0].tolist()
    lengths = ((drawn == trainer.processing_class.eos_token_id).cumsum(1) == 0).sum(1).add(1).clamp(max=drawn.shape[1])
    cut = lengths.tolist()
    return {
        "prompt_ids": ids,
        "completion_ids": [x[:n] for x, n in zip(drawn.tolist(), cut, strict=True)],
        "logprobs": [x[:n] for x, n in zip(said, cut, strict=True)],
    }


def watched(kind: type) -> type:
    """A trainer that keeps, of each step, how far TRL's log-probabilities are from the rollout's."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        """What the trainer does, looked at."""

        def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*args, **named)
            self.scored = found[0].detach() if found[0] is not None else None
            return found

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            there = inputs["completion_mask"].bool()
            said = inputs["sampling_per_token_logps"][there].float()
            apart = self.scored[there].float() - said
            self.drift.append(torch.stack([
                apart.numel() * torch.ones_like(apart[0]), (apart != 0).sum().float(), apart.abs().mean(),
                apart.abs().max(), (apart.expm1().abs() > FAR).float().mean(),
            ]))  # fmt: skip
            return loss

    return Watched


class Clock(transformers.TrainerCallback):
    """Seconds of each step, generation and optimizer included."""

    def __init__(self, device: str) -> None:
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.seconds: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self._mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step has ended, and with it all of its work on the device."""
        before = self.at
        self._mark()
        self.seconds.append(self.at - before)

    def _mark(self) -> None:
        self.wait()
        self.at = time.perf_counter()


def run(name: str, model: Any, given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One training from where the model is."""
    config = stock.GRPOConfig(
        output_dir=f"{folder}/{name}", max_steps=given.steps, learning_rate=given.lr, lr_scheduler_type="constant",
        per_device_train_batch_size=given.prompts * given.group, num_generations=given.group, beta=0.0,
        max_completion_length=given.terms, temperature=given.temperature, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, bf16=False, seed=1, use_cpu=given.device == "cpu",
        gradient_checkpointing=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(NUMBERS, (given.steps * given.prompts, 2), generator=generator)
    data = Dataset.from_dict({"prompt": [f"{a} {b}" for a, b in rows.tolist()]})

    def right(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = []
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            a, b = map(int, prompt.split())
            numbers = [a, *(i - FIRST for i in ids)]
            rewards.append(sum((n + b) % NUMBERS == m for n, m in pairwise(numbers)) / given.terms)
        return rewards

    clock = Clock(given.device)
    with ExitStack() as within:
        if name == "exact":
            rlk.configure(**{op: {"need": ["batch_invariant"]} for op in EXACT})
            exact = within.enter_context(rlk.exact(model))
            rollout = trl.exact_rollout(exact, max_length=2 + given.terms)
        else:
            rlk.configure()
            rollout = by_transformers
        if name != "stock":
            within.enter_context(trl.enabled())
        trainer = watched(stock.GRPOTrainer if name == "stock" else trl.grpo_trainer())(
            model, args=config, train_dataset=data, processing_class=tokenizer(), reward_funcs=right,
            rollout_func=rollout, callbacks=[clock],
        )  # fmt: skip
        trainer.drift = []
        if given.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        peak = torch.cuda.max_memory_allocated() / 2**30 if given.device == "cuda" else None
    log = [row for row in trainer.state.log_history if "reward" in row]
    tokens, differ, mean, largest, far = (x.tolist() for x in torch.stack(trainer.drift).T)
    ran = {op: d.target for op in (*EXACT, "advantage", "policy_loss") if (d := rlk.last_decision(op)) is not None}
    late = clock.seconds[len(clock.seconds) // 4 :]  # what compiles and captures is behind
    return {
        "ran": {} if name == "stock" else ran,
        "reward_first": statistics.mean(row["reward"] for row in log[:10]),
        "reward_last": statistics.mean(row["reward"] for row in log[-10:]),
        "step_s": statistics.median(late),
        "peak_gib": peak,
        "tokens": int(sum(tokens)),
        "differ": int(sum(differ)),
        "drift_mean": statistics.mean(mean),
        "drift_max": max(largest),
        "share_of_ratios_off_by_a_tenth": statistics.mean(far),
        "reward": [row["reward"] for row in log],
        "loss": [row["loss"] for row in log],
        "drift": mean,
        "seconds": clock.seconds,
    }


def main(words: list[str] | None = None) -> None:
    """Every run from the same weights."""
    given = arguments(words)
    warnings.filterwarnings("ignore", category=UserWarning)
    transformers.logging.set_verbosity_error()
    model, warm = warmed(given)
    print(json.dumps(warm), file=sys.stderr, flush=True)
    start = {k: v.detach().to("cpu", copy=True) for k, v in model.state_dict().items()}
    result: dict[str, Any] = {
        "arguments": {n: x for n, x in vars(given).items() if n != "output"},
        "model": TOY if given.toy else QWEN3_06B,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else platform.processor(),
        "versions": {
            "rlkernel": rlk.__version__, "torch": torch.__version__, "trl": stock.__version__,
            "transformers": transformers.__version__,
        },
        "warm": warm,
        "runs": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name in given.runs.split(","):
            model.load_state_dict(start)
            model.zero_grad(set_to_none=True)
            result["runs"][name] = found = run(name, model, given, folder)
            said = {k: v for k, v in found.items() if not isinstance(v, (list, dict))}
            print(f"{name}: {json.dumps(said)}", file=sys.stderr, flush=True)
            if given.output is not None:  # a run that is ended leaves what it has
                write_json(given.output, result)
            gc.collect()
            if given.device == "cuda":
                torch.cuda.empty_cache()
    if given.output is None:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
