"""Policy updates of a decoder by operators of exact bits, beside the same loop by torch's kernels: bits and time.

    python benchmarks/gpu_exact_rollout.py --toy                                     # on this CPU, seconds
    python benchmarks/gpu_exact_rollout.py --layers 36 --updates 5 --output exact.json     # Qwen3-8B's shape, one GPU
    python benchmarks/gpu_exact_rollout.py --weights int4_g128 --lora 16                   # quantized layers, and LoRA
    python benchmarks/gpu_exact_rollout.py --experts 64 --layers 12                        # Qwen3-30B-A3B's experts

Each update: a rollout that is captured, prompts to draws; then the trainer's forward and backward over the same
sequences with a clipped policy loss on random advantages, and a step of SGD. Weights are random, made on the device.

    exact   rlkernel.exact: `generate` in pages, packed sequences, linear_logprob
    stock   the same model as transformers makes it: sdpa, StaticCache and torch's sampling in one captured step, a
            padded batch (prompts are of one length, so nothing is padding), log_softmax of the logits

Printed is JSON: log-probabilities whose bits differ between rollout and trainer, the largest difference, and seconds.
The first update, which compiles and captures, stands apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import rlkernel as rlk
from rlkernel.integrations.transformers_pages import cache_argument
from rlkernel.nn import QuantLinear, QuantPolicy, quantize_model
from rlkernel_core.files import write_json

QWEN3_8B = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"hidden_size": 2048, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
TOY = {  # ranks can share it: gpu_exact_ranks.py
    "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
CLIP = 0.2  # of the ratio, on both sides


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What the command line says, with sizes of the toy or of the whole where it says nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--updates", type=int)
    parser.add_argument("--rows", type=int, help="sequences of a rollout")
    parser.add_argument("--group", type=int, help="sequences of one prompt")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt")
    parser.add_argument("--new", type=int, help="tokens drawn for a sequence")
    parser.add_argument("--micro", type=int, help="sequences of a backward pass")
    parser.add_argument("--page", type=int, default=64, help="keys of a page")
    parser.add_argument("--weights", default="dense", help="format of the layers, as in int4_g128 or fp8_channel")
    parser.add_argument("--lora", type=int, default=0, help="rank of LoRA beside quantized layers; 0 for none")
    parser.add_argument("--experts", type=int, default=0, help="of a mixture, Qwen3-MoE; 0 for a dense MLP")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95, help="1 for none: the stock loop sorts the vocabulary")
    parser.add_argument("--order", default="", help="backends of rlkernel, as in triton,torch")
    parser.add_argument("--without-stock", action="store_true", help="the exact loop alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(words)
    toy, full = (2, 2, 4, 2, 9, 6, 2), (36, 3, 64, 8, 256, 512, 4)
    for name, small, large in zip(
        ("layers", "updates", "rows", "group", "prompt", "new", "micro"), toy, full, strict=True
    ):
        if getattr(given, name) is None:
            setattr(given, name, small if given.toy else large)
    return given


def model_of(given: argparse.Namespace) -> Any:
    """A decoder of random weights in bf16, made on the device; its backward pass computes layers again."""
    sizes = TOY if given.toy else QWEN3_8B
    config = transformers.Qwen3Config(**sizes, num_hidden_layers=given.layers)
    if given.experts:
        experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32} if given.toy else EXPERTS
        sizes = {**sizes, **experts, "num_experts": given.experts, "norm_topk_prob": True}
        config = transformers.Qwen3MoeConfig(**sizes, num_hidden_layers=given.layers)
    torch.manual_seed(0)
    with torch.device(given.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if given.weights != "dense":
        quantize_model(model, QuantPolicy(given.weights))
    for layer in (m for m in model.modules() if isinstance(m, QuantLinear) and given.lora):
        layer.add_lora(given.lora, 2.0 * given.lora)
    newer = "activation_checkpointing_enable"  # what transformers 5.23 calls it
    getattr(model, newer if hasattr(model, newer) else "gradient_checkpointing_enable")({"use_reentrant": False})
    return model


def clocked(device: str, work: Callable[[], Any]) -> tuple[Any, float]:
    """What work gives, and seconds."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    made = work()
    wait()
    return made, time.perf_counter() - start


