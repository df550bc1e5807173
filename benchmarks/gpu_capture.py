"""capture@1 of the triton backend on one GPU: held to its clauses, attacked where CI has no GPU, then timed.

    python benchmarks/gpu_capture.py --out $OUT [--seconds 80]

Writes gpu_capture.json after every section and the reports of the conformance runs; a section that raises loses itself
only. Nothing needs to be installed but what gpu_all.py names. Ends by itself. One file over 400 lines, since what it
attacks and times has one machine and one set of graphs to share.

Predictions and outcomes: benchmarks/notes/capture.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START = time.monotonic()
DEVICE = "cuda:0"

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "captured_update")]
from gpu_all import PATHS, distributions, environment  # noqa: E402  the script beside this one

Section = Callable[[], Any]


def capture(fn: Any, example: Any, **options: Any) -> Any:
    """The operator, straight from the backend."""
    from rlkernel_bench.direct import of_triton

    return of_triton.capture(fn, example, **options)


# ------------------------------------------------------------------------------------------------- what may go wrong


def broken_captures() -> dict[str, Any]:
    """Work that CUDA itself refuses; afterwards draws, plain work, old graphs and new captures are as before."""
    import torch

    from rlkernel_core.errors import CaptureError

    def synchronises(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + torch.rand_like(x)
        torch.cuda.synchronize()
        return y

    def waits_for_a_stream(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().synchronize()
        return x + torch.rand_like(x)

    def forks_alone(x: torch.Tensor) -> torch.Tensor:
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            return x * 2

    def copies_from_the_host(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.tensor([3.0, 4.0], device=x.device)

    def takes_too_much(x: torch.Tensor) -> torch.Tensor:
        room = 1 << 20 if not torch.cuda.is_current_stream_capturing() else 1 << 50
        return x + torch.empty(room, dtype=torch.uint8, device=x.device)[0]

    def breaks_off(x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rand_like(x)
        if torch.cuda.is_current_stream_capturing():
            raise KeyError("mine")
        return y

    x = torch.ones(1024, device=DEVICE)
    old = capture(lambda x: x * 3, (x,))
    found: dict[str, Any] = {}
    for fn in (synchronises, waits_for_a_stream, forks_alone, copies_from_the_host, takes_too_much, breaks_off):
        given = x[:2] if fn is copies_from_the_host else x
        torch.manual_seed(1)
        state = torch.cuda.get_rng_state()
        try:
            capture(fn, (given,))
            said = "captured"
        except (CaptureError, KeyError) as error:
            said = f"{type(error).__name__}: {error}"[:300]
        checks = {"generator kept": torch.equal(state, torch.cuda.get_rng_state())}
        checks["draws go on"] = bool(torch.rand(1000, device=DEVICE).mean() > 0.3)
        checks["plain work"] = bool((x + 1 == 2).all())
        checks["old graph"] = bool((old(x * 5) == 15).all())
        fresh = capture(lambda x: x + torch.rand_like(x), (x,))
        torch.manual_seed(7)
        want = x + torch.rand_like(x)
        torch.manual_seed(7)
        checks["new capture"] = torch.equal(fresh(x), want)
        fresh.close()
        checks["stream"] = torch.cuda.current_stream() == torch.cuda.default_stream()
        checks["empty_cache"] = torch.cuda.empty_cache() is None
        found[fn.__name__] = {"said": said, "wrong": [k for k, v in checks.items() if not v]}
    return found


def draws() -> dict[str, Any]:
    """Default and own generators, two captured functions that take turns, and seeds between replays."""
    import torch

    own = torch.Generator(DEVICE).manual_seed(3)
    x = torch.zeros(257, device=DEVICE)

    def one(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    def two(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, device=x.device) + torch.rand(x.shape, device=x.device, generator=own)

    g1, g2 = capture(one, (x,)), capture(two, (x,), generators=(own,))
    results = []
    for fns in ((one, two), (g1, g2)):
        torch.manual_seed(11)
        own.manual_seed(5)
        results.append([fn(x) for fn in (fns[0], fns[1], fns[1], fns[0], fns[1])])
        results.append([torch.cuda.get_rng_state(), own.get_state()])
    same = [torch.equal(a, b) for a, b in zip(results[0] + results[1], results[2] + results[3], strict=True)]
    return {"as plain runs": same, "differ": not torch.equal(results[2][1], results[2][2])}


def streams() -> dict[str, Any]:
    """One captured function called on two streams in turn without a synchronisation: no call reads another's input."""
    import torch

    work = torch.randn(2048, 2048, device=DEVICE)
    g = capture(lambda x: (x @ work * 1e-3).sum() * 0 + x[0, 0] * 2, (work,))
    side, given = torch.cuda.Stream(), [torch.full((2048, 2048), float(i), device=DEVICE) for i in range(8)]
    side.wait_stream(torch.cuda.current_stream())
    found = []
    for i in range(64):
        if i % 2:
            with torch.cuda.stream(side):
                found.append(g(given[i % 8]))
        else:
            found.append(g(given[i % 8]))
    torch.cuda.synchronize()
    return {"right": [float(y) for y in found] == [2.0 * (i % 8) for i in range(64)]}


