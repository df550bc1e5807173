"""What one capture gives: a graph, with autograd a second one for the backward pass, and the tensors they write to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, cuda

from rlkernel_core.errors import CaptureError
from rlkernel_core.tree import flatten


class Backward:
    """The backward pass as a graph of its own, from static upstream gradients to static gradients."""

    def __init__(
        self, graph: cuda.CUDAGraph, upstream: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> None:
        self.graph, self._upstream, self._gradients = graph, upstream, gradients

    def __call__(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay; the caller's own gradients."""
        for kept, gradient in zip(self._upstream, given, strict=True):
            if kept is not None:
                kept.zero_() if gradient is None else kept.copy_(gradient)
        self.graph.replay()
        return [None if g is None else g.clone() for g in self._gradients]


class GraphRecording:
    """See `rlkernel_common.graphs.recorder.Recording`."""

    def __init__(
        self,
        graph: cuda.CUDAGraph,
        outputs: Any,
        differentiable: Sequence[bool],
        backward: Backward | None,
        sources: int,
        release: Callable[[], None],
    ) -> None:
        self.outputs, self.differentiable = outputs, tuple(differentiable)
        held = [x.untyped_storage() for x in flatten(outputs)[0] if isinstance(x, Tensor)]
        self.nbytes = sum({s.data_ptr(): s.nbytes() for s in held}.values())
        self._graph: cuda.CUDAGraph | None = graph
        self._backward, self._sources, self._release = backward, sources, release
        self.replay = graph.replay  # the method itself: nothing stands between a call and the launch

    def backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of inputs that want them, then of parameters."""
        if self._backward is None:
            return [None] * self._sources
        with torch.no_grad():
            return self._backward(gradients)

    def close(self) -> None:
        """Free both graphs and leave the pool."""
        if self._graph is None:
            return
        graph, self._graph = self._graph, None
        self.replay = _closed
        graph.reset()
        if self._backward is not None:
            self._backward.graph.reset()
        self._backward, self.outputs = None, None
        self._release()


def _closed() -> None:
    raise CaptureError("This recording was closed.")
