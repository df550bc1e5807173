"""Whole engines of SGLang on a CPU, each in a process of its own: `python -m tests.sglang_runs CASE FOLDER`.

The models are those of `vllm_runs`. SGLang's scheduler, cache and sampler are its own; `sgl_kernel` is a stub
(tests/sglang_stub.py), and attention is torch's. `make hosts` has the environment.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.vllm_rl_runs import rows
from tests.vllm_runs import FILTERS, PROMPTS, SEEDS, TOKENS

ROOT = Path(__file__).parents[1]
PLACES = [str(ROOT / "tests" / "sglang_cpu"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {"PYTHONPATH": ":".join(PLACES), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
SMALL = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "mem_fraction_static": 0.2, "random_seed": 1,
    "disable_cuda_graph": True, "skip_server_warmup": True, "log_level": "warning", "max_running_requests": 8,
}  # fmt: skip


def engine(folder: Path, backend: str = "rlkernel", **options: Any) -> Any:
    import sglang

    more = {"max_total_tokens": 2048, "sampling_backend": backend, **options}
    return sglang.Engine(model_path=str(folder / "model"), **{**SMALL, **more})


def params(seed: int | None = None, **options: Any) -> dict[str, Any]:
    asked = {"temperature": 0.9, "sampling_seed": seed, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {**asked, **options}


def outputs(llm: Any, prompts: list[list[int]], asked: Any) -> list[dict[str, Any]]:
    return llm.generate(input_ids=prompts, sampling_params=asked, return_logprob=True)


def tokens(llm: Any, prompts: list[list[int]], asked: Any) -> list[list[int]]:
    return [out["output_ids"] for out in outputs(llm, prompts, asked)]


def inside(folder: Path) -> dict[str, Any]:
    """Batches that change, what transformers draws, a request that goes on, stop tokens, log-probabilities."""
    from transformers import Qwen2ForCausalLM

    from rlkernel import rollouts
    from rlkernel.integrations import transformers

    llm = engine(folder)
    seeded = [params(s, **FILTERS) for s in SEEDS]
    drawn = outputs(llm, PROMPTS, seeded)
    found: dict[str, Any] = {"together": [out["output_ids"] for out in drawn]}
    found["alone"] = [tokens(llm, [p], [a])[0] for p, a in zip(PROMPTS, seeded, strict=True)]
    llm.flush_cache()
    found["without a cache"] = tokens(llm, PROMPTS, seeded)
    found["other seed"] = tokens(llm, PROMPTS[:1], [params(99, **FILTERS)])
    found["greedy"] = tokens(llm, PROMPTS, [params(temperature=0) for _ in PROMPTS])
    found["top k"] = tokens(llm, PROMPTS, [params(s, top_k=20) for s in SEEDS])
    cut = 5
    resumed = [p + ids[:cut] for p, ids in zip(PROMPTS, found["together"], strict=True)]
    rest = tokens(llm, resumed, [params(s, **FILTERS, max_new_tokens=TOKENS - cut) for s in SEEDS])
    found["resumed"] = [ids[:cut] + more for ids, more in zip(found["together"], rest, strict=True)]
    stop = found["together"][1][3]
    ends = params(SEEDS[1], **FILTERS, stop_token_ids=[stop], ignore_eos=False)
    found["stopped"] = tokens(llm, PROMPTS[1:2], [ends])[0]
    rollouts.write(folder / "rollout", rollouts.from_sglang(PROMPTS, drawn, seeded, weights="w"))
    llm.shutdown()

    model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    longest = max(len(p) for p in PROMPTS)
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    rules = {"max_new_tokens": TOKENS, "eos_token_id": None, "attention_mask": mask}
    drawing = transformers.drawing(SEEDS)
    made = model.generate(padded, custom_generate=drawing, do_sample=True, temperature=0.9, top_k=20, **rules)
    found["transformers"] = made[:, longest:].tolist()
    found["transformers greedy"] = model.generate(padded, do_sample=False, **rules)[:, longest:].tolist()
    return found


def masked(llm: Any, asked: list[dict[str, Any]], wanted: bool | list[bool]) -> list[dict[str, Any]]:
    """What a server's /generate does, which has sampling masks; `Engine.generate` has no argument for them."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=PROMPTS, sampling_params=asked, return_logprob=True, return_sampling_mask=wanted
    )
    return llm.loop.run_until_complete(anext(llm.tokenizer_manager.generate_request(request, None)))


def masks(folder: Path) -> dict[str, Any]:
    """Sampling masks of some requests of a batch, and what a trainer makes of them."""
    import rlkernel as rlk
    from rlkernel import rollouts
    from rlkernel.integrations import sampling_masks

    llm = engine(folder)
    seeded = [params(s, **FILTERS) for s in SEEDS]
    made = masked(llm, seeded, True)
    some = masked(llm, seeded, [n % 2 == 1 for n in range(len(PROMPTS))])
    llm.shutdown()
    drawn = [out["output_ids"] for out in made]
    logits, ids, seed, step = rows(folder, drawn)
    law = {"temperature": 0.9, **FILTERS, "filter_order": "joint", "seed": seed, "step": step}
    again = rlk.sample(logits, **law)
    support = sampling_masks.from_sglang(made)
    scored = rlk.logprob(logits, ids, temperature=0.9, support=support)
    written = rollouts.from_sglang(PROMPTS, made, seeded, weights="w")
    rollouts.write(folder / "masked", written)
    field = "output_token_sampling_mask"
    return {
        "drawn": drawn,
        "some": [out["output_ids"] for out in some],
        "masks of some": [out["meta_info"].get(field) for out in some[1::2]],
        "masks": [out["meta_info"][field] for out in made],
        "asked for no mask": [out["meta_info"].get(field) for out in some[::2]],
        "kept": support.offsets.diff().tolist(),
        "kept again": again.kept_count.tolist(),
        "processed": [p for out in made for p in out["meta_info"]["output_token_sampling_logprobs"]],
        "processed of the trainer": scored.logprob.tolist(),
        "kept mass": [m for r in written.rollouts for m in r.log_kept_mass],
        "kept mass of the trainer": scored.log_kept_mass.tolist(),
    }


def retracted(folder: Path) -> dict[str, Any]:
    """Requests that are sent back and begin again, which SGLANG_TEST_RETRACT makes happen."""
    llm = engine(folder, disable_radix_cache=True)
    made = outputs(llm, PROMPTS, [params(s, **FILTERS) for s in SEEDS])
    llm.shutdown()
    return {
        "tokens": [out["output_ids"] for out in made],
        "retractions": sum(out["meta_info"]["num_retractions"] for out in made),
    }


def stock(folder: Path) -> dict[str, Any]:
    """Without anything of ours that is asked for."""
    llm = engine(folder, "pytorch")
    out = outputs(llm, PROMPTS, [params(**FILTERS) for _ in PROMPTS])
    llm.shutdown()
    return {"drawn": [o["output_ids"] for o in out], "logprobs": [o["meta_info"]["output_token_logprobs"] for o in out]}


CASES = {case.__name__: case for case in (inside, masks, retracted, stock)}

if __name__ == "__main__":
    name, where = sys.argv[1], Path(sys.argv[2])
    (where / f"{name}.json").write_text(json.dumps(CASES[name](where)))