def forks() -> dict[str, Any]:
    """Work on a second stream that is joined again with events; its memory serves nothing else meanwhile."""
    import torch

    weight = torch.randn(512, 512, device=DEVICE)
    other = torch.cuda.Stream()

    def both(x: torch.Tensor) -> torch.Tensor:
        here, ready, done = torch.cuda.current_stream(), torch.cuda.Event(), torch.cuda.Event()
        ready.record(here)
        with torch.cuda.stream(other):
            other.wait_event(ready)
            y = (x * 2) @ weight
            done.record(other)
        z = (x + 1) @ weight
        here.wait_event(done)
        return y + z

    x = torch.randn(64, 512, device=DEVICE)
    g = capture(both, (x,), static=(weight,))
    return {"right": all(torch.equal(g(x * i), both(x * i)) for i in range(4))}


def stale() -> dict[str, Any]:
    """What goes stale without a word elsewhere: values, freed statics, rebound ones, memory that was given back."""
    import torch

    layer = torch.nn.Linear(256, 256, bias=False, device=DEVICE).requires_grad_(False)
    g = capture(lambda x, t: layer(x) / t, (torch.ones(8, 256, device=DEVICE), 1.0), static=(layer,))
    x = torch.randn(8, 256, device=DEVICE)
    checks = {"a value is a key": all(torch.equal(g(x, t), layer(x) / t) for t in (1.0, 0.5, 2.0))}
    layer.weight = torch.nn.Parameter(torch.randn(256, 256, device=DEVICE), requires_grad=False)
    torch.cuda.empty_cache()  # the old weight's memory is the device's again, but for what the guard keeps of it
    checks["old memory until asked"] = not torch.equal(g(x, 1.0), layer(x))
    checks["named"] = g.check_static() == ("static.0.weight",)
    checks["captured again"] = torch.equal(g(x, 1.0), layer(x))
    with g.weight_update(canary=(x, 1.0)) as update:
        layer.weight.normal_()
    checks["in place"] = update.changed == () and torch.equal(g(x, 1.0), layer(x))
    g.pause("discard")
    torch.cuda.empty_cache()
    layer.weight.data = layer.weight.data.clone()
    g.resume()
    checks["awake"] = torch.equal(g(x, 1.0), layer(x))
    torch.cuda.empty_cache()
    checks["after empty_cache"] = torch.equal(g(x, 1.0), layer(x))
    big = torch.randn(1 << 20, device=DEVICE)
    way, end = (capture(fn, (big,), outputs="view") for fn in (lambda x: (x * 2).sum(), lambda x: x * 3))
    view = end(big)
    way(big)
    return {
        "wrong": [name for name, held in checks.items() if not held],
        "a view is overwritten by another graph of its group": not torch.equal(view, big * 3),
        "stats": str(g.stats),
    }


