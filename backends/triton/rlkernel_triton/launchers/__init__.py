"""Launches as values: host code states what to launch, and a launcher does it.

    partial = launcher.bind(kernels.partial_softmax, num_warps=2, HAS_MASK=False, PART=32768, N=8, V=151936)  # once
    partial((8, 5), logits, ids, parts)  # at every call: what is not bound, in the kernel's order

A launch belongs to the shape that it was bound for: types, alignments and which arguments are None are those of its
first run. Numbers that may change from call to call are passed at run time, and are asked at every launch.

    specialization   what Triton assumes of an argument
    binding          a kernel with all that is known before a call
    jit              compiled by Triton's JIT, launched without it
    triton_abi       how a compiled kernel is launched, for each version of Triton
    plain            launched by Triton: its interpreter, its JIT
    planning         what launches and for which GPU, where neither the device nor a caller says
    recorder         written down, not launched
    offline          what was written down, compiled for any architecture
    targets          architectures as a compiler and a launch see them

No module here imports an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Final, TypeVar

import torch

from rlkernel_triton.common.host import INTERPRETED, require_triton_on
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers.binding import Binding, Grid, Launch, Launcher
from rlkernel_triton.launchers.plain import PlainLauncher
from rlkernel_triton.launchers.planning import (
    Plan,
    Scope,
    current,
    in_pieces_of,
    piece_of,
    planned_target,
    planning_for,
    using,
    within,
)
from rlkernel_triton.launchers.recorder import Build, RecordedLaunch, Recorder

__all__ = [
    "Binding",
    "Build",
    "Grid",
    "Launch",
    "Launcher",
    "PlainLauncher",
    "Plan",
    "RecordedLaunch",
    "Recorder",
    "Scope",
    "current",
    "in_pieces_of",
    "launcher_for",
    "on_device_of",
    "piece_of",
    "plain_launcher_for",
    "planned",
    "planned_target",
    "planning_for",
    "using",
    "within",
]  # fmt: skip
T = TypeVar("T")
# Whether Triton is installed, so that kernels can be compiled: without it a launcher must be given by the scope.
COMPILES: Final[bool] = hasattr(triton.knobs.runtime, "launch_enter_hook")


def launcher_for(device: torch.device) -> Launcher:
    """What launches on a device for a plan: the JIT's kernels on a GPU, else Triton's interpreter or its own driver.

    Raises:
        RLKernelError: the device is no GPU, Triton's interpreter is off, and no driver of Triton's serves the device.
    """
    used = current().launcher
    if used is not None:
        return used
    if device.type == "cuda" and COMPILES and not INTERPRETED:
        return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)
    return plain_launcher_for(device)


def plain_launcher_for(device: torch.device) -> Launcher:
    """What launches on a device for host code that makes no plan: every argument is asked at every launch.

    Raises:
        RLKernelError: as `launcher_for`.
    """
    used = current().launcher
    if used is not None:
        return used
    return PlainLauncher(device) if device.type == "cuda" else _elsewhere(device.type)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """The scope in which kernels on x may be launched.

    Raises:
        RLKernelError: x is on a CPU, Triton's interpreter is off and no driver of Triton's serves the CPU.
    """
    if x.is_cuda:
        return torch.cuda.device_of(x)
    if current().launcher is None:
        require_triton_on(x.device.type)
    return nullcontext()


def planned(plan: Plan | None, place: str, device: torch.device, bind: Callable[[Launcher], T]) -> T:
    """What a plan bound at this place; without a plan bound anew, for launches that ask every argument."""
    return bind(plain_launcher_for(device)) if plan is None else plan.get(place, bind)


@cache
def _of_gpu(index: int) -> Launcher:
    from rlkernel_triton.launchers.jit import JitLauncher, gpu

    return JitLauncher(gpu(torch.device("cuda", index)))


@cache
def _elsewhere(kind: str) -> Launcher:
    require_triton_on(kind)
    return PlainLauncher()
