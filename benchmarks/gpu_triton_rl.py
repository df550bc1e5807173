"""Advantages and policy losses of the triton backend on one GPU: right first, then timed.

    PYTHONPATH=.:registry:conformance:backends/triton OUT=. python benchmarks/gpu_triton_rl.py

Writes $OUT/gpu_triton_rl.json after every section and prints a line a finding; a section that raises loses itself only.
Times are medians of CUDA graph replays over rotating inputs that exceed the L2, unless they say eager. Ends within
about 100 s (`--seconds`); sections that find no time are left out and said so.
One file over 400 lines, since it compares variants that do not ship: those that do are timed by `rlkernel bench`.

Predictions, written before the first run (H200: copies at 4.3 TB/s; GAE reads 4 + 4 + 1 bytes a token, writes 4 + 4):

    GAE, us           floor   rows  chunks
    512 x 4096          8.3     14      18    4 programs a multiprocessor, 4 chunks one after the other
    512 x 8192         16.6     25      29
    256 x 32768        33       75      57    2 programs a multiprocessor: latency of 32 chunks
    4096 x 1024        16.6     20      27    one chunk a sequence: 85 % of the copy
    4096 x 4096        66       75     105
    16384 x 8192      531      600     830    88 % of the copy
    16 x 131072         8.3    260      18    2048 programs and 9 bytes a token read twice, the second time from L2

    The same bits by rows and by chunks, packed and padded.
    policy_loss, 4 M tokens (GRPO, mask, k3 to a reference): floor 25 bytes a token 24 us forward, 12 us backward;
    predicted 45 forward + backward in a graph, against 10 to 20 times that in eager torch, 2 times compiled.
    linear_policy_loss over cuBLAS's logits, forward and backward: 3.4 with 4 GiB of workspace, 3.6 with 2 GiB
    (three matmuls, fp32 logits written and read twice, dW added up in fp32 once a block); the same at both shapes.
    Extra memory the same at three N, but for 256 bytes a row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START = time.monotonic()
GAE = (
    (16, 131072), (4096, 4096), (512, 8192), (4096, 1024), (256, 32768), (512, 4096), (132, 131072), (16384, 8192),
)  # fmt: skip
LINEAR = {"A": (8192, 4096, 128256), "B": (16384, 2048, 151936)}
COLD = 160 << 20  # bytes of inputs and results of one graph: more than any L2


def left(limit: float) -> float:
    """Seconds that are left."""
    return limit - (time.monotonic() - START)


# ------------------------------------------------------------------------------------------------------------- timing


def replayed(calls: list[Callable[[], Any]], seconds: float = 0.25) -> float:
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
        kept = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    times, until = [], time.monotonic() + seconds
    while len(times) < 10 or (time.monotonic() < until and len(times) < 200):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / len(calls))
    del kept, graph
    return statistics.median(times)


def eager(call: Callable[[], Any], rounds: int = 10) -> float:
    """Microseconds between events, median."""
    import torch

    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        call()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3)
    return statistics.median(times)


def copies() -> dict[str, Any]:
    """What a copy of 1 GiB reaches, TB/s."""
    import torch

    x = torch.empty(1 << 28, device="cuda").normal_()
    y = torch.empty_like(x)
    return {"copy TB/s": 2 * x.numel() * 4 / eager(lambda: y.copy_(x)) / 1e6}


# -------------------------------------------------------------------------------------------------------- correctness


def worst(have: Any, want: Any) -> float:
    """Largest error over max(1, |want|); NaN is infinite."""
    have, want = have.double().cpu(), want.double().cpu()
    if not have.numel():
        return 0.0
    error = ((have - want).abs() / want.abs().clamp(min=1)).max().item()
    return float("inf") if math.isnan(error) else error


def right_advantages() -> dict[str, Any]:
    """Every recursion in every layout against the definition in float64; schedules bit by bit."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_torch.direct import advantage as definition
    from rlkernel_triton import recursion

    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for B, T in ((5, 37), (7, 3000), (3, 20000)):
        rewards, values, ratio = (torch.randn(B, T, device="cuda") for _ in range(3))
        ratio = ratio.exp()
        boot, dones = torch.randn(B, device="cuda"), torch.rand(B, T, device="cuda") < 0.01
        mask = torch.rand(B, T, device="cuda") > 0.3
        lengths = torch.randint(0, T + 1, (B,), device="cuda")
        cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        packed = torch.arange(T, device="cuda") < lengths[:, None]
        kinds = {
            "gae": {"values": values, "gamma": 0.99, "lam": 0.95, "bootstrap": boot, "dones": dones},
            "gae, decoupled": {"values": values, "gamma": 1.0, "lam": torch.rand(B, device="cuda"), "lam_value": 1.0},
            "returns": {"gamma": 0.999, "bootstrap": boot},
            "vtrace": {"values": values, "ratio": ratio, "gamma": 0.99, "lam": 0.9, "bootstrap": boot},
            "retrace": {"values": values, "ratio": ratio, "gamma": 0.99, "lam": 0.9},
            "reinforce_pp": {"gamma": 0.99},
        }
        for name, more in kinds.items():
            for layout in ("plain", "mask", "lengths", "packed"):
                given = {"rewards": rewards, **more}
                if layout == "packed":
                    given = {
                        n: x[packed] if isinstance(x, torch.Tensor) and x.shape == (B, T) else x
                        for n, x in given.items()
                    } | {"cu_seqlens": cu, "reward_level": "token"}
                elif layout != "plain":
                    given[layout] = mask if layout == "mask" else lengths
                kind = name.partition(",")[0]
                have = of_triton.advantage(given.pop("rewards"), kind=kind, **given)
                wide = {
                    n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                    for n, x in given.items()
                }
                source = rewards[packed] if layout == "packed" else rewards
                want = definition(source.double(), kind=kind, **wide)
                key = f"{name}, {layout}"
                error = max(worst(have.advantages, want.advantages), worst(have.returns, want.returns))
                found[key] = max(found.get(key, 0.0), error)
                if name == "gae":
                    rows = recursion.Rows.of(tuple(source.shape), B, given.get("mask"), given.get("lengths"),
                                             given.get("cu_seqlens"))  # fmt: skip
                    same = [
                        recursion.run(
                            "gae", rows, b=source, values=given["values"], gamma=0.99, lam=0.95, init=boot, by=by
                        )
                        for by in ("rows", "chunks")
                    ]
                    equal = torch.equal(same[0].out, same[1].out) and torch.equal(same[0].targets, same[1].targets)
                    found["schedules give the same bits"] = found.get("schedules give the same bits", True) and equal
    # Padded and packed, and a call repeated.
    padded = of_triton.advantage(rewards, kind="gae", values=values, lengths=lengths, gamma=0.99, lam=0.95).advantages
    flat = of_triton.advantage(
        rewards[packed], kind="gae", values=values[packed], cu_seqlens=cu, gamma=0.99, lam=0.95, reward_level="token"
    ).advantages
    found["packed and padded give the same bits"] = torch.equal(padded[packed], flat)
    bad = values.clone()
    bad[1, 5] = float("nan")
    spoiled = of_triton.advantage(rewards, kind="gae", values=bad, gamma=0.99, lam=0.95)
    clean = of_triton.advantage(rewards, kind="gae", values=values, gamma=0.99, lam=0.95)
    others = [i for i in range(B) if i != 1]
    found["a NaN stays in its sequence"] = bool(
        (spoiled.advantages[1] == 0).all() and spoiled.stats.invalid[1]
    ) and torch.equal(spoiled.advantages[others], clean.advantages[others])
    numbers = [x for x in found.values() if not isinstance(x, bool)]
    return {
        "worst": max(numbers),
        "fine": max(numbers) < 1e-3 and all(x for x in found.values() if x is True or x is False),
        **found,
    }


