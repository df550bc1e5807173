"""capture: what a replay costs the calling thread, beside the same kernels launched one by one and a bare graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

import rlkernel as rlk
from rlkernel_bench.gates import exact
from rlkernel_bench.suites.common import Draw
from rlkernel_bench.work import Goal, Inputs, Judgment, Outputs, Problem, Work

_INPUTS = 8


def work_of(kernels: int, inputs: int = _INPUTS, suite: str = "capture", why: str = "", **options: object) -> Work:
    """One row; the seeds' row is made of it too."""
    over = Goal(10.0, "over", "H200") if not options else Goal(12.0, "over", "H200")  # guards may take 2 us more
    return Work(
        suite,
        "capture",
        {"kernels": kernels, "inputs": inputs, "N": 1024},
        "float32",
        "replay",
        {"batch": 5, "chain": "replay", **options},
        goals=(over,),
        ruler="bare graph",
        clock="host",
        why=why,
    )


WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (work_of(6, 2), work_of(6, 2, guard="call")),
    "full": (
        work_of(1, why="nothing but the replay"),
        work_of(100, why="a decode step of small kernels"),
        work_of(400, why="the same, four times as long"),
        work_of(100, guard="call", why="with the addresses of static tensors looked at in every call"),
    ),
}


def chain(kernels: int) -> Callable[..., torch.Tensor]:
    """A function of that many small kernels, elementwise on its inputs in turn."""

    def run(*xs: torch.Tensor) -> torch.Tensor:
        y = xs[0]
        for i in range(kernels):
            y = y * 0.5 + xs[i % len(xs)] if i % 2 else y.add(xs[i % len(xs)], alpha=0.25)
        return y

    return run


def make(work: Work, device: str, seed: int) -> Inputs:
    """The tensors that a caller passes anew at every call."""
    draw = Draw(device, seed)
    return {f"x{i}": draw.normal(work.sizes["N"]) for i in range(work.sizes["inputs"])}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    fn = chain(work.sizes["kernels"])
    guard = str(work.options.get("guard", "sync"))
    static = (torch.ones(8, device=device),) if guard == "call" else None
    held: dict[str, Callable[..., torch.Tensor]] = {}  # candidates run in scopes of their own

    def call(way: str, given: Inputs) -> Outputs:
        xs = tuple(given.values())
        key = f"{way} {rlk.policy.current().policy.default.order}"
        if key not in held:
            held[key] = rlk.capture(fn, xs, outputs=way, guard=guard, static=static)
        return {"y": held[key](*xs)}

    def judge(_given: Inputs, want: torch.Tensor, found: Outputs) -> dict[str, Judgment]:
        return {"y": exact(found["y"], want)}

    ours = {way: partial(call, way) for way in ("clone", "view")}
    return Problem(work, partial(make, work, device), ours, lambda given: fn(*given.values()), judge)


def eager(work: Work) -> Callable[[Inputs], Outputs]:
    """The kernels launched one by one."""
    fn = chain(work.sizes["kernels"])
    return lambda given: {"y": fn(*given.values())}


def bare(work: Work) -> Callable[[Inputs], Outputs]:
    """torch.cuda.CUDAGraph with one copy of all inputs before the replay: what any wrapper has to do."""
    fn = chain(work.sizes["kernels"])
    held: list[tuple[list[torch.Tensor], torch.cuda.CUDAGraph, torch.Tensor]] = []

    def run(given: Inputs) -> Outputs:
        xs = list(given.values())
        if not held:
            buffers = [x.clone() for x in xs]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                fn(*buffers)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = fn(*buffers)
            held.append((buffers, graph, y))
        buffers, graph, y = held[0]
        torch._foreach_copy_(buffers, xs)
        graph.replay()
        return {"y": y}

    return run
