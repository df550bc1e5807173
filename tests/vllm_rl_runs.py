"""Engines of vLLM as RL frameworks hold them, each case in its own process: `python -m tests.vllm_rl_runs CASE FOLDER`.

Ray: `tests.vllm_rl_runs.as_a_gpu` has vLLM count its CPU workers as GPUs of Ray, since on a CPU vLLM asks Ray for none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.vllm_runs import FILTERS, PROMPTS, RECORD, SEEDS, TOKENS, engine, params, quantized, tokens

ADAPTERS = ("first", "second")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HOT = 0.7  # a temperature at which the raw law is not the tempered one
SPLIT = {"quant_method": "rlkernel", "format": "int4_g32"}  # groups that half of the columns have whole
QUANTIZED = {"quantization": "rlkernel", "hf_overrides": {"quantization_config": SPLIT}, "worker_extension_cls": RECORD}


def seeded(**more: Any) -> list[Any]:
    return [params(s, **{**FILTERS, **more}) for s in SEEDS]


def as_a_gpu() -> None:
    """What Ray calls in each of its processes, and the driver calls itself."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


class Holder:
    """An actor that has an engine in its process, as TRL, verl and OpenRLHF have one."""

    def __init__(self, folder: Path) -> None:
        self.llm = engine(folder, **QUANTIZED)

    def drawn(self) -> list[list[int]]:
        return tokens(self.llm, PROMPTS, seeded())

    def record(self, folder: str) -> list[str]:
        return self.llm.collective_rpc("rlkernel_record", args=(folder,))


def actor(folder: Path) -> dict[str, Any]:
    """An engine in this process, and one in an actor."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False)
    held = ray.remote(Holder).remote(folder)
    found = {"actor": ray.get(held.drawn.remote())}
    found["record"] = ray.get(held.record.remote(str(folder / "actor")))
    ray.shutdown()
    found["process"] = Holder(folder).drawn()
    return found


def workers(folder: Path) -> dict[str, Any]:
    """An engine in this process whose two ranks are actors."""
    import ray

    ray.init(
        num_cpus=1, num_gpus=2, include_dashboard=False,
        runtime_env={"worker_process_setup_hook": f"{__spec__.name}.as_a_gpu"},
    )  # fmt: skip
    as_a_gpu()
    llm = engine(folder, **QUANTIZED, tensor_parallel_size=2, distributed_executor_backend="ray")
    return {
        "drawn": tokens(llm, PROMPTS, seeded()),
        "executor": type(llm.llm_engine.model_executor).__name__,
        "record": llm.collective_rpc("rlkernel_record", args=(str(folder / "workers"),)),
    }


def adapters(folder: Path) -> None:
    """Two of random numbers, whose greedy tokens are not the base's."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2ForCausalLM

    for seed, name in enumerate(ADAPTERS):
        torch.manual_seed(100 + seed)
        base = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        made = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
        for path, weight in made.named_parameters():
            if "lora_B" in path:
                torch.nn.init.normal_(weight, std=0.1)
        made.save_pretrained(folder / name)


def lora(folder: Path) -> dict[str, Any]:
    return _lora(folder)


def lora_quantized(folder: Path) -> dict[str, Any]:
    return {**_lora(folder, quantization="rlkernel"), "base": quantized(folder / "model")[1]}


def _lora(folder: Path, **options: Any) -> dict[str, Any]:
    """The base and two adapters in one batch. A slot more than adapters: on a CPU vLLM reads the last for the base."""
    from vllm.lora.request import LoRARequest

    llm = engine(folder, enable_lora=True, max_loras=len(ADAPTERS) + 1, max_lora_rank=8, **options)
    asked = [None, *(LoRARequest(name, n, str(folder / name)) for n, name in enumerate(ADAPTERS, 1))]

    def made(which: list[Any], rule: Any) -> list[list[int]]:
        prompts = [{"prompt_token_ids": PROMPTS[1]}] * len(which)
        outs = llm.generate(prompts, rule, lora_request=which, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outs]

    found = {}
    for name, rule in (("drawn", params(11, **FILTERS)), ("greedy", params(temperature=0))):
        found[name] = made(asked, rule)
        found[f"{name} alone"] = [made([one], rule)[0] for one in asked]
    return found


def merged(folder: Path) -> list[list[int]]:
    """Greedy tokens of transformers: the base, and PEFT's adapters merged into it."""
    from peft import PeftModel
    from transformers import Qwen2ForCausalLM

    made = []
    for name in (None, *ADAPTERS):
        model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        if name is not None:
            model = PeftModel.from_pretrained(model, folder / name).merge_and_unload()
        made.append(greedy(model))
    return made


