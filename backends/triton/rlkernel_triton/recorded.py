"""What the calls of the table of workloads launch on a target, recorded without a GPU."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from rlkernel_core.spec import OPERATORS
from rlkernel_triton.claims import CLAIMS
from rlkernel_triton.launchers import Build, Recorder, planning_for, using
from rlkernel_triton.workloads import WORKLOADS, Workload


class Recorded(NamedTuple):
    """A build that an operator launches."""

    kernel: str  # the kernel's own name: "sweep"
    label: str  # the first workload that launches it, and which of its launches of this kernel, from the second on
    build: Build


@cache
def recorded(op: str, target: str) -> tuple[Recorded, ...]:
    """Every build that the workloads of an operator launch, once, in the order of the launches.

    Args:
        op: a key of `WORKLOADS`.
        target: of `rlkernel_triton.aot.targets.TARGETS`: "sm_90", "gfx942".

    Raises:
        UnknownNameError: there is no such target.
    """
    seen: set[Build] = set()
    found: list[Recorded] = []
    for label, workload in WORKLOADS[op].items():
        own: dict[str, int] = {}
        for build in launched(op, workload, target):
            kernel = build.kernel.partition(":")[2]
            if build in seen:
                continue
            seen.add(build)
            own[kernel] = own.get(kernel, 0) + 1
            found.append(Recorded(kernel, label if own[kernel] == 1 else f"{label} ({own[kernel]})", build))
    return tuple(found)


def launched(op: str, workload: Workload, target: str) -> tuple[Build, ...]:
    """The builds that one call launches, and that its gradients do."""
    recorder = Recorder()
    with planning_for(target), using(recorder):
        made(op, workload)
    return recorder.builds


def made(op: str, workload: Workload) -> None:
    """Make a call of the table of workloads, and its gradients, with what launches in this scope."""
    call = OPERATORS[op].call(**workload.arguments)
    OPERATORS[op].check(call)
    result = _implementation(op)(call)
    if workload.upstream:
        roots = [getattr(result, name) for name in workload.upstream]
        inputs = [x for x in workload.arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.grad(roots, inputs, [torch.ones_like(x) for x in roots])


def _implementation(op: str) -> Any:
    claim = CLAIMS[op]
    module, _, name = claim.target.partition(":")
    found = getattr(import_module(module), name)
    return (lambda call: found(call)(call)) if claim.prepared else found
