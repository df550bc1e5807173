"""The portable sampler on one GPU: right first, then timed, variants beside what ships.

    PYTHONPATH=.:registry:conformance:backends/triton OUT=. python benchmarks/gpu_sampler.py
    ... python benchmarks/gpu_sampler.py --only "neutral,heads right,heads in batches,heads,head parts"

Writes $OUT/gpu_sampler.json (--name) after every section and prints a line a finding; a section that raises loses
itself only.
Times are medians of CUDA graph replays over rotating inputs that exceed the L2, unless they say eager. Predictions and
outcomes: benchmarks/notes/sampling.md. One file over 400 lines, since it compares shapes that do not ship.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

START = time.monotonic()
LIMIT = [75.0]  # seconds, by --seconds
NAME = ["gpu_sampler"]  # of the file, by --name
V = 128256
COLD = 320 << 20  # bytes of inputs of one graph: several times any L2
BATCHES = (1, 32, 64, 256, 1024)
OUTPUT: dict[str, Any] = {}


def rows(kind: str, N: int, dtype: Any, seed: int = 0, width: int = V) -> Any:
    """[N, width] logits on the GPU: normal, skewed (popular tokens at low ids) or flat."""
    import torch

    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(N, width, generator=g, device="cuda")
    if kind == "skewed":
        x = x * 0.5 - 2 * torch.log(torch.arange(width, device="cuda") + 2.0)
    x = x * {"normal": 3.0, "flat": 0.1}.get(kind, 1.0)
    return x.to(dtype)


def replayed(calls: list[Callable[[], Any]], seconds: float = 0.12) -> float:
    """Microseconds of one call in a CUDA graph of all of them."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times, until = [], time.monotonic() + seconds
    while len(times) < 7 or (time.monotonic() < until and len(times) < 100):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(calls))
    return statistics.median(times)


def requested(N: int, case: str) -> dict[str, Any]:
    """The law of a case, one entry a row on the device."""
    import torch

    each = {"temperature": torch.full((N,), 0.9, device="cuda"), "seed": torch.arange(N, device="cuda") + 7}
    each["step"] = torch.full((N,), 5, device="cuda")
    if case == "topk+topp":
        each |= {"top_k": torch.full((N,), 50, device="cuda"), "top_p": torch.full((N,), 0.95, device="cuda")}
    if case == "top_k=50 top_p=0.95":  # numbers
        each |= {"top_k": 50, "top_p": 0.95}
    if case == "topp":
        each |= {"top_p": torch.full((N,), 0.95, device="cuda")}
    return each


def law_of(given: dict[str, Any]) -> Any:
    """The same as the sampler takes it."""
    from rlkernel_triton.sampling.call import Law

    off = {"top_k": None, "top_p": None, "min_p": None, "filter_order": "topk_topp", "tie": "lowest_id"}
    return Law(**{**off, "slot": None, "stream": 0, **given})


# -------------------------------------------------------------------------------------------------------- correctness


