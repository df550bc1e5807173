"""A whole engine of SGLang, with its own sampler and with rlkernel's: what agrees, and seconds; one GPU.

    python benchmarks/gpu_sglang.py --toy                      # on a CPU
    python benchmarks/gpu_sglang.py --output sglang.json       # Qwen3-0.6B's shape, random weights

SGLang's scheduler, cache, Triton attention and sampler are its own. Its compiled part, `sgl_kernel`, may be absent:
tests/sglang_stub.py stands for it, SGLANG_FORCE_FUSED_OP_BACKEND=torch takes layers in plain torch, and steps are not
in CUDA graphs. Each engine runs in a process of its own:

    pytorch    --sampling-backend pytorch, SGLang's own
    rlkernel   --sampling-backend rlkernel

Of each: seconds for a batch of requests with top-p. Of ours also whether a seeded request draws the same tokens alone
and in a batch, and what a record of the rollout explains (`rollouts.verify`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_vllm import LAW, QWEN3_06B, TOY, in_a_process, model, prompts, tell, timed

from rlkernel_core.files import write_json

ROOT = Path(__file__).parents[1]
ENGINES = ("pytorch", "rlkernel")
TOLERANCE = {True: 1e-3, False: 0.25}  # nats, of fp32 and of bf16


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--batches", help="numbers of requests that are timed")
    parser.add_argument("--new", type=int, help="tokens of a request")
    parser.add_argument("--turns", type=int, default=3, help="times that each batch is run")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # in the process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.batches = given.batches or ("2" if given.toy else "64,256")
    given.new = given.new or (4 if given.toy else 128)
    return given


def engine(given: argparse.Namespace) -> dict[str, Any]:
    """What one engine does, in this process and those that it starts."""
    import sglang

    options = {
        "skip_tokenizer_init": True, "random_seed": 1, "disable_cuda_graph": True, "skip_server_warmup": True,
        "log_level": "warning", "sampling_backend": given.engine,
        "disable_radix_cache": True,  # its Rust part is compiled for one version of torch
    }  # fmt: skip
    if given.toy:
        options |= {"device": "cpu", "dtype": "float32", "mem_fraction_static": 0.2, "max_total_tokens": 2048}
        options |= {"max_running_requests": 8}
    else:
        options |= {"device": "cuda", "dtype": "bfloat16", "attention_backend": "triton", "max_total_tokens": 65536}
        options |= {"max_running_requests": 256, "context_length": 512}
    llm = sglang.Engine(model_path=str(given.folder / "model"), **options)
    vocabulary = (TOY if given.toy else QWEN3_06B)["vocab_size"]

    def law(seed: int | None) -> dict[str, Any]:
        return {**LAW, "sampling_seed": seed, "max_new_tokens": given.new, "ignore_eos": True}

    def generate(rows: list[list[int]], asked: Any, *, logprob: bool = False) -> list[dict[str, Any]]:
        return llm.generate(input_ids=rows, sampling_params=asked, return_logprob=logprob)

    found: dict[str, Any] = {"seconds": timed(given, vocabulary, generate, law)}
    if given.engine == "rlkernel":
        rows = prompts(4 if given.toy else 32, vocabulary)
        asked = [law(n) for n in range(len(rows))]
        made = generate(rows, asked, logprob=True)
        together = [out["output_ids"] for out in made]
        alone = [generate([ids], [each])[0]["output_ids"] for ids, each in zip(rows[:4], asked, strict=False)]
        found["requests_alone_as_in_the_batch"] = [a == b for a, b in zip(alone, together, strict=False)]
        found["batch_drawn_again_is_the_same"] = [o["output_ids"] for o in generate(rows, asked)] == together
        found["record"] = explained(given, rows[:4], made[:4], asked[:4])
    llm.shutdown()
    return found


def explained(
    given: argparse.Namespace, rows: list[list[int]], made: list[dict[str, Any]], asked: list[dict[str, Any]]
) -> dict[str, Any]:
    """What a record of these requests explains from transformers' logits."""
    from rlkernel import rollouts

    record = rollouts.from_sglang(rows, made, asked, weights="w")
    judge = rollouts.pretrained(given.folder / "model", device="cpu" if given.toy else "cuda")
    told = rollouts.verify(record, judge, tolerance=TOLERANCE[given.toy])
    tokens = len(rows) * given.new
    return {"tokens": tokens, "tolerance": TOLERANCE[given.toy], "ok": told.ok, "same": told.same}


def main(words: list[str] | None = None) -> None:
    """Every engine, each in a process of its own."""
    given = arguments(words)
    if given.engine:
        write_json(given.folder / f"{given.engine}.json", engine(given))
        return
    import sglang

    places = [str(ROOT / "tests" / "sglang_cpu"), str(ROOT), *sys.path]  # of the processes that an engine starts
    environment = {
        "PYTHONPATH": ":".join(places), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    }  # fmt: skip
    if not given.toy:
        environment["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"
    os.environ.update(environment)
    result: dict[str, Any] = {
        "arguments": {n: x for n, x in vars(given).items() if n not in {"output", "engine", "folder"}},
        "model": TOY if given.toy else QWEN3_06B,
        "law": LAW,
        "device": "cpu" if given.toy else torch.cuda.get_device_name(),
        "environment": {n: x for n, x in environment.items() if n.startswith("SGLANG")},
        "versions": {"torch": torch.__version__, "sglang": sglang.__version__},
        "engines": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        model(given, Path(folder) / "model")
        for name in given.engines.split(","):
            options = ["--folder", folder, "--engine", name, "--batches", given.batches, "--new", str(given.new)]
            options += ["--turns", str(given.turns), *(["--toy"] if given.toy else [])]
            ran = {"RLKERNEL_RECORD": str(Path(folder) / "ran")} if name == "rlkernel" else {}
            found = in_a_process(__file__, options, Path(folder) / f"{name}.json", **ran)
            if ran and "failed" not in found:
                from rlkernel import record

                found["ran"] = [str(each) for each in record.read(Path(folder) / "ran")[1]]
            result["engines"][name] = found
            if given.output is not None:
                write_json(given.output, result)
    tell(result)


if __name__ == "__main__":
    main()
