"""Profiler ranges: each call under the id of the decision behind it, where the policy says `profile = true`.

A range is named `rlkernel.<operator> <backend> <decision>`, for example `rlkernel.logprob triton b75406e39381`, with
the hash that `explain`, `status` and decisions.json print. torch's profiler shows it; so do Nsight Systems and rocprof
for calls on an accelerator, through NVTX (ROCTX on ROCm). What autograd runs later, in backward, is outside it.

Imports torch when a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rlkernel_core.decision import Decision

_NO_ACCELERATOR: Final = "cpu"


def label(decision: Decision) -> str:
    """The name of the ranges of calls that a decision is about."""
    return f"rlkernel.{decision.call.op.partition('@')[0]} {decision.backend} {decision.hash}"


def ranged(run: Callable[[Any], Any], decision: Decision) -> Callable[[Any], Any]:
    """`run` with each of its calls inside a range.

    Args:
        run: takes a call record.
        decision: names the range; its device says which profilers there are.
    """
    import torch

    name = label(decision)
    recorded: Any = torch.profiler.record_function

    def in_range(call: Any) -> Any:
        with recorded(name):
            return run(call)

    if decision.call.device == _NO_ACCELERATOR or not torch.cuda.is_available():
        return in_range
    nvtx: Any = torch.cuda.nvtx
    push, pop = nvtx.range_push, nvtx.range_pop

    def in_both(call: Any) -> Any:
        push(name)
        try:
            return in_range(call)
        finally:
            pop()

    return in_both