def dequantized(folder: Path) -> list[list[int]]:
    """The same on the base's weights as int4_g128 has them, adapters beside them and not merged."""
    from peft import PeftModel
    from transformers import Qwen2ForCausalLM

    import rlkernel as rlk

    made = []
    for name in (None, *ADAPTERS):
        model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        for path, layer in model.named_modules():
            if path.rpartition(".")[2] in TARGETS:
                spec = rlk.QuantSpec.named("int4_g128")
                layer.weight.data = rlk.dequantize(rlk.quantize(layer.weight.data, spec, dtype=torch.float32))
        made.append(greedy(model if name is None else PeftModel.from_pretrained(model, folder / name)))
    return made


def greedy(model: Any) -> list[int]:
    out = model.generate(
        input_ids=torch.tensor([PROMPTS[1]]), do_sample=False, max_new_tokens=TOKENS, eos_token_id=None
    )
    return out[0, len(PROMPTS[1]) :].tolist()


def masks(folder: Path) -> dict[str, Any]:
    """Sampling masks of an engine that takes no logits processors, and what a trainer makes of them."""
    import rlkernel as rlk
    from rlkernel.integrations import sampling_masks

    llm = engine(
        folder, logits_processors=None, worker_extension_cls=RECORD,
        return_sampling_mask=True, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    llm.collective_rpc("rlkernel_draw")
    found: dict[str, Any] = {}
    for heat in (1.0, HOT):
        made = llm.generate(
            [{"prompt_token_ids": ids} for ids in PROMPTS],
            seeded(temperature=heat, logprobs=0),
            use_tqdm=False,
        )
        drawn = [list(out.outputs[0].token_ids) for out in made]
        logits, ids, seed, step = rows(folder, drawn)
        support = sampling_masks.from_vllm(made)
        scored = rlk.logprob(logits, ids, temperature=heat, support=support)
        again = rlk.sample(logits, temperature=heat, **FILTERS, tie="keep_all", seed=seed, step=step)
        raw = [
            logprob[token].logprob
            for prompt, mine in zip(PROMPTS, drawn, strict=True)
            for logprob, token in zip(scored_again(llm, prompt + mine)[len(prompt) :], mine, strict=True)
        ]
        found[str(heat)] = {
            "drawn": ids.tolist(),
            "drawn again": again.token.tolist(),
            "kept": support.offsets.diff().tolist(),
            "kept again": again.kept_count.tolist(),
            "processed": processed(made),
            "processed of the trainer": scored.logprob.tolist(),
            "kept mass of the trainer": scored.log_kept_mass.tolist(),
            "kept mass of the draw": again.log_kept_mass.tolist(),
            "raw": raw,
        }
    found["record"] = llm.collective_rpc("rlkernel_record", args=(str(folder / "masks"),))
    return found


def processed(made: list[Any]) -> list[float]:
    """Log-probabilities that vLLM returned of drawn tokens, one after the other."""
    samples = [out.outputs[0] for out in made]
    return [row[i].logprob for s in samples for row, i in zip(s.logprobs, s.token_ids, strict=True)]


def scored_again(llm: Any, ids: list[int]) -> list[Any]:
    """Raw log-probabilities of a sequence, which vLLM returns of prompts whatever `logprobs_mode` is."""
    asked = params(0, **FILTERS, max_tokens=1, prompt_logprobs=0)
    return llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)[0].prompt_logprobs


def rows(folder: Path, drawn: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """Logits of every drawn token by transformers, its id, seed and step."""
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    logits, seeds, steps = [], [], []
    for prompt, mine, seed in zip(PROMPTS, drawn, SEEDS, strict=True):
        out = model(torch.tensor([[*prompt, *mine[:-1]]])).logits[0, len(prompt) - 1 :].detach()
        logits.append(out)
        seeds += [seed] * len(mine)
        steps += range(len(prompt), len(prompt) + len(mine))
    ids = [i for mine in drawn for i in mine]
    return torch.cat(logits), torch.tensor(ids), torch.tensor(seeds), torch.tensor(steps)


CASES = {case.__name__: case for case in (actor, workers, lora, lora_quantized, masks)}

if __name__ == "__main__":
    name, where = sys.argv[1], Path(sys.argv[2])
    (where / f"{name}.json").write_text(json.dumps(CASES[name](where)))
