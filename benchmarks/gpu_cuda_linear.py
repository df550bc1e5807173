"""linear_logprob of the cuda backend on one Hopper GPU: right against float64, then timed beside cuBLAS's logits.

    PYTHONPATH=.:registry:conformance:backends/triton:backends/cuda OUT=. python benchmarks/gpu_cuda_linear.py

Each stage runs in a process of its own with a time limit, because a wrong barrier hangs. Writes
$OUT/gpu_cuda_linear.json after every stage; prints one line a finding. The cases of the second stage run side by side,
because most of their time is compilation. Ends within three minutes.
One file over 400 lines, since it compares variants that do not ship: those that do are timed by `rlkernel bench`.

Timing: device events, calls of all kinds in an order drawn anew each round ("mixed", the card at its power cap), and
with 0.15 s of idleness before each call ("rested"). Ratios are medians over cuBLAS's median in the same rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

VERSION = 6
HERE = Path(__file__).resolve().parents[1]
SHAPES = {"A": (8192, 4096, 128256), "B": (16384, 2048, 151936)}
LIMITS = {
    "smoke": 30,
    "smoke pair+": 25,
    "smoke pair0+": 25,
    "time": 75,
    "correct": 45,
    "correct pair0+": 45,
    "memory": 20,
}
VARIANT = "shipped"
SHIPPED: list[Any] = []  # what the package itself would run
START = time.monotonic()
TOTAL = 170


def packages() -> None:
    """Make the backends importable; where pydantic is missing, without their manifests, which need it."""
    for folder in ("", "registry", "backends/triton", "backends/cuda"):
        if str(HERE / folder) not in sys.path:
            sys.path.insert(0, str(HERE / folder))
    if importlib.util.find_spec("pydantic") is None:
        for name, folder in (("rlkernel_triton", "backends/triton"), ("rlkernel_cuda", "backends/cuda")):
            bare = types.ModuleType(name)
            bare.__path__ = [str(HERE / folder / name)]
            sys.modules[name] = bare


def use(variant: str, **change: Any) -> None:
    """Which kernels run from here on: "single", "pair", "pair0" frees tiles at once; "+" for dX and dW too."""
    from rlkernel_cuda import variants

    SHIPPED.extend((variants.FORWARD, variants.GRADIENT, variants.PRODUCT)[len(SHIPPED) :])
    base = (
        variants.SINGLE if variant.startswith("single") else dataclasses.replace(variants.PAIR, lag="0" not in variant)
    )
    if variant == "shipped":
        variants.FORWARD, variants.GRADIENT, variants.PRODUCT = SHIPPED
        return
    variants.FORWARD = variants.GRADIENT = dataclasses.replace(base, **change)
    variants.PRODUCT = base if variant.endswith("+") else None


def throttle() -> str:
    """What nvidia-smi says of clocks, power and throttling."""
    query = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip()


# ------------------------------------------------------------------------------------------------ data and definition


def data(N: int, D: int, V: int, seed: int = 0, peaks: float = 30.0) -> tuple[Any, Any, Any]:
    """Logits of standard deviation 3; a quarter of the rows pushed toward their id by up to `peaks` nats."""
    import torch

    g = torch.Generator("cuda").manual_seed(seed)
    w = (torch.randn(V, D, device="cuda", generator=g) * (3 / D**0.5)).bfloat16()
    x = torch.randn(N, D, device="cuda", generator=g)
    ids = torch.randint(0, V, (N,), device="cuda", generator=g)
    if peaks:
        some = torch.arange(N, device="cuda") % 4 == 0
        push = torch.rand(N, 1, device="cuda", generator=g) * peaks / 9
        toward = w[ids].float()
        x = torch.where(some[:, None], x + push * toward, x)
    return x.bfloat16(), w, ids


def definition(
    x: Any,
    w: Any,
    ids: Any,
    g: Any,
    h: Any,
    columns: Any,
    *,
    bias: Any = None,
    T: Any = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    mask: Any = None,
    block: int = 1024,
) -> dict[str, Any]:
    """Float64: log p, lse, entropy, dX, and dW and dbias of some columns, for gradients of log p and entropy."""
    import torch

    N, w64 = x.shape[0], w.double()
    out: dict[str, list[Any]] = {n: [] for n in ("logprob", "lse", "entropy", "dx")}
    dw, db = 0.0, 0.0
    T = torch.as_tensor(T, device=x.device, dtype=torch.float64).expand(N)
    for r in range(0, N, block):
        s = slice(r, min(r + block, N))
        keep = torch.ones(s.stop - s.start, dtype=torch.bool, device=x.device) if mask is None else mask[s]
        x64 = torch.where(keep[:, None], x[s].double(), 0.0)
        y = x64 @ w64.T
        if bias is not None:
            y += bias.double()
        y *= scale
        bend = None
        if softcap is not None:
            bend = 1 - torch.tanh(y / softcap) ** 2
            y = torch.where(y == -torch.inf, y, softcap * torch.tanh(y / softcap))
        z = y / T[s, None]
        lse = z.logsumexp(1)
        logp = z - lse[:, None]
        p = logp.exp()
        H = -(p * torch.where(p > 0, logp, 0.0)).sum(1)
        chosen = torch.where(keep, ids[s], 0)[:, None]
        gg, hh = torch.where(keep, g[s].double(), 0.0)[:, None], torch.where(keep, h[s].double(), 0.0)[:, None]
        out["logprob"].append(torch.where(keep, logp.gather(1, chosen)[:, 0], 0.0))
        out["lse"].append(torch.where(keep, lse, 0.0))
        out["entropy"].append(torch.where(keep, H, 0.0))
        dz = -gg * p - hh * p * (torch.where(p > 0, logp, 0.0) + H[:, None])
        dz.scatter_add_(1, chosen, gg)
        dz /= T[s, None]
        if bend is not None:
            dz *= bend.nan_to_num(0.0)
        dz *= scale
        out["dx"].append(dz @ w64)
        dw = dw + dz[:, columns].T @ x64
        db = db + dz[:, columns].sum(0)
    made = {n: torch.cat(v) for n, v in out.items()}
    return {**made, "dw": dw, "db": db}


def distance(have: Any, want: Any) -> float:
    """Relative Frobenius error; NaN never passes."""
    have = have.double()
    return float((have - want).norm() / want.norm().clamp_min(1e-30))


def errors(have: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Worst absolute error of the results, relative ones of the gradients."""
    found = {}
    for n, x in have.items():
        if n in {"logprob", "lse", "entropy"}:
            error = (x.double() - want[n]).abs()
            found[n], found[n + "_mean"] = float(error.max()), float(error.mean())
        else:
            found[n] = distance(x, want[n])
    return found


