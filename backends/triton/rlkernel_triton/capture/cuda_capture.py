"""Taking one graph on the current stream, and putting right what a capture that broke off leaves behind.

A capture that CUDA refuses ends with an error in `capture_end`, and torch (up to 2.13 at least) then leaves out the
rest of that function: the allocator believes that the capture goes on, and before 2.12 so does every generator, whose
next draw fails with "Offset increment outside graph capture". Both are put right here.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import torch
from torch import Generator, cuda

_T = TypeVar("_T")

# Graphs whose capture broke off. An allocator may still hold a function of theirs, so they are never destroyed.
_BROKEN_GRAPHS: Final[list[Any]] = []


def capture_graph(
    run: Callable[[], _T], pool: Any, device: torch.device, generators: Sequence[Generator]
) -> tuple[cuda.CUDAGraph, _T]:
    """Record what `run` launches, in memory of this pool; the graph, and what `run` returns.

    Other threads may go on using the device: only what this thread does can fail the capture.

    Raises:
        RuntimeError: CUDA or HIP refused. Stream, allocator and generators are as before, but the pool's handle must
            not be used again.
    """
    graph, succeeded = _new_graph(device, generators), False
    with _without_garbage_collection():
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            result = run()
            _end_capture(graph)
            succeeded = True
        finally:
            if not succeeded:
                _recover(graph, pool, device, generators)
    return graph, result


def _end_capture(graph: cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # as a function that returns its input is
        graph.capture_end()


def _recover(graph: cuda.CUDAGraph, pool: Any, device: torch.device, generators: Sequence[Generator]) -> None:
    ended = False
    with suppress(RuntimeError):
        _end_capture(graph)
        ended = True
    graph.reset()
    if ended:  # the error was one of Python, and CUDA knows nothing of it
        return
    _BROKEN_GRAPHS.append(graph)
    with suppress(RuntimeError):  # torch may have done it
        torch._C._cuda_endAllocateToPool(device.index, pool)  # noqa: SLF001  torch has no public name for it
        torch._C._cuda_releasePool(device.index, pool)  # noqa: SLF001
    with suppress(RuntimeError):  # a capture that ends well ends the generators' too
        empty = _new_graph(device, generators)
        empty.capture_begin(pool=cuda.graph_pool_handle(), capture_error_mode="thread_local")
        _end_capture(empty)
        empty.reset()


def _new_graph(device: torch.device, generators: Sequence[Generator]) -> cuda.CUDAGraph:
    graph = cuda.CUDAGraph()
    for generator in generators:
        # torch.Generator("cuda") has no index.
        if generator.device.type == device.type and generator.device.index in (None, device.index):
            graph.register_generator_state(generator)
    return graph


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """No garbage collection: what it destroys (events, modules, other graphs) may fail a capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
