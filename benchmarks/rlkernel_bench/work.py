"""A workload: what is run on which sizes, the least it has to move and to compute, and what would be good enough.

Workloads are data. A suite holds a table of them per size ("toy", which a CPU runs in a moment, and "full"), and knows
how to make inputs, call the operator and judge results (`Problem`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

Inputs = dict[str, Any]  # tensors and quantized weights by name; dimension names stand in the suites
Outputs = dict[str, Any]  # tensors by name
Call = Callable[[Inputs], Outputs]

GOALS: Final = {
    "us": "microseconds a call at most, in a graph where it can be captured",
    "times": "at most this multiple of the ruler's time, in the same rounds",
    "over": "microseconds a call above the ruler at most",
    "of copy": "at least this share of the copy bandwidth measured in the same run",
    "MiB": "memory beyond results and gradients at most",
}
# Operations a byte above which arithmetic takes longer than memory; GPUs since 2020 are between 130 and 300.
_INTENSE: Final = 100
# Options about how to measure, not what.
_UNSAID: Final = ("batch", "chain", "of", "processes")


@dataclass(frozen=True)
class Goal:
    """What would be good enough."""

    number: float
    unit: str  # a key of GOALS
    device: str = ""  # judged where this is part of the device's name; "" everywhere
    variant: str = ""  # of our ways to do it that one alone; "" all of them


@dataclass(frozen=True)
class Work:
    """One row of a table."""

    suite: str
    op: str  # the operator, or operators with commas
    sizes: Mapping[str, int]
    dtype: str = "bfloat16"
    task: str = "forward"  # or "forward+backward", or what the suite says
    options: Mapping[str, Any] = field(default_factory=dict)
    bytes: str = "0"  # least traffic, a formula over the sizes: every input read once, every result written once
    flops: str = "0"  # least arithmetic on the matrix units
    rate: str = "bfloat16"  # dtype of those
    goals: tuple[Goal, ...] = ()
    ruler: str | None = None  # candidate that the others are held against, call by call in the same rounds
    memory_at: tuple[str, tuple[int, ...]] | None = None  # measure memory at these values of a size too
    clock: str = "device"  # "host": what the caller's thread spends; "process": a fresh process
    tokens: str = ""  # tokens that a call generates, a formula over the sizes; reported a second
    why: str = ""  # where the row comes from

    @property
    def name(self) -> str:
        """Unique within a suite: `8192x128256 bfloat16 forward entropy`."""
        sizes = "x".join(str(n) for n in self.sizes.values())
        options = {k: v for k, v in self.options.items() if k not in _UNSAID and v is not False}
        said = [k if v is True else f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in options.items()]
        return " ".join(w for w in (sizes, self.dtype, self.task, *said) if w)

    @property
    def backward(self) -> bool:
        """Gradients are part of the task."""
        return "backward" in self.task

    def floor(self, formula: str, **other: int) -> float:
        """A formula over the sizes, some of them changed."""
        return float(eval(formula, {"__builtins__": {}}, {**self.sizes, **other}))  # noqa: S307 our own tables

    @property
    def compute_bound(self) -> bool:
        """The matrix units decide: such calls are measured back to back, in random order, as ratios."""
        return self.floor(self.flops) > _INTENSE * self.floor(self.bytes)


@dataclass
class Problem:
    """A workload with everything that it takes to run and to judge it."""

    work: Work
    make: Callable[[int], Inputs]  # seed -> one set of inputs on the device
    ours: Mapping[str, Call]  # variant -> call through the front door; "" where there is one way only
    expected: Callable[[Inputs], Any]  # the definition on (some of) these inputs, in float64 or exactly
    judge: Callable[..., dict[str, Judgment]]  # (inputs, expected, outputs) -> by name of the output
    # forward function of a peer -> the whole task, gradients included
    complete: Callable[[Call], Call] = field(default=lambda forward: forward)
    # Within a backend's scope, once per set of inputs and outside the time: what a caller does once, such as packing.
    prepare: Callable[[Inputs], Inputs] | None = None
    # Around everything that is done with the workload.
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Judgment:
    """How far one output is from its definition."""

    error: float  # largest absolute error, or the relative Frobenius norm of the error
    over: float  # worst error over the spec's tolerance: at most 1 is right
    coarse: float = 0.0  # the same over the tolerance of rounded logits, which peers are admitted with