def right_losses() -> dict[str, Any]:
    """Every kind and level against the definition in float64."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_core.spec.policy_kinds import KINDS, REQUIRED, Correction
    from rlkernel_torch.direct import policy_loss as definition

    torch.manual_seed(0)
    B, T = 6, 2500
    base = torch.randn(B, T, device="cuda") - 3
    lp, ref, rollout = (base + s * torch.randn(B, T, device="cuda") for s in (0.2, 0.1, 0.05))
    mask, A = torch.rand(B, T, device="cuda") > 0.2, torch.randn(B, device="cuda")
    H = torch.rand(B, T, device="cuda")
    lp = torch.where(mask, lp, torch.nan)
    found: dict[str, Any] = {}
    for kind, what in KINDS.items():
        needed = {n: (0.2, 0.3) if n == "clip" else 0.1 for n, v in what.options.items() if v == REQUIRED}
        for level in what.levels:
            more: dict[str, Any] = {
                "kind": kind,
                "level": level,
                **needed,
                "kl": "k3",
                "kl_coef": 0.05,
                "entropy_coef": 0.01,
            }
            if kind != "gmpo":
                more["correction"] = Correction("token", "truncate", None, 1.05)
            results = []
            for f, wide in ((of_triton.policy_loss, False), (definition, True)):
                cast = (lambda x: x.double()) if wide else (lambda x: x)
                x, h = cast(lp).clone().requires_grad_(), cast(H).clone().requires_grad_()
                out = f(
                    x,
                    cast(base),
                    cast(A),
                    mask=mask,
                    ref_logprob=cast(ref),
                    rollout_logprob=cast(rollout),
                    entropy=h,
                    **more,
                )
                out.loss.backward()
                results.append((out.loss, x.grad * mask.sum(), h.grad * mask.sum(), out.stats.effective_sample_size,
                                out.stats.ratio_mean, out.stats.kl_ref))  # fmt: skip
            found[f"{kind}, {level}"] = max(worst(a.detach(), b.detach()) for a, b in zip(*results, strict=True))
    return {"worst": max(found.values()), "fine": max(found.values()) < 2e-4, **found}


def right_linear() -> dict[str, Any]:
    """linear_policy_loss against the definition in float64, in bf16 and fp32, per token and per sequence."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_torch.direct import linear_policy_loss as definition

    torch.manual_seed(0)
    B, T, D, V = 4, 700, 256, 5003
    h, w = torch.randn(B, T, D, device="cuda"), torch.randn(V, D, device="cuda") * (3 / D**0.5)
    ids, A = torch.randint(0, V, (B, T), device="cuda"), torch.randn(B, T, device="cuda")
    mask = torch.rand(B, T, device="cuda") > 0.2
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for kind in ("grpo", "gspo"):
            x, m = h.to(dtype), w.to(dtype)
            old = torch.log_softmax(x.double() @ m.double().T, -1).gather(-1, ids[..., None])[..., 0].float()
            old = old + 0.05 * torch.randn(B, T, device="cuda")
            grads = []
            for f, cast in ((of_triton.linear_policy_loss, dtype), (definition, torch.float64)):
                a, b = x.detach().to(cast).requires_grad_(), m.detach().to(cast).requires_grad_()
                wide = cast == torch.float64
                out = f(a, b, ids, old.double() if wide else old, A.double() if wide else A, mask=mask, kind=kind,
                        entropy=True, entropy_coef=0.01)  # fmt: skip
                out.loss.backward()
                grads.append((out.loss.detach(), out.logprob, a.grad.double(), b.grad.double()))
            (loss, lp, dx, dw), (loss0, lp0, dx0, dw0) = grads
            found[f"{kind}, {dtype}"] = {
                "loss": worst(loss, loss0),
                "logprob": worst(lp, lp0),
                "dX": float((dx - dx0).norm() / dx0.norm()),
                "dW": float((dw - dw0).norm() / dw0.norm()),
            }
    limit = {"loss": 2e-4, "logprob": 2e-4, "dX": 3e-3, "dW": 3e-3}
    fine = all(found[k][n] < limit[n] for k in found for n in limit)
    return {"fine": fine, **found}