def scored(model: Any, ids: Tensor, prompt: int, temperature: float, group: Any = None) -> Tensor:
    """Log-probabilities [b, M] of whole sequences [b, S], packed, by operators of exact bits."""
    b, S = ids.shape
    cu = torch.arange(0, b * S + 1, S, dtype=torch.int32, device=ids.device)
    at = torch.arange(S, device=ids.device).repeat(b)[None]
    hidden = model.base_model(
        input_ids=ids.reshape(1, -1), position_ids=at, use_cache=False, cu_seq_lens_q=cu, cu_seq_lens_k=cu,
        max_length_q=S, max_length_k=S,
    ).last_hidden_state  # fmt: skip
    rows = hidden.view(b, S, -1)[:, prompt - 1 : -1]
    found: Tensor = rlk.linear_logprob(
        rows, model.lm_head.weight, ids[:, prompt:], temperature=temperature, group=group
    ).logprob
    return found


class ExactLoop:
    """By operators of exact bits."""

    def __init__(self, model: Any, given: argparse.Namespace) -> None:
        self.model, self.given, self.exact = model, given, rlk.exact(model, force=True)

    def rollout(self, prompts: Tensor, seed: int, new: int) -> tuple[Tensor, Tensor]:
        """Tokens drawn and their log-probabilities, [B, M]."""
        given = self.given
        made = self.exact.generate(
            prompts, max_new_tokens=new, seed=seed, temperature=given.temperature, stop_ids=(), page=given.page,
            top_p=given.top_p if given.top_p < 1 else None, max_length=given.prompt + given.new,
        )  # fmt: skip
        return made.ids, made.logprob

    def trained(self, ids: Tensor, prompt: int) -> Tensor:
        """Log-probabilities [b, M] of whole sequences [b, S], packed."""
        return scored(self.model, ids, prompt, self.given.temperature)

    def close(self) -> dict[str, Any]:
        """Put the model back, and say what ran."""
        ops = ("lm_head_sample", "linear_logprob", "capture")
        ran = {op: decision.target for op in ops if (decision := rlk.last_decision(op)) is not None}
        ran = {**self.exact.ran, **ran, "captures": self.exact.decoder.step.stats.captures}
        self.exact.undo()
        return ran