def gradients() -> dict[str, Any]:
    """autograd=True: three layers, another captured function between forward and backward, and its memory."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)).to(DEVICE)
    other = capture(lambda x: (x * 2 + 1) * 3, (torch.ones(1 << 20, device=DEVICE),))
    forward = capture(model, (torch.ones(32, 64, device=DEVICE, requires_grad=True),), autograd=True, static=(model,))
    worst = 0.0
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(32, 64, device=DEVICE, requires_grad=True)
        wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
        y = forward(x)
        other(torch.ones(1 << 20, device=DEVICE))
        found = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)))
    return {"largest difference": worst, "replays": forward.stats.replays}


def memory() -> dict[str, Any]:
    """Growth over 1000 replays, over 60 evictions, and what close and empty_cache give back."""
    import torch

    from rlkernel_core.spec.graphed import Bucket, CaptureGroup, bucket_sizes

    weight = torch.randn(512, 512, device=DEVICE)
    fn = lambda x: torch.softmax(x @ weight, -1) @ weight  # noqa: E731
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_reserved()
    g = capture(fn, (torch.ones(64, 512, device=DEVICE),), buckets=(Bucket({"x": 0}, bucket_sizes(64)),),
                group=CaptureGroup("memory"))  # fmt: skip
    warmed = g.warm()
    x = torch.randn(37, 512, device=DEVICE)
    g(x)
    torch.cuda.synchronize()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    for _ in range(1000):
        g(x)
    torch.cuda.synchronize()
    after = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    held = torch.cuda.memory_reserved() - start
    right = torch.equal(g(x)[:37], fn(torch.cat((x, x.new_zeros(3, 512))))[:37])
    few = capture(lambda x, t: fn(x) * t, (x, 1.0), max_graphs=4, group=CaptureGroup("few"))
    reserved = []
    for i in range(60):
        few(x, float(i % 9))
        reserved.append(torch.cuda.memory_reserved())
    correct = torch.equal(few(x, 3.0), fn(x) * 3.0)
    evictions = few.stats.evictions
    g.close()
    few.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    again = capture(fn, (x,), group=g.group)  # in a group whose pool ended
    return {
        "graphs warmed": warmed,
        "allocated grew": after[0] - before[0],
        "reserved grew": after[1] - before[1],
        "held by 16 buckets, MiB": held / 2**20,
        "right": right,
        "evictions": evictions,
        "right after evictions": correct,
        "reserved over evictions, MiB": [reserved[10] / 2**20, reserved[-1] / 2**20],
        "left after close, MiB": (torch.cuda.memory_reserved() - start) / 2**20,
        "captured again": torch.equal(again(x), fn(x)),
    }


def collectives() -> dict[str, Any]:
    """A collective of one rank is refused unless asked for, and recorded when it is."""
    import torch
    import torch.distributed as dist

    from rlkernel_core.errors import CaptureError

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device(DEVICE))
    try:
        x = torch.ones(1024, device=DEVICE)

        def reduced(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            dist.all_reduce(y)
            return y + 1

        refused = ""
        try:
            capture(reduced, (x,))
        except CaptureError as error:
            refused = str(error)[:200]
        g = capture(reduced, (x,), collectives=True)
        return {"refused": refused, "right": bool((g(x * 4) == 9).all())}
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- timing


def host(call: Callable[[], Any], seconds: float = 0.6, burst: int = 40) -> dict[str, float]:
    """Microseconds that a call keeps the calling thread, over bursts that the device can follow."""
    import torch

    times: list[float] = []
    until = time.monotonic() + seconds
    for _ in range(burst):
        call()
    while len(times) < 5 or time.monotonic() < until:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(burst):
            call()
        times.append((time.perf_counter() - start) / burst * 1e6)
    return {"median": round(statistics.median(times), 2), "min": round(min(times), 2), "bursts": len(times)}


def interleaved(calls: dict[str, Callable[[], Any]], seconds: float, burst: int = 20) -> dict[str, Any]:
    """Microseconds of host time of several calls, measured in turn, so that they see the same host and clocks."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in calls}
    until = time.monotonic() + seconds
    gc.collect()
    gc.disable()
    try:
        while len(times["bare"]) < 5 or time.monotonic() < until:
            for name, call in calls.items():
                call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(burst):
                    call()
                times[name].append((time.perf_counter() - start) / burst * 1e6)
    finally:
        gc.enable()
    bare = statistics.median(times["bare"])
    return {
        name: {
            "median": round(statistics.median(t), 2),
            "min": round(min(t), 2),
            "over bare": round(statistics.median(t) - bare, 2),
            "min over min": round(min(t) - min(times["bare"]), 2),
            "bursts": len(t),
        }
        for name, t in times.items()
    }


