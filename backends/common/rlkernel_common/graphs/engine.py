"""The graphed callable: its life cycle, its guards, and the path of a call.

One call, under the group's lock: state, order of streams, guard, likeness; then the route of calls like it, which
copies inputs, replays and hands out outputs. A call of no known likeness is read into its key, and captured if that is
new. There is one table of routes (`GraphTable.routes`), empty again whenever a graph or a failure is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns
from typing import Any, ClassVar

import torch

from rlkernel_common.graphs.buffers import run_plain
from rlkernel_common.graphs.graph import Graph, Options, Run
from rlkernel_common.graphs.key import Reader, Reading
from rlkernel_common.graphs.recorder import Recorder
from rlkernel_common.graphs.resize import as_call, at_every_size, volume, without_static
from rlkernel_common.graphs.static import StaticSet
from rlkernel_common.graphs.table import GraphTable
from rlkernel_common.graphs.verify import outputs_differ, tensors_differ
from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError, CaptureError
from rlkernel_core.spec.graphed import CaptureGroup, CaptureStats, WeightUpdate, check_examples, check_reason

READY, PAUSED, GUARDED, CLOSED = "ready", "paused", "guarded", "closed"


class Graphed:
    """See `rlkernel_core.spec.graphed.GraphedCallable`. Subclasses may name other parts."""

    reader: ClassVar[type[Reader]] = Reader
    table: ClassVar[type[GraphTable]] = GraphTable

    def __init__(
        self,
        fn: Callable[..., Any],
        example: Any,
        options: Options,
        group: CaptureGroup,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self._fn, self._options, self.group, self._recorder, self._device = fn, options, group, recorder, device
        mutated = [(f"mutates.{i}", s) for i, s in enumerate(options.mutates)]
        modules = [("fn", m) for m in (fn, getattr(fn, "__self__", None)) if isinstance(m, torch.nn.Module)]
        self._mutated = StaticSet(mutated)
        self._static = StaticSet([*((f"static.{i}", s) for i, s in enumerate(options.static)), *mutated, *modules])
        self._reader = self.reader(fn, options.buckets, options.pad, self._static, device)
        self._table = self.table(fn, options, self._static, self._mutated, group, recorder, device)
        self._verify = recorder.verify if options.verify == "auto" else options.verify
        self._state, self._moved = READY, tuple[str, ...]()
        self._order, self._looks = recorder.order, options.guard == "call"
        with group.lock:
            self._recorder.order()
            args, kwargs = as_call(example)
            example = self._read_example(args, kwargs)
            self._example = without_static(example)
            if not example.over:
                self._table.of(example)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay fn on these inputs."""
        group = self.group
        with group.lock:
            if group.updates or self._state != READY:
                self._require_written()
                self._require_open()
            self._order()
            if self._looks and self._state == READY and (changed := self._look()):
                self._guard_failed(changed)
            leaves = (*args, *kwargs.values()) if kwargs else args
            likeness = self._reader.likeness(leaves, args, kwargs)
            run = self._table.routes.get(likeness)
            if run is None or self._state != READY:
                return self._read_and_run(likeness, args, kwargs)
            return run(leaves)

    def warm(self, examples: Iterable[Any] | None = None) -> int:
        """Capture these examples, or the first example at every bucket size, largest first."""
        if examples is not None:
            check_examples(examples)
        with self.group.lock:
            self._require_written()
            self._require_open()
            self._recorder.order()
            if examples is None:
                calls = at_every_size(self._example, self._options.buckets, self._static.tensors())
            else:
                calls = [as_call(example) for example in examples]
            readings = [self._reader.read(*call) for call in calls]
            before = self._table.tally.captures
            for reading in sorted(readings, key=volume, reverse=True):
                if not reading.over and self._state == READY:
                    self._table.of(reading)
            return self._table.tally.captures - before

    def check_static(self) -> tuple[str, ...]:
        """Names of static tensors that moved; follows on_guard_fail."""
        with self.group.lock:
            self._require_open()
            if self._state == READY:
                changed = self._look_together()
                if changed:
                    self._guard_failed(changed)
                return changed
            if self._options.on_guard_fail == "raise":
                raise self._guard_error()
            return self._moved

    def invalidate(self, reason: str = "invalidated") -> None:
        """Forget all graphs, failures included, and take the static tensors as they are."""
        check_reason(reason)
        with self.group.lock:
            self._require_open(paused=True)
            self._table.forget(reason, failures=True)
            self._accept()
            self._moved = ()
            if self._state == GUARDED:
                self._state = READY

    def pause(self, mode: str = "keep") -> None:
        """Refuse calls; "discard" also frees graphs and buffers."""
        checks.choice("mode", mode, ("keep", "discard"))
        with self.group.lock:
            self._require_open(paused=True)
            self._recorder.synchronize()
            if mode == "discard":
                self._table.forget("discarded")
                self._recorder.release()
                self._let_go()
            self._state = PAUSED

    def resume(self) -> None:
        """Accept calls again, after looking at the static tensors."""
        with self.group.lock:
            self._require_open(paused=True)
            if self._state == PAUSED:
                self._state = READY
                self.check_static()
                if self._state == READY:
                    self._accept()  # after a discard no tensor is known by identity

    def close(self) -> None:
        """Free everything."""
        with self.group.lock:
            if self._state != CLOSED:
                self._recorder.synchronize()
                self._table.forget("closed")
                self._recorder.release()
                self._let_go()
                self._state = CLOSED

    @contextmanager
    def weight_update(self, canary: tuple[Any, ...] | None = None) -> Iterator[WeightUpdate]:
        """No replay while the body runs; then look at static tensors, and verify one call."""
        with self.group.lock:
            self._require_open()
            if canary is not None:
                self._reader.read(*as_call(canary))  # before a weight is written, and again after
            self._recorder.synchronize()
            update, state, finished = WeightUpdate(), self._state, False
            self._state = PAUSED
            self.group.updates += 1
            try:
                yield update
                finished = True
            finally:  # after an error too: some weights may have moved
                self.group.updates -= 1
                self._state = state
                update.changed = self._look_together()
                if update.changed and state == READY:
                    self._guard_failed(update.changed, quiet=not finished)
            if canary is not None and self._state == READY:
                self._verify_canary(self._reader.read(*as_call(canary)))

    @property
    def stats(self) -> CaptureStats:
        """Counters so far."""
        with self.group.lock:
            return self._table.tally.snapshot(self._state, len(self._table), self._table.nbytes)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """What a call would do and why."""
        with self.group.lock:
            if self._state == GUARDED:
                verb = "eager" if self._options.on_guard_fail == "eager" else "refused"
                return f"{verb}: static tensors moved: {', '.join(self._moved)}"
            if self._state != READY:
                return f"refused: {self._state}"
            return self._table.explain(self._reader.read(args, kwargs))

    def _require_written(self) -> None:
        if self.group.updates:
            raise CaptureError("Replays are paused while weights of their group are written. Call after weight_update.")

    def _require_open(self, *, paused: bool = False) -> None:
        if self._state == CLOSED:
            raise CaptureError("This captured function was closed. Capture it again.")
        if self._state == PAUSED and not paused:
            raise CaptureError("This captured function is paused: its memory may be gone. Call resume() first.")

    def _read_example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        try:
            return self._reader.read(args, kwargs)
        except ArgumentError:
            raise
        except TypeError as error:  # of binding: fn has not run
            given = [*map(checks.describe, args), *kwargs]
            remedy = "Pass (x, y) for fn(x, y), or a dict of keyword arguments."
            raise ArgumentTypeError("example", given, f"is no call of fn: {error}", remedy) from error

    def _look(self) -> tuple[str, ...]:
        start = perf_counter_ns()
        changed = self._static.changed()
        self._table.tally.guard_ns += perf_counter_ns() - start
        return changed

    def _look_together(self) -> tuple[str, ...]:
        """What moved here or, where ranks replay together, on any of them: all forget their graphs, or none."""
        changed, agreement = self._look(), self._table.agreement
        return changed if agreement is None else agreement.moved(changed)

    def _accept(self) -> None:
        self._static.accept()
        self._mutated.accept()

    def _let_go(self) -> None:
        self._static.let_go()
        self._mutated.let_go()

    def _guard_failed(self, changed: tuple[str, ...], *, quiet: bool = False) -> None:
        self._table.forget("static tensors moved")
        if self._options.on_guard_fail == "recapture":
            self._accept()
            return
        self._state, self._moved = GUARDED, changed
        if self._options.on_guard_fail == "raise" and not quiet:
            raise self._guard_error()

    def _guard_error(self) -> CaptureError:
        return CaptureError(
            f"Static tensors moved since capture: {', '.join(self._moved)}. A replay would read their old memory. "
            "Write weights in place (param.data.copy_), or call invalidate() to accept the new ones."
        )

    def _read_and_run(self, likeness: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no route is known for: read it, and keep what carries out the next ones like it."""
        reading = self._reader.read(args, kwargs)
        if self._state == GUARDED:
            if self._options.on_guard_fail == "raise":
                raise self._guard_error()
            return self._eagerly("static tensors moved", reading)
        if likeness is None:  # arguments in containers: alike if they were read alike
            likeness = reading.key, reading.sizes, reading.strangers
        run = self._table.routes.get(likeness)
        if run is None:
            graph = None if reading.over else self._table.of(reading)
            if graph is not None and (self._verify == "always" or (self._verify == "first" and not graph.verified)):
                return self._replay_verified(graph, reading)
            described = replace(reading, leaves=())  # keeps no tensor alive
            run = self._running_eagerly(described) if graph is None else self._replaying(graph, described)
            self._table.keep(likeness, run)
        return run(reading.leaves)

    def _replaying(self, graph: Graph, reading: Reading) -> Run:
        """What replays this graph for calls like this one."""
        return graph.replaying(reading, self._options, self._table.tally)

    def _running_eagerly(self, reading: Reading) -> Run:
        """What runs calls like this one without a graph, and counts why."""
        reason = "over the largest bucket" if reading.over else "capture failed"
        return lambda leaves: self._eagerly(reason, replace(reading, leaves=leaves))

    def _eagerly(self, reason: str, reading: Reading) -> Any:
        self._table.tally.eager_calls[reason] += 1
        return run_plain(self._fn, reading, self._options.buckets, self._device)

    def _replay_verified(self, graph: Graph, reading: Reading) -> Any:
        before = self._table.snapshot()
        outputs, problem = self._compare(graph, reading)
        if problem is None:
            return outputs
        before.restore()
        self._table.fail(reading, CaptureError(f"A replay is not what fn returns: {problem}."))
        return self._eagerly("capture failed", reading)

    def _verify_canary(self, reading: Reading) -> None:
        self._recorder.order()
        graph = None if reading.over else self._table.of(reading)
        if graph is None:
            return
        before = self._table.snapshot()
        try:
            problem = self._compare(graph, reading)[1]
        finally:
            before.restore()
        if problem is not None:
            self._table.fail(reading, CaptureError(f"After the weight update a replay is wrong: {problem}."))

    def _compare(self, graph: Graph, reading: Reading) -> tuple[Any, str | None]:
        """A replay, and what is wrong with it compared with a plain run from the same state."""
        before = self._table.snapshot()
        graph.inputs.fill(reading)
        try:
            expected = graph.plain(reading, self._options)
            mutated, random = before.mutated(), before.random()
        finally:
            before.restore()
        outputs = self._replaying(graph, reading)(reading.leaves)
        self._table.tally.verified += 1
        graph.verified = True
        return outputs, (
            outputs_differ(expected, outputs)
            or tensors_differ("mutated tensors", mutated, before.mutated())
            or tensors_differ("generators", random, before.random())
        )