class StockLoop:
    """By torch's kernels, in the same order of work: prompts in one forward, one captured step."""

    def __init__(self, model: Any, given: argparse.Namespace) -> None:
        self.model, self.given, self.step = model, given, None
        model.set_attn_implementation("sdpa")
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=given.prompt + given.new)
        self.cached = {cache_argument(): self.cache}
        device = model.device
        self.token = torch.zeros(given.rows, 1, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As transformers warps and draws, with log-probabilities of the whole vocabulary; [B] each."""
        x = logits.float() / self.given.temperature
        kept = x
        if self.given.top_p < 1:
            ordered, index = x.sort(descending=False)
            gone = ordered.softmax(-1).cumsum(-1) <= 1 - self.given.top_p
            gone[:, -1] = False
            kept = x.masked_fill(gone.scatter(1, index, gone), -torch.inf)
        # multinomial draws likewise, and looks at values on the host before, which a graph cannot.
        token = (kept.softmax(-1) / torch.empty_like(x).exponential_()).argmax(-1, keepdim=True)
        return token[:, 0], x.log_softmax(-1).gather(1, token)[:, 0]

    def decode(self) -> tuple[Tensor, Tensor]:
        """One token more of each row."""
        out = self.model(input_ids=self.token, position_ids=self.at, use_cache=True, **self.cached)
        token, logprob = self.draw(out.logits[:, -1])
        self.token.copy_(token[:, None])
        self.at.add_(1)
        return token, logprob

    @torch.no_grad()
    def rollout(self, prompts: Tensor, seed: int, new: int) -> tuple[Tensor, Tensor]:
        """Tokens drawn and their log-probabilities, [B, M]."""
        torch.manual_seed(seed)
        self.model.eval()
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.cumulative_length.zero_()
        out = self.model(input_ids=prompts, use_cache=True, logits_to_keep=1, **self.cached)
        drawn = [self.draw(out.logits[:, -1])]
        self.token.copy_(drawn[0][0][:, None])
        self.at.fill_(prompts.shape[1])
        if new > 1 and self.step is None:
            counts = [layer.cumulative_length for layer in self.cache.layers]
            keys = [x for layer in self.cache.layers for x in (layer.keys, layer.values)]
            state = [self.token, self.at, *counts]
            self.step = rlk.capture(self.decode, (), static=[*keys, self.model], mutates=state)
        drawn += [self.step() for _ in range(1, new)]
        self.model.train()
        ids, logprob = (torch.stack(x, 1) for x in zip(*drawn, strict=True))
        return ids, logprob

    def trained(self, ids: Tensor, prompt: int) -> Tensor:
        """Log-probabilities [b, M] of whole sequences [b, S]."""
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - prompt + 1).logits[:, :-1]
        law = (logits.float() / self.given.temperature).log_softmax(-1)
        found: Tensor = law.gather(2, ids[:, prompt:, None])[..., 0]
        return found

    def close(self) -> dict[str, Any]:
        """Free the graph."""
        self.step.close()
        return {"attention": "sdpa", "captures": self.step.stats.captures}


def update(loop: Any, prompts: Tensor, n: int, given: argparse.Namespace) -> dict[str, Any]:
    """One rollout, one step of the optimizer; what differed, and seconds."""
    model, P = loop.model, given.prompt
    (ids, said), whole = clocked(given.device, lambda: loop.rollout(prompts, 2 * n, given.new))
    _, first = clocked(given.device, lambda: loop.rollout(prompts, 2 * n + 1, 1))
    generator = torch.Generator().manual_seed(n)
    advantages = torch.randn(given.rows, 1, generator=generator).to(ids.device)
    sequences = torch.cat([prompts, ids], 1)

    def train() -> Tensor:
        found = []
        for some in torch.arange(given.rows, device=ids.device).split(given.micro):
            trained = loop.trained(sequences[some], P)
            ratio, a = (trained - said[some]).exp(), advantages[some]
            loss = -torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).sum() / ids.numel()
            loss.backward()
            found.append(trained.detach())
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.grad is not None):
                p.add_(p.grad, alpha=-given.lr)
                p.grad = None
        return torch.cat(found)

    model.train()
    trainable = [p for p in model.model.layers[0].parameters() if p.requires_grad and p.dim() > 1]
    probe = (trainable or [model.lm_head.weight])[-1]
    before = probe.detach().clone()
    found, trainer = clocked(given.device, train)
    changed = (probe != before).float().mean()
    differ = (found.float().view(torch.int32) != said.float().view(torch.int32)).sum()
    return {
        "tokens": said.numel(),
        "differ": int(differ),
        "largest_difference": float((found - said).abs().max()),
        "rollout_s": whole,
        "prompts_s": first,
        "decode_step_ms": 1e3 * (whole - first) / max(given.new - 1, 1),
        "trainer_s": trainer,
        "update_s": whole + trainer,
        "weights_changed": float(changed),
    }


def run(kind: Any, model: Any, given: argparse.Namespace) -> dict[str, Any]:
    """All updates of one loop."""
    loop, updates = kind(model, given), []
    for n in range(given.updates + 1):
        generator = torch.Generator().manual_seed(1000 + n)
        sizes = (given.rows // given.group, given.prompt)
        prompts = torch.randint(model.config.vocab_size, sizes, generator=generator).repeat_interleave(given.group, 0)
        updates.append(update(loop, prompts.to(given.device), n, given))
        differ, seconds = (sum(u[name] for u in updates) for name in ("differ", "update_s"))
        print(
            f"{kind.__name__} {n + 1}/{given.updates + 1}: {differ} differ, {seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        if given.output is not None:  # a run that is ended leaves what it has
            write_json(given.output, {"unfinished": kind.__name__, "updates": updates})
    timed = [name for name in updates[0] if name.endswith(("_s", "_ms"))]
    return {
        "ran": loop.close(),
        "tokens": sum(u["tokens"] for u in updates),
        "differ": sum(u["differ"] for u in updates),
        "largest_difference": max(u["largest_difference"] for u in updates),
        **{name: statistics.median(u[name] for u in updates[1:]) for name in timed},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if given.device.startswith("cuda") else None,
        "updates": updates,
    }


def main(words: list[str] | None = None) -> None:
    """Both loops, one after the other, on one model."""
    given = arguments(words)
    exact = ("linear", "rms_norm", "glu", "attention", "lm_head_sample", "linear_logprob", "grouped_linear", "route")
    rlk.configure(*filter(None, given.order.split(",")), **{op: {"need": ["batch_invariant"]} for op in exact})
    model = model_of(given)
    result: dict[str, Any] = {
        "arguments": {n: x for n, x in vars(given).items() if n != "output"},
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else platform.processor(),
        "versions": {"rlkernel": rlk.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "exact": run(ExactLoop, model, given),
    }
    if not given.without_stock:
        rlk.configure()
        if given.device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        stock = result["stock"] = run(StockLoop, model, given)
        names = ("decode_step_ms", "rollout_s", "trainer_s", "update_s")
        result["exact_over_stock"] = {name: result["exact"][name] / stock[name] for name in names}
    text = json.dumps(result, indent=1)
    print(text)
    if given.output is not None:
        write_json(given.output, result)


if __name__ == "__main__":
    main()