def replays() -> dict[str, Any]:
    """Host time of a call with 8 inputs: bare graph with one copy, our wrapper, plain launches."""
    import torch
    from rlkernel_bench.suites.capture import bare, chain, work_of

    xs = tuple(torch.randn(1024, device=DEVICE) for _ in range(8))
    given = {f"x{i}": x for i, x in enumerate(xs)}
    found: dict[str, Any] = {}
    ways = {
        "view": {"outputs": "view"},
        "clone": {},
        "view, guard": {"outputs": "view", "guard": "call", "static": (torch.ones(8, device=DEVICE),)},
    }
    with torch.no_grad():
        for kernels in (1, 100, 400):
            fn = chain(kernels)
            raw, work = bare(work_of(kernels)), given
            calls: dict[str, Callable[[], Any]] = {"bare": lambda raw=raw, work=work: raw(work)}
            for name, options in ways.items():
                g = capture(fn, xs, **options)
                if not torch.equal(g(*xs), fn(*xs)):
                    found[f"{kernels} kernels, {name}"] = "WRONG"
                calls[name] = lambda g=g: g(*xs)
            found[f"{kernels} kernels"] = interleaved(calls, 2.0)
            found[f"{kernels} kernels"]["launches"] = host(lambda fn=fn: fn(*xs), 0.2)["median"]
    static = capture(lambda x: x * 2, (xs[0],), static=(torch.ones(8, device=DEVICE),))
    buffers = [x.clone() for x in xs]
    found["one foreach copy"] = host(lambda: torch._foreach_copy_(buffers, xs), 0.2)
    found["check_static of one tensor"] = host(static.check_static, 0.2)
    return found


def policy_update() -> dict[str, Any]:
    """The example: the same weights with and without a graph, and the time of both."""
    import copy

    import torch
    import update as example

    import rlkernel as rlk

    sizes = example.Sizes(B=64, group=8, T=32, D=128, V=1024, layers=6)
    torch.manual_seed(0)
    plain = example.Policy(sizes).to(DEVICE)
    graphed = copy.deepcopy(plain)
    step = example.update_of(plain, sizes)
    replay = example.captured(graphed, sizes, DEVICE)
    a = example.train(plain, step, sizes, DEVICE, 10)
    b = example.train(graphed, replay, sizes, DEVICE, 10)
    batch = example.draw(sizes, DEVICE, 0)
    return {
        "weights equal": all(torch.equal(p, q) for p, q in zip(plain.parameters(), graphed.parameters(), strict=True)),
        "losses": [a[0], a[-1], b[0], b[-1]],
        "ms plain": example.milliseconds(step, batch, DEVICE),
        "ms captured": example.milliseconds(replay, batch, DEVICE),
        "served by": rlk.last_decision("capture").backend,
        "linear_logprob by": rlk.last_decision("linear_logprob").backend,
        "verified": replay.stats.verified,
    }