def bound(name: str, want: dict[str, Any], D: int) -> float:
    """The gates of the operator's contract."""
    if name in {"logprob", "lse", "entropy"}:
        size = float(want["lse"].abs().max())
        return max(2e-4, 8e-6 * max(size, 1.0) * D / 4096)
    return 2.5e-3 if name != "db" else 4e-3


# ------------------------------------------------------------------------------------------------------------- stages


def call(x: Any, w: Any, ids: Any, g: Any, h: Any, wanted: tuple[bool, ...], **options: Any) -> tuple[Any, ...]:
    """The operator and its backward pass."""
    import torch
    from rlkernel_bench.direct import of_cuda

    bias = options.pop("bias", None)
    leaves = [
        None if t is None else t.detach().requires_grad_(want) for t, want in zip((x, w, bias), wanted, strict=True)
    ]
    out = of_cuda.linear_logprob(leaves[0], leaves[1], ids, bias=leaves[2], entropy=True, **options)
    asked = [t for t in leaves if t is not None and t.requires_grad]
    grads = torch.autograd.grad((out.logprob, out.entropy), asked, (g, h)) if asked else ()
    return out, dict(zip([i for i, t in enumerate(leaves) if t is not None and t.requires_grad], grads, strict=True))


CASES: dict[str, dict[str, Any]] = {
    "plain": {"size": (777, 1024, 50264)},
    "odd V": {"size": (513, 768, 50257)},
    "odd V, long": {"size": (300, 512, 151669)},
    "odd D": {"size": (130, 77, 1031)},
    "tiny": {"size": (5, 8, 7)},
    "one id": {"size": (3, 16, 1)},
    "one row": {"size": (1, 2048, 32000)},
    "scale and T": {"size": (300, 512, 8192), "logit_scale": 0.5, "T": 0.7},
    "T per row": {"size": (300, 512, 8192), "T": "rows"},
    "bias": {"size": (300, 512, 8200), "bias": True},
    "softcap": {"size": (300, 512, 8200), "softcap": 15.0},
    "bias, cap, scale": {"size": (300, 512, 8200), "bias": True, "softcap": 8.0, "logit_scale": 2.0, "T": "rows"},
    "mask": {"size": (1000, 512, 8200), "mask": 0.5},
    "mask, bias": {"size": (1000, 512, 8200), "mask": 0.9, "bias": True},
    "all masked": {"size": (200, 512, 8200), "mask": 1.1},
}


