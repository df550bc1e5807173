"""sample@1 of the cuda backend on one Hopper GPU: right against the reference, then timed beside its peers.

    PYTHONPATH=.:registry:conformance:backends/triton:backends/cuda OUT=. python benchmarks/gpu_cuda_sampler.py
    ... python benchmarks/gpu_cuda_sampler.py --only build,on,steps      # blocks that read on, alone

Each stage runs in a process of its own with a time limit, because a wrong barrier hangs. Writes
$OUT/gpu_cuda_sampler.json after every stage; prints one line a finding. Ends within --seconds.

Timing: calls over rotating inputs (256 MB of them, two at least) in one CUDA graph, median of seven replays.
One file over 400 lines, since it compares shapes of which one ships per batch: that one is timed by `rlkernel bench`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
LIMITS = {"build": 60, "on": 40, "steps": 25, "right": 20, "time": 60, "peers": 20}  # seconds a stage
START = time.monotonic()
V = 128256
# Shapes tried at each number of rows: threads, blocks a row, blocks a multiprocessor, finishing warps, reading ahead.
READ_ON = (768, 1, 1, 6)  # blocks that read on while they finish
APART = (256, 1, 3)  # what they are held against: a block a row
SWEEP: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((512, 8, 1),),
    32: ((512, 3, 1, 0, 1),),
    64: ((512, 2, 1, 0, 1),),
    256: ((256, 1, 2, 0, 1),),
    1024: (READ_ON, APART),
}
STEPS = (264, 396, 528, 660, 1024, 2048)  # rows at which the two are timed
CLOCKED = {1: ((512, 8, 1),), 32: ((512, 3, 1, 0, 1),), 64: ((512, 2, 1, 0, 1),)}
PLAIN_SWEEP: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((512, 8, 1),),
    32: ((512, 3, 1),),
    64: ((512, 2, 1),),
    256: ((512, 1, 2),),
    1024: ((512, 1, 2),),
}


def packages() -> None:
    """Make the backends importable."""
    for folder in ("", "registry", "backends/triton", "backends/cuda"):
        if str(HERE / folder) not in sys.path:
            sys.path.insert(0, str(HERE / folder))


# ---------------------------------------------------------------------------------------------------------- builds


def needed(*, all_stages: bool) -> list[tuple[str, ...]]:
    """Options of every kernel that a later stage launches, or that those of blocks that read on do."""
    import torch

    from rlkernel_cuda.sampling import call
    from rlkernel_cuda.sampling.launch import Shape, flags

    found = {(Shape(*s), d, False) for s in (READ_ON, APART) for d in ("float32", "bfloat16", "float16")}
    if not all_stages:
        return sorted({flags(s, getattr(torch, d), plain=p) for s, d, p in found})
    found |= {(Shape(*s), "float32", False) for s in itertools.chain(*SWEEP.values())}
    found |= {(Shape(*s), "float32", True) for s in itertools.chain(*PLAIN_SWEEP.values())}
    found |= {(s, d, False) for _, s in (*call.FILTERED, *call.CUT) for d in ("float32", "bfloat16")}
    found |= {(s, "float32", True) for _, s in call.PLAIN}
    found |= {(call.FILTERED[-1][1], "float16", False), (call.PLAIN[-1][1], "bfloat16", True)}
    options = {flags(s, getattr(torch, d), plain=p) for s, d, p in found}
    clocked = {flags(Shape(*s), torch.float32, plain=False) for s in itertools.chain(*CLOCKED.values())}
    return sorted(options | {(*o, "-DCLOCKS=1") for o in clocked})


def build(part: int, parts: int, *, all_stages: bool) -> dict[str, Any]:
    """Build a share of what is needed."""
    from rlkernel_cuda.sampling import launch

    took = {}
    for options in needed(all_stages=all_stages)[part::parts]:
        at = time.monotonic()
        launch.built(options)
        took[" ".join(options)] = round(time.monotonic() - at, 2)
    return took


def all_builds(only: str) -> dict[str, Any]:
    """Build what the stages need, on all cores that this process may use."""
    parts = min(14, len(os.sched_getaffinity(0)))
    command = [sys.executable, __file__, "--stage", "part", "--only", only]
    running = [
        subprocess.Popen(
            [*command, "--part", f"{i}/{parts}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in range(parts)
    ]
    took: dict[str, Any] = {}
    for process in running:
        out = process.communicate()[0]
        if process.returncode:
            return {"error": out[-3000:]}
        took |= json.loads(out.splitlines()[-1])
    return {"builds": len(took), "slowest": max(took.values()), "took": took}


# ----------------------------------------------------------------------------------------------------- correctness


def cases() -> Any:
    """(name, logits, parameters) with mixed parameters per row; seeds are fixed."""
    import torch

    g = torch.Generator("cuda").manual_seed(7)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", generator=g)

    def pick(values: list[float], n: int) -> Any:
        return torch.tensor(values, device="cuda")[torch.randint(0, len(values), (n,), device="cuda", generator=g)]

    def law(n: int, width: int, **given: float) -> dict[str, Any]:
        some = {
            "temperature": pick([0.0, 0.3, 0.7, 1.0, 1.0, 2.0], n),
            "top_k": pick([0, 1, 2, 5, 50, 50, 300, width, width + 5], n).int(),
            "top_p": pick([1.0, 0.95, 0.95, 0.5, 0.999, 0.0, 2.0, float("nan")], n),
            "min_p": pick([0.0, 0.0, 0.0, 0.01, 0.1, 2.0], n),
        }
        return {k: torch.full((n,), given[k], device="cuda").to(x.dtype) if k in given else x for k, x in some.items()}

    inf = float("inf")
    for width in (1, 2, 31, 33, 1000, 1025, 4096, 32000):
        for sigma in (0.1, 1.0, 5.0, 30.0):
            yield f"V{width} sigma {sigma}", normal(8, width) * sigma, law(8, width)
        yield f"V{width} ties", (normal(8, width) * 2).round(), law(8, width)
        yield f"V{width} equal", torch.full((6, width), 1.25, device="cuda"), law(6, width)
    x = normal(8, 1000)
    x[:, 100:900] = -inf
    yield "block of -inf", x, law(8, 1000)
    x = normal(8, 1000) * 3
    x[:, ::3], x[0], x[1, 1:] = -inf, -inf, -inf
    yield "-inf", x, law(8, 1000)
    x = normal(8, 1000) * 3
    x[:, 5], x[3, ::2], x[4] = torch.nan, torch.nan, torch.nan
    yield "NaN", x, law(8, 1000)
    x = normal(8, 1000) * 3
    x[:, 7], x[3, ::5] = inf, inf
    yield "+inf", x, law(8, 1000)
    x = normal(8, 1000)
    x[:, 500:], x[2:4, 0] = -1e30, 1e30
    yield "1e30", x, law(8, 1000)
    x = normal(8, 1000) * 3e38
    yield "3e38", x.clamp(-3.4e38, 3.4e38), law(8, 1000)
    x = normal(8, 1000)
    bad = law(8, 1000)
    bad["temperature"][:4] = torch.tensor([-1.0, torch.nan, inf, 0.5])
    yield "bad T", x, bad
    yield "sigma 3, 50, 0.95", normal(8, V) * 3, law(8, V, temperature=1.0, top_k=50, top_p=0.95, min_p=0.0)
    yield "sigma 3", normal(16, V) * 3, law(16, V)
    yield "flat, 0.95", normal(3, V) * 0.1, law(3, V, temperature=1.0, top_k=0, top_p=0.95, min_p=0.0)
    yield "flat, 50", normal(3, V) * 0.1, law(3, V, temperature=1.0, top_k=50, top_p=0.95, min_p=0.0)
    yield "flat, 5000, 0.9", normal(2, V) * 0.1, law(2, V, temperature=1.0, top_k=5000, top_p=0.9)
    yield "2000", normal(2, V) * 3, law(2, V, temperature=1.0, top_k=2000, top_p=1.0)
    yield "no filter", normal(6, V) * 3, law(6, V, temperature=0.8, top_k=0, top_p=1.0, min_p=0.0)
    yield (
        "zeros, no filter",
        torch.zeros(2, V, device="cuda"),
        law(2, V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    )
    yield "ties", normal(4, V).round(), law(4, V, temperature=1.0, top_k=50, top_p=0.95)
    yield "zeros, 0.9", torch.zeros(2, V, device="cuda"), law(2, V, temperature=1.0, top_k=0, top_p=0.9, min_p=0.0)
    yield "zeros, 50", torch.zeros(2, V, device="cuda"), law(2, V, temperature=1.0, top_k=50, top_p=0.9, min_p=0.0)
    ids = torch.arange(V, device="cuda")
    z = -2 * (ids + 2.0).log() + normal(4, V) * 0.5 + 20
    yield "skewed, 50", z, law(4, V, temperature=1.0, top_k=50, top_p=0.95)
    yield "skewed, 0.95", z, law(4, V, temperature=1.0, top_k=0, top_p=0.95, min_p=0.0)
    x = normal(3, V) * 3
    x[:, 30000:], x[:, :5] = -1e30, -inf
    yield "masked", x, law(3, V, temperature=1.0, top_k=50, top_p=0.95)


def judged(x: Any, args: dict[str, Any], out: Any) -> dict[str, Any]:
    """How the results of one call compare with the reference's: rows wrong, rows at a rounding boundary, errors."""
    import torch

    from rlkernel_common.philox import gumbel, range_words
    from rlkernel_common.requests import decode
    from rlkernel_core.spec.sample import SampleCall
    from rlkernel_torch.direct import sample as reference
    from rlkernel_torch.truncation import running_sum, truncate, weigh

    want = reference(x, **args)
    equal = (out.token == want.token) & (out.kept_count == want.kept_count)
    equal &= (out.threshold == want.threshold) & (out.threshold_id == want.threshold_id)
    equal &= (out.status & ~32) == want.status
    worst = 0.0
    for name in ("logprob", "log_kept_mass", "raw_logprob"):
        a, b = getattr(out, name), getattr(want, name)
        if a is None:
            continue
        error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs() / b.abs().clamp(min=1))
        error = torch.where(equal, error, 0.0)
        worst = max(worst, float(error.nan_to_num(1e9).max()))
        equal &= error.nan_to_num(1e9) < 2e-6
    wrong, near = [], 0
    for row in (~equal).nonzero()[:, 0].tolist():
        one = {k: v[row : row + 1] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in args.items()}
        law = {k: one.get(k) for k in ("temperature", "top_k", "top_p", "min_p", "seed", "step")}
        y = torch.where(x[row : row + 1].isnan(), -torch.inf, x[row : row + 1]).float()
        requests = decode(SampleCall(y, **law), 1, x.device, torch.float32, None)
        kept = truncate(y, requests, filter_order="topk_topp", tie="lowest_id")
        scores = kept.weights.y + gumbel(range_words(requests.seed, requests.step, 0, y.shape[1], 0), torch.float64)
        best = torch.where(kept.keep, scores, -torch.inf)[0].sort(descending=True).values
        gap = float(best[0] - best[1]) if best.numel() > 1 else 1.0
        w = weigh(y, requests.temperature).w[0].sort(descending=True).values[None]
        k = int(requests.top_k[0]) if requests.top_k is not None and requests.top_k[0] > 0 else w.shape[1]
        mass = running_sum(w)[0]
        edge = float((mass / mass[min(k, w.shape[1]) - 1] - float(requests.top_p[0])).abs().min())
        close = abs(int(out.kept_count[row]) - int(want.kept_count[row])) <= max(2, 1e-4 * int(want.kept_count[row]))
        if (edge < 4e-6 and close) or (gap < 4e-6 and out.kept_count[row] == want.kept_count[row]):
            near += 1
            continue
        have = {n: getattr(out, n)[row].item() for n in vars(want) if getattr(want, n) is not None}
        right = {n: getattr(want, n)[row].item() for n in have}
        told = {n: v.item() for n, v in law.items() if isinstance(v, torch.Tensor)}
        wrong.append({"row": row, "gap": gap, "edge": edge, "law": told, "have": have, "want": right})
    return {
        "rows": len(out.token),
        "wrong": wrong,
        "near": near,
        "slow": int((out.status & 32 != 0).sum()),
        "worst": worst,
    }


