"""Bundles on a GPU: conformance of their operators, and how long a first call takes with one and without.

    python benchmarks/gpu_aot.py --out $OUT/first --limit 90 --only first --bundles runs/aot
    python benchmarks/gpu_aot.py --out $OUT/aot --limit 300 --bundles runs/aot --quick policy_loss

`first`: the first call of every operator from a bundle, and compiled on the spot. `conformance`: every operator against
its clauses, from cubins and from PTX. `grow`: what those clauses launch, compiled as it is asked for. `board`: the
calls of `first` on as few multiprocessors and as little memory as a board has.

Bundles were built elsewhere, `FOLDER/OP.zip` and `FOLDER/first.zip`, with cubins for this GPU and PTX for sm_87: that
is what they are for. One that is missing, or was built from other sources, is built here, of the configurations in
`FOLDER/OP.jsonl` or the shipped ones, with the Triton that is here.

`aot` runs cubins of this GPU, `orin-ptx` the sm_87 PTX through the driver's compiler: sm_87 code on this GPU. Nothing
here is measured on a Jetson. What is found is written under --out as it is found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [
    str(ROOT / p)
    for p in (".", "registry", "conformance", "backends/triton", "backends/cuda", "backends/jetson", "benchmarks")
]
MANIFESTS = {"aot": "rlkernel_triton.aot.backend:backend", "orin-ptx": "rlkernel_jetson.elsewhere:backend"}
# What takes longest comes first.
OPS = "policy_loss,qmatmul,sample,linear_logprob,advantage,logprob"
CORES = len(os.sched_getaffinity(0))
WORKERS = 4  # processes of one run of the suite
LAST = 12.0  # seconds for a run of the suite to write its report when its time is over
BUILD = """
import json, sys
from rlkernel_triton.aot.command import build
if __name__ == "__main__":
    ops, out, table, jobs, *targets = sys.argv[1:]
    found = build(targets, ops.split(","), out=out, jobs=int(jobs), configurations=table or None, keep_going=True)
    print(json.dumps(found))
"""
# File -> kernels whose source is not the one that it was built from.
CHECK = """
import json, sys
from importlib import import_module
from pathlib import Path
from rlkernel_triton.aot.bundle import Bundle
from rlkernel_triton.aot.sources import digest
for path in sys.argv[1:]:
    sources = {c.build.kernel: c.source for c in Bundle(Path(path)).codes}
    kernels = {k: getattr(import_module(k.partition(":")[0]), k.partition(":")[2], None) for k in sources}
    print(json.dumps([path, [k for k, f in kernels.items() if f is None or digest(f.fn) != sources[k]]]))