def rollout_append() -> dict[str, Any]:
    """The buffer of the reference on the device: appends without a synchronisation, in a graph, nothing grows."""
    import torch

    import rlkernel as rlk

    buffer = rlk.rollout_buffer(max_tokens=1 << 16, max_seqs=128, group_size=4, page_tokens=64, device=DEVICE)
    slots = buffer.reserve(128, [i // 4 for i in range(64)])
    token = torch.arange(64, device=DEVICE)
    row = {"token": token, "logprob": -token.float()}
    alive = torch.ones(64, dtype=torch.bool, device=DEVICE)
    buffer.append(slots, row, alive=alive)
    torch.cuda.set_sync_debug_mode("error")
    try:
        buffer.append(slots, row, alive=alive)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    nobody = type(slots)(torch.full_like(slots.ids, -1), torch.zeros_like(slots.stamps))
    step = capture(
        lambda slots, token, alive: buffer.append(slots, {"token": token, "logprob": token * -1.0}, alive=alive),
        (nobody, token, alive),
        static=(buffer.tensors(),),
    )
    with buffer.assert_zero_growth():
        for _ in range(20):
            step(slots, token, alive)
    times = {"append, plain": host(lambda: buffer.append(nobody, row, alive=alive), 0.3)}
    times["append, replayed"] = host(lambda: step(nobody, token, alive), 0.3)
    buffer.finish(slots, [float(i % 2) for i in range(64)])
    with buffer.pop(groups=16) as batch:
        whole = batch.cu_seqlens.tolist() == [22 * i for i in range(65)]
        right = bool((batch["token"].view(64, 22) == token[:, None]).all())
    return {"whole": whole, "right": right, **times}


# --------------------------------------------------------------------------------------------------------------- main


def conformance(into: Path, environ: dict[str, str], backend: str, op: str, limit: float) -> dict[str, Any]:
    """`rlkernel conformance run` of one operator, four attacks at a time."""
    folder = into / f"conformance-{backend}-{op}"
    command = [sys.executable, "-m", "rlkernel", "conformance", "run", backend, "--op", op, "--device", DEVICE]
    command += ["--profile", "quick", "--jobs", "4", "--report", str(folder)]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=max(limit, 5), check=False
        )
        rc, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        rc, said = "out of time", (error.stdout or b"").decode() + (error.stderr or b"").decode()
    (into / f"conformance-{backend}-{op}.log").write_text(said, encoding="utf-8")
    report = folder / "report.json"
    found: dict[str, Any] = {"rc": rc, "seconds": round(time.monotonic() - start, 1), "tail": said[-1500:]}
    if report.exists():
        found["summary"] = json.loads(report.read_text(encoding="utf-8"))["summary"]
    return found


def main() -> int:
    """Every section, in this order, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--only", default="", help="sections, with commas")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folders = distributions(Path(temporary))
        for name in ("reference", "template"):
            folders.pop(name, None)
        paths = [Path(temporary), *(ROOT / p for p in PATHS), *folders.values()]
        environ = environment(*paths)
        sys.path[:0] = [str(p) for p in paths]

        def left() -> float:
            return asked.seconds - (time.monotonic() - START)

        sections: dict[str, Section] = {
            "replays": replays,
            "broken captures": broken_captures,
            "draws": draws,
            "streams": streams,
            "forks": forks,
            "stale": stale,
            "gradients": gradients,
            "memory": memory,
            "policy update": policy_update,
            "rollout append": rollout_append,
            "collectives": collectives,
            "conformance of capture": lambda: conformance(asked.out, environ, "triton", "capture", left() - 2),
            "conformance of rollout_buffer": lambda: conformance(
                asked.out, environ, "reference", "rollout_buffer", left() - 2
            ),
        }
        wanted = asked.only.split(",") if asked.only else list(sections)
        for name in wanted:
            began = time.monotonic()
            if left() < 4:
                results[name] = "no time left"
            else:
                try:
                    with warnings.catch_warnings(record=True) as said:
                        results[name] = sections[name]()
                    if said:
                        results[f"{name}: warnings"] = sorted({str(w.message)[:200] for w in said})
                except Exception:  # one section must not take the others along
                    results[name] = {"error": traceback.format_exc()[-3000:]}
            text = json.dumps(results, indent=1, default=str)
            (asked.out / "gpu_capture.json").write_text(text, encoding="utf-8")
            shown = json.dumps(results[name], default=str)
            print(f"== {name} ({time.monotonic() - began:.1f} s): {shown[:1500]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
