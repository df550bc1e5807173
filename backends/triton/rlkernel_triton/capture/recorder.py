"""From a program to a graph: warm up, run once under an audit, record.

The audited run finds in Python what a capture would find as an error of CUDA, or would not find: host synchronization,
shapes that depend on values, generators and collectives that were not declared. It runs on the stream of the capture,
so that handles, workspaces and kernels are there when recording begins, and none of them lies in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Generator, Tensor, cuda

from rlkernel_common.graphs.audit import Audit
from rlkernel_common.graphs.autograd import check_graph, run
from rlkernel_common.graphs.recorder import Program
from rlkernel_common.graphs.table import first_line
from rlkernel_core.errors import CaptureError
from rlkernel_core.spec.graphed import CaptureGroup
from rlkernel_core.tree import flatten
from rlkernel_triton.capture.capture_stream import CaptureStream, capture_stream_of
from rlkernel_triton.capture.cuda_capture import capture_graph
from rlkernel_triton.capture.recording import Backward, GraphRecording

# A word in the driver's error -> what it means for the function.
DRIVER_ERRORS: Final = (
    ("out of memory", "there was no memory for its results while recording"),
    ("unjoined", "it forks work to another stream and does not join it: let the first stream wait for the other"),
    ("uncaptured work", "it waits for work of another stream from before: synchronize before the call"),
    ("legacy", "it uses the default stream beside the one it is called on"),
    ("implicit", "it uses the default stream beside the one it is called on"),
    (
        "captur",
        "it does what no graph may hold: a host synchronization, an allocation outside torch, or loading a kernel",
    ),
)


class TorchGraphRecorder:
    """Records with `torch.cuda.CUDAGraph`, which is a HIP graph where torch was built for HIP."""

    errors: tuple[type[Exception], ...] = ()  # every refusal is a CaptureError by the time it leaves `record`
    # torch 2.11 may free a workspace that graphs captured earlier still use when one of them goes.
    evict = "generation"

    def __init__(self, group: CaptureGroup, device: torch.device) -> None:
        # HIP before ROCm 7.14 records illegal work in silence.
        self.verify = "first" if torch.version.hip else "never"
        self._stream = capture_stream_of(group, device)
        self.order = self._stream.order  # called at every call: nothing stands between
        self.release = self._stream.release

    def synchronize(self) -> None:
        """Wait for the device."""
        cuda.synchronize(self._stream.device)

    def warm(self, program: Program) -> None:
        """One run on the side stream."""
        with self._stream.on_side_stream():
            outputs, sources = run(program, program.inputs)
            _gradients(outputs, sources)
        self._stream.side.synchronize()

    def record(self, program: Program) -> GraphRecording:
        """Run once under an audit, then record."""
        generators = (*program.generators, cuda.default_generators[program.device.index])
        with self._stream.on_side_stream(), Audit(generators, collectives=program.collectives):
            outputs, sources = run(program, program.inputs)
            if program.autograd:
                check_graph(outputs, sources)
            _gradients(outputs, sources)
        _check_outputs(outputs, program.device)
        del outputs, sources
        self._stream.side.synchronize()
        return self._with_gradients(program) if program.autograd else self._plain(program)

    def _plain(self, program: Program) -> GraphRecording:
        stream = self._stream
        pool, succeeded = stream.acquire_pool(), False
        try:
            work = partial(run, program, program.inputs)
            graph, (outputs, _) = _captured(stream, pool.handle, program.generators, work)
            succeeded = True
        finally:
            if not succeeded:
                stream.retire_pool(pool)
                stream.release_pool(pool)
        kept, differentiable = _detached(outputs)
        return GraphRecording(graph, kept, differentiable, None, 0, lambda: stream.release_pool(pool))

    def _with_gradients(self, program: Program) -> GraphRecording:
        """Two graphs in a pool of their own: what the first saves for the second must survive other graphs."""
        stream, handle = self._stream, cuda.graph_pool_handle()
        work = partial(run, program, program.inputs)
        graph, (outputs, sources) = _captured(stream, handle, program.generators, work)
        upstream = [torch.zeros_like(x) if x.requires_grad else None for x in _tensors(outputs)]
        backward, succeeded = None, False
        try:
            if sources and any(g is not None for g in upstream):
                again, gradients = _captured(
                    stream, handle, program.generators, lambda: _gradients(outputs, sources, upstream)
                )
                backward = Backward(again, upstream, gradients)
            succeeded = True
        finally:
            if not succeeded:
                graph.reset()
        kept, differentiable = _detached(outputs)
        return GraphRecording(graph, kept, differentiable, backward, len(sources), lambda: None)


def _captured(stream: CaptureStream, handle: Any, generators: Sequence[Generator], work: Any) -> Any:
    try:
        with stream.on_side_stream():
            return capture_graph(work, handle, stream.device, generators)
    except RuntimeError as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(explained(error)) from error


def explained(error: RuntimeError) -> str:
    """What a refusal of the driver means for the function, and its own words."""
    said = first_line(error)
    meaning = next((m for word, m in DRIVER_ERRORS if word in str(error).lower()), "it failed while recording")
    return f"fn cannot be recorded: {meaning} ({said})."


def _tensors(outputs: Any) -> list[Tensor]:
    return [x for x in flatten(outputs)[0] if isinstance(x, Tensor)]


def _gradients(
    outputs: Any, sources: Sequence[Tensor], upstream: Sequence[Tensor | None] | None = None
) -> list[Tensor | None]:
    """One gradient for each source; upstream gradients are ones unless given."""
    tensors = _tensors(outputs)
    given = [torch.ones_like(x) for x in tensors] if upstream is None else upstream
    pairs = [(x, g) for x, g in zip(tensors, given, strict=True) if x.requires_grad]
    if not sources or not pairs:
        return [None] * len(sources)
    live, above = zip(*pairs, strict=True)
    return list(torch.autograd.grad(live, sources, above, allow_unused=True))


def _detached(outputs: Any) -> tuple[Any, list[bool]]:
    leaves, structure = flatten(outputs)
    differentiable = [x.requires_grad for x in leaves if isinstance(x, Tensor)]
    return structure.build([x.detach() if isinstance(x, Tensor) else x for x in leaves]), differentiable


def _check_outputs(outputs: Any, device: torch.device) -> None:
    leaves, structure = flatten(outputs)
    for name, x in zip(structure.names(), leaves, strict=True):
        if isinstance(x, Tensor) and x.device != device:
            where = f"output {name}" if name else "the output"
            raise CaptureError(f"{where} is on {x.device}: a graph of {device} would not compute it anew. Move it.")