"""
# Everything that one update on a GPU calls, once; (seconds, results) on standard output.
COLD = """
import json, sys, time
from importlib import import_module
import torch
kind, ops, device = sys.argv[1], sys.argv[2].split(","), sys.argv[3]
confined = {}
if len(sys.argv) > 4:  # as many multiprocessors and as much memory as a board has
    import aot_board
    confined = {k: v for k, v in aot_board.confined().items() if k != "green"}
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
product = 0.0
if device == "cuda":  # how much of the GPU there is
    a = torch.ones(4096, 4096, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(a, a)
        torch.cuda.synchronize()
        product = time.perf_counter() - start
name = torch.cuda.get_device_name() if device == "cuda" else device
peak = torch.cuda.max_memory_reserved() if device == "cuda" else 0
found = {"seconds": took_all, "by": took, "results": out, "device": name, "product_s": product, "peak": peak}
found |= confined
print(json.dumps(found))
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
        self.out, self.work, self.ops, self.bundles = asked.out, work, asked.ops.split(","), asked.bundles
        self.until = time.monotonic() + asked.limit - 3
        inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.environ = {
            **kept,
            "PYTHONPATH": os.pathsep.join([*PATHS, *inherited]),
            "TRITON_CACHE_DIR": str(work / "triton"),
            # The driver keeps what it compiled from PTX, for all processes.
            "CUDA_CACHE_PATH": str(work / "nv"),
            "CUDA_CACHE_MAXSIZE": str(4 << 30),
            "OMP_NUM_THREADS": "2",  # of many processes
        }
        self.used: dict[str, Any] = {}  # name of a bundle -> where it is from
        self.codes: list[str] = asked.codes.split(",")
        self.lock = Lock()
        self.target = own_target()

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

    def with_bundle(self, name: str) -> dict[str, str]:
        """The environment of a process that finds one bundle."""
        # The outcome of a self-test is remembered, and is of one bundle.
        homes = {f"XDG_{kind}_HOME": str(self.work / kind.lower() / name) for kind in ("DATA", "CACHE")}
        return {**self.environ, **homes}

    def file(self, name: str) -> Path:
        """Where that bundle lies."""
        return self.work / "data" / name / "rlkernel" / "bundles" / "here.zip"

    def uses(self, name: str, how: dict[str, Any]) -> None:
        """Say where a bundle is from."""
        with self.lock:
            self.used[name] = how
            self.save("bundles", self.used)
        print(f"bundle of {name}: {how}"[:700], flush=True)


def own_target() -> str:
    """The target of this GPU."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def brought(run: Run, names: list[str]) -> set[str]:
    """Take over the bundles that were built elsewhere from these sources; their names."""
    found = {str(path): name for name in names if (path := run.bundles / f"{name}.zip").exists()}
    if not found:
        return set()
    status, text = child([sys.executable, "-c", CHECK, *found], run.left, run.environ, run.out / "check.log")
    taken = set()
    for path, stale in map(json.loads, text.splitlines()):
        name = found[path]
        if stale:
            run.uses(name, {"refused": f"built from other sources of {', '.join(stale)}"})
            continue
        run.file(name).parent.mkdir(parents=True)
        shutil.copy(path, run.file(name))
        run.uses(name, {"built": "elsewhere", "bytes": Path(path).stat().st_size})
        taken.add(name)
    if status != 0:
        print(f"bundles that were brought: {status} {run.said('check')[-600:]}", flush=True)
    return taken


def build(run: Run, name: str, ops: str, processes: int, table: str = "") -> None:
    """A bundle, here: cubins for this GPU, cubin and PTX for sm_87; what one that was brought lacks, if one was."""
    start = time.monotonic()
    file = run.work / f"build-{name}.py"  # a file, as the processes that compile import it
    file.write_text(BUILD)
    out = run.file(name)
    if out.exists() and not table:
        return
    if out.exists():
        from rlkernel_triton.aot.builds import Build
        from rlkernel_triton.aot.bundle import Bundle

        there = {(c.target, c.build) for c in Bundle(out).codes}
        lines = Path(table).read_text().splitlines(keepends=True)
        lacking = [x for x in lines if (json.loads(x)["target"], Build.of(json.loads(x))) not in there]
        if not lacking:
            return
        Path(table).write_text("".join(lacking))
        out = out.with_name("more.zip")
    command = [sys.executable, str(file), ops, str(out), table, str(processes), run.target, "sm_87"]
    status, text = child(command, run.left, run.environ, run.out / f"build-{name}.log")
    seconds = time.monotonic() - start
    if status == 0:
        found = json.loads(text.splitlines()[-1])
        kept = {k: found[k] for k in ("builds", "bytes", "compiler")} | {"failed": found["failed"][:3]}
        run.uses(name, {**run.used.get(name, {}), "built here": kept, "seconds": seconds})
    else:
        run.uses(name, {"status": status, "seconds": seconds, "log": run.said(f"build-{name}")[-600:]})


def first(run: Run) -> None:
    """First calls: from a bundle, compiled on the spot, from PTX, and again with Triton's cache on disk."""
    ops = ",".join(run.ops)
    ready(run, ops)
    found: dict[str, Any] = {}
    environ = {**run.with_bundle("first"), "TRITON_CACHE_DIR": str(run.work / "cold")}
    ways = {"bundle": "rlkernel_triton.aot.backend", "jit": "jit", "bundle, sm_87 PTX": "rlkernel_jetson.elsewhere"}
    ways |= {"bundle again": "rlkernel_triton.aot.backend", "jit, cached on disk": "jit"}
    for name, module in ways.items():
        log = run.out / f"first-{name.replace(' ', '-').replace(',', '')}.log"
        # A first load of PTX is measured without what the driver kept.
        own = {**environ, "CUDA_CACHE_DISABLE": "1"} if "PTX" in name else environ
        status, text = child([sys.executable, "-c", COLD, module, ops, "cuda"], run.left, own, log)
        if status == 0:
            found[name] = json.loads(text.splitlines()[-1])
            found[name]["apart"] = close(found[name]["results"], found.get("bundle", {}).get("results", {}))
            by = {op: round(s, 3) for op, s in found[name]["by"].items()}
            print(f"first calls, {name}: {found[name]['seconds']:.3f} s {by}", flush=True)
            print(f"    apart from the bundle's {found[name]['apart']}", flush=True)
        else:
            found[name] = {"status": status, "log": log.read_text()[-1500:]}
            print(f"first calls, {name}: {status} {found[name]['log'][-700:]}", flush=True)
        run.save("first", found)
    if all("seconds" in found[way] for way in ("jit", "bundle")):
        print(f"jit / bundle: {found['jit']['seconds'] / found['bundle']['seconds']:.1f}", flush=True)


def board(run: Run) -> None:
    """The sm_87 PTX on as many multiprocessors and as much memory as an Orin of 8 GB has, and on the whole GPU."""
    ops = ",".join(run.ops)
    ready(run, ops)

    def calls(name: str, *more: str) -> dict[str, Any]:
        log = run.out / f"board-{len(more)}.log"
        command = [sys.executable, "-c", COLD, "rlkernel_jetson.elsewhere", ops, "cuda", *more]
        status, text = child(command, run.left, run.with_bundle("first"), log)
        found = json.loads(text.splitlines()[-1]) if status == 0 else {"status": status, "log": log.read_text()[-3000:]}
        print(f"sm_87 PTX, {name}: { {k: v for k, v in found.items() if k != 'results'} }"[-1500:], flush=True)
        return found

    with ThreadPoolExecutor(2) as pool:
        few, whole = pool.map(lambda of: calls(*of), (("8 multiprocessors, 5 GiB", "confined"), ("whole",)))
    apart = close(few.get("results", {}), whole.get("results", {}))
    same = "results" in few and few.get("results") == whole.get("results")
    run.save("board", {"few": few, "whole": whole, "same bits": same, "apart": apart})
    print(f"the same bits: {same}, apart {apart}", flush=True)


def grow(run: Run, profile: str) -> None:
    """What every operator launches under its clauses on this GPU, compiled as it is asked for."""
    from collections import Counter

    ready(run, ",".join(run.ops))
    jobs = max(1, CORES // len(run.ops))
    summary: dict[str, Any] = {}

    def lane(op: str) -> None:
        files = {"": run.out / f"grown-{op}-cubins.jsonl", "ptx": run.out / f"grown-{op}-ptx.jsonl"}
        for code, file in files.items():
            if code not in run.codes:
                continue
            file.touch()
            environ = {**run.with_bundle("first"), "AOT_MISSING": str(file), "AOT_CODE": code}
            environ["XDG_CACHE_HOME"] = str(run.work / "cache" / f"{op}-{code}")
            command = [sys.executable, *suite("growing", "aot_growing:backend", op, profile, "cuda", jobs)]
            share = 1.0 if code == run.codes[-1] else 0.5
            report = run.out / "grown" / f"{op}-{code or 'cubins'}"
            command += ["--within", f"{max(1.0, (run.left - LAST) * share):.0f}", "--report", str(report)]
            start = time.monotonic()
            status, text = child(command, run.left, environ, run.out / f"grow-{op}-{code or 'cubins'}.log")
            kernels = Counter(json.loads(line)["kernel"] for line in set(file.read_text().splitlines()))
            found = {"status": status, "seconds": time.monotonic() - start, "builds": kernels, "end": text[-9000:]}
            with run.lock:
                summary[f"{op} {code or 'cubins'}"] = found
                run.save("grown", summary)
            print(f"grown {op:15} {code or 'cubins':7} {status!s:12} {found['seconds']:5.1f} s {sum(kernels.values())}")

    with ThreadPoolExecutor(len(run.ops)) as pool:
        list(pool.map(lane, run.ops))


def ready(run: Run, ops: str) -> None:
    """See to it that the bundle of the first calls is there."""
    if run.file("first").exists() or "first" in brought(run, ["first"]):
        return
    table = recorded(run, "first", ["-c", COLD, "rlkernel_triton.aot.recording", ops, "cpu"])
    build(run, "first", f"{ops},quantize,prepack,dequantize", CORES, str(table))


def recorded(run: Run, name: str, command: list[str]) -> Path:
    """A table of what a command launches over `rlkernel_triton.aot.recording`, on this GPU's target and on sm_87."""

    def record(target: str) -> str:
        file = run.work / f"{name}-{target}.jsonl"
        file.touch()
        environ = {**run.environ, "AOT_RECORDING": f"{file}:{target}"}
        child([sys.executable, *command], run.left, environ, run.out / f"record-{name}-{target}.log")
        return file.read_text()

    with ThreadPoolExecutor(2) as pool:
        lines = list(pool.map(record, (run.target, "sm_87")))
    table = run.work / f"{name}.jsonl"
    table.write_text("".join(lines))
    return table


def suite(backend: str, manifest: str, op: str, profile: str, device: str, jobs: int) -> list[str]:
    """The arguments of Python that hold an operator of a backend against its clauses."""
    command = ["-m", "rlkernel", "conformance", "run", backend, "--manifest", manifest, "--op", op]
    return [*command, "--profile", profile, "--device", device, "--jobs", str(jobs)]


def close(a: dict[str, list[float]], b: dict[str, list[float]]) -> dict[str, float]:
    """Operator -> the largest relative difference of two runs' sums."""
    return {
        op: max((abs(x - y) / max(abs(y), 1e-6) for x, y in zip(a[op], b[op], strict=True)), default=0.0)
        for op in a
        if op in b
    }


def conformance(run: Run, profile: str, quick: list[str], again: list[str]) -> None:
    """Every operator over its bundle against its clauses, several at a time: from cubins, then from PTX.

    `again` names operators whose configurations are recorded here.
    """
    lanes = max(1, min(len(run.ops), CORES // WORKERS))
    workers = max(1, CORES // lanes)
    there = brought(run, run.ops)
    summary: dict[str, Any] = {}

    def lane(op: str) -> None:
        effort = "quick" if op in quick else profile
        if op not in there or op in again:
            build(run, op, op, max(workers, CORES // 2), table(op, effort))
        for backend, share in zip(MANIFESTS, (0.5, 1.0), strict=False):
            attacked(backend, op, effort, share)

    def table(op: str, effort: str) -> str:
        """A file of configurations, if those that ship will not do: they are those of the quick profile."""
        brought_along = run.bundles / f"{op}.jsonl"
        if op in again:
            command = suite("recorded", "rlkernel_triton.aot.recording:on_gpu", op, effort, "cuda", workers)
            found = recorded(run, op, command)
            if found.stat().st_size:
                return str(found)
        return str(brought_along) if effort != "quick" and brought_along.exists() else ""

    def attacked(backend: str, op: str, effort: str, share: float) -> None:
        folder, log = run.out / "conformance" / effort / backend / op, run.out / f"{backend}-{op}.log"
        command = [sys.executable, *suite(backend, MANIFESTS[backend], op, effort, "cuda", workers)]
        command += ["--within", f"{max(1.0, (run.left - LAST) * share):.0f}", "--report", str(folder)]
        start = time.monotonic()
        status, text = child(command, run.left, run.with_bundle(op), log)
        report = folder / "report.json"
        counts = json.loads(report.read_text())["summary"] if report.exists() else {}
        seconds = time.monotonic() - start
        with run.lock:
            of = {"status": status, "seconds": seconds, "profile": effort, "summary": counts, "end": text[-6000:]}
            summary[f"{backend} {op}"] = of
            run.save("conformance", summary)
            whole = merged_conformance(SimpleNamespace(work=run.out), backend, effort)
            if whole is not None:
                run.save(f"conformance-{backend}-{effort}", whole)
        print(f"{backend:9} {op:15} {effort:9} {status!s:12} {seconds:5.1f} s {counts}", flush=True)

    from gpu_all import merged_conformance

    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(lane, run.ops))


def main() -> int:
    """Run the sections; one that fails leaves the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/aot-found")))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds in all")
    parser.add_argument("--ops", default=OPS)
    parser.add_argument("--only", default="conformance", help="first, board, grow, conformance, with commas")
    parser.add_argument("--codes", default=",ptx", help="what `grow` runs: nothing for cubins, ptx, with commas")
    parser.add_argument("--profile", default="standard")
    parser.add_argument("--quick", default="", help="operators that are attacked at the quick profile, with commas")
    parser.add_argument("--record", default="", help="operators whose configurations are recorded here, with commas")
    parser.add_argument("--bundles", type=Path, default=Path("runs/aot"), help="where bundles from elsewhere lie")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.out = asked.out.resolve()
    sys.path[:0] = PATHS
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(asked, Path(temporary))
        quick, again = asked.quick.split(","), asked.record.split(",")
        sections = {
            "first": first,
            "board": board,
            "grow": lambda r: grow(r, asked.profile),
            "conformance": lambda r: conformance(r, asked.profile, quick, again),
        }
        for name in asked.only.split(","):
            try:
                sections[name](run)
            except Exception as error:  # every section is tried
                print(f"{name}: {error!r}", flush=True)
                run.save(f"{name}-failed", {"error": repr(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
