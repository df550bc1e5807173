"""Products with quantised weights in CUDA C++ on one Hopper GPU, as they ship: each is checked, then timed.

    PYTHONPATH=.:registry:conformance:backends/triton:backends/cuda OUT=. python benchmarks/gpu_qmatmul_cuda.py

Writes $OUT/gpu_qmatmul_cuda.json after every finding. Kernels are compiled in several processes first; then one process
a family checks (the share of the contract's bound that is used, in float64; repeated bits; the first row of a batch
beside the row alone) and times (medians of CUDA graph replays over copies of a weight that exceed 256 MB together).
A process that says nothing for some seconds is ended, and what it hung in is left out. Ends within `--seconds`.
One file over 400 lines, since its families share one machine, one way to check and one to time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu_qmatmul import COLD, replayed

ROOT = Path(__file__).resolve().parents[1]
MAIN = (28672, 4096)
WORKERS = max(4, min(14, len(os.sched_getaffinity(0))))  # that compile
SILENCE = 9.0  # seconds
BANDWIDTH, RATE = 4.3e12, 790e12  # bytes and operations a second that an H200 reaches
Finding = dict[str, Any]


# (N, K): Llama 3 8B and 70B, Qwen3 4B, 8B and 14B
SHAPES = [
    MAIN, (6144, 4096), (4096, 14336), (4096, 4096), (8192, 8192), (10240, 8192), (57344, 8192), (8192, 28672),
    (24576, 4096), (4096, 12288), (19456, 2560), (34816, 5120), (5120, 17408),
]  # fmt: skip
TOKENS = {"main": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096), "elsewhere": (1, 16, 64, 128, 256, 1024)}
FORMATS = ("int4_g128", "int4_g64_asym", "int4_channel", "int4_channel_asym", "int4_g32_asym")
FORMATS8 = ("int8_channel", "fp8_channel", "fp8_tensor", "fp8_block128")
# Seconds that a family may take of those that are left, in this order.
SHARES = {
    "main": {"narrow": 0.35, "split": 0.45, "whole": 0.75, "narrow8": 0.8, "portable": 1.0},
    "elsewhere": {"narrow": 0.4, "split": 0.65, "whole": 0.8, "portable": 1.0},
}


class Described:
    """What cuts and builds depend on of a weight."""

    def __init__(self, kind: str, shape: tuple[int, int] = (0, 0)) -> None:
        from rlkernel_core.quant.spec import QuantSpec

        self.spec, self.shape = QuantSpec.named(kind), shape


def kinds(family: str) -> tuple[str, ...]:
    """Formats that are timed."""
    return FORMATS8[:2] if family == "narrow8" else ("int4_g128",)


def jobs(family: str, where: str) -> Iterator[tuple[int, int, int, Any]]:
    """(N, K, M, cut) as they ship; `where`: at the main shape, or at all others."""
    from rlkernel_cuda.quant import choice

    for N, K in SHAPES[:1] if where == "main" else SHAPES[1:]:
        if family == "portable":
            for M in (1, 16, 32, 64, 128, 256) if where == "main" else (16, 64):
                yield N, K, M, None
            continue
        for M in TOKENS[where]:
            cut = choice.cut(M, Described(kinds(family)[0], (N, K)))
            if cut is not None and family_of(cut) == family:
                yield N, K, M, cut


def family_of(cut: Any) -> str:
    """The kernel of a cut; of `wide`, whether blocks share tiles."""
    name = type(cut).__name__.lower()
    return name if name != "wide" else "split" if cut.split else "whole"


def kept_compiler(folder: Path) -> None:
    """Compiled kernels are kept in a folder, for the processes that come after."""
    from rlkernel_cuda import driver

    fresh = driver.compiled

    def compiled(source: str, options: Any) -> bytes:
        place = folder / hashlib.sha256("\n".join((source, *options)).encode()).hexdigest()
        if place.exists():
            return place.read_bytes()
        code = fresh(source, options)
        half = place.with_suffix(f".{os.getpid()}")
        half.write_bytes(code)
        half.replace(place)
        return code

    driver.compiled = compiled


def small_jobs(family: str, where: str) -> Iterator[tuple[str, int, int, int, Any, str]]:
    """(format, N, K, M, cut, dtype) that are only checked: ends of clusters, of tokens and of the depth of a tile."""
    from rlkernel_cuda.quant.launch import Narrow, Narrow8, Wide

    small = {
        "split": [
            (512, 2048, 13, Wide(16, 2, 4, split=True, teams=4)),
            (384, 1024, 50, Wide(64, 2, 4, split=True)),
            (640, 1024, 200, Wide(128, 2, 4, split=True)),
        ],
        "whole": [
            (512, 640, 33, Wide(64, 2, 4, split=False, teams=4)),
            (384, 2048, 300, Wide(256, 1, 4, split=False)),
            (640, 640, 300, Wide(256, 1, 4, split=False)),
        ],
        "narrow": [
            (448, 2048, 13, Narrow(16, 4, 2, 2, 2, 2, 4)),
            (448, 5120, 5, Narrow(8, 3, 2, 1, 4, 1, 4)),
            (448, 5120, 13, Narrow(16, 3, 1, 3, 4, 2, 8)),
        ],
        "narrow8": [(400, 1536, 13, Narrow8(16, 4, 2, 3))],
    }
    if where != "main":
        return
    for N, K, M, cut in small.get(family, []):
        if family == "narrow8":
            yield from ((kind, N, K, M, cut, "bfloat16") for kind in FORMATS8)
            continue
        few = ("int4_g128", "int4_channel_asym")
        every = FORMATS[:4] if family == "narrow" else FORMATS if cut.tokens == 64 else few
        yield from ((kind, N, K, M, cut, "bfloat16") for kind in every)
        yield ("int4_g64_asym" if family == "narrow" else "int4_g32_asym"), N, K, M, cut, "float16"


def compile_some(worker: int, folder: Path, where: str) -> None:
    """Every WORKERS-th build."""
    import torch

    from rlkernel_cuda import driver
    from rlkernel_cuda.quant import launch

    kept_compiler(folder)
    wanted: dict[tuple[Any, ...], None] = {}

    def add(cut: Any, kind: str, dtype: str) -> None:
        if cut is not None:  # else a portable kernel
            sources, options, _ = launch.build(cut, Described(kind), getattr(torch, dtype))
            wanted[sources, options] = None

    for family in SHARES[where]:
        for kind, _, _, _, cut, dtype in small_jobs(family, where):
            add(cut, kind, dtype)
        for _, _, _, cut in jobs(family, where):
            for kind in kinds(family):
                add(cut, kind, "bfloat16")
    for sources, options in list(wanted)[worker::WORKERS]:
        driver.compiled("\n".join(path.read_text() for path in sources), options)
        print("compiled", flush=True)


# ----------------------------------------------------------------------------------------------------------- one family


def checked(run: Any, x: Any, y: Any, exact: Any, rounding: str, kind_unit: str) -> Finding:
    """Correctness of one call; y is poisoned before each."""
    import torch

    from rlkernel_core.spec.qmatmul import UNITS, accumulation_bound

    y.fill_(float("nan"))
    run(x, y)
    h, reach = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
    bound = accumulation_bound(h, reach, unit=UNITS[kind_unit], inner=x.shape[1], weight_rounding=rounding)
    used = float(((y.double() - h).abs() / bound).nan_to_num(nan=1e9).max())
    first = y.clone()
    repeats = True
    for _ in range(4):
        y.fill_(float("nan"))
        run(x, y)
        repeats &= bool(torch.equal(first, y))
    alone = torch.empty_like(y[:1])
    run(x[:1].contiguous(), alone)
    return {"used": round(used, 4), "repeats": repeats, "row_alone": bool(torch.equal(alone[0], first[0]))}


def chained(run: Any, x: Any, y: Any, weights: list[Any]) -> Finding:
    """With a small kernel before each product that writes its x: microseconds of both, and whether that x was seen."""
    import torch

    several = weights[:8]
    xs = [x * (i + 1) for i in range(len(several))]
    ys = [torch.empty_like(y) for _ in several]
    between = torch.empty_like(x)

    def step(x: Any, w: Any, y: Any) -> None:
        torch.mul(x, 1.0, out=between)  # a kernel, not a copy
        run(between, w, y)

    us = replayed([partial(step, *given) for given in zip(xs, several, ys, strict=True)], 0.04)
    right = True
    for x_i, w, y_i in zip(xs, several, ys, strict=True):
        run(x_i, w, y)
        right &= bool(torch.equal(y, y_i))
    return {"chain": us, "chain_right": right}


def weight(N: int, K: int, kind: str, dtype: Any) -> Any:
    """A packed weight."""
    import torch
    from rlkernel_bench.direct import of_triton

    full = torch.randn(N, K, device="cuda", dtype=dtype)
    from rlkernel_core.quant.spec import QuantSpec

    if not kind.startswith("int4"):
        return of_triton.quantize(full, QuantSpec.named(kind))
    half = {"scale_dtype": "float16"} if dtype == torch.float16 else {}
    return of_triton.prepack(of_triton.quantize(full, QuantSpec.named(kind, **half)))


def named(cut: Any) -> str:
    """The numbers of a cut."""
    return str(tuple(map(int, cut)))


def cut_in(label: str) -> str:
    """The cut that a label names."""
    found = re.findall(r"\((?:\d+, )+\d+\)", label)
    return found[-1] if found else label


def family_child(family: str, folder: Path, where: str, skip: set[str], hung: set[str]) -> None:
    """Check, then time, all jobs of a family; a line a finding."""
    import torch
    from rlkernel_bench.direct import of_triton

    from rlkernel_cuda.quant import launch

    kept_compiler(folder)
    torch.manual_seed(1)
    run_of = launch.product

    rounding = "any" if family == "portable" else "dtype" if family in {"split", "whole"} else "none"

    def told(label: str, work: Any) -> None:
        if label in skip or cut_in(label) in hung:
            return
        print("@begin " + label, flush=True)
        try:
            found = work()
        except Exception:
            found = {"failed": traceback.format_exc()[-800:]}
        print("@found " + json.dumps([label, found]), flush=True)
        if "failed" in found and "CUDA error" in found["failed"]:
            sys.exit(1)  # the context is lost

    def exact_of(w: Any, dtype: Any, rounding: str) -> Any:
        values = of_triton.dequantize(w, dtype=dtype if rounding == "dtype" else torch.float32)
        return values.double()

    def small(kind: str, N: int, K: int, M: int, cut: Any, dtype_name: str) -> Finding:
        dtype = getattr(torch, dtype_name)
        w = weight(N, K, kind, dtype)
        x, y = torch.randn(M, K, device="cuda", dtype=dtype), torch.empty(M, N, device="cuda", dtype=dtype)
        bias = torch.randn(N, device="cuda", dtype=dtype)
        found = checked(
            lambda a, b: run_of(a, w, None, b, cut), x, y, exact_of(w, dtype, rounding), rounding, dtype_name
        )
        plain = y.clone()
        run_of(x, w, bias, y, cut)
        off = (y.float() - (plain.float() + bias.float())).abs() / (plain.float().abs() + bias.float().abs() + 1)
        return {**found, "bias": round(float(off.nan_to_num(nan=1e9).max()), 5)}

    for job in small_jobs(family, where):
        told(f"small {job[:4]} {job[5]} {named(job[4])}", partial(small, *job))
    state: dict[str, Any] = {}

    def timed(N: int, K: int, M: int, cut: Any, kind: str = "int4_g128") -> Finding:
        if state.get("shape") != (N, K, kind):
            state.clear()
            torch.cuda.empty_cache()
            first = weight(N, K, kind, torch.bfloat16)
            copies = [first]
            while sum(w.nbytes for w in copies) < COLD:
                parts = {n: t.clone() for n, t in first.parts.items()}
                copies.append(type(first)(first.spec, first.shape, first.dtype, parts, first.layout))
            dense = of_triton.dequantize(first, dtype=torch.bfloat16)
            state.update(shape=(N, K, kind), dense_at=None, copies=copies, dense=[dense, dense.clone()])
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)

        def run(x: Any, w: Any, y: Any) -> None:
            if cut is None:
                y.copy_(of_triton.qmatmul(x, w))
            else:
                run_of(x, w, None, y, cut)

        found: Finding = {}
        if M <= 1024:
            w = state["copies"][0]
            if "exact" not in state:
                state["exact"] = exact_of(w, torch.bfloat16, rounding)
            found = checked(lambda a, b: run(a, w, b), x, y, state["exact"], rounding, "bfloat16")
        timing = partial(of_triton.qmatmul, x) if cut is None else partial(run, x)
        rest = () if cut is None else (y,)
        calls = [partial(timing, w, *rest) for w in state["copies"]]
        found["us"] = replayed(calls, 0.05)
        if cut is not None and M <= 64:
            found |= chained(run, x, y, state["copies"])
        if state.get("dense_at") != M:
            state["dense_at"] = M
            state["cublas"] = replayed([partial(torch.mm, x, d.t(), out=y) for d in state["dense"]], 0.05)
        found["cublas"] = state["cublas"]
        moved = state["copies"][0].nbytes + 2 * M * (N + K)
        found["floor"] = round(1e6 * max(moved / BANDWIDTH, 2 * M * N * K / RATE), 2)
        return found

    for kind in kinds(family):
        for N, K, M, cut in jobs(family, where):
            label = f"{kind} {K}x{N} M={M}"
            told(f"portable {label}" if cut is None else f"{label} {named(cut)}", partial(timed, N, K, M, cut, kind))
    print("@done", flush=True)


def followed(family: str, folder: Path, where: str, until: float, note: Any) -> None:
    """A family's child, ended and started again without what it hung in."""
    patience = 2 * SILENCE if family == "portable" else SILENCE  # Triton compiles where it is first called
    skip: list[str] = []
    hung: list[str] = []
    while time.monotonic() < until:
        command = [sys.executable, __file__, "--child", family, "--folder", str(folder), "--skip", json.dumps(skip)]
        command += ["--where", where, "--hung", json.dumps(hung)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        lines: queue.Queue[str | None] = queue.Queue()

        def pump(of: Any = process, to: Any = lines) -> None:
            for line in of.stdout:
                to.put(line)
            to.put(None)

        threading.Thread(target=pump, daemon=True).start()
        at, tail, done = "", "", False
        while True:
            try:
                line = lines.get(timeout=max(0.1, min(patience, until - time.monotonic())))
            except queue.Empty:
                note(family, at or "start", {"failed": "silent; ended"})
                hung.append(cut_in(at))
                break
            if line is None:
                break
            if line.startswith("@begin "):
                at = line[7:].strip()
            elif line.startswith("@found "):
                label, found = json.loads(line[7:])
                note(family, label, found)
                skip.append(label)
                at = ""
            elif line.startswith("@done"):
                done = True
            else:
                tail = (tail + line)[-600:]
        process.kill()
        process.wait()
        if done:
            return
        if at:
            skip.append(at)
        elif not skip:
            note(family, "start", {"failed": tail})
            return


def main() -> None:
    """Compile, then each family."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--where", choices=tuple(SHARES), default="main")
    parser.add_argument("--child")
    parser.add_argument("--folder", default="")
    parser.add_argument("--skip", default="[]")
    parser.add_argument("--hung", default="[]")
    given = parser.parse_args()
    if given.child:
        folder = Path(given.folder)
        if given.child.isdigit():
            compile_some(int(given.child), folder, given.where)
        else:
            family_child(given.child, folder, given.where, set(json.loads(given.skip)), set(json.loads(given.hung)))
        return
    begun = time.monotonic()
    name = "gpu_qmatmul_cuda.json" if given.where == "main" else "gpu_qmatmul_cuda_shapes.json"
    place = Path(os.environ.get("OUT", ".")) / name
    report: dict[str, Any] = {}

    def note(family: str, label: str, found: Finding) -> None:
        report.setdefault(family, {})[label] = found
        report["seconds"] = round(time.monotonic() - begun, 1)
        place.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{family} {label} {json.dumps(found)[:330]}", flush=True)

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        more = ["--where", given.where]
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", str(i), "--folder", folder, *more],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            )
            for i in range(WORKERS)
        ]  # fmt: skip
        failed = [p.communicate(timeout=given.seconds)[1][-1500:] for p in workers]
        note("compile", "all", {"failed": [f for p, f in zip(workers, failed, strict=True) if p.returncode]})
        end = begun + given.seconds
        left = end - time.monotonic()
        start = time.monotonic()
        for family, share in SHARES[given.where].items():
            followed(family, Path(folder), given.where, start + share * left, note)
    print("seconds", report["seconds"])


if __name__ == "__main__":
    main()
