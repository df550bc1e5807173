"""Launches on a GPU, through Triton's JIT and by bound launches: microseconds on the host, and whether they are right.

    PYTHONPATH=.:registry:backends/triton OUT=. python benchmarks/gpu_launchers.py

Writes $OUT/gpu_launchers.json after every section and prints a line a finding; a section that raises loses itself only.
Ends within a minute. Times are the best of several rounds of launches that the GPU keeps up with: the least that a call
costs the host.

Predictions, written before the first run (H200: JIT 28.9, Triton's own launcher of the compiled kernel 6.4): a bound
launch of eight pointers, two fixed and four passed numbers 7, without passed numbers 6; ten alternating arguments 0.3
more.
"""

# ruff: noqa: ANN001, ANN201, ARG001, D403 -- kernels, whose parameters Triton types
from __future__ import annotations

import json
import os
import platform
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from rlkernel_triton.launchers import launcher_for
from rlkernel_triton.launchers.jit import JitLauncher, gpu

N = 256


@triton.jit
def eight(a, b, c, d, e, f, g, h, s0, s1, s2, s3, n, m, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
          D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, G: tl.constexpr, H: tl.constexpr):  # fmt: skip
    """d = a + b (+ c), scaled and shifted: as many arguments as a kernel of logprob has."""
    i = tl.program_id(0) * A + tl.arange(0, A)
    x = tl.load(a + i, mask=i < n, other=0.0) + tl.load(b + i, mask=i < n, other=0.0)
    if B:
        x += tl.load(c + i, mask=i < n, other=0.0)
    tl.store(d + i, x * s0 + s1 + s2 + s3 + m, mask=i < n)


@triton.jit
def scaled(x, out, factor, n, BLOCK: tl.constexpr):
    """out = x * factor."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def alternating(x, n, factor, BLOCK: tl.constexpr, out):
    """The same, with what is passed between what is bound."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


def microseconds(call: Callable[[], Any], calls: int = 2000, rounds: int = 7) -> float:
    """Host time of a call: the best round."""
    call()
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return round(best, 2)


def times() -> dict[str, Any]:
    """Microseconds a launch, by way of launching."""
    device = torch.device("cuda", torch.cuda.current_device())
    t = [torch.zeros(N, device=device) for _ in range(8)]
    numbers, sizes = (1.0, 2.0, 3.0, 4.0), {"n": N, "m": 3}
    constants = {"A": 256, "B": True, "C": 1, "D": 2, "E": 3, "F": 4, "G": 5, "H": 6}
    launcher, checked = launcher_for(device), JitLauncher(gpu(device), checked=True)
    bound = launcher.bind(eight, **sizes, **constants)
    fixed = launcher.bind(eight, **sizes, **constants, **dict(zip(("s0", "s1", "s2", "s3"), numbers, strict=True)))
    sized = launcher.bind(eight, **constants)
    held = checked.bind(eight, **sizes, **constants)
    between = launcher.bind(alternating, n=N, BLOCK=256)
    plain = launcher.bind(scaled, n=N, BLOCK=256)
    compiled = eight[1,](*t, *numbers, N, 3, **constants)
    full = (*t, *numbers, N, 3, *constants.values())
    get = torch._C._cuda_getCurrentRawStream

    def own() -> None:
        compiled.run(
            1, 1, 1, get(device.index), compiled.function, compiled.packed_metadata, None, None, None, *full
        )  # fmt: skip

    addresses = [x.data_ptr() for x in t]
    return {
        "jit": microseconds(lambda: eight[1,](*t, *numbers, N, 3, **constants)),
        "triton's compiled[grid]": microseconds(lambda: compiled[1, 1, 1](*full)),
        "triton's compiled.run": microseconds(own),
        "bound, four numbers passed": microseconds(lambda: bound((1,), *t, *numbers)),
        "bound, six numbers passed, two of them integers": microseconds(lambda: sized((1,), *t, *numbers, N, 3)),
        "bound, pointers alone": microseconds(lambda: fixed((1, 1, 1), *t)),
        "bound, pointers alone, as addresses": microseconds(lambda: fixed((1, 1, 1), *addresses)),
        "bound and checked": microseconds(lambda: held((1,), *t, *numbers)),
        "bound, four arguments": microseconds(lambda: plain((1,), t[0], t[1], 2.0)),
        "bound, four arguments that alternate": microseconds(lambda: between((1,), t[0], 2.0, t[1])),
        "torch.empty": microseconds(lambda: torch.empty(4, device=device)),
        "torch add": microseconds(lambda: t[0] + t[1]),
    }


def directly() -> dict[str, Any]:
    """Whether kernels are launched by the launcher in C, and of which form."""
    launch = launcher_for(torch.device("cuda")).bind(scaled, n=N, BLOCK=256)
    x = torch.zeros(N, device="cuda")
    launch((1,), x, x, 1.0)
    [entry] = launch._entries.values()
    return {"call": type(entry.entry.call).__name__, "middle": len(entry.entry.middle), "spread": entry.entry.spread}


