"""What a draw costs that states the trainer's number, and which bits differ; one GPU, Triton.

    python benchmarks/gpu_trainer_bits.py --output trainer_bits.json

A head of 128256 ids and width 4096 in bf16. Of each number of rows, in CUDA graphs, microseconds of

    draw            lm_head_sample
    draw_and_score  the same, and linear_logprob of the drawn tokens
    trainer_bits    lm_head_sample under need = ["trainer_bits"], which states that number

and how many of its `logprob + log_kept_mass` differ in a bit from linear_logprob's, and how many tokens from `draw`'s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rlkernel as rlk
from rlkernel_core.files import write_json

V, D, T = 128256, 4096, 0.7
ROWS = (1, 32, 64, 128, 256, 512)
LAWS: tuple[dict[str, float], ...] = ({}, {"top_p": 0.95})


def timed(run: Callable[[], Any], turns: int = 50) -> float:
    """Microseconds of a captured call."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(turns):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) / turns * 1000, 1)


def row(n: int, law: dict[str, float], weight: torch.Tensor) -> dict[str, Any]:
    """Times and differences of `n` rows under a law."""
    hidden = torch.randn(n, D, device="cuda", dtype=torch.bfloat16)
    seed = torch.arange(n, device="cuda")

    def draw() -> rlk.SampleResult:
        return rlk.lm_head_sample(hidden, weight, temperature=T, seed=seed, step=3, **law)

    def score(token: torch.Tensor) -> torch.Tensor:
        return rlk.linear_logprob(hidden, weight, token, temperature=T).logprob

    with rlk.use("triton", fallback="error"):
        found = {"rows": n, **law, "draw": timed(draw), "draw_and_score": timed(lambda: score(draw().token))}
        with rlk.use("triton", fallback="error", need=["trainer_bits"]):
            found["trainer_bits"] = timed(draw)
            stated = draw()
        found["bits_differ"] = int((stated.logprob + stated.log_kept_mass != score(stated.token)).sum())
        found["tokens_differ"] = int((stated.token != draw().token).sum())
    return found


def main() -> None:
    """Every number of rows under every law."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    weight = torch.randn(V, D, device="cuda", dtype=torch.bfloat16) / 64
    rows = [row(n, law, weight) for n in ROWS for law in LAWS]
    result = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "head": {"V": V, "D": D, "dtype": "bfloat16"},
        "temperature": T,
        "microseconds": rows,
    }
    if given.output is not None:
        write_json(given.output, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
