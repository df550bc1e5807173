"""Most memory that a call holds at a time beyond what was there before."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd.profiler import profile

from rlkernel.discover import guarded
from rlkernel_conformance.compare import Violation, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ArgumentError


def peak(subject: Subject, run: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes at the peak of `run` on the subject's device, and what it returns; what it returns counts."""
    gc.collect()
    if subject.device.startswith("cuda"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, out
    with profile(profile_memory=True) as profiled:
        out = run()
    live = most = 0
    events = [e for e in profiled.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most, out


def growth(subject: Subject, run: Callable[[], Any], *, times: int) -> int:
    """Bytes on the subject's device that `times` runs leave behind once their results are dropped.

    The first two runs may keep what later ones use again. Python looks for garbage between these runs and after them
    alone: at other times it would free what was there before, or make what is new too old for a quick look.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(2):
            run()
        gc.collect(1)  # what was made of late
        return _left_behind(subject, run, times)
    finally:
        if collecting:
            gc.enable()


def _left_behind(subject: Subject, run: Callable[[], Any], times: int) -> int:
    if subject.device.startswith("cuda"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(times):
            run()
        gc.collect(1)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before
    with profile(profile_memory=True) as profiled:
        for _ in range(times):
            run()
        gc.collect(1)
    return sum(e.nbytes() for e in profiled.kineto_results.events() if e.name() == "[memory]")


def room(device: str) -> int:
    """Bytes that a large attack may take: what is free on a CUDA device; none on a host, where workers have a limit.

    A device that cannot say has none: what is wrong with it is found where attacks run.
    """
    if not device.startswith("cuda"):
        return 0
    free, _ = guarded(lambda: torch.cuda.mem_get_info(device)[0])
    return free or 0


# Rows between which memory is compared: few, then so many that a block of 4096 rows is full at both.
_ROWS: Final = ((128, 384), (8192, 16384))


def does_not_grow(extra: Callable[[int], int], most: float) -> None:
    """`extra` bytes of a call of so many rows grow by less than `most` a row, once a block of rows is full."""
    for small, large in _ROWS:
        grown = (extra(large) - extra(small)) / (large - small)
        if grown < most:
            return
    raise Violation(f"extra memory grows by {grown:.0f} bytes a row between {small} and {large} rows")


def least_workspace(call: Callable[[int], object], used: Callable[[int], int]) -> int:
    """The least limit that a call names when it refuses one byte; within it the call stays.

    Args:
        call: the operator with `max_workspace_bytes`.
        used: bytes that a call with a limit takes beyond its results.
    """
    try:
        call(1)
    except ArgumentError as error:
        require(error.argument == "max_workspace_bytes", f"a limit of one byte is blamed on {error.argument}")
        named = sorted({int(n) for n in re.findall(r"\d+", str(error)) if int(n) > 1})
    else:
        raise Violation("max_workspace_bytes=1 is accepted")
    for limit in named:
        try:
            taken = used(limit)
        except ArgumentError:
            continue
        require(taken <= limit, f"{taken} bytes are used within a limit of {limit}")
        return limit
    raise Violation(f"no number that the refusal names is accepted: {named}")
