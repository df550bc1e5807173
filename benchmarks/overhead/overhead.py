"""What calling an operator costs beyond its kernel, and what importing costs; on any CPU, in half a minute.

    python benchmarks/overhead/overhead.py                  # a table
    python benchmarks/overhead/overhead.py --json FILE      # the same as data
    python benchmarks/overhead/overhead.py --check          # exit status 1 where a budget is missed

Kernels are stand-ins that return a result made beforehand, so that what is measured is the way to them. Each call is
measured as the smallest of several medians: a median drops single hiccups, the smallest of them a busy machine. Each
process is measured as the smallest of several runs, with a warm file cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROUNDS, BATCHES, CALLS = 5, 40, 500  # medians taken, batches per median, calls per batch
PROCESSES = 7


@dataclass(frozen=True)
class Measure:
    """One line of the table."""

    name: str
    value: float
    unit: str
    budget: float | None = None  # None: reported, not judged

    @property
    def met(self) -> bool:
        """Within the budget."""
        return self.budget is None or self.value <= self.budget


def microseconds(run: Callable[[], Any], *, calls: int = CALLS) -> float:
    """Cost of one call."""
    clock = time.perf_counter_ns
    medians = []
    for _ in range(ROUNDS):
        batches = []
        for _ in range(BATCHES):
            start = clock()
            for _ in range(calls):
                run()
            batches.append((clock() - start) / calls)
        medians.append(statistics.median(batches))
    return min(medians) / 1e3


def milliseconds(*command: str) -> float:
    """Wall time of a fresh process; a first one warms the file cache."""
    times = []
    for _ in range(PROCESSES + 1):
        start = time.perf_counter_ns()
        subprocess.run([sys.executable, *command], check=True, capture_output=True)  # noqa: S603 our own interpreter
        times.append((time.perf_counter_ns() - start) / 1e6)
    return min(times[1:])


def import_ms(module: str) -> float:
    """Time of an import statement in a fresh process that then holds no torch."""
    code = (
        "import sys, time; start = time.perf_counter_ns(); import "
        + module
        + "; took = time.perf_counter_ns() - start\n"
        "if 'torch' in sys.modules: sys.exit('torch was imported')\n"
        "print(took / 1e6)"
    )
    times = []
    for _ in range(PROCESSES + 1):
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)  # noqa: S603
        times.append(float(done.stdout))
    return min(times[1:])


def calls() -> list[Measure]:
    """Eager dispatch, binding, and the compiled lane, over kernels that cost nothing."""
    import torch
    from standins import logprob, sample

    import rlkernel as rlk
    from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
    from rlkernel_core.spec import OPERATORS

    torch.set_num_threads(1)
    impls = tuple(
        Impl(
            op=OPERATORS[op].id,
            target=f"standins:{op}",
            requires=Requires(device="cpu"),
            supports=OPERATORS[op].feature_names,
        )
        for op in ("logprob", "sample")
    )
    logits, ids = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    per_row = torch.full((4,), 0.9)
    few: Callable[..., Any] = lambda op: op(logits, ids, temperature=0.7)  # noqa: E731
    many: Callable[..., Any] = lambda op: op(  # noqa: E731
        logits, temperature=per_row, top_k=ids, top_p=per_row, min_p=per_row, seed=ids, step=3, raw_logprob=True
    )
    out = []
    with rlk.registered(Backend(name="standins", api=API_VERSION, impls=impls)), rlk.use("standins"):
        for name, direct, op, call in (("logprob", logprob, rlk.logprob, few), ("sample", sample, rlk.sample, many)):
            bound = call(op.bind)
            base = microseconds(lambda d=direct, c=call: c(d))
            dispatched = microseconds(lambda o=op, c=call: c(o))
            # A bound operator is the kernel itself; where it is not, the detour is measured.
            detour = 0.0 if bound is direct else microseconds(lambda b=bound, c=call: c(b)) - base
            out += [
                Measure(f"{name}: the kernel, called directly", base, "us"),
                Measure(f"{name}: dispatch over that", dispatched - base, "us", 2.0),
                Measure(f"{name}: bound over that", detour, "us", 0.0),
            ]
        for backend in ("eager", "aot_eager"):
            out += compiled(backend, lambda: rlk.logprob(logits, ids, temperature=0.7).logprob)
    return out


def compiled(backend: str, call: Callable[[], Any]) -> list[Measure]:
    """A compiled function of one operator, and the same function of one addition."""
    import torch

    x = torch.zeros(4)
    plain = torch.compile(lambda: x + 1, backend=backend, fullgraph=True)
    run = torch.compile(call, backend=backend, fullgraph=True)
    with torch.no_grad():
        run(), plain()
        base = microseconds(plain, calls=50)
        return [
            Measure(f"compiled logprob over a compiled addition, {backend}", microseconds(run, calls=50) - base, "us")
        ]


def processes() -> list[Measure]:
    """Imports and the command line in fresh processes."""
    explain = milliseconds("-m", "rlkernel", "explain", "logprob")
    return [
        Measure("an empty process", milliseconds("-c", "pass"), "ms"),
        Measure("import rlkernel_core", import_ms("rlkernel_core"), "ms", 20.0),
        Measure("import rlkernel", import_ms("rlkernel"), "ms", 150.0),
        Measure("rlkernel explain logprob", explain, "ms", 400.0),
    ]


def table(measures: list[Measure]) -> str:
    """Aligned text."""
    lines = []
    for m in measures:
        budget = "" if m.budget is None else f"  budget {m.budget:g} {m.unit}  {'ok' if m.met else 'MISSED'}"
        lines.append(f"{m.name:52} {m.value:9.2f} {m.unit}{budget}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and judge where asked to."""
    options = argparse.ArgumentParser(description="What calling and importing rlkernel costs.")
    options.add_argument("--json", type=Path, help="write the measures to this file")
    options.add_argument("--check", action="store_true", help="exit with 1 where a budget is missed")
    asked = options.parse_args()
    measures = calls() + processes()
    print(table(measures))
    if asked.json:
        import torch

        machine = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
        content = {"machine": machine, "measures": [{**asdict(m), "met": m.met} for m in measures]}
        asked.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(asked.check and not all(m.met for m in measures))


if __name__ == "__main__":
    sys.exit(main())
