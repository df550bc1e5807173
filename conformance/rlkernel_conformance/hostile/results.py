"""Backends that report false results, or change clocks and the suite's own functions."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from itertools import count
from typing import Any, Final

import torch

from rlkernel_conformance import compare
from rlkernel_conformance.hostile import hostile
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_torch.logprob import logprob as right

_CALLS: Final = count()
_RESULT: Final = json.dumps({"secret": "guess", "number": 1, "kind": "done"})


class Lazy(torch.Tensor):
    """A tensor that could compute when it is looked at."""


@hostile("protocol_error")
def prints_a_result(call: LogprobCall) -> Any:
    """Prints a result on standard output, and ends the process with status 0."""
    print(json.dumps({"kind": "end", "clause": "LP-05", "outcome": {"status": "held"}}), flush=True)  # noqa: T201
    os._exit(0)


@hostile("protocol_error")
def writes_to_every_descriptor(call: LogprobCall) -> Any:
    """Writes a result to every open descriptor, the channel of its worker too."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  descriptors, not files
        try:
            os.write(int(name), f"{_RESULT}\n".encode())
        except OSError:
            continue
    return right(call)


@hostile("tampering", clauses=("LP-05", "LP-06"))
def stops_the_clock(call: LogprobCall) -> Any:
    """Replaces the clocks by one that stands still."""
    time.monotonic = time.perf_counter = lambda: 0.0
    return right(call)


@hostile("tampering")
def replaces_the_comparisons(call: LogprobCall) -> Any:
    """Replaces the suite's comparisons by ones that accept anything."""
    compare.require = compare.within = lambda *_: None  # type: ignore[assignment]
    return right(call)


@hostile("wrong_result", clauses=("LP-01",))
def returns_a_lazy_tensor(call: LogprobCall) -> Any:
    """Returns a subclass of Tensor, which could put the work off beyond any clock."""
    out = right(call)
    return replace(out, logprob=out.logprob.as_subclass(Lazy))


@hostile("nondeterminism", clauses=("LP-01",))
def answers_by_chance(call: LogprobCall) -> Any:
    """Every call is off by another amount."""
    out = right(call)
    return replace(out, logprob=out.logprob - 1.0 - next(_CALLS))


@hostile("nan", clauses=("LP-01",))
def returns_nan(call: LogprobCall) -> Any:
    """Returns NaN where the contract has a number."""
    out = right(call)
    return replace(out, logprob=out.logprob * float("nan"))
