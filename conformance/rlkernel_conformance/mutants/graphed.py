"""Graphed callables of plain torch, and parts of them, with one method each that does something else.

The bugs that they plant are described in the table of `capture`.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_common.graphs.autograd import check_graph, run
from rlkernel_common.graphs.buffers import cut_outputs
from rlkernel_common.graphs.eager import EagerRecorder, EagerRecording
from rlkernel_common.graphs.engine import Graphed
from rlkernel_common.graphs.graph import Graph
from rlkernel_common.graphs.state import DeviceState
from rlkernel_common.graphs.table import GraphTable
from rlkernel_core.spec.graphed import CaptureStats
from rlkernel_core.tree import flatten


class ReadsDense(Graphed):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*map(_dense, args), **kwargs)


def _dense(x: Any) -> Any:
    if not isinstance(x, Tensor) or x.is_contiguous() or x.stride()[:1] == (0,):
        return x
    return torch.as_strided(x, x.shape, [x.shape[1], 1])


class NoCanary(Graphed):
    def weight_update(self, canary: Any = None) -> Any:
        return super().weight_update()


class ForgetsStatic(Graphed):
    """After a discard static tensors are no longer known where they are arguments."""

    def resume(self) -> None:
        held, self._accept = self._accept, lambda: None  # type: ignore[method-assign]
        try:
            super().resume()
        finally:
            self._accept = held  # type: ignore[method-assign]


class WritesBack(Graphed):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        graph = max(self._table.graphs, key=lambda g: g.used, default=None)
        if graph is not None and not kwargs and len(args) == len(graph.inputs.tensors) == 2:
            for x, buffer in zip(args, graph.inputs.tensors, strict=True):
                x.copy_(buffer)
        return out


class FrozenDraws(Graphed):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._start = torch.get_rng_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        torch.set_rng_state(self._start)
        return super().__call__(*args, **kwargs)


class GeneratorStays(Graphed):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = torch.get_rng_state()
        try:
            return super().__call__(*args, **kwargs)
        finally:
            torch.set_rng_state(before)


class NeverLooks(Graphed):
    def _look(self) -> tuple[str, ...]:
        return ()


class LooksIntoModulesOnly(Graphed):
    """Tensors that are declared static themselves are never looked at again."""

    def _look(self) -> tuple[str, ...]:
        static = self._options.static
        return () if static and all(isinstance(x, Tensor) for x in static) else super()._look()


class ComparesWithItself(DeviceState):
    """What a plain run writes is not copied, so that a replay is compared with what it wrote itself."""

    def mutated(self) -> list[Tensor]:
        return list(self._mutated)


class ComparesWithWhatFnKeeps(Graph):
    """What a plain run returns is not copied: where fn keeps it, the replay writes what it is compared with."""

    def plain(self, reading: Any, options: Any) -> Any:
        outputs = self.program.call([x.clone() for x in self.inputs.tensors])
        return cut_outputs(outputs, reading, options.buckets)


class ClonesPairs(Graph):
    """An output that is alone of its dtype is handed out as it is."""

    def replaying(self, *call: Any) -> Any:
        replay = super().replaying(*call)

        def outputs(leaves: Any) -> Any:
            found, structure = flatten(replay(leaves))
            kept, _ = flatten(self.recording.outputs)
            alike = Counter(x.dtype for x in kept if isinstance(x, Tensor))
            alone = [isinstance(k, Tensor) and alike[k.dtype] == 1 for k in kept]
            pairs = zip(found, kept, alone, strict=True)
            return structure.build([k[: len(x)] if one and x.dim() else x for x, k, one in pairs])

        return outputs


class HandsOutInputs(Graph):
    """An output that is an input is handed out as it is."""

    def replaying(self, *call: Any) -> Any:
        replay = super().replaying(*call)
        inputs = {x.data_ptr(): x for x in self.inputs.tensors}

        def own(x: Any, kept: Any) -> Any:
            found = inputs.get(kept.data_ptr()) if isinstance(kept, Tensor) else None
            return found if found is not None and found.shape == x.shape else x

        def outputs(leaves: Any) -> Any:
            found, structure = flatten(replay(leaves))
            kept, _ = flatten(self.recording.outputs)
            return structure.build([own(x, k) for x, k in zip(found, kept, strict=True)])

        return outputs


class BreaksTheOthers(GraphTable):
    def _make_room(self, reading: Any) -> None:
        held = len(self)
        super()._make_room(reading)
        if len(self) < held:
            for graph in self.graphs:
                graph.recording.replay = lambda: None  # type: ignore[method-assign]


class EvictsBadly(Graphed):
    table = BreaksTheOthers


class KeepsOutputs(Graphed):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        self.kept = [*getattr(self, "kept", ()), out]
        return out


class FailsWithDraws(DeviceState):
    """After a failure the generators stay where they are."""

    def restore(self) -> None:
        noise = self.random()
        super().restore()
        if FailingTable.failed:
            for (_, write), kept in zip(self._channels, noise, strict=True):
                write(kept)


class FailsWithWrites(DeviceState):
    """After a failure the mutated tensors stay as they are."""

    def restore(self) -> None:
        values = self.mutated()
        super().restore()
        if FailingTable.failed:
            for x, value in zip(self._mutated, values, strict=True):
                x.copy_(value)


class FailingTable(GraphTable):
    """Knows while it captures whether fn has raised."""

    failed = False

    def _capture(self, reading: Any) -> Any:
        true = self._fn

        def fn(*args: Any, **kwargs: Any) -> Any:
            FailingTable.failed = True
            out = true(*args, **kwargs)
            FailingTable.failed = False
            return out

        self._fn = fn
        try:
            return super()._capture(reading)
        finally:
            self._fn, FailingTable.failed = true, False


class Failing(Graphed):
    table = FailingTable


class LeavesGradientsOn(Graphed):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as failure:
            failure.callback(torch.set_grad_enabled, True)
            out = super().__call__(*args, **kwargs)
            failure.pop_all()
        return out


class GivesUp(Graphed):
    dead = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.dead:
            return self._fn(*args, **kwargs) * 0
        self.dead = True
        out = super().__call__(*args, **kwargs)
        self.dead = False
        return out


class Silent(GraphTable):
    def fail(self, reading: Any, error: Exception) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().fail(reading, error)


class SilentlyEager(Graphed):
    table = Silent


class UncountedEagerCalls(Graphed):
    @property
    def stats(self) -> CaptureStats:
        found = super().stats
        return replace(found, eager_calls={}) if self._table.failures else found


class ExplainsNothing(Graphed):
    def explain(self, *args: Any, **kwargs: Any) -> str:
        return "eager"


class RunsWhilePaused(Graphed):
    def _require_open(self, *, paused: bool = False) -> None:
        """It always is."""


class AnswersFromBefore(Graphed):
    asleep, last = False, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        if self.asleep and self.last is not None:
            return self.last
        self.last = copy.copy(out)
        return out

    def pause(self, mode: str = "keep") -> None:
        super().pause(mode)
        self.asleep = self.asleep or mode == "discard"


class DrawsOnCapture(GraphTable):
    def _capture(self, reading: Any) -> Any:
        graph = super()._capture(reading)
        if graph is not None:
            torch.rand(1)
        return graph


class Drawing(Graphed):
    table = DrawsOnCapture


class RecordsAnything(EagerRecorder):
    """Records without an audit."""

    def record(self, program: Any) -> EagerRecording:
        outputs, sources = run(program, program.inputs)
        if program.autograd:
            check_graph(outputs, sources)
        return EagerRecording(program, outputs)


class Open:
    """A group without a lock."""

    name, lock, updates = "open", nullcontext(), 0

    def __init__(self, pools: Any) -> None:
        self.pools = pools


class NotKeptApart(Graphed):
    def __init__(self, fn: Any, example: Any, options: Any, group: Any, *rest: Any) -> None:
        super().__init__(fn, example, options, Open(group.pools), *rest)  # type: ignore[arg-type]


class NeverLater:
    number = property(lambda self: 0, lambda self, value: None)


class AnswersLate(Graph):
    """No replay is known to have come after another."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.latest = NeverLater()  # type: ignore[assignment]


class WithoutGrad(Graphed):
    def __init__(self, *args: Any) -> None:
        with torch.no_grad():
            super().__init__(*args)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return super().__call__(*args, **kwargs)


class FailsOnNoRows(Graphed):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].numel() == 0:
            raise RuntimeError("CUDA error: invalid configuration argument")
        return super().__call__(*args, **kwargs)


class CutsTheLarge(Graphed):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x, *rest = args or (None,)
        cut = x[:8] if isinstance(x, Tensor) and self._options.buckets else x
        return super().__call__(*((cut, *rest) if args else ()), **kwargs)


class FirstAnswers(Graphed):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)
        self.first = getattr(self, "first", out)
        return self.first
