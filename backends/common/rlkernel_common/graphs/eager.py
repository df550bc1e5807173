"""The recorder that needs no graphs: it audits fn once, then runs it on the static buffers at every replay.

What a graph would freeze is frozen here too: outputs keep the addresses they had when recorded, results that are no
tensors keep the value they had, and a result whose shape changes is an error. Python between operators runs anew,
so that a Python value read from a closure is not frozen as a graph would freeze it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel_common.graphs.audit import Audit
from rlkernel_common.graphs.autograd import check_graph, run
from rlkernel_common.graphs.recorder import Program
from rlkernel_core.errors import CaptureError
from rlkernel_core.tree import Structure, flatten


class EagerRecorder:
    """Semantic emulation of graphs, on any device."""

    errors: tuple[type[Exception], ...] = ()
    verify = "never"
    evict = "lru"

    def order(self) -> None:
        """One stream, one order."""

    def warm(self, program: Program) -> None:
        """Run fn."""
        run(program, program.inputs)

    def record(self, program: Program) -> EagerRecording:
        """Audit one run and keep its outputs as the static ones."""
        with Audit(program.generators, collectives=program.collectives):
            outputs, sources = run(program, program.inputs)
        if program.autograd:
            check_graph(outputs, sources)
        return EagerRecording(program, outputs)

    def synchronize(self) -> None:
        """Nothing runs behind our back."""

    def release(self) -> None:
        """Nothing is shared."""


class EagerRecording:
    """Static inputs, static outputs, and the function in between."""

    def __init__(self, program: Program, outputs: Any) -> None:
        self._program: Program | None = program
        leaves, self._structure = flatten(outputs)
        self.differentiable = tuple(x.requires_grad for x in leaves if isinstance(x, Tensor))
        self._leaves = [_keep(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.outputs = self._structure.build(self._leaves)
        self.nbytes = sum(x.nbytes for x in self._leaves if isinstance(x, Tensor))
        self._live: list[Tensor] = []  # outputs of the latest replay, with their autograd graph
        self._sources: list[Tensor] = []

    def replay(self) -> None:
        """Run fn and overwrite the outputs."""
        program = self._open()
        outputs, sources = run(program, program.inputs)
        leaves, structure = flatten(outputs)
        _check_same(self._leaves, self._structure, leaves, structure)
        with torch.no_grad():
            for kept, new in zip(self._leaves, leaves, strict=True):
                if isinstance(new, Tensor) and not _same_memory(kept, new):
                    kept.copy_(new)
        if program.autograd:
            self._live, self._sources = [x for x in leaves if isinstance(x, Tensor)], sources

    def backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Backward through the latest replay."""
        pairs = [(x, g) for x, g in zip(self._live, gradients, strict=True) if g is not None and x.requires_grad]
        if not pairs:
            return [None] * len(self._sources)
        live, given = zip(*pairs, strict=True)
        return torch.autograd.grad(live, self._sources, given, allow_unused=True)

    def close(self) -> None:
        """Forget everything."""
        self._program, self._live, self._sources = None, [], []

    def _open(self) -> Program:
        if self._program is None:
            raise CaptureError("This recording was closed.")
        return self._program


def _keep(x: Tensor) -> Tensor:
    """The static tensor that replays write this output into."""
    x = x.detach()
    overlapping = any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))
    return x.contiguous() if overlapping else x


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.numel() > 0


def _check_same(kept: list[Any], was: Structure, new: list[Any], now: Structure) -> None:
    if was != now:
        raise CaptureError(f"fn returned {now.names()}, but {was.names()} when it was captured.")
    for name, a, b in zip(was.names(), kept, new, strict=True):
        tensors = isinstance(a, Tensor), isinstance(b, Tensor)
        if tensors[0] != tensors[1] or (all(tensors) and (a.shape, a.dtype) != (b.shape, b.dtype)):
            raise CaptureError(f"Output {name or 'of fn'} is no longer what it was when captured: shapes are frozen.")
