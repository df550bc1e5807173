"""The Triton kernels of logprob and linear_logprob on one GPU: right first, then timed. One call, no network.

    PYTHONPATH=.:registry:conformance:backends/triton OUT=/tmp/out python benchmarks/gpu_triton_logprob.py

First every check and one untimed round of every timing run at once, in processes of their own, which fills Triton's
cache; then the timings alone, one after the other. Whatever has ended stands in $OUT/triton_logprob.json; what fails
says so and stops nothing else. Matmul timings are medians of calls in random order, given beside cuBLAS's own logits
matmul of the same rounds, because a card under its power cap has no other yardstick.
One file over 400 lines, since it compares tiles that do not ship: those that do are timed by `rlkernel bench`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton

from rlkernel.discover import guarded
from rlkernel_core.reference.linear_logprob import linear_logprob as linear_definition
from rlkernel_core.reference.logprob import logprob as definition
from rlkernel_core.spec.logprob import Support
from rlkernel_triton import head_calls, logprob_kernels
from rlkernel_triton.head_tiles import Tile
from rlkernel_triton.linear_logprob import linear_logprob
from rlkernel_triton.logprob import logprob

OUT = Path(os.environ.get("OUT", "."))
BUDGET_S = float(os.environ.get("BUDGET_S", "100"))
BEGUN = time.monotonic()
FOUND: dict[str, Any] = {}
WARM = "--warm" in sys.argv  # once, untimed
DEVICE = os.environ.get("DEVICE", "cuda")


CHECKS: dict[str, Callable[[], Any]] = {}
TIMINGS: dict[str, Callable[[], Any]] = {}


def outcome(run: Callable[[], Any]) -> Any:
    """What a section returns, or why it failed."""
    result, error = guarded(run)
    if error is None:
        return result
    where = "".join(traceback.format_exception(error))
    return {"failed": f"{type(error).__name__}: {error}"[:2000], "where": where[-1500:]}


def times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call, all in random order in every round."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    if WARM:
        rounds = 1
    order, events = list(calls), {n: [] for n in calls}
    draw = random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            calls[name]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {n: round(statistics.median(a.elapsed_time(b) for a, b in e), 4) for n, e in events.items()}


def extra(call: Callable[[], Any]) -> float:
    """GiB at the peak beyond what was there and what stays."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    gib = (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) / 2**30
    del kept
    return round(gib, 3)


def total(out: Any) -> torch.Tensor:
    """A sum with another weight for every result."""
    found = [x for x in (out.logprob, out.lse, out.entropy, out.log_kept_mass) if x is not None]
    weights = torch.linspace(-1, 1, found[0].numel(), device=DEVICE)
    return sum((x.nan_to_num().reshape(-1) * weights.to(x.dtype) * (i + 1)).sum() for i, x in enumerate(found))


def errors(mine: Any, theirs: Any) -> dict[str, float]:
    """Largest error of each result."""
    names = ("logprob", "lse", "entropy", "log_kept_mass", "top_logprobs")
    pairs = {n: (getattr(mine, n), getattr(theirs, n)) for n in names}
    return {
        n: float(f"{(a.double() - b).abs().nan_to_num().max():.2e}") for n, (a, b) in pairs.items() if b is not None
    }


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float(f"{(a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30):.2e}")


def kept(N: int, V: int) -> Support:
    """Each row keeps every 97th id from its own number on."""
    rows = [torch.arange(i % V, V, 97) for i in range(N)]
    return Support(torch.cat(rows).to(DEVICE), torch.tensor([0, *[len(r) for r in rows]]).cumsum(0).to(DEVICE))


def machine() -> dict[str, Any]:
    """What this was measured on."""
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": sys.version.split()[0], "capability": torch.cuda.get_device_capability(),
    }  # fmt: skip