def right() -> dict[str, Any]:
    """Bound launches give the bits of the JIT, for every kind of number and alignment."""
    x, out, want = (torch.randn(N + 1, device="cuda") for _ in range(3))
    wrong = []
    for n in (1, 3, 16, 100, N):
        for first in (0, 1):
            bound = launcher_for(x.device).bind(scaled, n=n, BLOCK=256)
            free = launcher_for(x.device).bind(scaled, BLOCK=256)
            for factor in (1.0, 0.5, 3.0):
                scaled[1,](x[first:], want, factor, n, BLOCK=256)
                for name, call in {
                    "bound": lambda first=first, factor=factor, b=bound: b((1,), x[first:], out, factor),
                    "passed": lambda n=n, first=first, factor=factor, f=free: f((1,), x[first:], out, factor, n),
                }.items():
                    out.zero_()
                    call()
                    if not torch.equal(out[:n], want[:n]):
                        wrong.append(f"{name} n={n} from {first} factor={factor}")
    launch = launcher_for(x.device).bind(scaled, BLOCK=256)
    for n in (1, 16, 3, 1, N, 7, 16):  # one launch, several compiled kernels
        out.zero_()
        launch((1,), x, out, 2.0, n)
        if not torch.equal(out[:n], x[:n] * 2) or out[n:].any():
            wrong.append(f"one launch, n={n}")
    return {"wrong": wrong}


def captured() -> dict[str, Any]:
    """A graph of a bound launch, replayed; with the kernel loaded before the capture."""
    x, out = torch.randn(N, device="cuda"), torch.zeros(N, device="cuda")
    launch = launcher_for(x.device).bind(scaled, n=N, BLOCK=256)
    launch((1,), x, out, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch((1,), x, out, 3.0)
    x += 1
    graph.replay()
    return {"right": torch.equal(out, x * 3)}


def streams() -> dict[str, Any]:
    """A launch follows what its own stream holds, while another stream is busy."""
    size = 1 << 22
    x, y, a, b = (torch.zeros(size, device="cuda") for _ in range(4))
    launch = launcher_for(x.device).bind(scaled, n=size, BLOCK=1024)
    launch((size // 1024,), x, a, 1.0)
    torch.cuda.synchronize()
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        torch.cuda._sleep(200_000_000)
        x.fill_(1.0)
        launch((size // 1024,), x, a, 2.0)
    with torch.cuda.stream(two):
        y.fill_(1.0)
        launch((size // 1024,), y, b, 3.0)
    two.synchronize()
    early = not one.query()
    one.synchronize()
    return {"right": bool((a == 2).all() and (b == 3).all()), "second stream did not wait": early}


def devices() -> dict[str, Any]:
    """A launch on a GPU that is not the current one; through the JIT it needs a guard."""
    if torch.cuda.device_count() < 2:
        return {"devices": torch.cuda.device_count()}
    x = torch.randn(N, device="cuda:1")
    out = torch.zeros_like(x)
    launch = launcher_for(x.device).bind(scaled, n=N, BLOCK=256)
    launch((1,), x, out, 1.0)
    launch((1,), x, out, 5.0)
    return {
        "devices": torch.cuda.device_count(),
        "right": torch.equal(out, x * 5),
        "current device kept": torch.cuda.current_device() == 0,
        "host, us": microseconds(lambda: launch((1,), x, out, 5.0)),
    }


def hooks() -> dict[str, Any]:
    """Launch hooks see a bound launch as one of the JIT's."""
    x, out, seen = torch.randn(N, device="cuda"), torch.zeros(N, device="cuda"), []
    launch = launcher_for(x.device).bind(scaled, n=N, BLOCK=256)
    launch((1,), x, out, 1.0)
    runtime, before = triton.knobs.runtime, triton.knobs.runtime.launch_enter_hook
    after = runtime.launch_exit_hook
    runtime.launch_enter_hook = lambda said: seen.append(("enter", sorted(said.get()), said.get()["name"]))
    runtime.launch_exit_hook = lambda said: seen.append(("exit", sorted(said.get()), said.get()["name"]))
    try:
        launch((1,), x, out, 2.0)
        scaled[1,](x, out, 2.0, N, BLOCK=256)
    finally:
        runtime.launch_enter_hook, runtime.launch_exit_hook = before, after
    launch((1,), x, out, 4.0)
    return {"calls": len(seen), "as through the jit": seen[:2] == seen[2:], "right": torch.equal(out, x * 4)}


def main() -> None:
    """All sections."""
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "host": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    for section in (directly, times, right, captured, streams, devices, hooks):
        try:
            found[section.__name__] = section()
        except Exception:
            found[section.__name__] = {"error": traceback.format_exc()}
        print(section.__name__, json.dumps(found[section.__name__], indent=1), flush=True)
        Path(os.environ.get("OUT", "."), "gpu_launchers.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
