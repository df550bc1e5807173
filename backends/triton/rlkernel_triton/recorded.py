"""What the calls of the table of workloads launch on a target, recorded without a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from rlkernel_core.spec import OPERATORS
from rlkernel_triton.claims import ASKED_FOR, CLAIMS
from rlkernel_triton.launchers import Build, Recorder, planning_for, using
from rlkernel_triton.prepared import named
from rlkernel_triton.workloads import WORKLOADS, Workload


class Recorded(NamedTuple):
    """A build that an operator launches."""

    kernel: str  # the kernel's own name: "partial_softmax"
    label: str  # the first workload that launches it, and which of that workload's builds, from the second on
    build: Build


@cache
def recorded(op: str, target: str) -> tuple[Recorded, ...]:
    """Every build that the workloads of an operator launch, once, in the order of the launches.

    Args:
        op: a key of `WORKLOADS`.
        target: of `rlkernel_triton.launchers.targets.TARGETS`: "sm_90", "gfx942".

    Raises:
        UnknownNameError: there is no such target.
    """
    seen: set[Build] = set()
    found: list[Recorded] = []
    for label, workload in WORKLOADS[op].items():
        fresh = [build for build in launched(op, workload, target) if build not in seen]
        seen.update(fresh)
        for i, build in enumerate(fresh, 1):
            found.append(Recorded(build.kernel.partition(":")[2], label if i == 1 else f"{label} ({i})", build))
    return tuple(found)


def launched(op: str, workload: Workload, target: str) -> tuple[Build, ...]:
    """The builds that one call launches, and that its gradients do."""
    recorder = Recorder()
    with planning_for(target), using(recorder):
        run_workload(op, workload)
    return recorder.builds


def run_workload(op: str, workload: Workload) -> None:
    """Make a call of the table of workloads, and its gradients, with what launches in this scope.

    Gradients are recorded whatever the caller's mode: a build may be missed inside a node of autograd.
    """
    call = OPERATORS[op].call(**workload.arguments)
    if (check := OPERATORS[op].check) is not None:
        check(call)
    with torch.enable_grad():
        result = _implementation(op, asked_for=workload.asked_for)(call)
    if workload.upstream:
        roots = [getattr(result, name) if name else result for name in workload.upstream]
        inputs = [x for x in workload.arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.grad(roots, inputs, [torch.ones_like(x) for x in roots])


def _implementation(op: str, *, asked_for: bool) -> Any:
    claim = (ASKED_FOR if asked_for else CLAIMS)[op]
    found = named(claim.target)
    return (lambda call: found(call)(call)) if claim.prepared else found