def hostile(width: int) -> Any:
    """[24, width] rows that may go wrong."""
    import torch

    g = torch.Generator().manual_seed(3)
    x = 3 * torch.randn(24, width, generator=g)
    x[0] = -torch.inf
    x[1] = 1.5
    x[2, 5] = torch.nan
    x[3] = torch.nan
    x[4, torch.rand(width, generator=g) < 0.01] = torch.inf
    x[5, width - 1] = torch.inf
    x[6, torch.rand(width, generator=g) < 0.99] = -torch.inf
    x[7] = x[7].round()
    x[8] = (x[8] * 0.1).round()
    x[9] *= 0.03
    x[10] *= 10
    x[11] = 3e38 * torch.sign(x[11])
    x[12] *= 1e-40
    x[13] = torch.where(torch.arange(width) == 77, 40.0, x[13])
    x[14] = -2 * torch.log(torch.arange(width) + 2.0)
    x[15] = -2 * torch.log(torch.arange(width) + 2.0) + 0.5 * x[15]
    x[16, : width // 2] = -torch.inf
    x[17] = torch.arange(width) * 1e-3
    x[18] = -torch.arange(width) * 1e-3
    x[19, :2000] = 9.0
    return x


def correctness(limit: float) -> dict[str, Any]:
    """Every result of hostile rows against the definition on the same device, for many laws and two dtypes.

    Parameters are tensors, so that few builds serve many laws.
    """
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_torch.direct import sample as definition

    off, K = 1.0, "top_k"
    laws: list[dict[str, Any]] = [
        {K: 50, "top_p": 0.95}, {K: 0, "top_p": 0.95}, {K: 0, "top_p": 0.3}, {K: 1, "top_p": off},
        {K: 64, "top_p": off}, {K: 65, "top_p": off}, {K: 3000, "top_p": 0.9}, {K: 0, "top_p": 0.999},
        {K: 0, "top_p": off}, {K: 0, "top_p": 0.9, "temperature": 0.05}, {K: 50, "top_p": 0.9, "temperature": 0.0},
        {K: 0, "top_p": 0.9, "temperature": 3.0, "tie": "keep_all"}, {K: 40, "top_p": off, "tie": "keep_all"},
        {K: 20, "top_p": 0.8, "filter_order": "joint"}, {K: 20, "top_p": 0.8, "filter_order": "topp_topk"},
    ]  # fmt: skip
    wrong: list[str] = []
    checked = 0
    for dtype, width in ((torch.float32, V), (torch.bfloat16, V), (torch.float32, 5000)):
        x = hostile(width).to(dtype).cuda()
        seed = torch.arange(24, device="cuda") + 100
        for asked in laws:
            if time.monotonic() - START > limit:
                break
            law = {"seed": seed, "step": seed * 0 + 3, "entropy": True, "raw_logprob": True, "temperature": 0.9} | asked
            for name in (K, "top_p", "temperature"):
                law[name] = torch.full((24,), law[name], device="cuda")
            want, got = definition(x, **law), of_triton.sample(x, **law)
            checked += 24
            for name in ("token", "kept_count", "threshold_id", "status"):
                a, b = getattr(want, name), getattr(got, name)
                bad = a != (b & ~32 if name == "status" else b)
                wrong += [
                    f"{name} {asked} row {r} {dtype} V={width}: {b[r].item()} for {a[r].item()} "
                    f"(kept {got.kept_count[r].item()} of {want.kept_count[r].item()})"
                    for r in bad.nonzero().flatten().tolist()
                ]
            for name in ("logprob", "log_kept_mass", "raw_logprob", "entropy"):
                a, b = getattr(want, name).double(), getattr(got, name).double()
                same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= 8e-6 * a.abs().clamp(min=1))
                wrong += [
                    f"{name} {asked} row {r} {dtype} V={width}: {b[r].item()} for {a[r].item()}"
                    for r in (~same).nonzero().flatten().tolist()
                ]
    torch.cuda.empty_cache()
    for line in wrong[:30]:
        print("  wrong:", line)
    return {"rows": checked, "wrong": len(wrong), "first": wrong[:60]}


