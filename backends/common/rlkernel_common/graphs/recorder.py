"""What an implementation of capture supplies: how to warm up, record and replay on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from rlkernel_core.spec.graphed import CaptureGroup


@dataclass(frozen=True)
class Program:
    """One key of one function, ready to be recorded."""

    call: Callable[[Sequence[Tensor]], Any]  # runs fn on these tensors in place of the static inputs
    inputs: Sequence[Tensor]  # static buffers, already filled
    wants_grad: tuple[bool, ...]  # per input; all False without autograd
    parameters: Sequence[Tensor]  # static tensors that require grad; empty without autograd
    static: Sequence[Tensor]  # all static tensors
    generators: Sequence[Generator]  # that fn may draw from, besides the default one
    group: CaptureGroup
    device: torch.device
    autograd: bool
    collectives: bool


class Recording(Protocol):
    """A graph: replaying overwrites `outputs`."""

    outputs: Any  # nested; tensors keep their addresses for the life of the recording
    differentiable: tuple[bool, ...]  # per output tensor: whether it required grad when recorded
    nbytes: int  # memory held, inputs not counted

    def replay(self) -> None:
        """Run on what the static inputs hold now."""
        ...

    def backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of inputs that want them, then of parameters; one gradient for each output tensor comes in."""
        ...

    def close(self) -> None:
        """Free the graph and its memory."""
        ...


class Recorder(Protocol):
    """Makes recordings on one kind of device."""

    errors: tuple[type[Exception], ...]  # what a failed recording raises, besides CaptureError
    verify: str  # what verify="auto" means here: "never" or "first"
    evict: str  # "lru": graphs go one by one; "generation": all of a callable's graphs go together

    def order(self) -> None:
        """Called before a call touches memory of the group: let it come after what another stream does there."""
        ...

    def warm(self, program: Program) -> None:
        """Run the program once without recording, where recording will take place (a side stream), and wait for it."""
        ...

    def record(self, program: Program) -> Recording:
        """Record the program. On failure leave stream, allocator and pool as they were, and raise."""
        ...

    def synchronize(self) -> None:
        """Wait until replays under way are done."""
        ...

    def release(self) -> None:
        """Called when a callable gave up its graphs for good: memory that no graph of the group uses may go."""
        ...
