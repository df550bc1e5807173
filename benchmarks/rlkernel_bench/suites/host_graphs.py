"""Graphs of the suite `host`: bare ones, whose replay is all that there is, and those of rlkernel.capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_bench.work import Call, Inputs, Outputs


def step(given: Inputs) -> Outputs:
    """Two small kernels, of the first and the last input."""
    return {"y": of_ends(*given.values())}


def of_ends(*inputs: Tensor) -> Tensor:
    """Of as many inputs as a call has: all are copied, two are read."""
    return inputs[0] * 2 + inputs[-1]


def recorded(fn: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """A graph of one call on inputs that stay where they are, and what it writes to."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn()
    return graph, out


def bare_replay(call: Call) -> Call:
    """A bare replay of a graph of the call, recorded when it is first made."""
    held: list[tuple[torch.cuda.CUDAGraph, Outputs]] = []

    def run(given: Inputs) -> Outputs:
        if not held:
            held.append(recorded(lambda: call(given)))
        held[0][0].replay()
        return held[0][1]

    return run


def graphed(call: Call, names: Sequence[str]) -> Call:
    """A replay of a call by rlkernel.capture: inputs of these names are copied at every call, the rest is static."""
    held: list[Any] = []

    def run(given: Inputs) -> Outputs:
        inputs = {name: given[name] for name in names}
        if not held:
            held.append(rlk.capture(lambda **tensors: call({**given, **tensors}), inputs))
        found: Outputs = held[0](**inputs)
        return found

    return run


def copied_step(*, together: bool) -> Call:
    """A replay with its inputs copied in and its output out, by hand: one by one, or by one launch for all inputs."""
    held: list[tuple[list[Tensor], torch.cuda.CUDAGraph, Outputs]] = []

    def run(given: Inputs) -> Outputs:
        if not held:
            kept = {name: x.clone() for name, x in given.items()}
            held.append((list(kept.values()), *recorded(lambda: step(kept))))
        buffers, graph, out = held[0]
        if together:
            torch._foreach_copy_(buffers, list(given.values()))
        else:
            for buffer, x in zip(buffers, given.values(), strict=True):
                buffer.copy_(x)
        graph.replay()
        return {"y": out["y"].clone()}

    return run


def captured_step(outputs: str) -> Call:
    """The same by rlkernel.capture, with its way to hand out outputs."""
    held: list[Any] = []

    def run(given: Inputs) -> Outputs:
        if not held:
            held.append(rlk.capture(of_ends, tuple(given.values()), outputs=outputs))
        return {"y": held[0](*given.values())}

    return run