def draws() -> dict[str, Any]:
    """Tokens of 2048 ordinary rows a law against the definition; mismatches are counted."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_torch.direct import sample as definition

    found: dict[str, Any] = {}
    for kind in ("normal", "skewed", "flat"):
        for asked in ({}, {"top_k": 50, "top_p": 0.95}, {"top_p": 0.95}):
            off = worst = fallback = 0
            for part in range(2):
                x = rows(kind, 64, torch.float32, seed=part)
                law = {"seed": torch.arange(64, device="cuda") + 64 * part, "step": part, "temperature": 0.9} | asked
                want, got = definition(x, **law), of_triton.sample(x, **law)
                same = want.token == got.token
                off += int((~same).sum())
                fallback += int(((got.status & 32) != 0).sum())
                worst = max(worst, float((want.logprob - got.logprob)[same].abs().max()))
                worst = max(worst, float((want.log_kept_mass - got.log_kept_mass).abs().max()))
            found[f"{kind} {asked}"] = {"mismatches": off, "of": 128, "worst": worst, "searched": fallback}
    torch.cuda.empty_cache()
    return found


def invariance() -> dict[str, Any]:
    """The bits of a row alone, in a batch, and at every number of tiles a program."""
    import torch

    from rlkernel_triton.sampling.call import SHAPE, draw

    differ = []
    for kind in ("normal", "flat"):
        x = rows(kind, 96, torch.float32)
        for case in ("topk+topp", "none", "topp"):
            given = requested(96, case)
            want, _ = draw(x, None, law_of(given))
            for per in (1, 2, 4, 8):
                got, _ = draw(x, None, law_of(given), shape=replace(SHAPE, per=per))
                alone, _ = draw(x[40:41], None, law_of({k: v[40:41] for k, v in given.items()}))
                for name in ("token", "logprob", "log_kept_mass", "threshold"):
                    if not torch.equal(getattr(want, name), getattr(got, name)):
                        differ.append(f"{kind} {case} per {per}: {name}")
                    if getattr(want, name)[40] != getattr(alone, name)[0]:
                        differ.append(f"{kind} {case} alone: {name}")
    return {"differ": differ}


# ------------------------------------------------------------------------------------------------------------- timing


def timed(case: str, kind: str, dtype: Any, N: int, shape: Any) -> float:
    """Microseconds a call in a graph over rotating inputs."""
    import torch

    from rlkernel_triton.sampling.call import draw

    size = N * V * dtype.itemsize
    copies = max(2, min(64, -(-COLD // size)))
    xs = [rows(kind, N, dtype, seed=i) for i in range(copies)] if N > 1 else list(rows(kind, copies, dtype).split(1))
    law = law_of(requested(N, case))
    draw(xs[0], None, law, shape=shape)
    torch.cuda.synchronize()
    return replayed([lambda x=x: draw(x, None, law, shape=shape) for x in xs])


# name, what of the shape, case, batches
VARIANTS: tuple[tuple[str, dict[str, Any], str, tuple[int, ...]], ...] = (
    ("4 warps, 80 registers", {"finish_warps": 4, "finish_registers": 80}, "numbers", (1, 64)),
    ("8 warps, 64 registers", {"finish_warps": 8, "finish_registers": 64}, "numbers", (1, 64, 256, 1024)),
    ("2 tiles", {"per": 2}, "none", (1, 256, 1024)),
    ("4 tiles", {"per": 4}, "numbers", (256, 1024)),
    ("edges", {"edges": 4096}, "numbers", (32, 256)),
)


def timings(limit: float) -> dict[str, Any]:
    """What ships in every case, then variants of the shape at the usual law."""
    import torch

    from rlkernel_triton.sampling.call import SHAPE

    found: dict[str, Any] = {}

    def add(name: str, case: str, kind: str, dtype: Any, batches: tuple[int, ...], shape: Any) -> None:
        if time.monotonic() - START > limit:
            return
        try:
            found[name] = {N: round(timed(case, kind, dtype, N, shape), 2) for N in batches}
        except Exception as error:
            found[name] = repr(error)[:300]
        torch.cuda.empty_cache()
        print(f"  {name:44} {found[name]}", flush=True)
        OUTPUT["timings"] = found
        save()

    f32, b16 = torch.float32, torch.bfloat16
    cases = {"none": "none", "numbers": "top_k=50 top_p=0.95"}
    for name, case in cases.items():
        add(name, case, "normal", f32, BATCHES, SHAPE)
    for name, change, case, batches in VARIANTS:
        add(f"{case}, {name}", cases[case], "normal", f32, batches, replace(SHAPE, **change))
    add("topk+topp", "topk+topp", "normal", f32, BATCHES, SHAPE)
    add("topp flat", "topp", "flat", f32, BATCHES, SHAPE)
    add("topk+topp bf16", "topk+topp", "normal", b16, BATCHES, SHAPE)
    add("topp skewed", "topp", "skewed", f32, BATCHES, SHAPE)
    add("topk+topp skewed", "topk+topp", "skewed", f32, BATCHES, SHAPE)
    add("none bf16", "none", "normal", b16, BATCHES, SHAPE)
    return found


def parts() -> dict[str, Any]:
    """Microseconds of each kernel alone, by the profiler, of what ships and of every variant."""
    import torch

    from rlkernel_triton.sampling.call import SHAPE

    found: dict[str, Any] = {}
    for case, kind in (("none", "normal"), ("top_k=50 top_p=0.95", "normal"), ("topp", "flat")):
        for N in (1, 64, 1024):
            found[f"{case} {kind} {N}"] = profiled(case, kind, N, SHAPE)
        torch.cuda.empty_cache()
    return found


def profiled(case: str, kind: str, N: int, shape: Any) -> dict[str, float]:
    """Microseconds of each kernel of a draw."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from rlkernel_triton.sampling.call import draw

    xs = [rows(kind, N, torch.float32, seed=i) for i in range(2)]
    law = law_of(requested(N, case))
    for x in xs:
        draw(x, None, law, shape=shape)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(4):
            for x in xs:
                draw(x, None, law, shape=shape)
        torch.cuda.synchronize()
    return {
        e.key: round(e.device_time_total / e.count, 2)
        for e in recorded.key_averages()
        if e.key in {"tiles", "finish", "searched"}
    }