def logprob_is_right() -> dict[str, Any]:
    """Every option against the float64 reference, bits, sizes past 2^31."""
    found: dict[str, Any] = {}
    g = torch.Generator(DEVICE).manual_seed(0)
    cases = {
        "bf16": (33, 128256, torch.bfloat16, {"entropy": True, "temperature": 0.7}),
        "fp32": (7, 50257, torch.float32, {"entropy": True}),
        "fp16 cap": (9, 151936, torch.float16, {"entropy": True, "softcap": 30.0}),
        "bf16 everything": (16, 32001, torch.bfloat16, {
            "entropy": True, "softcap": 20.0, "temperature": torch.linspace(0.5, 2, 16, device=DEVICE),
            "mask": torch.arange(16, device=DEVICE) % 5 != 2, "support": kept(16, 32001), "top_logprobs": 7}),
        "V=1": (4, 1, torch.float32, {"entropy": True}),
    }  # fmt: skip
    for name, (N, V, dtype, options) in cases.items():
        x = (3 * torch.randn(N, V, device=DEVICE, generator=g)).to(dtype)
        ids = torch.randint(0, V, (N,), device=DEVICE, generator=g)
        x[::3].scatter_(1, ids[::3, None], 22.0)
        mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        out, want = logprob(mine, ids, **options), definition(theirs, ids, **options)
        total(out).backward()
        total(want).backward()
        found[name] = {**errors(out, want), "gradient": relative(mine.grad, theirs.grad)}
        if out.top_ids is not None:
            found[name]["same top ids"] = torch.equal(out.top_ids, want.top_ids)
    x = (3 * torch.randn(64, 128256, device=DEVICE, generator=g)).bfloat16()
    ids = torch.randint(0, 128256, (64,), device=DEVICE, generator=g)
    whole = logprob(x, ids, entropy=True)
    padded = torch.zeros(64, 128263, device=DEVICE, dtype=x.dtype)
    padded[:, 3:-4] = x
    found["same bits"] = {
        name: bool(torch.equal(out.logprob, whole.logprob[at]) and torch.equal(out.entropy, whole.entropy[at]))
        for name, out, at in (
            ("one row", logprob(x[17:18], ids[17:18], entropy=True), slice(17, 18)),
            ("flipped", logprob(x.flip(0), ids.flip(0), entropy=True), torch.arange(63, -1, -1, device=DEVICE)),
            ("unaligned", logprob(padded[:, 3:-4], ids, entropy=True), slice(None)),
            ("with gradient", logprob(x.clone().requires_grad_(), ids, entropy=True), slice(None)),
        )
    }
    far = torch.zeros(17000, 128256, device=DEVICE, dtype=torch.bfloat16)  # 2.18e9 numbers: past 2^31
    far[-1] = x[0]
    out = logprob(far, ids[:1].expand(17000), entropy=True)
    found["past 2^31"] = bool(torch.equal(out.logprob[-1], whole.logprob[0]))
    del far, out
    wide = torch.randn(70000, 64, device=DEVICE, generator=g).requires_grad_()
    out = logprob(wide, torch.zeros(70000, dtype=torch.int64, device=DEVICE), entropy=True)
    out.logprob.sum().backward()
    found["70000 rows"] = relative(out.logprob, wide.detach().double().log_softmax(-1)[:, 0])
    return found


