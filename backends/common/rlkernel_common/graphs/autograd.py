"""One node of the autograd graph for a whole replay; its backward is the recording's.

The backward reads what the replay left in static memory, so it must run before the next replay of the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkernel_common.graphs.recorder import Program, Recording
from rlkernel_core.errors import CaptureError
from rlkernel_core.tree import flatten


def run(program: Program, inputs: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """Run fn; with autograd also the tensors whose gradients are wanted: inputs first, then parameters."""
    if not program.autograd:
        return program.call(inputs), []
    with torch.enable_grad():
        tensors = [x.detach().requires_grad_(wanted) for x, wanted in zip(inputs, program.wants_grad, strict=True)]
        return program.call(tensors), [x for x in tensors if x.requires_grad] + list(program.parameters)


def check_graph(outputs: Any, sources: Sequence[Tensor]) -> None:
    """Every tensor that would receive a gradient is among the sources: inputs and declared static tensors."""
    known = {id(x) for x in sources}
    stack = [x.grad_fn for x in flatten(outputs)[0] if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = {*stack, *(x.grad_fn for x in sources)}
    while stack:
        node: Any = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise CaptureError(
                f"A tensor of shape {list(variable.shape)} that requires grad is used by fn but is neither an "
                "input nor in static; its gradient would be lost. Pass static=(module,)."
            )
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        stack += fresh


@dataclass
class Latest:
    """Number of the latest replay of a graph."""

    number: int = 0


def replay_with_grad(
    recording: Recording,
    latest: Latest,
    sources: Sequence[Tensor],
    cut: Sequence[Callable[[Tensor], Tensor]],
    differentiable: Sequence[bool],
    clone: bool,
) -> Any:
    """Replay; the outputs carry gradients back to `sources`.

    Args:
        recording: its static inputs are filled.
        latest: replay number, to refuse a backward that comes too late.
        sources: tensors of the caller that want a gradient: inputs first, then parameters.
        cut: per source, from the gradient in static memory to that of the source (padding cut off).
        differentiable: per output tensor, whether it has a gradient.
        clone: whether the caller gets tensors of their own.
    """
    leaves, structure = flatten(recording.outputs)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    results = _Replay.apply(  # type: ignore[no-untyped-call]
        recording, latest, tuple(cut), tuple(differentiable), clone, *sources
    )
    for i, result in zip(at, results, strict=True):
        leaves[i] = result
    return structure.build(leaves)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recording: Recording,
        latest: Latest,
        cut: tuple[Callable[[Tensor], Tensor], ...],
        differentiable: tuple[bool, ...],
        clone: bool,
        *sources: Tensor,  # noqa: ARG004  autograd's protocol
    ) -> tuple[Tensor, ...]:
        recording.replay()
        latest.number += 1
        ctx.recording, ctx.latest, ctx.cut, ctx.number = recording, latest, cut, latest.number
        kept = [x for x in flatten(recording.outputs)[0] if isinstance(x, Tensor)]
        results = tuple(x.clone() if clone else x.detach() for x in kept)
        ctx.mark_non_differentiable(*(x for x, d in zip(results, differentiable, strict=True) if not d))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if ctx.latest.number != ctx.number:
            raise CaptureError(
                "Backward came after the next replay of the same graph, which overwrote what it reads. Call backward "
                "before calling the captured function again, or capture it twice."
            )
        found = ctx.recording.backward(gradients)
        cut = (None if g is None else f(g) for g, f in zip(found, ctx.cut, strict=True))
        return (None, None, None, None, None, *cut)
