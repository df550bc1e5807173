"""Ranks on the GPUs of one machine, through NCCL: a split vocabulary drawn from, collectives captured, and agreement.

    python benchmarks/gpu_ranks.py --out $OUT [--seconds 75]

As many ranks as there are GPUs, one included. Checks before it times. `--device cpu` plays the same over gloo, with two
ranks, small. Writes gpu_ranks.json.

Predictions, written before the first run (four H200, 64 rows of 151936): every bit equal on every rank; a draw by
candidates 2 ms (float64 passes of the reference and a sort of a quarter of a row), by gathered logits and our kernels
0.4 ms; a captured all-reduce right on every rank; ranks with different sizes are refused within a second.
Found: as predicted but for candidates, 12.8 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]
from gpu_all import PATHS, distributions  # noqa: E402  the script beside this one

LAWS: dict[str, dict[str, Any]] = {
    "no filter": {"raw_logprob": True},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "min-p 0.05, kept ids": {"min_p": 0.05, "kept_capacity": 64},
    "top-p 0.999, flat": {"top_p": 0.999, "temperature": 3.0},  # more than is sent
}


def differing(want: Any, have: Any) -> list[str]:
    """Names of the results whose bits differ."""
    import torch

    pairs = {f.name: (getattr(want, f.name), getattr(have, f.name)) for f in fields(want)}
    same = {
        n: a is b if a is None else torch.equal(a.nan_to_num(nan=7e7), b.nan_to_num(nan=7e7))
        for n, (a, b) in pairs.items()
    }
    return [name for name, equal in same.items() if not equal]


def shards(rank: int, ranks: int, device: Any, rows: int, width: int) -> dict[str, Any]:
    """Every bit beside the reference's draw of the joined rows, then the time of a call."""
    import torch
    from torch import distributed as dist

    from rlkernel.distributed import sample_shard
    from rlkernel_torch.direct import sample

    x = 4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    x = x.to(device)
    mine, seed = x.chunk(ranks, 1)[rank].contiguous(), torch.arange(rows, device=device)
    sizes = tuple(part.shape[1] for part in x.chunk(ranks, 1))
    found: dict[str, Any] = {}
    for name, law in LAWS.items():
        request = {**law, "seed": seed, "step": 3}
        ways = {"candidates": 128, "gathered": 0}
        draws = {
            way: sample_shard(mine, group=dist.group.WORLD, sizes=sizes, candidates=c, **request)
            for way, c in ways.items()
        }
        want = sample(x, **request)
        row: dict[str, Any] = {"differ": differing(want, draws["candidates"])}
        row["other tokens when gathered"] = int((draws["gathered"].token != want.token).sum())
        for way, c in ways.items():
            row[f"{way}, us"] = microseconds(
                lambda c=c, r=request: sample_shard(mine, group=dist.group.WORLD, sizes=sizes, candidates=c, **r),
                device,
            )
        found[name] = row
    return found


def microseconds(call: Any, device: Any) -> float:
    """Median of host time with the device waited for, all ranks together."""
    import torch
    from torch import distributed as dist

    times = []
    for _ in range(12):
        dist.barrier()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return round(statistics.median(times[2:]), 1)


def graphs(rank: int, ranks: int, device: Any, rows: int, width: int) -> dict[str, Any]:
    """Collectives in a graph; ranks that would capture differently, or of which one cannot."""
    import torch
    from torch import distributed as dist

    import rlkernel as rlk
    from rlkernel.distributed import sample_shard
    from rlkernel_core.errors import CaptureError

    def reduced(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    x = torch.full((8,), rank + 1.0, device=device)
    total = 2 * sum(range(1, ranks + 1))
    g = rlk.capture(reduced, (x,), collectives=True, buckets=(rlk.Bucket({"x": 0}, (8, 16)),))
    found: dict[str, Any] = {"sums": [bool((g(x[:n] * k) == total * k + 1).all()) for n, k in ((8, 1), (3, 5), (8, 2))]}
    began = time.perf_counter()
    try:
        rlk.capture(reduced, (torch.ones(8 + rank, device=device),), collectives=True)
        said = "captured"
    except CaptureError as error:
        said = str(error).splitlines()[1][:200]
    found["other sizes"] = [said, round(time.perf_counter() - began, 2)]

    def one_looks(x: torch.Tensor) -> torch.Tensor:
        y = reduced(x)
        return y * float(y[0]) if rank == ranks - 1 else y

    try:
        rlk.capture(one_looks, (x,), collectives=True)
        found["one cannot"] = "captured"
    except CaptureError as error:
        found["one cannot"] = str(error)[:200]
    found["afterwards"] = bool((g(x) == total + 1).all())

    logits = (4 * torch.randn(rows, width, generator=torch.Generator().manual_seed(1))).to(device)
    part, seed = logits.chunk(ranks, 1)[rank].contiguous(), torch.arange(rows, device=device)

    def draw(part: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return sample_shard(part, group=dist.group.WORLD, candidates=0, seed=seed, step=at, top_k=50, top_p=0.95).token

    step = rlk.capture(draw, (part, torch.zeros(rows, dtype=torch.int64, device=device)), collectives=True)
    at = torch.full((rows,), 5, dtype=torch.int64, device=device)
    found["draw in a graph"] = torch.equal(
        step(part, at), rlk.sample(logits, seed=seed, step=at, top_k=50, top_p=0.95).token
    )
    found["draw in a graph, us"] = microseconds(lambda: step(part, at), device)
    found["served by"] = f"{rlk.last_decision('capture').backend}, {rlk.last_decision('sample').backend}"
    return found


def play(rank: int, ranks: int, asked: argparse.Namespace, folder: str, paths: list[str]) -> None:
    """One rank; the first writes what it found after every section."""
    sys.path[:0] = paths
    import torch
    from torch import distributed as dist

    device = torch.device("cpu") if asked.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rows, width = (64, 151936) if device.type == "cuda" else (8, 4000)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=40),
    )
    found: dict[str, Any] = {"ranks": ranks}
    for section in (graphs, shards):
        try:
            found[section.__name__] = section(rank, ranks, device, rows, width // ranks * ranks)
        except Exception:  # one section must not take the other along
            found[section.__name__] = {"error": traceback.format_exc()[-2500:]}
        if rank == 0:
            (asked.out / "gpu_ranks.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(f"== {section.__name__}: {json.dumps(found[section.__name__])[:3000]}", flush=True)
        elif "error" in found[section.__name__]:
            print(f"rank {rank}: {found[section.__name__]['error']}", flush=True)
    os._exit(0)  # a communicator whose ranks disagree would wait for them while it is taken down


def main() -> int:
    """As many processes as there are GPUs, ended when the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folders = distributions(Path(temporary))
        for name in ("reference", "template"):
            folders.pop(name, None)
        if asked.device != "cpu":
            for name in [n for n in folders if n not in {"triton", "cuda"}]:
                folders.pop(name)
        paths = [temporary, *(str(ROOT / p) for p in PATHS), *map(str, folders.values())]
        sys.path[:0] = paths
        import torch
        from torch import multiprocessing as mp

        ranks = 2 if asked.device == "cpu" else torch.cuda.device_count()
        context = mp.get_context("spawn")
        playing = [context.Process(target=play, args=(r, ranks, asked, temporary, paths)) for r in range(ranks)]
        for process in playing:
            process.start()
        until = time.monotonic() + asked.seconds
        for process in playing:
            process.join(max(0.1, until - time.monotonic()))
            if process.is_alive():
                print("out of time", flush=True)
                process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
