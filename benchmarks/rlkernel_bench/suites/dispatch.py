"""dispatch: what calling an operator costs beyond its kernel, and what importing costs; on any CPU.

Kernels are stand-ins that return a result made beforehand, so that what is measured is the way to them. Each process
is measured with a warm file cache.
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
from rlkernel_bench.stub import BY_SHAPE, KERNELS, PLAIN, RESULTS, standing_in
from rlkernel_bench.work import Call, Goal, Inputs, Judgment, Outputs, Problem, Work

# us above the direct call: a key, a lookup and a record; no more where a check looks at shapes, asked once a shape.
_OVER = {"dispatch": 4.0, "bound": 4.0, "by shape": 4.0}
_CODE = {  # fresh interpreters: what they run; the time they print, in ms, else that of the whole process
    "an empty process": ("-c", "pass"),
    "import rlkernel_core": "rlkernel_core",
    "import rlkernel": "rlkernel",
    "rlkernel explain logprob": ("-m", "rlkernel", "explain", "logprob"),
}
_LIMITS = {"import rlkernel_core": 20.0, "import rlkernel": 150.0, "rlkernel explain logprob": 400.0}  # ms


def _calls(op: str, parameters: int) -> Work:
    goals = tuple(Goal(most, "over", variant=name) for name, most in _OVER.items())
    sizes = {"arguments": parameters}
    options = {"batch": 500}
    return Work("dispatch", op, sizes, "float32", "calls", options, goals=goals, ruler="direct", clock="host")


def _compiled(backend: str) -> Work:
    options = {"batch": 50, "backend": backend}
    return Work("dispatch", "logprob", {}, "float32", "compiled", options, ruler="direct", clock="host")


def _process(what: str) -> Work:
    goals = (Goal(1e3 * _LIMITS[what], "us"),) if what in _LIMITS else ()
    return Work("dispatch", "", {}, "", what, goals=goals, clock="process")


_EAGER = (_calls("logprob", 9), _calls("sample", 23))
_ALL = (*_EAGER, _compiled("eager"), _compiled("aot_eager"), *(_process(what) for what in _CODE))
WORKS: Mapping[str, tuple[Work, ...]] = {"toy": (*_EAGER, _process("import rlkernel")), "full": _ALL}


def make(_seed: int) -> Inputs:
    """Four rows: sizes are no part of the way."""
    return {"logits": torch.randn(4, 8), "ids": torch.tensor([0, 1, 2, 3]), "p": torch.full((4,), 0.9)}


def few(op: Callable[..., Any], given: Inputs) -> Any:
    """A call of logprob with one option."""
    return op(given["logits"], given["ids"], temperature=0.7)


def many(op: Callable[..., Any], given: Inputs) -> Any:
    """A call of sample with most options."""
    p, ids = given["p"], given["ids"]
    return op(given["logits"], temperature=p, top_k=ids, top_p=p, min_p=p, seed=ids, step=3, raw_logprob=True)


def problem(work: Work, _device: str) -> Problem:
    """See `rlkernel_bench.suites`."""

    def judge(_given: Inputs, want: Any, found: Outputs) -> dict[str, Judgment]:
        same = want is None or found["result"] is want
        return {"result": Judgment(0.0, 0.0) if same else Judgment(torch.inf, torch.inf)}

    expected = RESULTS.get(work.op) if work.task == "calls" else None  # the others make something of their own
    return Problem(work, make, {}, lambda _: expected, judge, within=standing_in)


def candidates(problem: Problem, _device: str, _use: Sequence[str], _against: Sequence[str] | None) -> list[Candidate]:
    """Ways to the same kernel."""
    work = problem.work
    if work.clock == "process":
        return [Candidate(work.task, "backend", run=lambda _: {"milliseconds": milliseconds(work.task)})]
    ways = _compiled_ways(str(work.options["backend"])) if work.task == "compiled" else _eager_ways(work.op)
    return [
        Candidate(name, "ruler" if name == work.ruler else "backend", run=in_scope(scope, call), ran="anywhere")
        for name, (scope, call) in ways.items()
    ]


def _eager_ways(op: str) -> dict[str, tuple[str, Call]]:
    """The kernel itself, the operator, the operator bound, the operator over a backend that looks at shapes."""
    operator, call = {"logprob": (rlk.logprob, few), "sample": (rlk.sample, many)}[op]
    direct = KERNELS[op]
    with rlk.use(PLAIN):
        bound = call(operator.bind, make(0))
    return {
        "direct": (PLAIN, lambda given: {"result": call(direct, given)}),
        "dispatch": (PLAIN, lambda given: {"result": call(operator, given)}),
        "bound": (PLAIN, lambda given: {"result": call(bound, given)}),
        "by shape": (BY_SHAPE, lambda given: {"result": call(operator, given)}),
    }


def _compiled_ways(backend: str) -> dict[str, tuple[str, Call]]:
    """A compiled function of one addition, and the same of one operator."""
    x = torch.zeros(4)
    addition = torch.compile(lambda: x + 1, backend=backend, fullgraph=True)
    operator = torch.compile(lambda given: few(rlk.logprob, given).logprob, backend=backend, fullgraph=True)

    def run(compiled: Callable[..., Any], *given: Inputs) -> Outputs:
        with torch.no_grad():
            return {"result": compiled(*given)}

    return {
        "direct": (PLAIN, lambda _: run(addition)),
        "dispatch": (PLAIN, lambda given: run(operator, given)),
    }


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
