"""The graphs of one captured function: found by key, captured when new, evicted when there are too many.

A failed capture leaves no graph, puts generators and mutated tensors back, and then follows `on_capture_error`.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Final, TypeVar

import torch

from rlkernel_common.graphs.agreement import agreement_of, described
from rlkernel_common.graphs.buffers import StaticInputs
from rlkernel_common.graphs.graph import Graph, Options, Run
from rlkernel_common.graphs.key import Key, Reading, TensorKey, difference, varying
from rlkernel_common.graphs.recorder import Program, Recorder, Recording
from rlkernel_common.graphs.state import DeviceState
from rlkernel_common.graphs.static import StaticSet
from rlkernel_common.graphs.tally import Tally
from rlkernel_core.errors import CaptureError, FallbackWarning
from rlkernel_core.ranks import Round
from rlkernel_core.spec.graphed import CaptureGroup

ROUTES: Final = 1024  # calls whose way to a result is kept
REMEMBERED: Final = 1024  # keys without a graph whose story is kept: failed, evicted, forgotten

_logger = logging.getLogger("rlkernel")
_V = TypeVar("_V")


class GraphTable:
    """Key -> graph, with its bound, its failures and its statistics. Subclasses may name other parts."""

    inputs: ClassVar[type[StaticInputs]] = StaticInputs
    graph: ClassVar[type[Graph]] = Graph
    state: ClassVar[type[DeviceState]] = DeviceState

    def __init__(
        self,
        fn: Callable[..., Any],
        options: Options,
        static: StaticSet,
        mutated: StaticSet,
        group: CaptureGroup,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self._fn, self._options, self._static, self._mutated = fn, options, static, mutated
        self._group, self._recorder, self._device = group, recorder, device
        self._graphs: dict[Key, Graph] = {}
        self._failed: dict[Key, str] = {}  # runs eagerly, because
        self._forgotten: dict[Key, str] = {}  # had a graph until
        self._churn_said = False
        self.routes: dict[Hashable, Run] = {}  # likeness of a call -> what carries out calls like it
        self.agreement = agreement_of(fn, options, group)
        self.tally = Tally()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All of them."""
        return tuple(self._graphs.values())

    @property
    def failures(self) -> int:
        """Keys that run eagerly because their capture failed."""
        return len(self._failed)

    @property
    def nbytes(self) -> int:
        """Bytes held by all graphs."""
        return sum(graph.nbytes for graph in self._graphs.values())

    def of(self, reading: Reading) -> Graph | None:
        """The graph of a call, captured if new; None if this key runs eagerly."""
        graph = self._graphs.get(reading.key)
        if graph is not None:
            graph.used = self.tally.use()
        elif reading.key not in self._failed:
            graph = self._capture(reading)
        return graph

    def keep(self, likeness: Hashable, run: Run) -> None:
        """Carry out calls of this likeness so, until a graph or a failure is forgotten."""
        if len(self.routes) >= ROUTES:
            self.routes.clear()
        self.routes[likeness] = run

    def forget(self, reason: str, *, failures: bool = False) -> None:
        """Drop all graphs; with `failures` also let failed keys try again."""
        for key, graph in self._graphs.items():
            _remember(self._forgotten, key, reason)
            graph.recording.close()
        self._graphs.clear()
        self.routes.clear()
        if failures:
            self._failed.clear()

    def fail(self, reading: Reading, error: Exception) -> None:
        """Mark a key as one that runs eagerly, or raise, as `on_capture_error` says."""
        graph = self._graphs.pop(reading.key, None)
        if graph is not None:
            graph.recording.close()
            self.routes.clear()
        self.tally.last_error = first_line(error)
        if self._options.on_capture_error == "raise":
            if isinstance(error, CaptureError):
                raise error
            raise CaptureError(f"The recording failed: {first_line(error)}") from error
        _remember(self._failed, reading.key, first_line(error))
        name = getattr(self._fn, "__name__", type(self._fn).__name__)
        said = f"{name} runs without a graph: {first_line(error)} (on_capture_error='eager')"
        warnings.warn(said, FallbackWarning, stacklevel=2)

    def explain(self, reading: Reading) -> str:
        """What a call would do and why."""
        key = reading.key
        if reading.over:
            return f"eager: {reading.over}"
        if key in self._failed:
            return f"eager: capture failed: {self._failed[key]}"
        if key in self._graphs:
            padding = "".join(f", {n} padded to {p}" for n, p in reading.sizes if n != p)
            return f"replay: graph {list(self._graphs).index(key) + 1} of {len(self)}{padding}"
        if key in self._forgotten:
            return f"capture: again, its graph is gone: {self._forgotten[key]}"
        near = min((d for d in (difference(reading, k) for k in self._graphs) if d), key=len, default=None)
        return f"capture: new key because {'; '.join(near)}" if near else "capture: no graph has this structure"

    def snapshot(self) -> DeviceState:
        """Generators and mutated tensors as they are now."""
        return self.state(self._device, self._options.generators, self._mutated.held())

    def _capture(self, reading: Reading) -> Graph | None:
        after = None
        if self.agreement is not None:
            tensors = self._static.tensors()
            after = self.agreement.before(described(reading, self._options, tensors, self._recorder))
        wants = any(isinstance(k, TensorKey) and k.requires_grad for k in reading.key[1])
        if wants and not self._options.autograd:
            refusal = "An input requires grad. Pass autograd=True, or call under torch.no_grad()."
            self.fail(reading, CaptureError(refusal))
            return None
        self._make_room(reading)
        start = time.perf_counter_ns()
        inputs = self.inputs(reading, self._options.buckets, self._device)
        inputs.fill(reading)
        program = self._program(inputs)
        before = self.snapshot()
        try:
            for _ in range(self._options.warmup):
                self._recorder.warm(program)
                self.tally.warmup_calls += 1
                self._check_draws(before)
                before.restore()
                inputs.fill(reading)  # fn may write to its inputs
            recording = self._record(reading, program, after)
            self._check_draws(before)
        finally:
            if after is not None and not after.said:
                after.say({"failure": "fn raised"})
            before.restore()
        if recording is None:
            return None
        self.tally.captures += 1
        self.tally.capture_ns += time.perf_counter_ns() - start
        if reading.key in self._forgotten:
            self.tally.recaptures[self._forgotten.pop(reading.key)] += 1
        graph = self._graphs[reading.key] = self.graph(inputs, recording, program, self.tally.use())
        return graph

    def _record(self, reading: Reading, program: Program, after: Round | None) -> Recording | None:
        failures: tuple[type[Exception], ...] = (CaptureError, *self._recorder.errors)
        recording: Recording | None = None
        error: Exception | None = None
        try:
            recording = self._recorder.record(program)
        except failures as refused:
            error = refused
        if recording is not None and any(recording.differentiable) and not self._options.autograd:
            error = CaptureError(
                "An output requires grad, and a replay would detach it. Pass autograd=True with static=(module,), "
                "or call under torch.no_grad()."
            )
        if after is not None and self.agreement is not None:
            elsewhere = self.agreement.outcome(after, None if error is None else first_line(error))
            error = error or (CaptureError(elsewhere) if elsewhere else None)
        if error is None:
            return recording
        if recording is not None:
            recording.close()
        self.fail(reading, error)
        return None

    def _program(self, inputs: StaticInputs) -> Program:
        autograd = self._options.autograd and torch.is_grad_enabled()
        held = self._static.held()
        return Program(
            call=lambda tensors: inputs.call(self._fn, tensors),
            inputs=inputs.tensors,
            wants_grad=tuple(autograd and wanted for wanted in inputs.wants_grad),
            parameters=[x for x in held if autograd and x.requires_grad],
            static=held,
            generators=self._options.generators,
            group=self._group,
            device=self._device,
            autograd=autograd,
            collectives=self._options.collectives,
        )

    def _check_draws(self, before: DeviceState) -> None:
        """rng="forbid" is a promise about fn, not about capture: breaking it always raises."""
        if self._options.rng == "forbid" and before.drew():
            raise CaptureError("fn draws random numbers, and rng='forbid'. Use rng='follow', or pass noise as input.")

    def _make_room(self, reading: Reading) -> None:
        if len(self) < self._options.max_graphs:
            return
        names = varying([*self._graphs, reading.key], reading.layout)
        if names and not self._churn_said:
            self._churn_said = True
            _logger.warning("graphs are evicted because %s varies; pass it as a tensor", " and ".join(names))
        gone = (
            list(self._graphs)
            if self._recorder.evict == "generation"
            else [min(self._graphs, key=lambda key: self._graphs[key].used)]
        )
        self.routes.clear()
        for key in gone:
            self._graphs.pop(key).recording.close()
            _remember(self._forgotten, key, "evicted")
            self.tally.evictions += 1


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _remember(table: dict[Key, _V], key: Key, value: _V) -> None:
    table[key] = value
    if len(table) > REMEMBERED:
        del table[next(iter(table))]