def neutral() -> dict[str, Any]:
    """What changes a bit although it says off."""
    import torch
    from rlkernel_bench.direct import of_triton

    differ = []
    for N, width in ((8, 33), (40, 32003)):
        x = rows("normal", N, torch.float32, width=width) * torch.rand(N, 1, device="cuda")
        asked = {"temperature": 0.7, "seed": torch.arange(N, device="cuda"), "step": 3, "entropy": True}
        asked |= {"raw_logprob": True, "rank": True, "top_n": 3, "kept_capacity": 5}
        every = torch.full((N, -(-width // 32)), -1, dtype=torch.int32, device="cuda")
        bare = of_triton.sample(x, **asked)
        for off in ({"allowed": every}, {"top_k": 0}, {"top_p": 1.0}):
            out = of_triton.sample(x, **asked, **off)
            differ += [
                f"{N} x {width} {[*off]}: {n}" for n, v in vars(bare).items() if not same_bits(v, getattr(out, n))
            ]
    return {"differ": differ}


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results are one."""
    import torch

    if a is None or b is None:
        return a is b
    return torch.equal(a.view(torch.int32), b.view(torch.int32)) if a.dtype == torch.float32 else torch.equal(a, b)


def operands(N: int, D: int, width: int, dtype: Any) -> tuple[Any, Any]:
    """Hidden states and a head whose logits have a deviation of 3."""
    import torch

    g = torch.Generator("cuda").manual_seed(N)
    weight = torch.randn(width, D, device="cuda", generator=g) * (3 / D**0.5)
    return torch.randn(N, D, device="cuda", generator=g).to(dtype), weight.to(dtype)


def heads_right() -> dict[str, Any]:
    """lm_head_sample against its definition, and a row's bits in batches on both sides of every choice of tiles."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_torch.direct import lm_head_sample as definition

    wrong, differ, checked = [], [], 0
    for dtype, width, D in ((torch.bfloat16, 32003, 256), (torch.float16, 8192, 200), (torch.float32, 5001, 128)):
        hidden, weight = operands(300, D, width, dtype)
        hidden[3], hidden[4] = torch.nan, 0
        words = torch.randint(-(2**31), 2**31 - 1, (300, -(-width // 32)), dtype=torch.int32, device="cuda")
        slot = torch.randperm(300, device="cuda")
        slot[9] = -1
        cases: dict[str, dict[str, Any]] = {
            "plain": {},
            "raw": {"raw_logprob": True, "temperature": torch.linspace(0, 2, 300, device="cuda")},
            "all": {"softcap": 4.0, "bias": weight[:, 0].contiguous(), "logit_scale": 0.7, "raw_logprob": True},
            "mask": {"allowed": words, "slot": slot, "raw_logprob": True},
            "filters": {"top_k": 50, "top_p": 0.95},
        }
        for name, options in cases.items():
            given = {"temperature": 0.9, "seed": torch.arange(300, device="cuda") + 7, "step": 3, **options}
            whole, want = of_triton.lm_head_sample(hidden, weight, **given), definition(hidden, weight, **given)
            bad = (whole.token != want.token) | (whole.status & ~32 != want.status)
            bad |= (whole.kept_count - want.kept_count).abs() > (1 if name == "filters" else 0)
            same = ~bad
            for field in ("logprob", "log_kept_mass", "raw_logprob"):
                v, w = getattr(whole, field), getattr(want, field)
                if w is not None:
                    bad |= same & ~((v - w).abs() <= 2e-4) & ~((v == w) | (v.isnan() & w.isnan()))
            checked += 300
            for row in bad.nonzero().flatten().tolist():
                gap = float((want.logprob - whole.logprob)[row])
                wrong.append(
                    f"{dtype} {name} row {row}: {whole.token[row]} for {want.token[row]}, logprobs {gap} apart"
                )
            for first, n in ((0, 1), (5, 1), (0, 64), (7, 65), (100, 128), (150, 150), (2, 20)):
                part = slice(first, first + n)
                some = {
                    k: v[part] if isinstance(v, torch.Tensor) and len(v) == 300 and k != "bias" else v
                    for k, v in given.items()
                }
                if name == "mask":
                    some |= {"seed": given["seed"]}  # the tables stay whole: slots point into them
                out = of_triton.lm_head_sample(hidden[part], weight, **some)
                differ += [
                    f"{dtype} {name} [{first}:{first + n}]: {k}"
                    for k, v in vars(whole).items()
                    if v is not None and not same_bits(v[part], getattr(out, k))
                ]
    return {"rows": checked, "wrong": len(wrong), "first": wrong[:20], "differ": differ[:40]}


def heads_in_batches() -> dict[str, Any]:
    """Bits of a row that differ between batches on both sides of every choice of tiles, at the head of an 8B model."""
    import torch
    from rlkernel_bench.direct import of_triton

    differ = []
    hidden, weight = operands(256, 4096, V, torch.bfloat16)
    seed = torch.arange(256, device="cuda")
    for filters in ({}, {"top_k": 50, "top_p": 0.95}):
        whole = of_triton.lm_head_sample(hidden, weight, seed=seed, step=1, **filters)
        for first, n in ((0, 1), (11, 32), (100, 64), (3, 65), (128, 128)):
            part = slice(first, first + n)
            out = of_triton.lm_head_sample(hidden[part], weight, seed=seed[part], step=1, **filters)
            differ += [
                f"4096 x {V} {filters} [{first}:{first + n}]: {k}"
                for k, v in vars(whole).items()
                if v is not None and not same_bits(v[part], getattr(out, k))
            ]
    return {"differ": differ[:40]}


def heads() -> dict[str, Any]:
    """lm_head_sample at the head of an 8B model, beside draws from fp32 logits that cuBLAS stores: microseconds."""
    import torch
    from rlkernel_bench.direct import of_cuda, of_triton

    draws = {"stored": of_triton.sample}
    with suppress(ImportError):
        draws["stored, Hopper"] = of_cuda.sample
    found: dict[str, Any] = {}
    for N in (1, 64, 256, 32, 128, 512):
        hidden, weight = operands(N, 4096, V, torch.bfloat16)
        law = {"seed": torch.arange(N, device="cuda"), "step": 3}
        line: dict[str, Any] = {}

        def product(hidden: Any = hidden, weight: Any = weight) -> Any:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)

        for name, filters in (("", {}), (", 50, 0.95", {"top_k": 50, "top_p": 0.95})):
            given = {**law, **filters}

            def ours(hidden: Any = hidden, weight: Any = weight, given: Any = given) -> Any:
                return of_triton.lm_head_sample(hidden, weight, **given)

            line["lm_head_sample" + name] = round(replayed([ours, ours]), 1)
            for label, draw in draws.items():
                way = lambda d=draw, g=given, p=product: d(p(), **g)  # noqa: E731
                line[label + name] = round(replayed([way, way]), 1)
            if not filters:
                a, b = ours(), of_triton.sample(product(), **given)
                line["tokens apart"] = int((a.token != b.token).sum())
                line["cuBLAS alone"] = round(replayed([product, product]), 1)
        found[str(N)] = line
        OUTPUT["heads"] = found
        save()
        print("  ", N, line, flush=True)
    return found


def head_parts() -> dict[str, Any]:
    """Microseconds of each kernel of lm_head_sample alone, by the profiler."""
    import torch
    from rlkernel_bench.direct import of_triton
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, Any] = {}
    for N in (1, 64, 256):
        hidden, weight = operands(N, 4096, V, torch.bfloat16)
        given = {"seed": torch.arange(N, device="cuda"), "step": 3}
        of_triton.lm_head_sample(hidden, weight, **given)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(4):
                of_triton.lm_head_sample(hidden, weight, **given)
            torch.cuda.synchronize()
        found[str(N)] = {e.key: round(e.device_time_total / e.count, 2) for e in recorded.key_averages()}
    return found


def drafts() -> dict[str, float]:
    """Microseconds of verify on 32 requests with four drafts each, by logits and by probabilities of the drafts."""
    import torch
    from rlkernel_bench.direct import of_triton

    B, K = 32, 128
    x, q = rows("normal", K + B, torch.float32, seed=1), rows("normal", K, torch.float32, seed=2)
    given: dict[str, Any] = {
        "cu_draft": torch.arange(0, K + 1, 4, device="cuda"),
        "seed": torch.arange(B, device="cuda"),
    }
    given |= {"step": 0, "temperature": 1.0}
    ids = q.argmax(1)
    found = {}
    for name, law in (("draft_logits", q), ("draft_probs", q.softmax(1))):
        found[name] = round(replayed([lambda n=name, v=law: of_triton.verify(x, ids, **{n: v}, **given)] * 2), 1)
        found[f"{name}, top-k 50, top-p 0.95"] = round(
            replayed([lambda n=name, v=law: of_triton.verify(x, ids, **{n: v}, top_k=50, top_p=0.95, **given)] * 2), 1
        )
    return found


def eager() -> dict[str, float]:
    """Host microseconds of one eager call, through the front door and straight."""
    import torch

    import rlkernel as rlk
    from rlkernel_core.spec.sample import SampleCall
    from rlkernel_triton import backend
    from rlkernel_triton.sampling.call import sample

    def straight(x: Any, **given: Any) -> Any:
        return sample(SampleCall(x, **given))

    x = rows("normal", 32, torch.float32)
    found = {}
    with rlk.registered(backend), rlk.use(backend.name, fallback="error"):
        for case in ("topk+topp", "none", "topp", "top_k=50 top_p=0.95"):
            given = requested(32, case)
            for name, call in (("straight", straight), ("front door", rlk.sample)):
                for _ in range(20):
                    call(x, **given)
                torch.cuda.synchronize()
                times = []
                for _ in range(30):
                    a = time.perf_counter()
                    call(x, **given)
                    times.append(time.perf_counter() - a)
                    torch.cuda.synchronize()
                found[f"{case} {name}"] = round(statistics.median(times) * 1e6, 1)
    return found


def registers() -> list[dict[str, Any]]:
    """Registers and spills of every build that ran."""
    from rlkernel_triton.sampling import finish, searched, stream

    found = []
    for kernel in (stream.tiles, finish.finish, searched.searched):
        for cache in kernel.device_caches.values():
            found += [
                {
                    "kernel": kernel.__name__,
                    "registers": k.n_regs,
                    "spilled": k.n_spills,
                    "shared": k.metadata.shared,
                    "warps": k.metadata.num_warps,
                }
                for k in cache[0].values()
            ]
    return found


def save() -> None:
    """Write what is known."""
    path = Path(os.environ.get("OUT", ".")) / f"{NAME[0]}.json"
    path.write_text(json.dumps(OUTPUT, indent=1, default=str) + "\n")


def main() -> None:
    """Run the sections; each loses itself only."""
    import torch

    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=75.0)
    arguments.add_argument("--only", help="sections, in their order")
    arguments.add_argument("--name", default=NAME[0], help="of the file that is written")
    given = arguments.parse_args()
    limit = LIMIT[0] = given.seconds
    NAME[0] = given.name
    OUTPUT["device"] = torch.cuda.get_device_name()
    OUTPUT["torch"] = torch.__version__
    sections: dict[str, Callable[[], Any]] = {
        "draws": draws,
        "parts": parts,
        "neutral": neutral,
        "heads right": heads_right,
        "heads in batches": heads_in_batches,
        "heads": heads,
        "head parts": head_parts,
        "drafts": drafts,
        "timings": lambda: timings(limit * 0.75),
        "correctness": lambda: correctness(limit * 0.6),
        "eager": eager,
        "invariance": invariance,
        "registers": registers,
    }
    for name in given.only.split(",") if given.only else sections:
        section = sections[name]
        if time.monotonic() - START > limit:
            break
        began = time.monotonic()
        try:
            OUTPUT[name] = section()
        except Exception:
            OUTPUT[name] = traceback.format_exc()[-3000:]
        print(f"{name} ({time.monotonic() - began:.1f} s):", str(OUTPUT[name])[:2500], flush=True)
        save()


if __name__ == "__main__":
    main()
