"""Bundles on a GPU: conformance of their operators, and how long a first call takes with one and without.

    python benchmarks/gpu_aot.py --out $OUT --limit 80 --only first
    python benchmarks/gpu_aot.py --out $OUT --limit 80 --ops logprob,advantage --only build,conformance

`first`: the first call of every operator from a bundle, and compiled on the spot; the bundle holds what these calls
launch, recorded on the CPU before. `build`, `conformance`: a bundle of the shipped configurations with cubins for this
GPU and PTX for sm_87, built on all cores with the Triton that is here, and its operators against their clauses.

`aot` runs cubins of this GPU, `orin-ptx` the sm_87 PTX through the driver's compiler: sm_87 code on this GPU. Nothing
here is measured on a Jetson. Sections run in processes of their own and write JSON under --out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [
    str(ROOT / p)
    for p in (".", "registry", "conformance", "backends/triton", "backends/cuda", "backends/jetson", "benchmarks")
]
MANIFESTS = {"aot": "rlkernel_triton.aot.backend:backend", "orin-ptx": "rlkernel_jetson.elsewhere:backend"}
MODULES = {"aot": "rlkernel_triton.aot.backend", "orin-ptx": "rlkernel_jetson.elsewhere"}
OPS = "logprob,sample,advantage,policy_loss,linear_logprob,qmatmul,quantize,dequantize,prepack"
BUILD = """
import json, sys
from rlkernel_triton.aot.command import build
if __name__ == "__main__":
    ops, out, table, *targets = sys.argv[1:]
    found = build(targets, ops.split(","), out=out, configurations=table or None, keep_going=True)
    print(json.dumps(found))
"""
# Everything that one update on a GPU calls, once; (seconds, results) on standard output.
COLD = """
import json, sys, time
from importlib import import_module
import torch
kind, ops, device = sys.argv[1], sys.argv[2].split(","), sys.argv[3]
x = torch.zeros(1, device=device) + 1
torch.mm(torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device))
if device == "cuda":
    torch.cuda.synchronize()
g = torch.Generator(device=device).manual_seed(0)
V = 128256
logits = torch.randn(8, V, generator=g, device=device).bfloat16()
hidden = torch.randn(8, 64, generator=g, device=device).bfloat16()
head = torch.randn(151936, 64, generator=g, device=device).bfloat16()
weight = torch.randn(1024, 1024, generator=g, device=device).bfloat16()
rewards, values = (torch.randn(8, 1024, generator=g, device=device) for _ in range(2))
mask = torch.ones(8, 1024, dtype=torch.bool, device=device)
rows = torch.arange(8, device=device)
T, P = torch.full((8,), 0.8, device=device), torch.full((8,), 0.95, device=device)
begun = time.perf_counter()
if kind == "jit":
    from rlkernel_triton.claims import CLAIMS
    def run(op):
        module, _, name = CLAIMS[op].target.partition(":")
        return getattr(import_module(module), name)
else:
    module = import_module(kind)
    run = lambda op: getattr(module, op)
out, took = {}, {}
def timed(op, call):
    if op in ops:
        start = time.perf_counter()
        out[op] = [float(v.detach()) for v in call()]
        if device == "cuda":
            torch.cuda.synchronize()
        took[op] = time.perf_counter() - start
def logprob():
    x = logits.clone().requires_grad_()
    r = run("logprob")(x, rows, temperature=0.8, entropy=True)
    (r.logprob.sum() + r.entropy.sum()).backward()
    return r.logprob.sum(), r.entropy.sum(), x.grad.float().abs().sum()
def sample():
    r = run("sample")(logits, temperature=T, top_p=P, seed=rows, step=rows)
    return r.token.sum(), r.logprob.sum()
def linear():
    x, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    r = run("linear_logprob")(x, w, rows, entropy=True)
    (r.logprob.sum() + r.entropy.sum()).backward()
    return r.logprob.sum(), x.grad.float().abs().sum()