def one_case(name: str, spec: dict[str, Any], mode: str, limit: int | None = None) -> dict[str, Any]:
    """One small case against float64, all gradients."""
    import torch

    N, D, V = spec["size"]
    x, w, ids = data(N, D, V, seed=len(name))
    gen = torch.Generator("cuda").manual_seed(7)
    g, h = (torch.randn(N, device="cuda", generator=gen) for _ in range(2))
    T: Any = spec.get("T", 1.0)
    if T == "rows":
        T = 0.5 + torch.rand(N, device="cuda", generator=gen)
    bias = torch.randn(V, device="cuda", generator=gen) if spec.get("bias") else None
    mask, given = None, x
    if "mask" in spec:
        mask = torch.rand(N, device="cuda", generator=gen) >= spec["mask"]
        given = torch.where(mask[:, None], x, torch.nan)
    options = {
        "softcap": spec.get("softcap"),
        "mask": mask,
        "temperature": T,
        "logit_scale": spec.get("logit_scale", 1.0),
    }
    safe_ids = ids if mask is None else torch.where(mask, ids, 2**40)
    wanted = (True, True, bias is not None)
    out, grads = call(given, w, safe_ids, g, h, wanted, bias=bias, backward=mode, max_workspace_bytes=limit, **options)
    columns = torch.cat([torch.arange(min(V, 300), device="cuda"), torch.arange(max(0, V - 300), V, device="cuda")])
    want = definition(
        x, w, ids, g, h, columns, bias=bias, T=T, softcap=spec.get("softcap"), scale=options["logit_scale"], mask=mask
    )
    have = {"logprob": out.logprob, "lse": out.lse, "entropy": out.entropy, "dx": grads[0], "dw": grads[1][columns]}
    if bias is not None:
        have["db"] = grads[2][columns]
    found = errors(have, want)
    few = 1 + 3 / (N * D) ** 0.5
    # Rows that are sure of their id have no gradient to speak of; then errors are those of rounding.
    bad = []
    for n, e in found.items():
        if n.endswith("_mean"):
            continue
        small = n in {"dx", "dw", "db"} and float(want[n].norm()) < 1e-3 * float(g.norm())
        if not small and not e <= bound(n, want, D) * (few if n.startswith("d") else 1):
            bad.append(n)
        if small and not bool(have[n].isfinite().all()):
            bad.append(n)
    return {"case": name, "mode": mode, "errors": found, "bad": bad}