def right(shapes: list[Any]) -> dict[str, Any]:
    """Every case, each with two shapes, against the reference."""
    import torch
    from rlkernel_bench.direct import of_cuda

    from rlkernel_cuda.sampling import call

    total: dict[str, Any] = {"rows": 0, "near": 0, "slow": 0, "worst": 0.0, "wrong": [], "bits": []}
    tables = call.FILTERED, call.PLAIN, call.CUT
    at = time.monotonic()
    for i, (name, x, law) in enumerate(cases()):
        n = x.shape[0]
        g = torch.Generator("cuda").manual_seed(i)
        noise = {k: torch.randint(0, 2**62, (n,), device="cuda", generator=g) for k in ("seed", "step")}
        args = {**law, **noise, "raw_logprob": True}
        outs = []
        for shape in dict.fromkeys((shapes[i % len(shapes)], shapes[(i + 1) % len(shapes)])):
            call.FILTERED = call.CUT = ((2**31, shape),)
            of_cuda.sample.forget()
            outs.append(of_cuda.sample(x, **args))
        call.FILTERED, call.CUT = tables[0], tables[2]
        of_cuda.sample.forget()
        torch.cuda.synchronize()
        found = judged(x, args, outs[0])
        total["rows"] += found["rows"]
        total["near"] += found["near"]
        total["slow"] += found["slow"]
        total["worst"] = max(total["worst"], found["worst"])
        total["wrong"] += [{"case": name, **w} for w in found["wrong"]][:3]
        for field, value in vars(outs[0]).items():
            for other in outs[1:]:
                if value is not None and not torch.equal(
                    torch.nan_to_num(value), torch.nan_to_num(getattr(other, field))
                ):
                    total["bits"].append(f"{name}: {field} differs between shapes")
        if len(total["wrong"]) > 40 or time.monotonic() - at > 16:
            total["cut short at"] = name
            break
    total["seconds"] = round(time.monotonic() - at, 1)
    return total


