"""A whole engine of vLLM, stock and with rlkernel's draw and weights: what agrees, and tokens a second; one GPU.

    python benchmarks/gpu_vllm.py --toy                    # vLLM's build for a CPU, minutes in Triton's interpreter
    python benchmarks/gpu_vllm.py --output vllm.json       # Qwen3-0.6B's shape, random weights

Each engine runs in a process of its own:

    stock   vLLM's own sampler
    ours    --logits-processors rlkernel.integrations.vllm_worker:Draw
    int4    the same, and --quantization rlkernel: weights in int4_g128

Of each: whether a seeded request draws the same tokens alone and in a batch, seconds for a batch of requests with
top-p (seeded, as a rollout that shall be drawn again, and unseeded), and how far transformers' log-probabilities of
the drawn tokens are from those that the engine states. Of ours also what a record of the rollout explains
(`rollouts.verify`), and what ran. Random weights have flat laws; the head is scaled so that some tokens are likely.
The toy has run on a CPU, and all three on an H200 (benchmarks/results/h200/vllm.json).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlkernel_core.files import write_json

QWEN3_06B = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
TOY = {
    "vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
DRAW = "rlkernel.integrations.vllm_worker:Draw"
RECORD = "rlkernel.integrations.vllm_worker.Record"
LAW = {"temperature": 0.9, "top_p": 0.95}
ENGINES = {
    "stock": {},
    "ours": {"logits_processors": [DRAW], "worker_extension_cls": RECORD},
    "int4": {"logits_processors": [DRAW], "worker_extension_cls": RECORD, "quantization": "rlkernel"},
}
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
INTERPRETED = {"TRITON_INTERPRET": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--engines", default="stock,ours,int4")
    parser.add_argument("--batches", default=None, help="numbers of requests that are timed")
    parser.add_argument("--new", type=int, help="tokens of a request that is timed")
    parser.add_argument("--turns", type=int, default=3, help="times that each batch is run")
    parser.add_argument("--graphs", action="store_true", help="decode steps in CUDA graphs; else eager")
    parser.add_argument("--invariant", action="store_true", help="vLLM's own batch-invariant kernels below the draw")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # in the process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.batches = given.batches or ("2" if given.toy else "64,256")
    given.new = given.new or (4 if given.toy else 128)
    return given


def model(given: argparse.Namespace, folder: Path) -> None:
    """Random weights, saved as a model of transformers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**(TOY if given.toy else QWEN3_06B), eos_token_id=1, pad_token_id=0)
    with torch.device("cpu" if given.toy else "cuda"):
        made = transformers.Qwen3ForCausalLM(config).to(torch.float32 if given.toy else torch.bfloat16)
    with torch.no_grad():
        made.lm_head.weight.mul_(6)
    made.save_pretrained(folder)


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Prompts of 4 to 32 ids."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 33, (count,), generator=generator).tolist()
    return [torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def timed(
    given: argparse.Namespace,
    vocabulary: int,
    generate: Callable[[list[list[int]], Any], object],
    law: Callable[[int | None], Any],
) -> dict[str, Any]:
    """Seconds of each batch, seeded and unseeded; `law` gives the parameters of a request with a seed."""
    found: dict[str, Any] = {}
    for count in map(int, given.batches.split(",")):
        rows = prompts(count, vocabulary)
        for name, each in (("seeded", [law(n) for n in range(count)]), ("unseeded", law(None))):
            generate(rows, each)  # compiles
            turns = []
            for _ in range(given.turns):
                start = time.perf_counter()
                generate(rows, each)
                turns.append(time.perf_counter() - start)
            found[f"{count} {name}"] = {"median": statistics.median(turns), "all": turns}
            print(f"{given.engine} {count} {name}: {turns}", file=sys.stderr, flush=True)
    return found


def engine(given: argparse.Namespace) -> dict[str, Any]:
    """What one engine does, in this process."""
    from vllm import LLM, SamplingParams

    device = "cpu" if given.toy else "cuda"
    options: dict[str, Any] = {
        "enforce_eager": not given.graphs, "dtype": "float32" if given.toy else "bfloat16", "skip_tokenizer_init": True,
        "max_model_len": 96 if given.toy else 512, "max_num_seqs": 8 if given.toy else 256, "seed": 0,
    }  # fmt: skip
    if not given.toy:
        options |= {"attention_backend": "TRITON_ATTN", "kv_cache_memory_bytes": 8 << 30, "gpu_memory_utilization": 0.5}
    if given.graphs:
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    llm = LLM(model=str(given.folder / "model"), **options, **ENGINES[given.engine])
    vocabulary = (TOY if given.toy else QWEN3_06B)["vocab_size"]
    some = prompts(4 if given.toy else 32, vocabulary)

    def params(seed: int | None, new: int, **more: Any) -> Any:
        return SamplingParams(**LAW, seed=seed, max_tokens=new, ignore_eos=True, detokenize=False, **more)

    def generate(rows: list[list[int]], asked: Any) -> list[Any]:
        return llm.generate([{"prompt_token_ids": ids} for ids in rows], asked, use_tqdm=False)

    def tokens(made: list[Any]) -> list[int]:
        return [i for out in made for i in out.outputs[0].token_ids]

    found: dict[str, Any] = {}
    new = given.new
    asked = [params(n, new, logprobs=0) for n in range(len(some))]
    made = generate(some, asked)
    together = tokens(made)
    alone = [tokens(generate([ids], each)) for ids, each in zip(some[:4], asked, strict=False)]
    found["requests_alone_as_in_the_batch"] = [one == together[new * n :][:new] for n, one in enumerate(alone)]
    found["batch_drawn_again_is_the_same"] = tokens(generate(some, asked)) == together
    found["seconds"] = timed(given, vocabulary, generate, lambda seed: params(seed, new))
    if given.engine != "stock":
        from rlkernel import record

        folder = given.folder / given.engine
        llm.collective_rpc("rlkernel_record", args=(str(folder),))
        found["ran"] = [str(each) for each in record.read(folder)[1]]
        found["through"] = [str(entry) for entry in record.through(folder)]
    if given.engine != "int4":
        found["scored"] = scored(given, made, asked, device)
    return found


def scored(given: argparse.Namespace, made: list[Any], asked: list[Any], device: str) -> dict[str, Any]:
    """What transformers says of the drawn tokens, and what a record of them explains."""
    import transformers

    from rlkernel import rollouts

    judge = transformers.AutoModelForCausalLM.from_pretrained(given.folder / "model", dtype="auto").to(device).eval()
    apart = []
    for out in made:
        drawn = out.outputs[0]
        ids = torch.tensor([[*out.prompt_token_ids, *drawn.token_ids]], device=device)
        with torch.no_grad():
            law = judge(ids[:, :-1]).logits[0, len(out.prompt_token_ids) - 1 :].float().log_softmax(-1)
        said = [row[i].logprob for row, i in zip(drawn.logprobs, drawn.token_ids, strict=True)]
        apart.append(law.gather(1, ids[0, len(out.prompt_token_ids) :, None])[:, 0].cpu() - torch.tensor(said))
    every = torch.cat(apart).abs()
    found: dict[str, Any] = {"tokens": len(every), "drift_mean": float(every.mean()), "drift_max": float(every.max())}
    if given.engine == "ours":
        record = rollouts.from_vllm(made[:4], asked[:4], weights="w")
        tolerance = 1e-3 if given.toy else 0.25
        told = rollouts.verify(record, rollouts.pretrained(given.folder / "model", device=device), tolerance=tolerance)
        found["record"] = {"tokens": 4 * given.new, "tolerance": tolerance, "ok": told.ok, "same": told.same}
    return found


def in_a_process(script: str, options: list[str], file: Path, **variables: str) -> dict[str, Any]:
    """What an engine wrote to a file, in a process of its own; how it ended where it failed."""
    done = subprocess.run([sys.executable, script, *options], check=False, env={**os.environ, **variables})  # noqa: S603 - ours
    return {"failed": done.returncode} if done.returncode else json.loads(file.read_text(encoding="utf-8"))


def tell(result: dict[str, Any]) -> None:
    """Print the result.

    Raises:
        SystemExit: an engine failed.
    """
    print(json.dumps(result, indent=1))
    failed = [name for name, found in result["engines"].items() if "failed" in found]
    if failed:
        raise SystemExit(
            f"{', '.join(failed)}: the engine ended with an error, which stands above; leave it out with --engines"
        )


def main(words: list[str] | None = None) -> None:
    """Every engine, each in a process of its own."""
    given = arguments(words)
    if given.engine:
        found = engine(given)
        write_json(given.folder / f"{given.engine}.json", found)
        return
    import vllm

    invariant = {"VLLM_BATCH_INVARIANT": "1"} if given.invariant else {}
    os.environ.update({**ENVIRONMENT, **invariant, **(INTERPRETED if given.toy else {})})
    result: dict[str, Any] = {
        "arguments": {n: x for n, x in vars(given).items() if n not in {"output", "engine", "folder"}},
        "model": TOY if given.toy else QWEN3_06B,
        "law": LAW,
        "device": platform.processor() if given.toy else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "vllm": vllm.__version__},
        "engines": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        model(given, Path(folder) / "model")
        for name in given.engines.split(","):
            options = ["--folder", folder, "--engine", name, "--batches", given.batches, "--new", str(given.new)]
            options += ["--turns", str(given.turns)]
            options += [f"--{option}" for option in ("toy", "graphs") if getattr(given, option)]
            result["engines"][name] = in_a_process(__file__, options, Path(folder) / f"{name}.json")
            if given.output is not None:
                write_json(given.output, result)
    tell(result)


if __name__ == "__main__":
    main()