def smoke() -> dict[str, Any]:
    """Does it run at all."""
    return {"cases": [one_case("plain", CASES["plain"], mode) for mode in ("recompute", "save")]}


GROUPS = (
    ("odd V", "odd V, long", "odd D"),
    ("tiny", "one id", "one row", "scale and T", "T per row", "empty", "invalid"),
    ("bias",),
    ("softcap",),
    ("bias, cap, scale",),
    ("mask", "all masked", "graph"),
    ("mask, bias",),
    ("bits", "frozen"),
    ("small_budgets",),
    ("large",),
    ("policy",),
)


def correct() -> dict[str, Any]:
    """Options, odd sizes, bits, sizes beyond 2^31: every group in a process of its own, side by side."""
    limit = LIMITS["correct"] - 5
    began = time.monotonic()
    children = []
    for group in GROUPS:
        command = [sys.executable, __file__, "--group", json.dumps(group), "--variant", VARIANT]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    found: dict[str, Any] = {}
    for group, child in zip(GROUPS, children, strict=True):
        try:
            text, fault = child.communicate(timeout=max(1.0, limit - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            child.kill()
            text, fault = child.communicate()
            fault = "ran out of time " + fault
        for line in text.splitlines():
            if line.startswith("{"):
                found.update(json.loads(line))
        if child.returncode:
            found[f"fault of {group}"] = fault[-1500:]
    for name, result in found.items():
        print(name, json.dumps(result)[:1500])
    return found


def group_of(names: list[str]) -> None:
    """Some cases and checks in this process."""
    checks = {f.__name__: f for f in (bits, small_budgets, large, empty, frozen, invalid, graph, policy)}
    for name in names:
        for mode in ("recompute", "save") if name in CASES else ("",):
            label = f"{name} {mode}".strip()
            try:
                result = one_case(name, CASES[name], mode) if mode else checks[name]()
                if mode and not result["bad"]:
                    result = {
                        "ok": max(v for n, v in result["errors"].items() if not n.endswith("mean")),
                        **result["errors"],
                    }
            except Exception:
                result = traceback.format_exc()[-1500:]
            print(json.dumps({label: result}), flush=True)


def bits() -> dict[str, bool]:
    """A row's results are the same bits in any batch, in both modes and in every run."""
    import torch

    x, w, ids = data(4096, 1024, 50257)
    g = h = torch.ones(4096, device="cuda")
    first, grads = call(x, w, ids, g, h, (True, True, False), backward="recompute")
    again, more = call(x, w, ids, g, h, (True, True, False), backward="recompute")
    saved, _ = call(x, w, ids, g, h, (True, True, False), backward="save")
    turned, _ = call(x.flip(0), w, ids.flip(0), g, h, (False, False, False))
    found = {
        "runs": bool(torch.equal(first.logprob, again.logprob)) and all(torch.equal(grads[i], more[i]) for i in grads),
        "modes": bool(torch.equal(first.logprob, saved.logprob) and torch.equal(first.entropy, saved.entropy)),
        "reversed": bool(torch.equal(first.logprob, turned.logprob.flip(0))),
    }
    mask = torch.rand(4096, device="cuda") > 0.5
    some, _ = call(x, w, ids, g, h, (False, False, False), mask=mask)
    found["masked"] = bool(torch.equal(some.logprob[mask], first.logprob[mask]))
    for n in (1, 7, 64, 1000):
        part, _ = call(x[:n], w, ids[:n], g[:n], h[:n], (False, False, False))
        found[f"first {n}"] = bool(torch.equal(part.logprob, first.logprob[:n]))
    return found


def small_budgets() -> list[Any]:
    """Every kind of plan is right and stays within its limit."""
    import torch

    from rlkernel_cuda import plan

    out = []
    N, D, V = 3000, 512, 33000
    x, w, ids = data(N, D, V)
    g = torch.randn(N, device="cuda")
    size = plan.Size(N, V, D)
    every = {
        (p.save, p.apart, p.block): p for m in ("save", "recompute") for p in plan.plans(size, mode=m, backward=True)
    }
    columns = torch.arange(0, V, 100, device="cuda")
    want = definition(x, w, ids, g, g, columns)
    call(x, w, ids, g, g, (True, True, False))  # cuBLAS keeps a workspace from its first call on
    for p in every.values():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        mode = "save" if p.save else "recompute"
        made, grads = call(x, w, ids, g, g, (True, True, False), backward=mode, max_workspace_bytes=p.bytes)
        torch.cuda.synchronize()
        results = sum(t.nbytes for t in (made.logprob, made.lse, made.entropy, made.invalid, *grads.values()))
        extra = torch.cuda.max_memory_allocated() - before - results
        e = {"dx": distance(grads[0], want["dx"]), "dw": distance(grads[1][columns], want["dw"])}
        ok = extra <= p.bytes and max(e.values()) <= 2.5e-3
        out.append({"ok": ok, "plan": repr(p), "allowed": p.bytes, "extra": extra, **e})
        del made, grads
    return out


def large() -> dict[str, Any]:
    """65536 rows by 50257 ids: 3.3e9 logits, saved too."""
    import torch

    N, D, V = 65536, 256, 50257
    x, w, ids = data(N, D, V)
    g = torch.randn(N, device="cuda")
    found = {}
    some = torch.arange(N - 512, N, device="cuda")
    want = definition(x[some], w, ids[some], g[some], g[some], some[:1] * 0)
    for mode in ("recompute", "save"):
        made, grads = call(x, w, ids, g, g, (True, True, False), backward=mode)
        found[mode] = {
            "logprob": float((made.logprob[some].double() - want["logprob"]).abs().max()),
            "dx": distance(grads[0][some], want["dx"]),
        }
    return found


def empty() -> str:
    """No rows."""
    import torch

    x, w, ids = data(4, 64, 100)
    none = torch.zeros(0, device="cuda")
    out, grads = call(x[:0], w, ids[:0], none, none, (True, True, False))
    return "ok" if out.logprob.shape == (0,) and bool((grads[1] == 0).all()) else "BAD"


def frozen() -> dict[str, bool]:
    """An operand that wants no gradient changes nothing else."""
    import torch

    x, w, ids = data(700, 512, 9000)
    g = torch.randn(700, device="cuda")
    found = {}
    for mode in ("recompute", "save"):
        _, every = call(x, w, ids, g, g, (True, True, False), backward=mode)
        _, one = call(x, w, ids, g, g, (True, False, False), backward=mode)
        _, two = call(x, w, ids, g, g, (False, True, False), backward=mode)
        found[mode] = distance(one[0], every[0].double()) < 1e-3 and distance(two[1], every[1].double()) < 1e-3
    return found


def invalid() -> dict[str, Any]:
    """Ids out of range, and a row of NaN."""
    import torch

    x, w, ids = data(200, 512, 9000)
    g = torch.ones(200, device="cuda")
    clean, clean_grads = call(x, w, ids, g, 0 * g, (True, False, False))
    wrong = ids.clone()
    wrong[0] = 9000
    wrong[1] = -1
    out, grads = call(x, w, wrong, g, 0 * g, (True, False, False))
    spoiled = x.clone()
    spoiled[2] = torch.nan
    spoiled[3] = torch.inf
    bad, bad_grads = call(spoiled, w, ids, g, 0 * g, (True, False, False))
    return {
        "nan": bool(out.logprob[:2].isnan().all()) and out.invalid[:3].tolist() == [True, True, False],
        "no gradient": bool((grads[0][:2] == 0).all()),
        "others": bool(
            torch.equal(out.logprob[2:], clean.logprob[2:]) and torch.equal(grads[0][2:], clean_grads[0][2:])
        ),
        "spoiled": bool(bad.logprob[2:4].isnan().all()),
        "beside spoiled": bool(
            torch.equal(bad.logprob[4:], clean.logprob[4:]) and torch.equal(bad_grads[0][4:], clean_grads[0][4:])
        ),
    }


def loss_of(x: Any, w: Any, ids: Any, rest: dict[str, Any], operator: Any) -> tuple[Any, ...]:
    """A policy loss and its gradients."""
    import torch

    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    out = operator(x, w, ids, kind="grpo", aggregate="token_mean", **rest)
    return out, torch.autograd.grad(out.loss, (x, w))


def policy() -> dict[str, Any]:
    """A GRPO loss in one block, in several and under a mask, against the definition in float64."""
    import torch

    from rlkernel_cuda import linear_policy_loss as module
    from rlkernel_torch.direct import linear_policy_loss as definition_of_loss

    N, D, V = 3000, 512, 5003
    x, w, ids = data(N, D, V)
    kept, found = module.KEPT, {}
    for name, limit, masked in (
        ("one block", kept, False),
        ("two blocks", 4 * V * 1024, False),
        ("masked", 4 * V * 1024, True),
    ):
        module.KEPT = limit
        rest: dict[str, Any] = {
            "old_logprob": torch.randn(N, device="cuda") - 6,
            "advantages": torch.randn(N, device="cuda"),
            "entropy": True,
            "entropy_coef": 0.01,
            "mask": torch.rand(N, device="cuda") > 0.5 if masked else None,
        }
        out, (dx, dw) = loss_of(x, w, ids, rest, module.linear_policy_loss)
        exact = {**rest, "old_logprob": rest["old_logprob"].double(), "advantages": rest["advantages"].double()}
        want, (ex, ew) = loss_of(x.double(), w.double(), ids, exact, definition_of_loss)
        gap = float((out.loss - want.loss).abs())
        found[name] = {"loss": gap, "dx": distance(dx, ex), "dw": distance(dw, ew)}
    module.KEPT = kept
    return found


def graph() -> bool:
    """Forward and backward recorded, replayed on another batch."""
    import torch
    from rlkernel_bench.direct import of_cuda

    x, w, ids = data(512, 512, 9000)
    mask = torch.rand(512, device="cuda") > 0.3
    x.requires_grad_()
    w.requires_grad_()

    def step() -> tuple[Any, ...]:
        out = of_cuda.linear_logprob(x, w, ids, mask=mask, entropy=True)
        return out.logprob, *torch.autograd.grad(out.logprob.sum() + out.entropy.sum(), (x, w))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        static = step()
    with torch.no_grad():
        x.copy_(x.flip(0))
        ids.copy_(ids.flip(0))
        mask.copy_(torch.rand(512, device="cuda") > 0.6)
    recorded.replay()
    want = step()
    return all(torch.equal(a, b) for a, b in zip(static, want, strict=True))


def timed() -> dict[str, Any]:
    """Both shapes, mixed and rested."""
    import torch

    found: dict[str, Any] = {}
    usable = os.environ.get("USABLE", "shipped").split(",")
    for name, (N, D, V) in SHAPES.items():
        x, w, ids = data(N, D, V)
        gen = torch.Generator("cuda").manual_seed(3)
        g, h = (torch.randn(N, device="cuda", generator=gen) for _ in range(2))
        columns = torch.arange(0, V, V // 256, device="cuda")
        want = definition(x, w, ids, g, h, columns, block=512)
        z_max = float(want["lse"].abs().max())
        shape: dict[str, Any] = {"shape": (N, D, V), "gate_logprob": 8e-6 * max(z_max, 30.0) * D / 4096}
        for variant in usable:
            for mode in ("recompute", "save"):
                use(f"{variant}+" if variant.startswith("pair") else variant)
                out, grads = call(x, w, ids, g, h, (True, True, False), backward=mode)
                have = {n: getattr(out, n) for n in ("logprob", "lse", "entropy")}
                shape[f"errors_{mode}_{variant}"] = errors({**have, "dx": grads[0], "dw": grads[1][columns]}, want)
                del out, grads
        del want
        buffer = torch.empty(N, V, dtype=torch.bfloat16, device="cuda")
        cublas = functools.partial(torch.mm, x, w.t(), out=buffer)
        every = {"cublas": cublas}
        forward_only = {"cublas": cublas}
        gradients = {"cublas": cublas}
        nothing, both = (False, False, False), (True, True, False)
        for v in usable:
            every[f"forward {v}"] = kind_of(v, {}, (x, w, ids, g, h, nothing), "auto")
            for group in (8, 16) if v != "shipped" else (8,):
                forward_only[f"forward {v} {group}"] = kind_of(v, {"group": group}, (x, w, ids, g, h, nothing), "auto")
            for products in ("", "+") if v.startswith("pair") else ("",):
                for mode in ("save", "recompute"):
                    every[f"{mode} {v}{products}"] = kind_of(v + products, {}, (x, w, ids, g, h, both), mode)
        loss_rest = {"old_logprob": torch.full((N,), -9.0, device="cuda"), "advantages": torch.randn(N, device="cuda")}
        for v in usable:
            every[f"policy {v}"] = loss_by(f"{v}+" if v.startswith("pair") else v, (x, w, ids, loss_rest))
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        for v in usable:
            gradients[f"dX {v}"] = product_of(v, (buffer, w, dx), transposed=False)
            gradients[f"dW {v}"] = product_of(v, (buffer, x, dw), transposed=True)
        shape.update(rounds(every, 8, 0.0, "mixed"))
        shape.update(rounds(forward_only, 12, 0.0, "forward_only"))
        shape.update(rounds(gradients, 8, 0.0, "products"))
        shape.update(rounds(every, 3, 0.15, "rested"))
        found[name] = shape
        for n in ("mixed", "forward_only", "products", "rested"):
            line = {k: (round(v["ms"], 2), round(v["ratio"], 3)) for k, v in shape[n].items() if isinstance(v, dict)}
            print(name, n, line, flush=True)
        print(name, {k: v for k, v in shape.items() if k.startswith("errors")}, flush=True)
        del x, w, ids, buffer, every, forward_only, gradients, cublas, dx, dw, loss_rest
        torch.cuda.empty_cache()
    return found


def kind_of(variant: str, change: dict[str, Any], given: tuple[Any, ...], mode: str) -> Any:
    """A call with one of the kernels."""

    def run() -> None:
        use(variant, **change)
        call(*given, backward=mode)

    return run


def loss_by(variant: str, given: tuple[Any, ...]) -> Any:
    """The policy loss with one of the kernels."""

    def run() -> None:
        from rlkernel_bench.direct import of_cuda

        use(variant)
        loss_of(*given, of_cuda.linear_policy_loss)

    return run


def product_of(variant: str, given: tuple[Any, ...], *, transposed: bool) -> Any:
    """One matmul of the backward pass; "single" is cuBLAS."""

    def run() -> None:
        from rlkernel_cuda.products import product

        use(f"{variant}+" if variant.startswith("pair") else variant)
        product(*given, transposed=transposed)

    return run


def rounds(kinds: dict[str, Any], times: int, rest: float, label: str) -> dict[str, Any]:
    """Medians of interleaved calls in random order, over cuBLAS."""
    import torch

    rng = random.Random(times)
    for run in kinds.values():
        run()
    torch.cuda.synchronize()
    spent: dict[str, list[float]] = {n: [] for n in kinds}
    state = []
    for _ in range(times):
        for n in rng.sample(list(kinds), len(kinds)):
            if rest:
                torch.cuda.synchronize()
                time.sleep(rest)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            kinds[n]()
            end.record()
            spent[n].append((start, end))  # type: ignore[arg-type]
        state.append(throttle()) if not rest and len(state) < 3 else None
    torch.cuda.synchronize()
    ms = {n: [a.elapsed_time(b) for a, b in pairs] for n, pairs in spent.items()}  # type: ignore[misc]
    base = statistics.median(ms["cublas"])
    table = {
        n: {"ms": statistics.median(v), "ratio": statistics.median(v) / base, "least": min(v), "most": max(v)}
        for n, v in ms.items()
    }
    return {label: {**table, "state": state}}


def memory() -> dict[str, Any]:
    """Most extra memory at three N, beyond results and gradients."""
    import torch

    found = {}
    D, V = 4096, 128256
    for N in (4096, 8192, 16384, 65536):
        x, w, ids = data(N, D, V, peaks=0.0)
        g = torch.ones(N, device="cuda")
        for mode, wanted in (("forward", False), ("recompute", True), ("save", True)):
            if mode == "save" and N > 16384:
                continue
            for _ in range(2):
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                out, grads = call(
                    x, w, ids, g, g, (wanted, wanted, False), backward="auto" if mode == "forward" else mode
                )
                torch.cuda.synchronize()
                results = sum(t.nbytes for t in (out.logprob, out.lse, out.entropy, out.invalid, *grads.values()))
                extra = torch.cuda.max_memory_allocated() - before - results
                del out, grads
            found[f"{mode} {N}"] = round(extra / 2**30, 4)
            print("GiB", mode, N, found[f"{mode} {N}"], flush=True)
        del x, w, ids
        torch.cuda.empty_cache()
    return found


STAGES = {"smoke": smoke, "time": timed, "correct": correct, "memory": memory}


def main() -> None:
    """All stages, or one of them in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--group", type=json.loads)
    parser.add_argument("--variant", default="shipped")
    given = parser.parse_args()
    one = given.stage
    packages()
    if one or given.group:
        global VARIANT  # noqa: PLW0603 - of this process
        VARIANT = given.variant
        use(VARIANT)
    if given.group:
        group_of(given.group)
        return
    if one:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        print(json.dumps({"stage": one, "result": STAGES[one]()}))
        return
    out = Path(os.environ.get("OUT", "."))
    report: dict[str, Any] = {"version": VERSION, "before": throttle()}
    probe = "import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())"
    report["software"] = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    ).stdout
    for stage, limit in LIMITS.items():
        left = min(limit, TOTAL - (time.monotonic() - START))
        began = time.monotonic()
        if left < 5:
            report[stage] = "no time left"
            continue
        name, _, variant = stage.partition(" ")
        if name != "smoke" and variant and not report.get(f"smoke {variant}"):
            continue
        command = [sys.executable, __file__, "--stage", name, "--variant", variant or "shipped"]
        usable = ["shipped", *(v for v in ("single", "pair", "pair0") if v == "single" or report.get(f"smoke {v}+"))]
        environment = {**os.environ, "USABLE": ",".join(usable)}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False, env=environment)
            text, fault = done.stdout, done.stderr[-3000:] if done.returncode else ""
        except subprocess.TimeoutExpired as error:
            text, fault = (error.stdout or b"").decode(), f"ran past {left:.0f} s"
        *lines, last = text.strip().splitlines() or [""]
        try:
            report[stage] = json.loads(last)["result"]
        except (ValueError, KeyError, TypeError):
            lines, report[stage] = [*lines, last], None
        print("\n".join(lines))
        print(f"== {stage}: {time.monotonic() - began:.0f} s {fault}", flush=True)
        report[f"{stage}_log"], report[f"{stage}_fault"] = lines, fault
        (out / "gpu_cuda_linear.json").write_text(json.dumps(report, indent=1))
        if stage == "smoke" and report["smoke"] is None:
            break
    print("after", throttle())


if __name__ == "__main__":
    main()
