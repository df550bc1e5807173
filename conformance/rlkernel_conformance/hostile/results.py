"""Backends that lie about results, clocks and what they have proved."""

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
from rlkernel_core.reference.direct import logprob as right

_CALLS: Final = count()
_WORD: Final = json.dumps({"secret": "guess", "number": 1, "kind": "done"})


class Lazy(torch.Tensor):
    """A tensor that would rather do its work later."""


@hostile("protocol_error")
def prints_a_result(*args: Any, **kwargs: Any) -> Any:
    """Prints a result on standard output, and leaves with status 0."""
    print(json.dumps({"kind": "end", "clause": "LP-05", "outcome": {"status": "held"}}), flush=True)  # noqa: T201
    os._exit(0)


@hostile("protocol_error")
def writes_to_every_descriptor(*args: Any, **kwargs: Any) -> Any:
    """Writes a last word to every open descriptor, the channel of its worker too."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  descriptors, not files
        try:
            os.write(int(name), f"{_WORD}\n".encode())
        except OSError:
            continue
    return right(*args, **kwargs)


@hostile("tampering", clauses=("LP-05", "LP-06"))
def stops_the_clock(*args: Any, **kwargs: Any) -> Any:
    """Replaces the clocks by one that stands still."""
    time.monotonic = time.perf_counter = lambda: 0.0
    return right(*args, **kwargs)


@hostile("tampering")
def replaces_the_judge(*args: Any, **kwargs: Any) -> Any:
    """Replaces the suite's comparisons by ones that accept anything."""
    compare.require = compare.within = lambda *_: None  # type: ignore[assignment]
    return right(*args, **kwargs)


@hostile("wrong_result", clauses=("LP-01",))
def returns_a_lazy_tensor(*args: Any, **kwargs: Any) -> Any:
    """Returns a subclass of Tensor, which could put the work off beyond any clock."""
    out = right(*args, **kwargs)
    return replace(out, logprob=out.logprob.as_subclass(Lazy))


@hostile("nondeterminism", clauses=("LP-01",))
def answers_by_chance(*args: Any, **kwargs: Any) -> Any:
    """Every call is off by another amount."""
    out = right(*args, **kwargs)
    return replace(out, logprob=out.logprob - 1.0 - next(_CALLS))


@hostile("nan", clauses=("LP-01",))
def returns_nan(*args: Any, **kwargs: Any) -> Any:
    """Returns NaN where the contract has a number."""
    out = right(*args, **kwargs)
    return replace(out, logprob=out.logprob * float("nan"))
