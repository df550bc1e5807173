"""Whole engines of vLLM on a CPU, each in a process of its own: `python -m tests.vllm_runs CASE FOLDER` prints JSON.

The model is a Qwen2 of random numbers in FOLDER/model, and a second one in FOLDER/update; `make hosts` has the
environment, in which Triton's interpreter stands for a GPU (tests/vllm_cpu).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
DRAW = "rlkernel.integrations.vllm_worker:Draw"
RECORD = "rlkernel.integrations.vllm_worker.Record"
SMALL = {"enforce_eager": True, "dtype": "float32", "max_model_len": 96, "max_num_seqs": 8, "block_size": 32}
SKIP = ("lm_head", "embed_tokens")
LONG = [2 + i * i % 31 for i in range(40)]  # more than a page of the prefix cache
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [3, 12, 30, 31, 4, 22, 17], [5, 6, 7], LONG]
TOKENS = 12


def ran(case: str, folder: Path, module: str = "tests.vllm_runs", **environment: str) -> dict[str, Any]:
    """What a case of a module found, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", module, case, str(folder)],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / f"{case}.json").read_text())


def models(folder: Path) -> None:
    """Two of them, of one shape; heads of 32, the narrowest that vLLM's attention on a CPU knows."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.trl_runs import WORDS, tokenizer

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    for seed, name in enumerate(("model", "update")):
        torch.manual_seed(seed)
        made = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), **sizes, **heads, **ends))
        with torch.no_grad():
            made.lm_head.weight.mul_(6)
        made.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)


def params(seed: int | None = None, **options: Any) -> Any:
    from vllm import SamplingParams

    asked = {"temperature": 0.9, "seed": seed, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**asked, **options})


def tokens(llm: Any, prompts: list[list[int]], asked: Any) -> list[list[int]]:
    made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in made]


def engine(folder: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(model=str(folder / "model"), **{**SMALL, "logits_processors": [DRAW], **options})


SEEDS = [11, 12, 13, 14, 11]
FILTERS = {"top_k": 20, "top_p": 0.9}


def inside(folder: Path) -> dict[str, Any]:
    """In this process: batches that change, what transformers draws, a request that goes on, stop and abort."""
    from transformers import Qwen2ForCausalLM

    from rlkernel import rollouts
    from rlkernel.integrations import transformers, vllm

    with vllm.enabled():  # the engine keeps its draw when a block ends that it was made in
        llm = engine(folder, worker_extension_cls=RECORD)
        tokens(llm, PROMPTS[:1], params(1))
    found: dict[str, Any] = {}
    seeded = [params(s, **FILTERS) for s in SEEDS]
    found["together"] = tokens(llm, PROMPTS, seeded)
    found["alone"] = [tokens(llm, [p], a)[0] for p, a in zip(PROMPTS, seeded, strict=True)]
    found["other seed"] = tokens(llm, PROMPTS[:1], params(99, **FILTERS))
    found["greedy"] = tokens(llm, PROMPTS, params(temperature=0))
    cut = 5
    resumed = [p + t[:cut] for p, t in zip(PROMPTS, found["together"], strict=True)]
    found["resumed"] = [
        ids[:cut] + rest
        for ids, rest in zip(
            found["together"],
            tokens(llm, resumed, [params(s, **FILTERS, max_tokens=TOKENS - cut) for s in SEEDS]),
            strict=True,
        )
    ]
    stop = found["together"][1][3]
    found["stopped"] = tokens(llm, PROMPTS[1:2], params(SEEDS[1], **FILTERS, stop_token_ids=[stop]))[0]
    found["aborted"] = aborted(llm, seeded)

    model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    longest = max(len(p) for p in PROMPTS)
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    rules = {"max_new_tokens": TOKENS, "eos_token_id": None, "attention_mask": mask}
    drawing = transformers.drawing(SEEDS)
    made = model.generate(padded, custom_generate=drawing, do_sample=True, temperature=0.9, **FILTERS, **rules)
    found["transformers"] = made[:, longest:].tolist()
    found["transformers greedy"] = model.generate(padded, do_sample=False, **rules)[:, longest:].tolist()
    out = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params(11, logprobs=0), use_tqdm=False)[0].outputs[0]
    ids = PROMPTS[0] + list(out.token_ids)
    law = model(torch.tensor([ids[:-1]])).logits[0, len(PROMPTS[0]) - 1 :].log_softmax(-1)
    found["raw"] = [row[i].logprob for row, i in zip(out.logprobs, out.token_ids, strict=True)]
    found["raw of transformers"] = law.gather(-1, torch.tensor(out.token_ids)[:, None])[:, 0].tolist()
    asked = [params(s, **FILTERS, logprobs=0, n=2) for s in SEEDS]
    drawn = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], asked, use_tqdm=False)
    rollouts.write(folder / "rollout", rollouts.from_vllm(drawn, asked, weights="w"))
    found["record"] = llm.collective_rpc("rlkernel_record", args=(str(folder / "inside"),))
    return found


def aborted(llm: Any, asked: list[Any]) -> dict[str, list[int]]:
    """Tokens of the requests that are left after the second is aborted between two steps."""
    core = llm.llm_engine
    for n, (ids, each) in enumerate(zip(PROMPTS, asked, strict=True)):
        core.add_request(f"r{n}", {"prompt_token_ids": ids}, each)
    finished: dict[str, list[int]] = {}
    for step in range(10 * TOKENS):
        if step == 4:
            core.abort_request(["r1"])
        for out in core.step():
            if out.finished:
                finished[out.request_id] = list(out.outputs[0].token_ids)
        if not core.has_unfinished_requests():
            break
    return finished


def preempted(folder: Path) -> dict[str, Any]:
    """Too few pages for all requests at once, no prefix cache; log-probabilities of the processed law."""
    llm = engine(
        folder, num_gpu_blocks_override=8, enable_prefix_caching=False, logprobs_mode="processed_logprobs",
        disable_log_stats=False,
    )  # fmt: skip
    asked = [params(s, **FILTERS, max_tokens=40, logprobs=0) for s in SEEDS]
    made = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], asked, use_tqdm=False)
    alone = tokens(llm, PROMPTS[:2], asked[:2])
    counted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    first = made[0].outputs[0]
    logprobs = [row[i].logprob for row, i in zip(first.logprobs, first.token_ids, strict=True)]
    return {
        "preemptions": counted,
        "tokens": [list(out.outputs[0].token_ids) for out in made],
        "alone": alone,
        "processed": logprobs,
        "processed of transformers": processed(folder, PROMPTS[0], list(first.token_ids)),
    }


def processed(folder: Path, prompt: list[int], drawn: list[int]) -> list[float]:
    """Log-probabilities of tokens under the law that they were drawn from, by transformers and `sample`."""
    from transformers import Qwen2ForCausalLM

    import rlkernel as rlk

    model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    logits = model(torch.tensor([[*prompt, *drawn[:-1]]])).logits[0, len(prompt) - 1 :].detach()
    steps = torch.arange(len(drawn)) + len(prompt)
    draw = rlk.sample(logits, temperature=0.9, **FILTERS, seed=SEEDS[0], step=steps)
    assert draw.token.tolist() == drawn
    return draw.logprob.tolist()


def apart(folder: Path) -> dict[str, Any]:
    """In a process of its own, spawned: weights quantized while they are read, and reloaded, layer by layer."""
    llm = engine(folder, quantization="rlkernel", worker_extension_cls=RECORD, disable_log_stats=False)
    seeded = [params(s, **FILTERS) for s in SEEDS]

    def both() -> dict[str, Any]:
        return {"greedy": tokens(llm, PROMPTS, params(temperature=0)), "drawn": tokens(llm, PROMPTS, seeded)}

    found: dict[str, Any] = {"first": both()}
    found["hits"] = sum(m.value for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits")
    llm.reset_prefix_cache()
    found["without hits"] = tokens(llm, PROMPTS, seeded)
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    found["again"] = both()
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / "update")})
    llm.reset_prefix_cache()
    found["updated"] = both()
    found["record"] = llm.collective_rpc("rlkernel_record", args=(str(folder / "apart"),))
    for name in ("model", "update"):
        found[f"transformers {name}"] = quantized(folder / name)
    return found


def quantized(path: Path, kind: str = "int4_g128") -> list[list[int]]:
    """Greedy tokens of transformers on the same weights in the same format."""
    from transformers import Qwen2ForCausalLM

    from rlkernel import QuantSpec, nn

    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    nn.quantize_model(model, nn.QuantPolicy(QuantSpec.named(kind)))
    made = []
    for ids in PROMPTS:
        out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS, eos_token_id=None)
        made.append(out[0, len(ids) :].tolist())
    return made


def stock(folder: Path) -> dict[str, Any]:
    """Without anything of ours that is asked for."""
    llm = engine(folder, logits_processors=None)
    out = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params(11, logprobs=0), use_tqdm=False)[0].outputs[0]
    logprobs = [row[i].logprob for row, i in zip(out.logprobs, out.token_ids, strict=True)]
    return {"drawn": tokens(llm, PROMPTS, [params(s, **FILTERS) for s in SEEDS]), "logprobs": logprobs}


def ranks(folder: Path) -> dict[str, Any]:
    """Two ranks, a process each, and a graph of the model that vLLM has compiled."""
    said = {"quant_method": "rlkernel", "format": "int4_g32"}  # groups that half of the columns have whole
    more = {"tensor_parallel_size": 2, "enforce_eager": False, "hf_overrides": {"quantization_config": said}}
    more["worker_extension_cls"] = RECORD
    llm = engine(folder, **more)
    found = {"greedy": tokens(llm, PROMPTS, params(temperature=0))}
    found["record"] = llm.collective_rpc("rlkernel_record", args=(str(folder / "ranks"),))
    found["transformers"] = quantized(folder / "model", "int4_g32")
    return found


def refused(folder: Path) -> dict[str, Any]:
    """What an engine says that would not draw with rlkernel, in an environment that the test has chosen."""
    import rlkernel as rlk
    from rlkernel.integrations import vllm

    found: dict[str, Any] = {}
    try:
        with vllm.enabled():
            llm = engine(folder, logits_processors=None)
            found["tokens"] = tokens(llm, PROMPTS[:1], params(3))
    except rlk.HostError as error:
        found["block"] = str(error)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        try:
            engine(folder)
        except rlk.HostError as error:
            found["engine"] = str(error)
    return found


CASES = {"inside": inside, "preempted": preempted, "apart": apart, "stock": stock, "ranks": ranks, "refused": refused}

if __name__ == "__main__":
    where = Path(sys.argv[2])
    answer = CASES[sys.argv[1]](where)
    (where / f"{sys.argv[1]}.json").write_text(json.dumps(answer))