def advantage():
    r = run("advantage")(rewards, kind="gae", mask=mask, values=values, gamma=0.99, lam=0.95)
    return (r.advantages.sum(),)
def loss():
    x = values.clone().requires_grad_()
    r = run("policy_loss")(x, values + 0.1, rewards[:, 0].contiguous(), kind="grpo", mask=mask)
    r.loss.backward()
    return r.loss, x.grad.abs().sum()
def weights():
    w = run("prepack")(run("quantize")(weight, "int4_g128"))
    y = run("qmatmul")(weight[:4].contiguous(), w)
    return y.float().abs().sum(), run("dequantize")(w).float().abs().sum()
for op, call in {
    "logprob": logprob, "sample": sample, "linear_logprob": linear, "advantage": advantage, "policy_loss": loss,
    "qmatmul": weights,
}.items():
    timed(op, call)
took_all = time.perf_counter() - begun
name = torch.cuda.get_device_name() if device == "cuda" else device
print(json.dumps({"seconds": took_all, "by": took, "results": out, "device": name}))
"""


def child(command: list[str], limit: float, environ: dict[str, str], log: Path) -> tuple[int | str, str]:
    """Exit status and standard output of a process that is ended after `limit` seconds."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, cwd=ROOT, env=environ, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, limit))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return "out of time", process.communicate()[0] or ""
    return process.returncode, said


class Run:
    """Folders, environment and clock of one call."""

    def __init__(self, asked: argparse.Namespace, work: Path) -> None:
        self.out, self.work, self.ops = asked.out, work, asked.ops
        self.until = time.monotonic() + asked.limit - 3
        inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.environ = {
            **kept,
            "PYTHONPATH": os.pathsep.join([*PATHS, *inherited]),
            "XDG_DATA_HOME": str(work / "data"),
        }
        self.environ["TRITON_CACHE_DIR"] = str(work / "triton")
        self.bundle = work / "data" / "rlkernel" / "bundles" / "here.zip"

    @property
    def left(self) -> float:
        """Seconds until everything has to be done."""
        return self.until - time.monotonic()

    def save(self, name: str, content: Any) -> None:
        """Write a section's JSON."""
        (self.out / f"{name}.json").write_text(json.dumps(content, indent=1))

    def said(self, name: str) -> str:
        """The end of what a section wrote to standard error."""
        path = self.out / f"{name}.log"
        return path.read_text(errors="replace")[-1500:] if path.exists() else ""


def own_target() -> str:
    """The target of this GPU."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def build(run: Run, name: str = "build", table: str = "") -> None:
    """One bundle: cubins for this GPU, cubin and PTX for sm_87."""
    start = time.monotonic()
    file = run.work / "build.py"  # a file, as the processes that compile import it
    file.write_text(BUILD)
    command = [sys.executable, str(file), run.ops, str(run.bundle), table, own_target(), "sm_87"]
    status, text = child(command, run.left, run.environ, run.out / f"{name}.log")
    found = json.loads(text.splitlines()[-1]) if status == 0 else {"status": status, "log": run.said(name)}
    run.save(name, {"seconds": time.monotonic() - start, **found})
    told = (
        f"{found['builds']} builds, {len(found['failed'])} failed {found['failed'][:2]}, {found['bytes'] / 1e6:.1f} MB"
        if status == 0
        else found["log"][-600:]
    )
    print(f"{name}: {told}, {time.monotonic() - start:.1f} s", flush=True)


def first(run: Run) -> None:
    """First calls: compiled on the spot, from Triton's cache on disk, and from a bundle."""

    def record(target: str) -> str:
        file = run.work / f"{target}.jsonl"
        command = [sys.executable, "-c", COLD, "rlkernel_triton.aot.recording", run.ops, "cpu"]
        child(command, run.left, {**run.environ, "AOT_RECORDING": f"{file}:{target}"}, run.out / f"record-{target}.log")
        return file.read_text()

    with ThreadPoolExecutor(2) as pool:
        lines = list(pool.map(record, (own_target(), "sm_87")))
    table = run.work / "first.jsonl"
    table.write_text("".join(lines))
    build(run, "build-first", str(table))
    found: dict[str, Any] = {}
    environ = {**run.environ, "TRITON_CACHE_DIR": str(run.work / "cold")}
    ways = {"bundle": "rlkernel_triton.aot.backend", "jit": "jit", "bundle, sm_87 PTX": "rlkernel_jetson.elsewhere"}
    ways |= {"jit, cached on disk": "jit", "bundle again": "rlkernel_triton.aot.backend"}
    for name, module in ways.items():
        log = run.out / f"first-{name.replace(' ', '-').replace(',', '')}.log"
        # The driver keeps what it compiled from PTX; a first load is measured without.
        own = {**environ, "CUDA_CACHE_DISABLE": "1"} if "PTX" in name else environ
        status, text = child([sys.executable, "-c", COLD, module, run.ops, "cuda"], run.left, own, log)
        if status == 0:
            found[name] = json.loads(text.splitlines()[-1])
            found[name]["apart"] = close(found[name]["results"], found.get("bundle", {}).get("results", {}))
            print(f"first calls, {name}: {found[name]['seconds']:.3f} s, apart {found[name]['apart']}", flush=True)
        else:
            found[name] = {"status": status, "log": log.read_text()[-1500:]}
            print(f"first calls, {name}: {status} {found[name]['log'][-700:]}", flush=True)
        run.save("first", found)