# --------------------------------------------------------------------------------------------------------------- speed


def gae_inputs(B: int, T: int) -> list[tuple[Any, ...]]:
    """Rotating inputs, more than the L2 holds with the results."""
    import torch

    sets = max(1, min(12, -(-COLD // (B * T * 17))))
    return [
        (
            torch.randn(B, T, device="cuda"),
            torch.randn(B, T, device="cuda"),
            torch.ones(B, T, device="cuda", dtype=torch.bool),
        )
        for _ in range(sets)
    ]


def time_gae(limit: float) -> dict[str, Any]:
    """GAE with a mask: both schedules, tiles of 128 and 256 rows, registers as they are and held at 64."""
    import torch

    from rlkernel_triton import recursion

    found: dict[str, Any] = {}
    usual, options = recursion.TILE, recursion.FUSED
    for B, T in GAE:
        if left(limit) < 3:
            found["left out"] = f"from {B}x{T} on"
            break
        inputs, floor = gae_inputs(B, T), B * T * 17 / 4.3e6
        row: dict[str, Any] = {"floor us": floor, "sets": len(inputs)}
        variants = [
            ("rows", 128, None),
            ("chunks", 128, None),
            ("rows", 128, 64),
            ("rows", 256, None),
        ]
        for by, tile, registers in variants:
            if by == "chunks" and B * T > 40e6:
                continue
            recursion.TILE, recursion.CHUNK = tile, 8 * tile
            recursion.FUSED = options if registers is None else {**options, "maxnreg": registers}

            def call(r: Any, v: Any, m: Any, B: int = B, T: int = T, by: str = by) -> Any:
                rows = recursion.Rows.of((B, T), B, m, None, None)
                return recursion.run("gae", rows, b=r, values=v, gamma=0.99, lam=0.95, by=by)

            name = f"{by}, tile {tile}" + ("" if registers is None else f", {registers} registers")
            try:
                us = replayed([lambda s=s: call(*s) for s in inputs], 0.12)
                row[name] = {"us": us, "TB/s": B * T * 17 / us / 1e6, "of floor": floor / us}
            except Exception as error:  # a variant that does not build must not lose the others
                row[name] = repr(error)[:200]
        recursion.TILE, recursion.CHUNK, recursion.FUSED = usual, 8 * usual, options
        best = min((x["us"], n) for n, x in row.items() if isinstance(x, dict))
        row["best"] = best
        found[f"{B}x{T}"] = row
        print(f"gae {B}x{T}: floor {floor:.1f} us; " + "; ".join(
            f"{n} {x['us']:.1f}" for n, x in row.items() if isinstance(x, dict)), flush=True)  # fmt: skip
        del inputs
        torch.cuda.empty_cache()
    return found


def plain_grpo(lp: Any, old: Any, A: Any, ref: Any, mask: Any) -> Any:
    """GRPO with k3 as trainers write it, token mean."""
    import torch

    ratio = torch.exp(lp - old)
    policy = -torch.minimum(ratio * A[:, None], ratio.clamp(0.8, 1.2) * A[:, None])
    q = ref - lp
    return torch.where(mask, policy + 0.04 * (torch.exp(q) - q - 1), 0.0).sum() / mask.sum()


def time_loss(limit: float) -> dict[str, Any]:
    """policy_loss forward and backward beside torch, eager and compiled, all in graphs and all eager."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_triton import loss_batch

    found: dict[str, Any] = {}
    compiled = torch.compile(plain_grpo, dynamic=False)
    for B, T in ((512, 8192), (2048, 8192), (8, 2048)):
        if left(limit) < 8:
            found["left out"] = f"from {B}x{T} on"
            break
        sets = max(1, min(8, -(-COLD // (B * T * 33))))
        inputs = [
            (
                torch.randn(B, T, device="cuda").requires_grad_(), torch.randn(B, T, device="cuda"),
                torch.randn(B, device="cuda"), torch.randn(B, T, device="cuda"),
                torch.ones(B, T, device="cuda", dtype=torch.bool),
            )
            for _ in range(sets)
        ]  # fmt: skip

        def ours(lp: Any, old: Any, A: Any, ref: Any, mask: Any, *, back: bool = True) -> Any:
            out = of_triton.policy_loss(
                lp, old, A, mask=mask, kind="grpo", aggregate="token_mean", ref_logprob=ref, kl="k3", kl_coef=0.04
            )
            return torch.autograd.grad(out.loss, lp) if back else out.loss

        def theirs(f: Any, lp: Any, *rest: Any) -> Any:
            return torch.autograd.grad(f(lp, *rest), lp)

        calls = {
            "ours": ours,
            "ours, forward": lambda *s: ours(*s, back=False),
            "torch": lambda *s: theirs(plain_grpo, *s),
            "torch.compile": lambda *s: theirs(compiled, *s),
        }
        row: dict[str, Any] = {"floor us": B * T * 25 / 4.3e6, "sets": sets}
        for name, call in calls.items():
            try:
                row[name] = {"graph us": replayed([lambda s=s, call=call: call(*s) for s in inputs], 0.15),
                             "eager us": eager(lambda call=call, s=inputs[0]: call(*s))}  # fmt: skip
            except Exception as error:  # a peer that does not run must not lose ours
                row[name] = repr(error)[:200]
        if B * T > 1 << 22:
            usual = loss_batch.BLOCK
            for block in (512, 2048):
                loss_batch.BLOCK = block
                row[f"ours, forward, block {block}"] = {
                    "graph us": replayed([lambda s=s: ours(*s, back=False) for s in inputs], 0.12)
                }
            loss_batch.BLOCK = usual
        found[f"{B}x{T}"] = row
        print(f"policy_loss {B}x{T}: " + "; ".join(f"{n} {x}" for n, x in row.items()), flush=True)
        del inputs
        torch.cuda.empty_cache()
    return found


def linear_call(N: int, D: int, V: int) -> tuple[Callable[..., Any], Callable[[], Any], list[Any]]:
    """Forward and backward of of_triton.linear_policy_loss, cuBLAS's logits, and the operands."""
    import torch
    from rlkernel_bench.direct import of_triton

    x = torch.randn(N, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(V, D, device="cuda") * (3 / D**0.5)).bfloat16().requires_grad_()
    ids, A = torch.randint(0, V, (N,), device="cuda"), torch.randn(N, device="cuda")
    old = torch.full((N,), -12.0, device="cuda")

    def ours(limit: int | None = None) -> None:
        x.grad = w.grad = None
        of_triton.linear_policy_loss(
            x, w, ids, old, A, kind="grpo", aggregate="token_mean", max_workspace_bytes=limit
        ).loss.backward()

    def cublas() -> Any:
        with torch.no_grad():
            return torch.mm(x, w.T)

    return ours, cublas, [x, w]


def time_linear(limit: float) -> dict[str, Any]:
    """Ratios to cuBLAS's logits of the same rounds, calls in turn."""
    import torch

    found: dict[str, Any] = {}
    for name, (N, D, V) in LINEAR.items():
        if left(limit) < 8:
            found["left out"] = f"from {name} on"
            break
        ours, cublas, kept = linear_call(N, D, V)
        calls: dict[str, Callable[[], Any]] = {"cublas": cublas, "default": ours}
        for gib in (3, 6, 10):
            calls[f"{gib} GiB"] = lambda gib=gib, ours=ours: ours(gib << 30)
        times: dict[str, list[float]] = {n: [] for n in calls}
        for turn in range(6):
            for call_name, call in calls.items():
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                call()
                b.record()
                b.synchronize()
                if turn:
                    times[call_name].append(a.elapsed_time(b))
        base = statistics.median(times["cublas"])
        found[name] = {n: {"ms": statistics.median(t), "ratio": statistics.median(t) / base} for n, t in times.items()}
        print(f"linear_policy_loss {name}: " + "; ".join(
            f"{n} {x['ms']:.2f} ms {x['ratio']:.3f}" for n, x in found[name].items()), flush=True)  # fmt: skip
        del ours, cublas, kept, calls
        torch.cuda.empty_cache()
    return found


def memory_linear() -> dict[str, Any]:
    """Peak bytes beyond operands and their gradients, at three N."""
    import torch

    found: dict[str, Any] = {}
    for N in (4096, 16384, 65536):
        ours, _, (x, w) = linear_call(N, 1024, 50257)
        ours()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()  # with both gradients
        torch.cuda.reset_peak_memory_stats()
        ours()
        torch.cuda.synchronize()
        grads = (x.numel() + w.numel()) * 2
        found[str(N)] = {
            "extra GiB": (torch.cuda.max_memory_allocated() - before) / 2**30,
            "gradients GiB": grads / 2**30,
        }
        del ours, x, w
        torch.cuda.empty_cache()
    return found


def main() -> None:
    """All sections, the short ones first."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--only", nargs="*", default=None)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / p) for p in (".", "registry", "conformance", "backends/triton")]
    import torch
    import triton

    path = Path(options.out) / "gpu_triton_rl.json"
    report: dict[str, Any] = {
        "torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name(),
    }  # fmt: skip
    sections: dict[str, Callable[[], Any]] = {
        "copy": copies,
        "gae": lambda: time_gae(options.seconds - 18),
        "policy_loss": lambda: time_loss(options.seconds),
        "linear": lambda: time_linear(options.seconds),
        "memory": memory_linear,
        "right losses": right_losses,
        "right linear": right_linear,
        "right advantages": right_advantages,
    }
    for name, section in sections.items():
        if options.only and name not in options.only:
            continue
        if left(options.seconds) < 5:
            report[name] = "no time left"
            continue
        begun = time.monotonic()
        try:
            report[name] = section()
        except Exception:  # a section that raises loses itself only
            report[name] = {"raised": traceback.format_exc()[-3000:]}
        took = time.monotonic() - begun
        report.setdefault("seconds", {})[name] = took
        path.write_text(json.dumps(report, indent=1) + "\n")
        short = json.dumps(report[name])
        print(f"[{took:5.1f} s] {name}: {short[:1500]}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
