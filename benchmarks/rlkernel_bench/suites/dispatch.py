"""dispatch: what an operator costs in a compiled graph beyond its kernel, and what importing costs; on any CPU.

Kernels are stubs that return a result made beforehand, so that what is measured is the way to them; that of eager calls
is in the suite `host`. Each process is measured with a warm file cache.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import rlkernel as rlk
from rlkernel_bench.candidates import Candidate, in_scope
from rlkernel_bench.stub import STUB, stubbed
from rlkernel_bench.work import Goal, Inputs, Judgment, Outputs, Problem, Work

_CODE = {  # fresh interpreters: what they run; the time they print, in ms, else that of the whole process
    "an empty process": ("-c", "pass"),
    "import rlkernel_core": "rlkernel_core",
    "import rlkernel": "rlkernel",
    "rlkernel explain logprob": ("-m", "rlkernel", "explain", "logprob"),
}
_LIMITS = {"import rlkernel_core": 20.0, "import rlkernel": 150.0, "rlkernel explain logprob": 400.0}  # ms


def _compiled(backend: str) -> Work:
    options = {"batch": 50, "backend": backend}
    return Work("dispatch", "logprob", {}, "float32", "compiled", options, ruler="direct", clock="host")


def _process(what: str) -> Work:
    goals = (Goal(1e3 * _LIMITS[what], "us"),) if what in _LIMITS else ()
    return Work("dispatch", "", {}, "", what, goals=goals, clock="process")


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (_process("import rlkernel"),),
    "full": (_compiled("eager"), _compiled("aot_eager"), *(_process(what) for what in _CODE)),
}


def problem(work: Work, _device: str) -> Problem:
    """See `rlkernel_bench.suites`."""

    def make(_seed: int) -> Inputs:
        return {"logits": torch.randn(4, 8), "ids": torch.tensor([0, 1, 2, 3])}  # sizes are no part of the way

    return Problem(work, make, {}, lambda _: None, lambda *_: {"result": Judgment(0.0, 0.0)}, within=stubbed)


def candidates(problem: Problem, _device: str, _use: Sequence[str], _against: Sequence[str] | None) -> list[Candidate]:
    """A compiled function of one addition, and the same of one operator; or a process."""
    work = problem.work
    if work.clock == "process":
        return [Candidate(work.task, "backend", run=lambda _: {"milliseconds": milliseconds(work.task)})]
    x, backend = torch.zeros(4), str(work.options["backend"])
    addition = torch.compile(lambda _: x + 1, backend=backend, fullgraph=True)
    operator = torch.compile(
        lambda given: rlk.logprob(given["logits"], given["ids"], temperature=0.7).logprob,
        backend=backend,
        fullgraph=True,
    )

    def running(compiled: Callable[[Inputs], Any]) -> Callable[[Inputs], Outputs]:
        def run(given: Inputs) -> Outputs:
            with torch.no_grad():
                return {"result": compiled(given)}

        return in_scope(STUB, run)

    return [
        Candidate("direct", "ruler", run=running(addition), ran="anywhere"),
        Candidate("dispatch", "backend", run=running(operator), ran="anywhere"),
    ]


def milliseconds(what: str) -> float:
    """Wall time of one fresh process, or of one import in it."""
    command = _CODE[what]
    if isinstance(command, tuple):
        start = time.perf_counter_ns()
        subprocess.run([sys.executable, *command], check=True, capture_output=True)  # noqa: S603 our own interpreter
        return (time.perf_counter_ns() - start) / 1e6
    code = (
        f"import sys, time; start = time.perf_counter_ns(); import {command}; took = time.perf_counter_ns() - start\n"
        "if 'torch' in sys.modules: sys.exit('torch was imported')\n"
        "print(took / 1e6)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)  # noqa: S603
    return float(done.stdout)