def right_more() -> dict[str, Any]:
    """Dtypes, no filter at all, places, strides, slots, numbers, vocab_size, several rows a block."""
    import torch
    from rlkernel_bench.direct import of_cuda

    g = torch.Generator("cuda").manual_seed(3)
    found: dict[str, Any] = {"wrong": []}

    def tried(name: str, x: Any, **args: Any) -> Any:
        out = of_cuda.sample(x, **args)
        told = judged(x[:, : args.pop("vocab_size", None) or x.shape[1]], args, out)
        found[name] = {k: told[k] for k in ("rows", "near", "slow", "worst")}
        found["wrong"] += [{"case": name, **w} for w in told["wrong"]][:3]
        return out

    x = torch.randn(300, 32003, device="cuda", generator=g) * 3
    noise = {"seed": torch.arange(300, device="cuda"), "step": 5}
    usual = {"top_k": 50, "top_p": 0.95, "temperature": 0.9, **noise}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tried(f"{dtype}", x.to(dtype), **usual)
    for n in (1, 3, 40, 100, 300):
        tried(f"no filter {n}", x[:n], temperature=torch.tensor(0.9, device="cuda"), seed=noise["seed"][:n], step=5)
    whole = tried("padded columns", x, **usual, vocab_size=32000)
    same = of_cuda.sample(x[:, :32000].contiguous(), **usual)
    turned = of_cuda.sample(x.flip(0), **{**usual, "seed": noise["seed"].flip(0)}, vocab_size=32000)
    part = of_cuda.sample(x[7:8], **{**usual, "seed": noise["seed"][7:8]}, vocab_size=32000)
    slot = torch.arange(300, device="cuda").flip(0)
    slot[5] = -1
    slotted = of_cuda.sample(x.flip(0), **usual, vocab_size=32000, slot=slot)
    for field in ("token", "logprob", "log_kept_mass", "kept_count", "threshold", "threshold_id"):
        a = getattr(whole, field)
        found[f"bits {field}"] = [
            torch.equal(a, getattr(same, field)),
            torch.equal(a, getattr(turned, field).flip(0)),
            torch.equal(a[7:8], getattr(part, field)),
            int((a != getattr(slotted, field).flip(0)).sum()),
        ]
    return found