def close(a: dict[str, list[float]], b: dict[str, list[float]]) -> dict[str, float]:
    """Operator -> the largest relative difference of two runs' sums."""
    return {
        op: max((abs(x - y) / max(abs(y), 1e-6) for x, y in zip(a[op], b[op], strict=True)), default=0.0)
        for op in a
        if op in b
    }


def conformance(run: Run, profile: str) -> None:
    """Every operator over the bundle against its clauses, several at a time."""
    from gpu_all import merged_conformance

    summary: dict[str, Any] = {}
    pairs = [(backend, op) for op in run.ops.split(",") for backend in MANIFESTS]
    workers = str(max(2, (os.cpu_count() or 4) // (2 * len(pairs))))

    def one(pair: tuple[str, str]) -> None:
        backend, op = pair
        folder, log = run.out / "conformance" / profile / backend / op, run.out / f"{backend}-{op}.log"
        command = [sys.executable, "-m", "rlkernel", "conformance", "run", backend, "--manifest", MANIFESTS[backend]]
        command += ["--op", op, "--profile", profile, "--device", "cuda", "--jobs", workers, "--report", str(folder)]
        start = time.monotonic()
        status, text = child(command, run.left, run.environ, log)
        report = folder / "report.json"
        counts = json.loads(report.read_text())["summary"] if report.exists() else {}
        seconds = time.monotonic() - start
        summary[f"{backend} {op}"] = {"status": status, "seconds": seconds, "summary": counts, "end": text[-6000:]}
        print(f"{backend:9} {op:15} {status!s:12} {seconds:5.1f} s {counts}", flush=True)
        run.save("conformance", summary)

    with ThreadPoolExecutor(len(pairs)) as pool:
        list(pool.map(one, pairs))
    for backend in MANIFESTS:
        run.save(
            f"conformance-{backend}-{profile}", merged_conformance(SimpleNamespace(work=run.out), backend, profile)
        )


def main() -> int:
    """Run the sections; one that fails leaves the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/aot")))
    parser.add_argument("--limit", type=float, default=80.0, help="seconds in all")
    parser.add_argument("--ops", default=OPS)
    parser.add_argument("--only", default="build,conformance")
    parser.add_argument("--profile", default="quick")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.out = asked.out.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(asked, Path(temporary))
        sections = {"build": build, "first": first, "conformance": lambda r: conformance(r, asked.profile)}
        for name in asked.only.split(","):
            try:
                sections[name](run)
            except Exception as error:  # every section is tried
                print(f"{name}: {error!r}", flush=True)
                run.save(f"{name}-failed", {"error": repr(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
