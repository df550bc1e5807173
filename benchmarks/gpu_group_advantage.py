"""Advantages by group on one GPU: right first, for every kind, then timed beside plain torch.

    PYTHONPATH=.:registry:backends/triton python benchmarks/gpu_group_advantage.py gpu_group_advantage.json

Writes the JSON after every section and prints a line a finding; a section that raises loses itself only. Exits with 1
where a result is wrong. Times in microseconds: `graph` is the GPU's time of a call, from CUDA events around replays of
a graph of 20 calls; `eager` is the host's time of a call that waits for nothing; `first` is that of the first call of
its kind, compilation included. Plain torch is `x.view(-1, G)`, mean, std and a division. Inputs are small enough for
the L2, as they are in a step.

Predictions for an H200, written before the first run: by size 64 rewards 4 us, 64k rewards 6 us a call in a graph; ids
of 64k rewards 15 us, of 2048 in pairs 12 us; eager as much as Triton's own launcher takes for 45 arguments, 40 us.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rlkernel_bench.direct import of_triton

from rlkernel_torch.direct import advantage as definition
from rlkernel_triton.group_advantage.launch import MADE

GROUP = 8
CALLS = 20  # of a graph
SIZES = (64, 65536)
IDS = (64, 2048, 65536)


def batch(kind: str, B: int, group: int | torch.Tensor, seed: int = 0) -> dict[str, Any]:
    """A call of a kind, on the CPU."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, generator=g)
    given: dict[str, Any] = {"rewards": x, "kind": kind, "group": group}
    if kind in {"maxrl", "gpg", "passk"}:
        given["rewards"] = torch.randint(0, 5, (B,), generator=g) / 4
    if kind == "gdpo":
        given |= {"rewards": torch.randn(B, 3, generator=g), "reward_weights": torch.tensor([1.0, 0.5, 2.0])}
    if kind == "gigpo":
        anchor = torch.randint(0, 3, (B,), generator=g)
        given |= {"step_rewards": torch.randn(B, generator=g), "anchor": anchor, "step_weight": 0.8}
    if kind == "opo":
        given["lengths"] = torch.randint(1, 9, (B,), generator=g)
    return given


def shuffled(B: int) -> torch.Tensor:
    """Ids of groups of 8, in no order, spread over 64 bits."""
    g = torch.Generator().manual_seed(7)
    return (torch.arange(B) // GROUP * 0x12345678901 - 2**50)[torch.randperm(B, generator=g)]


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    """The same call on the GPU."""
    return {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in given.items()}


def plain(x: torch.Tensor) -> torch.Tensor:
    """Grpo in plain torch, without an answer to anything invalid."""
    rows = x.view(-1, GROUP)
    return ((rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-6)).view(-1)


def checked(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """The largest error against the reference in float64 on the CPU, twice the same bits, and statistics."""
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}
    want, here = definition(**wide), on_gpu(given)
    start = time.perf_counter()
    out = of_triton.advantage(**here)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    again = of_triton.advantage(**here)
    error = (out.advantages.cpu().double() - want.advantages).abs()
    allowed = 2e-5 * torch.clamp(want.advantages.abs(), min=float(max(1.0, given["rewards"].abs().max())))
    worst = float((error / allowed).max())
    count = bool((out.stats.group_count.cpu() == want.stats.group_count).all())
    constant = bool((out.stats.constant.cpu() == want.stats.constant).all())
    std = float((out.stats.group_std.cpu().double() - want.stats.group_std).abs().max())
    same = torch.equal(out.advantages, again.advantages)
    right = worst <= 1 and count and constant and same and std < 1e-4
    return {
        "kind": kind, "right": right, "error": float(error.max()), "error_over_tolerance": worst, "std_error": std,
        "same_counts": count, "same_constant": constant, "same_bits_twice": same, "first_us": first * 1e6,
    }  # fmt: skip


def in_graph(call: Callable[[], Any], repeats: int = 30) -> float:
    """Microseconds of the GPU for a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for _ in range(CALLS)]
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    del kept
    return statistics.median(times)


def eager(call: Callable[[], Any], repeats: int = 15) -> float:
    """Microseconds of the host for a call, the GPU's queue not full."""
    for _ in range(10):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) * 1e6 / CALLS)
    return statistics.median(times)


def timed(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """A call in a graph and eagerly."""
    here = on_gpu(given)

    def call() -> Any:
        return of_triton.advantage(**here)

    torch.cuda.set_sync_debug_mode("error")  # a call that waits for the GPU raises
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"case": name, "graph_us": in_graph(call), "eager_us": eager(call)}


def graph_is_right(B: int) -> dict[str, Any]:
    """Recorded on one batch, replayed on another: with other rewards and ids."""
    first, second = (on_gpu(batch("grpo", B, shuffled(B), seed)) for seed in (1, 2))
    second["group"] = second["group"].flip(0)
    want = of_triton.advantage(**second).advantages
    of_triton.advantage(**first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = of_triton.advantage(**first)
    for name in ("rewards", "group"):
        first[name].copy_(second[name])
    graph.replay()
    torch.cuda.synchronize()
    return {"kind": f"replayed, {B} ids", "right": torch.equal(out.advantages, want)}


def main(path: Path) -> int:
    """Run all sections; 1 where a result is wrong."""
    import triton

    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "right": [], "times": [], "failed": [],
    }  # fmt: skip

    def section(into: str, make: Callable[[], dict[str, Any]]) -> None:
        try:
            row = make()
            found[into].append(row)
            print(json.dumps(row), flush=True)
        except Exception:
            found["failed"].append(traceback.format_exc())
            print(found["failed"][-1], flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")

    B = 4096
    groupings: dict[str, tuple[int, int | torch.Tensor]] = {
        "groups of 8": (B, GROUP),
        "groups of 1024": (B, 1024),
        "ids in pairs": (512, shuffled(512)),
        "ids by table": (B, shuffled(B)),
    }
    for kind in sorted(MADE):
        for name, (rows, group) in groupings.items():
            section("right", lambda k=kind, n=name, r=rows, g=group: checked(f"{k}, {n}", batch(k, r, g)))
    for rows in (512, 65536):
        section("right", lambda r=rows: graph_is_right(r))
    for rows in SIZES:
        x = torch.randn(rows, device="cuda")
        section(
            "times",
            lambda x=x: {"case": f"plain torch, {len(x)}", "graph_us": in_graph(lambda: plain(x)),
                         "eager_us": eager(lambda: plain(x))},
        )  # fmt: skip
        for kind in sorted(MADE):
            section("times", lambda k=kind, r=rows: timed(f"{k}, groups of 8, {r}", batch(k, r, GROUP)))
    for rows in IDS:
        section("times", lambda r=rows: timed(f"grpo, ids, {r}", batch("grpo", r, shuffled(r))))
    section("times", lambda: timed("grpo, one group of 65536", batch("grpo", 65536, 65536)))
    section("times", lambda: timed("grpo, one id of 65536", batch("grpo", 65536, torch.zeros(65536, dtype=torch.long))))
    wrong = [row["kind"] for row in found["right"] if not row["right"]]
    print(f"{len(found['right'])} checked, wrong: {wrong}; failed: {len(found['failed'])}")
    return 1 if wrong or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