def mixed(N: int, width: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """[N, width] logits of sixteen kinds in turn, usual and hostile, and a law a row that is drawn apart from them."""
    import torch

    g = torch.Generator("cuda").manual_seed(seed)
    x, ids, inf = torch.randn(N, width, device="cuda", generator=g), torch.arange(width, device="cuda"), torch.inf

    def few(x: Any) -> Any:
        return torch.rand(x.shape, device="cuda", generator=g) < 0.01

    kinds = (
        lambda x: x * 3,
        lambda x: x * 0.1,
        lambda x: 0.5 * x - 2 * (ids + 2.0).log(),
        lambda x: (x * 2).round(),
        lambda x: x * 0 + 1.25,
        lambda x: x.where(few(x), -inf),
        lambda x: x.where(~few(x), torch.nan),
        lambda x: x.where(~few(x), inf),
        lambda x: (x * 3e38).clamp(-3.4e38, 3.4e38),
        lambda x: (3 * x).where(ids < width // 4, -1e30).where(ids > 4, -inf),  # a masked vocabulary
        lambda x: x * 30,
        lambda x: x.where(ids != width - 1, inf),
        lambda x: x.where(ids != 1, torch.nan) * 3,
        lambda x: x * torch.nan,
        lambda x: x * 0 - inf,
        lambda x: (3 * x).where(~few(x), 1e30),
    )
    for i, kind in enumerate(kinds):
        x[i :: len(kinds)] = kind(x[i :: len(kinds)])

    def pick(*values: float) -> Any:
        return torch.tensor(values, device="cuda")[torch.randint(0, len(values), (N,), device="cuda", generator=g)]

    law = {
        "temperature": pick(0.0, 0.3, 0.7, 1.0, 1.0, 1.0, 2.0, torch.nan, -1.0),
        "top_k": pick(0, 0, 1, 5, 50, 50, 50, 300, 5000, width, width + 5).int(),
        "top_p": pick(1.0, 0.95, 0.95, 0.95, 0.5, 0.999, 0.0, 2.0, torch.nan),
        "min_p": pick(0.0, 0.0, 0.0, 0.0, 0.01, 0.1, 2.0),
        "seed": torch.randint(0, 2**62, (N,), device="cuda", generator=g),
        "step": torch.randint(0, 2**62, (N,), device="cuda", generator=g),
    }
    return x, law


def reading_on(save: Any) -> dict[str, Any]:
    """Blocks that read on, over one to sixteen rows each: the reference's results, the bits of a block a row.

    Rows that are masked or penalised reach this kernel as what those edits make of logits, -inf and moved values; the
    edits themselves, top-n and ranks it does not claim.
    """
    import torch
    from rlkernel_bench.direct import of_cuda

    from rlkernel_cuda.sampling import call
    from rlkernel_cuda.sampling.launch import Shape

    found: dict[str, Any] = {"differ": [], "wrong": [], "rows": 0, "judged": 0, "near": 0, "slow": 0, "worst": 0.0}
    table = call.FILTERED, call.CUT

    def drawn(shape: tuple[int, ...], x: Any, **args: Any) -> Any:
        call.FILTERED = call.CUT = ((2**31, Shape(*shape)),)
        of_cuda.sample.forget()
        try:
            return of_cuda.sample(x, **args)
        finally:
            call.FILTERED, call.CUT = table
            of_cuda.sample.forget()

    def same(name: str, a: Any, b: Any) -> None:
        bits = {torch.float32: torch.int32}
        for field, v in vars(a).items():
            w = getattr(b, field)
            if v is not None and not torch.equal(
                v.view(bits.get(v.dtype, v.dtype)), w.view(bits.get(w.dtype, w.dtype))
            ):
                rows = (v.nan_to_num(7.0) != w.nan_to_num(7.0)).nonzero().flatten().tolist()
                found["differ"].append(f"{name}: {field} of {len(rows)} rows, first {rows[:5]}")

    def held(name: str, x: Any, args: dict[str, Any], *, judge: bool = True) -> None:
        args = {**args, "raw_logprob": True}
        out = drawn(READ_ON, x, **args)
        same(name, out, drawn(APART, x, **args))
        same(f"{name}, again", out, drawn(READ_ON, x, **args))
        found["rows"] += len(x)
        found["slow"] += int((out.status & 32 != 0).sum())
        for at in range(0, len(x) if judge else 0, 128):
            part = slice(at, at + 128)
            some = {k: v[part] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in args.items()}
            picked = type(out)(**{k: None if v is None else v[part] for k, v in vars(out).items()})
            told = judged(x[part], some, picked)
            found["wrong"] += [{"case": name, "from": at, **w} for w in told["wrong"]][:3]
            found["judged"] += told["rows"]
            found["near"] += told["near"]
            found["worst"] = max(found["worst"], told["worst"])
        save(found)

    for i, N in enumerate((1, 2, 131, 132, 133, 264, 265, 397, 529, 1037, 2111)):
        held(f"{N} x 4099", *mixed(N, 4099, i), judge=N in {133, 397, 1037})
    for i, dtype in enumerate((torch.bfloat16, torch.float16)):
        x, law = mixed(400, 32000, 30 + i)
        held(f"400 x 32000 {dtype}", x.where(x.isinf(), x.clamp(-6e4, 6e4)).to(dtype), law)
    x, law = mixed(700, 32003, 40)
    held("700 x 32003", x, law)
    slots = torch.randint(-1, 700, (700,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    held("700 x 32003, slots", x, {**law, "slot": slots}, judge=False)
    held("700 x 32003, numbers", x, {**law, "temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": None})
    x, law = mixed(1024, V, 50)
    held("1024 x 128256", x, law)
    usual = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": law["seed"], "step": 3}
    held("1024 x 128256, 50, 0.95", logits("normal", 1024, torch.float32, 60), usual)
    held("1024 x 128256, 0.95", logits("skewed", 1024, torch.float32, 61), {**usual, "top_k": None})
    args = {**law, "raw_logprob": True}
    first = drawn(READ_ON, x, **args)
    for i in range(20):
        same(f"1024 x 128256, call {i}", first, drawn(READ_ON, x, **args))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = drawn(READ_ON, x, **args)
    for i in range(20):
        graph.replay()
        same(f"1024 x 128256, replay {i}", first, out)
    return found


# ---------------------------------------------------------------------------------------------------------- timing


def steps(save: Any) -> dict[str, Any]:
    """Blocks that read on and a block a row, at numbers of rows between which a choice is made."""
    import torch
    from rlkernel_bench.direct import of_cuda

    from rlkernel_cuda.sampling import call
    from rlkernel_cuda.sampling.launch import Shape

    table, out = (call.FILTERED, call.CUT), {}
    for B in STEPS:
        ids, rows = torch.arange(B, device="cuda"), {}
        base = {"temperature": torch.ones(B, device="cuda"), "seed": ids, "step": ids}
        p, k = torch.full((B,), 0.95, device="cuda"), torch.full((B,), 50, device="cuda")
        laws = {"normal": {**base, "top_k": k, "top_p": p}}
        if B == 1024:
            laws |= {"bf16": laws["normal"], "skewed 0.95": {**base, "top_p": p}, "flat 0.95": {**base, "top_p": p}}
        for name, law in laws.items():
            kind = name.split()[0] if name != "bf16" else "normal"
            dtype = torch.bfloat16 if name == "bf16" else torch.float32
            inputs = [logits(kind, B, dtype, i) for i in range(2)]
            for s in (APART, READ_ON):
                call.FILTERED = call.CUT = ((2**31, Shape(*s)),)
                of_cuda.sample.forget()
                rows[f"{name} {s}"] = tried(partial(of_cuda.sample, **law), inputs, 4)
            del inputs
        out[str(B)] = rows
        call.FILTERED, call.CUT = table
        of_cuda.sample.forget()
        save(out)
        print(B, json.dumps(rows), flush=True)
        torch.cuda.empty_cache()
    return out


def logits(kind: str, B: int, dtype: Any, seed: int) -> Any:
    """[B, V] logits."""
    import torch

    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(B, V, device="cuda", generator=g)
    if kind == "skewed":
        x = -2 * (torch.arange(V, device="cuda") + 2.0).log() + 0.5 * x
    else:
        x *= {"normal": 3.0, "flat": 0.1}[kind]
    return x.to(dtype)


def timed(call: Any, inputs: list[Any], calls: int) -> float:
    """Microseconds a call, inside a graph of `calls` of them."""
    import torch

    call(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(inputs[i % len(inputs)])
    times = []
    for _ in range(8):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1000 / calls)
    return round(statistics.median(times[1:]), 2)


def tried(*what: Any) -> float | str:
    """The same, or what went wrong."""
    try:
        return timed(*what)
    except Exception:
        return traceback.format_exc()[-300:]


def timing(save: Any) -> dict[str, Any]:
    """Every workload at every number of rows."""
    import torch
    from rlkernel_bench.direct import of_cuda, of_triton

    from rlkernel_cuda.sampling import call
    from rlkernel_cuda.sampling.launch import Shape

    tables = call.FILTERED, call.PLAIN, call.CUT
    out: dict[str, Any] = {}
    at = time.monotonic()
    for B, shapes in SWEEP.items():
        buffers = max(2, min(256, -(-(256 << 20) // (B * V * 4))))
        calls = max(4, buffers)
        ids = torch.arange(B, device="cuda")
        base = {"temperature": torch.ones(B, device="cuda"), "seed": ids, "step": ids}
        both = {**base, "top_k": torch.full((B,), 50, device="cuda", dtype=torch.int32)}
        both["top_p"] = torch.full((B,), 0.95, device="cuda")
        nucleus = {**base, "top_p": both["top_p"]}
        rows: dict[str, Any] = {}
        inputs = [logits("normal", B, torch.float32, i) for i in range(buffers)]
        for s in shapes:
            call.FILTERED = call.CUT = ((2**31, Shape(*s)),)
            of_cuda.sample.forget()
            rows[f"50, 0.95 {s}"] = tried(partial(of_cuda.sample, **both), inputs, calls)
        call.FILTERED, call.CUT = tables[0], tables[2]
        of_cuda.sample.forget()
        for s in PLAIN_SWEEP[B]:
            call.PLAIN = ((2**31, Shape(*s)),)
            of_cuda.sample.forget()
            rows[f"no filter {s}"] = tried(partial(of_cuda.sample, **base), inputs, calls)
        call.PLAIN = tables[1]
        of_cuda.sample.forget()
        rows["one read"] = timed(lambda x: x.sum(), inputs, calls)
        rows["portable 50, 0.95"] = tried(partial(of_triton.sample, **both), inputs, calls)
        for kind, args in (("flat", nucleus), ("skewed", both), ("skewed", nucleus)):
            for i, x in enumerate(inputs):
                x.copy_(logits(kind, B, torch.float32, i)) if i < 2 else x.copy_(inputs[i % 2])
            name = "0.95" if args is nucleus else "50, 0.95"
            rows[f"{kind} {name}"] = tried(partial(of_cuda.sample, **args), inputs, calls)
        start = time.perf_counter()
        for i in range(50):
            of_cuda.sample(inputs[i % 2], **both)
        rows["host us"] = round((time.perf_counter() - start) / 50 * 1e6, 1)
        torch.cuda.synchronize()
        call.FILTERED, call.CUT = tables[0], tables[2]
        of_cuda.sample.forget()
        out[str(B)] = rows
        save(out)
        print(B, json.dumps(rows), flush=True)
        del inputs
        torch.cuda.empty_cache()
        if time.monotonic() - at > 55:
            break
    return out


def clocks() -> dict[str, Any]:
    """Cycles of the finishing block between its marks, medians over rows."""
    import ctypes

    import torch

    from rlkernel_cuda import driver
    from rlkernel_cuda.sampling import call, launch

    out: dict[str, Any] = {}
    for B, shapes in CLOCKED.items():
        x, ids = logits("normal", B, torch.float32, 0), torch.arange(B, device="cuda")
        k, p = torch.full((B,), 50, device="cuda"), torch.full((B,), 0.95, device="cuda")
        T = torch.ones(B, device="cuda")
        held = [call._given(T, 1.0, real=True), call._given(k, 0), call._given(p, 1.0, real=True)]
        held += [call._given(None, 0.0, real=True), call._given(ids, 0), call._given(ids, 0)]
        for s in shapes:
            shape = launch.Shape(*s)
            options = (*launch.flags(shape, torch.float32, plain=False), "-DCLOCKS=1")
            kernel = driver.loaded(launch.built(options), "sample", shape.shared)
            results, marks = torch.empty(8, 2 * B, device="cuda"), torch.empty(B, 10, dtype=torch.int64, device="cuda")
            at = [r.data_ptr() for r in results]
            params = launch.PARAMS.pack(
                x.data_ptr(), V, B, V, -(-V // 1024), 3, *(v for _, g in held for v in g), 0, 0, 0, 0, 0, 0,
                at[0], marks.data_ptr(), *at[1:7],
            )  # fmt: skip
            found = []
            for _ in range(6):
                driver.launched(
                    kernel, shape.blocks(B, 0), shape.threads, shape.shared, None, (ctypes.c_char_p * 1)(params)
                )
                torch.cuda.synchronize()
                found.append(marks.diff(dim=1).float().median(0).values.tolist())
            steps = [int(statistics.median(f[i] for f in found[2:])) for i in range(9)]
            out[f"{B} {s}"] = steps
    return out


def peers() -> dict[str, Any]:
    """FlashInfer's ways to the same draw, which return a token alone, beside ours."""
    import flashinfer
    import torch
    from flashinfer import sampling as fi
    from rlkernel_bench.direct import of_cuda

    out: dict[str, Any] = {"version": flashinfer.__version__}
    for B in SWEEP:
        buffers = max(2, min(64, -(-(256 << 20) // (B * V * 4))))
        inputs = [logits("normal", B, torch.float32, i) for i in range(buffers)]
        ids = torch.arange(B, device="cuda")
        noise = {"seed": ids, "offset": torch.zeros_like(ids)}
        k, p = torch.full((B,), 50, device="cuda", dtype=torch.int32), torch.full((B,), 0.95, device="cuda")
        ours = {"temperature": torch.ones(B, device="cuda"), "top_k": k, "top_p": p, "seed": ids, "step": ids}
        law = {n: ours[n] for n in ("temperature", "seed", "step")}
        ways = {
            "ours 50, 0.95": lambda x, a=ours: of_cuda.sample(x, **a),
            "joint": lambda x, k=k, p=p, n=noise: fi.top_k_top_p_sampling_from_logits(
                x, k, p, filter_apply_order="joint", **n
            ),
            "top-k first": lambda x, k=k, p=p, n=noise: fi.top_k_top_p_sampling_from_logits(x, k, p, **n),
            "softmax + cake": lambda x, k=k, p=p: flashinfer.cake_top_k_top_p_sampling_from_probs(
                fi.softmax(x), k, p, top_k_max=64, philox_seed=1, philox_offset=0
            ),
            "ours no filter": lambda x, a=law: of_cuda.sample(x, **a),
            "gumbel": lambda x, n=noise: fi.sampling_from_logits(x, **n),
        }
        out[str(B)] = {}
        for name, way in ways.items():
            try:
                out[str(B)][name] = timed(way, inputs, buffers)
            except Exception as error:
                out[str(B)][name] = repr(error)[:200]
        print(B, json.dumps(out[str(B)]), flush=True)
        del inputs, ways
        torch.cuda.empty_cache()
    return out


# ------------------------------------------------------------------------------------------------------------ stages


def main() -> None:
    """Run all stages, or one."""
    packages()
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--only", default="build,on,right,more,clocks,steps,time,peers", help="stages, in their order")
    parser.add_argument("--seconds", type=float, default=85.0)
    given = parser.parse_args()
    asked = given.only.split(",")
    all_stages = not {*asked} <= {"build", "on", "steps"}
    folder = Path(os.environ.get("OUT", "."))
    os.environ.setdefault("RLKERNEL_CUDA_CACHE", str(Path(tempfile.gettempdir()) / "rlkernel-cubins"))
    if given.stage == "part":
        part, parts = (int(n) for n in given.part.split("/"))
        print(json.dumps(build(part, parts, all_stages=all_stages)))
        return
    if given.stage:
        place = folder / f"gpu_cuda_sampler_{given.stage}.json"

        def save(found: Any) -> None:
            place.write_text(json.dumps(found, indent=1))

        from rlkernel_cuda.sampling import call

        stages = {
            "build": partial(all_builds, given.only),
            "on": partial(reading_on, save),
            "steps": partial(steps, save),
            "right": partial(right, [s for _, s in call.CUT]),
            "more": right_more,
            "clocks": clocks,
            "time": partial(timing, save),
            "peers": peers,
        }
        found = stages[given.stage]()
        save(found)
        if given.stage not in {"time", "steps"}:
            print(json.dumps(found)[:4000])
        return
    report: dict[str, Any] = {}
    for stage in asked:
        left = given.seconds - (time.monotonic() - START)
        if left < 5:
            break
        at = time.monotonic()
        command = [sys.executable, __file__, "--stage", stage, "--only", given.only]
        if stage == "peers":  # FlashInfer is carried in a folder of its own, and only this stage sees it
            if not Path(".fi").exists():
                continue
            place = Path(tempfile.gettempdir()) / "flashinfer"
            ready = f"mkdir -p {place} && tar xf .fi/fi_carry.tar.xz -C {place} && . .fi/fi_env.sh {place}/fi_carry"
            command = ["bash", "-c", f"{ready} && {' '.join(command)}"]
        try:
            done = subprocess.run(command, timeout=min(left, LIMITS.get(stage, 20)), check=False)
            report[stage] = {"rc": done.returncode}
        except subprocess.TimeoutExpired:
            report[stage] = {"rc": "time limit"}
        report[stage]["seconds"] = round(time.monotonic() - at, 1)
        place = folder / f"gpu_cuda_sampler_{stage}.json"
        if place.exists():
            report[stage]["found"] = json.loads(place.read_text())
            place.unlink()
        (folder / "gpu_cuda_sampler.json").write_text(json.dumps(report, indent=1))
        print(f"== {stage}: {report[stage]['rc']}, {report[stage]['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