def logprob_in_time() -> dict[str, Any]:
    """8192 x 128256 in bf16, with entropy: configurations of both kernels, in random order."""
    N, V = 8192, 128256
    x = torch.randn(N, V, device=DEVICE, dtype=torch.bfloat16).mul_(3)
    ids = torch.randint(0, V, (N,), device=DEVICE)
    leaf, up = x.clone().requires_grad_(), torch.randn(N, device=DEVICE)
    scratch = torch.empty_like(x)

    def both() -> None:
        out = logprob(leaf, ids, entropy=True)
        torch.autograd.grad((out.logprob, out.entropy), leaf, (up, up))

    def forward(tile: int, warps: int, part: int) -> Callable[[], Any]:
        def call() -> Any:
            logprob_kernels.TILE, logprob_kernels.SWEEP_WARPS, logprob_kernels.PART = tile, warps, part
            logprob_kernels.LOG_LANES = (tile // 8).bit_length() - 1
            return logprob(x, ids, entropy=True)

        return call

    shipped = (logprob_kernels.TILE, logprob_kernels.SWEEP_WARPS, logprob_kernels.PART)
    choices = [(2048, 4, 16384), (1024, 4, 16384), (4096, 8, 16384), (2048, 4, 32768), (2048, 4, 65536),
               (2048, 4, 131072),
               (4096, 4, 32768), (4096, 8, 65536), (1024, 2, 32768), (1024, 4, 65536)]  # fmt: skip
    calls = {f"forward {c}": forward(*c) for c in choices}
    calls["copy"] = lambda: scratch.copy_(x)
    calls["sum of all (one read)"] = lambda: x.view(torch.int32).amax()
    found = times(calls, 9)
    forward(*shipped)()
    gradients = {}
    for columns, warps in ((4096, 4), (2048, 4), (8192, 8), (4096, 8), (1024, 4)):

        def call(columns: int = columns, warps: int = warps) -> None:
            logprob_kernels.COLUMNS, logprob_kernels.GRADIENT_WARPS = columns, warps
            both()

        gradients[f"forward + backward {columns, warps}"] = call
    found |= times(gradients, 7)
    logprob_kernels.COLUMNS, logprob_kernels.GRADIENT_WARPS = 4096, 4
    found["few rows"] = times(
        {f"{n}, us": (lambda n=n: [logprob(x[:n], ids[:n], entropy=True) for _ in range(100)]) for n in (1, 8, 64)}, 5
    )  # fmt: skip
    found["few rows"] = {k: round(v * 10, 2) for k, v in found["few rows"].items()}  # host-bound: two launches
    found["torch log_softmax and gather"] = times(
        {"t": lambda: x[:4096].float().log_softmax(-1).gather(1, ids[:4096, None])}, 3
    )["t"] * 2  # fmt: skip
    found["GB/s of the best forward"] = round(
        N * V * 2 / 1e6 / min(v for k, v in found.items() if k.startswith("forward (")), 0
    )
    return found


def linear_cases() -> dict[str, Any]:
    """Name -> (N, D, V, dtype, options, whether there is a bias)."""
    return {
        "bf16": (300, 512, 32008, torch.bfloat16, {"entropy": True, "temperature": 0.7}, False),
        "bf16 saved, V odd": (300, 512, 10007, torch.bfloat16, {"entropy": True, "backward": "save"}, False),
        "fp32 bias": (130, 96, 5003, torch.float32, {"entropy": True, "logit_scale": 0.5}, True),
        "fp16": (130, 256, 5003, torch.float16, {"entropy": True}, True),
        "everything": (200, 256, 5003, torch.bfloat16, {
            "entropy": True, "softcap": 20.0, "temperature": torch.linspace(0.5, 2, 200, device=DEVICE),
            "mask": torch.arange(200, device=DEVICE) % 3 != 1, "support": kept(200, 5003)}, True),
        "small limit": (5000, 64, 3001, torch.bfloat16, {"entropy": True, "max_workspace_bytes": 9_000_000}, False),
    }  # fmt: skip


def linear_is_right(name: str) -> dict[str, Any]:
    """Results and gradients of one case against the float64 reference."""
    g = torch.Generator(DEVICE).manual_seed(1)
    N, D, V, dtype, options, biased = linear_cases()[name]
    given = [
        torch.randn(N, D, device=DEVICE, generator=g),
        3 / D**0.5 * torch.randn(V, D, device=DEVICE, generator=g),
    ]
    given = [t.to(dtype) for t in given] + [torch.randn(V, device=DEVICE, generator=g).to(dtype) if biased else None]
    ids = torch.randint(0, V, (N,), device=DEVICE, generator=g)
    results = []
    for run, to in ((linear_logprob, dtype), (linear_definition, torch.float64)):
        leaves = [None if t is None else t.to(to, copy=True).requires_grad_() for t in given]
        rest = {k: v for k, v in options.items() if run is linear_logprob or k != "max_workspace_bytes"}
        out = run(leaves[0], leaves[1], ids, bias=leaves[2], **rest)
        total(out).backward()
        results.append((out, leaves))
    (out, mine), (want, theirs) = results
    slopes = [relative(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True) if a is not None]
    return {**errors(out, want), "dX, dW, dbias": slopes}


def linear_bits() -> dict[str, Any]:
    """Results and dX of a row do not depend on the batch, nor on how the call was cut."""
    found: dict[str, Any] = {}
    g = torch.Generator(DEVICE).manual_seed(1)
    h = torch.randn(1000, 1024, device=DEVICE, generator=g).bfloat16()
    w = (0.1 * torch.randn(32000, 1024, device=DEVICE, generator=g)).bfloat16()
    ids = torch.randint(0, 32000, (1000,), device=DEVICE, generator=g)

    def bits(index: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = h[index].clone().requires_grad_()
        out = linear_logprob(leaf, w, ids[index], entropy=True, **options)
        (out.logprob.sum() + out.entropy.sum()).backward()
        return torch.stack((out.logprob.detach(), out.entropy.detach())), leaf.grad

    every = torch.arange(1000, device=DEVICE)
    base, slope = bits(every)
    for name, index, options in (
        ("one row", every[77:78], {}),
        ("flipped", every.flip(0), {}),
        ("7 rows", every[100:107], {}),
        ("small blocks", every, {"max_workspace_bytes": 20_000_000}),
    ):
        value, dx = bits(index, **options)
        found[f"same bits, {name}"] = [bool(torch.equal(value, base[:, index])), bool(torch.equal(dx, slope[index]))]
    return found


def linear_times(N: int, D: int, V: int, rounds: int) -> dict[str, Any]:
    """Forward, forward + backward saving and recomputing, beside cuBLAS's logits."""
    h = torch.randn(N, D, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    w = torch.randn(V, D, device=DEVICE, dtype=torch.bfloat16).mul_(3 / D**0.5).requires_grad_()
    ids, up = torch.randint(0, V, (N,), device=DEVICE), torch.randn(N, device=DEVICE)
    logits = torch.empty(N, V, device=DEVICE, dtype=torch.bfloat16)

    def forward() -> Any:
        with torch.no_grad():
            return linear_logprob(h, w, ids, entropy=True)

    def both(mode: str) -> Callable[[], Any]:
        def call() -> Any:
            out = linear_logprob(h, w, ids, entropy=True, backward=mode)
            return torch.autograd.grad((out.logprob, out.entropy), (h, w), (up, up))

        return call

    def cublas() -> None:
        with torch.no_grad():
            torch.mm(h, w.t(), out=logits)

    calls: dict[str, Callable[[], Any]] = {"cublas logits": cublas, "forward": forward}
    calls |= {f"both, {mode}": both(mode) for mode in ("save", "recompute")}
    found: dict[str, Any] = times(calls, rounds)
    found["ratios"] = {n: round(t / found["cublas logits"], 3) for n, t in found.items()}
    found["extra GiB"] = {n: extra(c) for n, c in calls.items() if n != "cublas logits"}
    return found


def linear_logprob_tiles() -> dict[str, Any]:
    """Tile shapes of each kernel at 4096 x 4096 x 65536, by itself, beside cuBLAS."""
    N, D, V = 4096, 4096, 65536
    h = torch.randn(N, D, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(V, D, device=DEVICE, dtype=torch.bfloat16).mul_(3 / D**0.5)
    ids, T = torch.randint(0, V, (N,), device=DEVICE), 1.0
    logits, shipped = torch.empty(N, V, device=DEVICE, dtype=torch.bfloat16), head_calls.tile_for
    calls: dict[str, Callable[[], Any]] = {"cublas logits": lambda: torch.mm(h, w.t(), out=logits)}
    plan = head_calls.Plan(16384, 8192, save=False)

    def with_tile(tile: Tile, run: Callable[[head_calls.Head], Any]) -> Callable[[], Any]:
        def call() -> Any:
            head_calls.tile_for = lambda *_: tile
            try:
                return run(head_calls.Head(h, w, None, ids, T, None, None, None, 1.0))
            finally:
                head_calls.tile_for = shipped

        return call

    row = logprob_rows = torch.zeros(6, N, device=DEVICE)
    row[1] = 20.0
    invalid = torch.zeros(N, dtype=torch.bool, device=DEVICE)
    up = torch.ones(N, device=DEVICE)
    big, small = (
        torch.randn(N, 8192, device=DEVICE, dtype=torch.bfloat16),
        torch.empty(8192, D, device=DEVICE).bfloat16(),
    )
    acc = torch.zeros(N, D, device=DEVICE)

    def slope(head: head_calls.Head) -> None:
        block = head.slope(invalid, logprob_rows, (up, None, up, None), None, None, plan)
        for v in range(0, V, 8192):
            block(h, 0, v, 8192)

    def to_hidden(head: head_calls.Head) -> None:
        for v in range(0, V, 8192):
            head._product(big, w[v:], 0, acc, add=True, limit="rows")

    def to_weight(head: head_calls.Head) -> None:
        for _ in range(8):
            head._product(big.t(), h, 0, small, add=False, limit="sum")

    shapes = {
        "sweep": (lambda head: head.statistics(plan, moment=True),
                  [(128, 256, 64, 8, 3, 8), (128, 256, 64, 8, 4, 8), (128, 256, 64, 8, 3, 16), (128, 128, 64, 4, 4, 8),
                   (256, 128, 64, 8, 3, 8)]),
        "slope": (slope, [(128, 256, 64, 8, 3, 8), (128, 256, 64, 8, 3, 16), (64, 256, 64, 4, 3, 8)]),
        "to hidden": (to_hidden, [(128, 256, 64, 8, 3, 8), (128, 256, 64, 8, 3, 16), (128, 128, 64, 4, 4, 8)]),
        "to weight": (to_weight, [(128, 256, 64, 8, 3, 8), (128, 256, 64, 8, 4, 8), (128, 128, 64, 4, 4, 8)]),
    }  # fmt: skip
    for name, (run, tiles) in shapes.items():
        for tile in tiles:
            calls[f"{name} {tile}"] = with_tile(Tile(*tile), run)
    calls["cublas to hidden"] = lambda: [torch.mm(big, w[v : v + 8192]) for v in range(0, V, 8192)]
    calls["cublas to weight"] = lambda: [torch.mm(big.t(), h) for _ in range(8)]
    good = {}
    for name, call in calls.items():  # a shape that does not fit is left out
        _, error = guarded(lambda call=call: (call(), torch.cuda.synchronize()))
        if error is None:
            good[name] = call
        else:
            print(f"{name}: {type(error).__name__}: {error}"[:300], flush=True)
    return times(good, 5)


def linear_llama() -> dict[str, Any]:
    """8192 x 4096 x 128256."""
    return linear_times(8192, 4096, 128256, 4)


def linear_qwen() -> dict[str, Any]:
    """16384 x 2048 x 151936."""
    return linear_times(16384, 2048, 151936, 3)


def captured() -> dict[str, Any]:
    """Both operators in a graph, replayed on new inputs."""
    x = torch.randn(64, 32000, device=DEVICE, dtype=torch.bfloat16)
    h, w = torch.randn(64, 256, device=DEVICE).bfloat16(), torch.randn(32000, 256, device=DEVICE).bfloat16()
    ids, mask = torch.randint(0, 32000, (64,), device=DEVICE), torch.arange(64, device=DEVICE) % 3 != 0

    def run() -> list[torch.Tensor]:
        a, b = x.detach().requires_grad_(), h.detach().requires_grad_()
        one, two = logprob(a, ids, entropy=True, mask=mask), linear_logprob(b, w, ids, entropy=True, mask=mask)
        return [one.logprob, two.logprob, *torch.autograd.grad(one.logprob.sum() + two.logprob.sum(), (a, b))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = run()
    x.normal_()
    h.normal_()
    mask.logical_not_()
    graph.replay()
    torch.cuda.synchronize()
    return {"replay equals eager": [bool(torch.equal(a, b)) for a, b in zip(static, run(), strict=True)]}


CHECKS |= {"logprob": logprob_is_right, "linear bits": linear_bits, "captured": captured}
CHECKS |= {f"linear {name}": (lambda name=name: linear_is_right(name)) for name in
           ("bf16", "bf16 saved, V odd", "fp32 bias", "fp16", "everything", "small limit")}  # fmt: skip
TIMINGS |= {"logprob in time": logprob_in_time, "linear llama": linear_llama, "linear qwen": linear_qwen,
            "linear tiles": linear_logprob_tiles}  # fmt: skip


def main() -> None:
    """All checks and warm-ups at once, then the timings one by one, while there is time."""
    children = {}
    for name in (*CHECKS, *TIMINGS):
        command = [sys.executable, __file__, "--section", name, *(["--warm"] if name in TIMINGS else [])]
        children[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    FOUND["machine"] = machine()
    for name, child in children.items():
        try:
            said, _ = child.communicate(timeout=max(5.0, 0.6 * BUDGET_S - (time.monotonic() - BEGUN)))
        except subprocess.TimeoutExpired:
            child.kill()
            said, _ = child.communicate()
            said += "\nFOUND null"
        last = said.strip().splitlines()[-1]
        if name in CHECKS or "failed" in last:
            result = json.loads(last.removeprefix("FOUND ")) if last.startswith("FOUND ") else None
            keep(name, result if result is not None else {"failed": said[-1500:]})
    for name, run in TIMINGS.items():
        if time.monotonic() - BEGUN < BUDGET_S:
            keep(name, outcome(run))
            torch.cuda.empty_cache()


def keep(name: str, result: Any) -> None:
    """Print a result and write all of them."""
    FOUND[name] = result
    print(f"== {name}, after {time.monotonic() - BEGUN:.0f} s\n{json.dumps(result, indent=1)}", flush=True)
    (OUT / "triton_logprob.json").write_text(json.dumps(FOUND, indent=1))


if __name__ == "__main__":
    if "--section" in sys.argv:
        chosen = sys.argv[sys.argv.index("--section") + 1]
        print("FOUND " + json.dumps(outcome({**CHECKS, **TIMINGS}[chosen])), flush=True)
    else:
        main()
