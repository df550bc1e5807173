"""A launcher that reports the configurations of a bundle that launches would need, and launches nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from rlkernel_triton.aot.backend import OPERATORS
from rlkernel_triton.aot.bundle import NoBuildError
from rlkernel_triton.aot.bundle_launcher import KernelRequest, argument_of
from rlkernel_triton.aot.configurations import Configuration
from rlkernel_triton.aot.dry_run import dry_run
from rlkernel_triton.aot.workloads import calls
from rlkernel_triton.launchers import Binding, Grid, Launch, Launcher, Scope
from rlkernel_triton.launchers.planning import within
from rlkernel_triton.launchers.targets import TARGETS
from rlkernel_triton.prepared import prepared
from rlkernel_triton.recorded import run_workload
from rlkernel_triton.workloads import WORKLOADS


class ConfigurationRecorder(Launcher):
    """Binds kernels and reports their configurations, each once an operator; tensors may be of any device.

    Args:
        target: a key of `TARGETS`, which is planned for.
        report: takes the operator that launches and the configuration.
    """

    overlaps = False  # as in bundles

    def __init__(self, target: str, report: Callable[[str, Configuration], object] = lambda *_: None) -> None:
        self.target, self._report = TARGETS[target], report
        self.seen: set[tuple[str, Configuration]] = set()

    @property
    def scope(self) -> Scope:
        """In which host code is recorded."""
        return Scope(self, self.target)

    def planned(self, op: str) -> Callable[[Any], Any]:
        """A function that records what a call of an operator launches, and its gradients; its result holds nothing."""
        prepare = prepared(op, self.scope)

        return lambda call: dry_run(prepare, call)

    def launch_of(self, binding: Binding) -> Launch:
        """See `Launcher`."""
        request = KernelRequest(binding)

        def record(grid: Grid, *args: Any) -> None:
            binding.by_name(args)
            try:
                passed = tuple(map(argument_of, args))
            except NoBuildError:  # no bundle could hold it
                return
            configuration = request.configuration(request.arguments(passed))
            if (request.op, configuration) not in self.seen:
                self.seen.add((request.op, configuration))
                self._report(request.op, configuration)

        return record


def launched(target: str, ops: Collection[str] = OPERATORS) -> list[Configuration]:
    """What operators launch for a target in the calls of `rlkernel_triton.aot.workloads`, and in every other way.

    The other ways are those of the table of workloads, `rlkernel_triton.workloads`, which the compile gate compiles. No
    tensor has memory; all operators take some ten seconds.
    """
    recorder = ConfigurationRecorder(target)
    with torch.device("meta"):
        for _ in calls(recorder.planned, ops):
            pass
    for op in ops:
        with within(recorder.scope._replace(op=op)):
            for workload in WORKLOADS.get(op, {}).values():
                run_workload(op, workload)
    return sorted({build for op, build in recorder.seen if op in ops}, key=lambda b: b.text)
