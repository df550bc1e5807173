"""What an implementation of sample@1 over FlashInfer's renormalised laws would cost, and where it would be wrong.

    python benchmarks/gpu_flashinfer.py --out $OUT [--seconds 25]

FlashInfer's `softmax`, `top_k_renorm_probs` and `top_p_renorm_probs` give the processed law, over which a draw of ours
could return the token and its log-probability. Here: which rows keep another number of tokens than the definition,
whether the same call gives the same bits twice, and the time of these three calls alone beside all of ours. FlashInfer
is looked for in `.fi/fi_carry.tar.xz`, as by gpu_rollout.py. Outcome: backends/cuda/README.md.

Predictions (H200): normal rows keep what the definition keeps; rows of bf16 differ from the lower-id rule in most rows;
close ones from both rules in all rows. 1, 64 and 1024 rows: 45, 110 and 1100 us beside 8.6, 17 and 148 of ours, whole.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]
from gpu_all import PATHS, environment  # noqa: E402  the scripts beside this one
from gpu_cuda_sampler import timed  # noqa: E402
from gpu_rollout import with_flashinfer  # noqa: E402

V, K, P = 128256, 50, 0.95


def rows(kind: str, B: int) -> torch.Tensor:  # -> [B, V] float32
    """normal: no ties. bfloat16: rounded, so that many tie. close: the first 4 k one ulp apart, of one probability."""
    g = torch.Generator("cuda").manual_seed(B)
    x = 2 * torch.randn(B, V, device="cuda", generator=g)
    if kind == "bfloat16":
        return x.bfloat16().float()
    if kind == "close":
        steps = torch.arange(4 * K, device="cuda", dtype=torch.int32)
        x -= 40
        x[:, : 4 * K] = (torch.tensor(0.01, device="cuda").view(torch.int32) - steps).view(torch.float32)
    return x


def law(x: torch.Tensor) -> torch.Tensor:  # -> [B, V]
    """FlashInfer's processed law, top-k first."""
    from flashinfer import sampling as fi

    k = torch.full((len(x),), K, dtype=torch.int32, device=x.device)
    p = torch.full((len(x),), P, device=x.device)
    return fi.top_p_renorm_probs(fi.top_k_renorm_probs(fi.softmax(x), k), p)


def kept(kind: str, B: int = 64) -> dict[str, Any]:
    """Rows whose number of kept tokens is not the definition's, by its two rules for ties; bits of two calls."""
    from rlkernel_torch.direct import sample

    x = rows(kind, B)
    seed = torch.arange(B, device="cuda")
    found, again = law(x), law(x)
    out: dict[str, Any] = {"rows": B, "other bits the second time": int((found != again).any(1).sum())}
    for tie in ("lowest_id", "keep_all"):
        want = sample(x, top_k=K, top_p=P, tie=tie, seed=seed, step=0).kept_count
        differ = (found > 0).sum(1) != want
        out[f"another number of tokens, {tie}"] = int(differ.sum())
        out[f"tokens, {tie}"] = [int(want.min()), int(want.max())]
    out["tokens"] = [int((found > 0).sum(1).min()), int((found > 0).sum(1).max())]
    return out


def times(B: int) -> dict[str, Any]:
    """Ours whole, and FlashInfer's three calls, its softmax alone too."""
    from flashinfer import sampling as fi
    from rlkernel_bench.direct import of_cuda

    inputs = [rows("normal", B) for _ in range(max(2, min(64, -(-(256 << 20) // (B * V * 4)))))]
    ids = torch.arange(B, device="cuda")
    given = {"temperature": torch.ones(B, device="cuda"), "top_p": torch.full((B,), P, device="cuda")}
    given |= {"top_k": torch.full((B,), K, device="cuda", dtype=torch.int32), "seed": ids, "step": ids}
    ways = {"ours, whole": lambda x: of_cuda.sample(x, **given), "its law": law, "its softmax alone": fi.softmax}
    return {name: round(timed(way, inputs, len(inputs)), 1) for name, way in ways.items()}


def stage(into: Path) -> None:
    """Everything, with FlashInfer on the path."""
    found: dict[str, Any] = {}
    for name, run in (
        *((f"kept, {kind}", lambda kind=kind: kept(kind)) for kind in ("normal", "bfloat16", "close")),
        *((f"us, {B} rows", lambda B=B: times(B)) for B in (1, 64, 1024)),
    ):
        try:
            found[name] = run()
        except Exception as error:  # one must not take the others along
            found[name] = f"{type(error).__name__}: {error}"[:500]
        into.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(f"== {name}: {found[name]}", flush=True)


def main() -> None:
    """In a process of its own, which ends with the time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--stage", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.stage:
        stage(asked.out / "gpu_flashinfer.json")
        return
    environ = environment(*(ROOT / p for p in PATHS), ROOT / "backends" / "triton", ROOT / "backends" / "cuda")
    environ.setdefault("RLKERNEL_CUDA_CACHE", str(Path(tempfile.gettempdir()) / "rlkernel-cubins"))
    command = with_flashinfer([sys.executable, __file__, "--stage", "--out", str(asked.out)])
    began = time.monotonic()
    try:
        subprocess.run(command, cwd=ROOT, env=environ, timeout=asked.seconds, check=False)
    except subprocess.TimeoutExpired:
        print(f"ended after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
