"""A stand-in for torch.cuda's graphs on the CPU: what is recorded is replayed on the same storages, and nothing else.

As on a device, recording does not execute: what an operator wrote to older tensors is put back when the capture ends.
A synchronization breaks the capture off; then, as torch does, `capture_end` raises and leaves the allocator with the
pool still open and generators still capturing. A pool's handle dies with the last graph in it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

REFUSED = "CUDA error: operation not permitted when stream is capturing"


class Stream:
    def __init__(self, world: FakeCuda) -> None:
        self.world, self.number = world, len(world.streams)
        self.waited_for: list[int] = []
        world.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.number)

    def synchronize(self) -> None:
        self.world.synchronize()


class Tape(TorchDispatchMode):
    """Executes operators and remembers how to do it again, and how to undo it."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.undo: list[tuple[Tensor, Tensor]] = []
        self.broken = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            self.broken = True
            raise RuntimeError(REFUSED)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.undo += [(x, x.clone()) for x in tree_iter(value) if isinstance(x, Tensor)]
        out = func(*args, **kwargs)
        self.entries.append((func, args, kwargs, [x for x in tree_iter(out) if isinstance(x, Tensor)]))
        return out

    def play(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, kept in self.entries:
                found = [x for x in tree_iter(func(*args, **kwargs)) if isinstance(x, Tensor)]
                for old, new in zip(kept, found, strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Graph:
    """CUDAGraph."""

    def __init__(self, world: FakeCuda) -> None:
        self.world = world
        self.generators: list[Generator] = []
        self.tape: Tape | None = None
        self.pool: Any = None
        self.whole = False

    def register_generator_state(self, generator: Generator) -> None:
        self.generators.append(generator)

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        world = self.world
        assert capture_error_mode == "thread_local"
        assert world.current.number != 0, "CUDA graphs must be captured on a non-default stream."
        if world.capturing is not None:
            raise RuntimeError(REFUSED)
        if world.users.get(pool) == 0:
            raise RuntimeError("INTERNAL ASSERT FAILED: the pool is not live")
        world.users[pool] = world.users.get(pool, 0) + 1
        world.open_pools.append(pool)
        world.stuck_generators = True
        self.pool, self.tape = pool, Tape()
        self.before = [torch.get_rng_state(), *(g.get_state() for g in self.generators)]
        world.capturing = self
        self.tape.__enter__()

    def capture_end(self) -> None:
        if self.world.capturing is not self:
            raise RuntimeError("CUDA error: the stream is not capturing")
        self.tape.__exit__(None, None, None)
        self.world.capturing = None
        with torch.no_grad():
            for x, value in reversed(self.tape.undo):
                x.copy_(value)
        for write, state in zip(
            (torch.set_rng_state, *(g.set_state for g in self.generators)), self.before, strict=True
        ):
            write(state)
        if self.tape.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.world.open_pools.remove(self.pool)
        self.world.stuck_generators = False
        self.whole = True

    def replay(self) -> None:
        if self.world.capturing is not None:
            raise RuntimeError(REFUSED)
        assert self.whole, "Called CUDAGraph::replay without a preceding successful capture."
        self.world.replays.append(self.world.current.number)
        self.tape.play()

    def reset(self) -> None:
        if self.whole:
            self.world.users[self.pool] -= 1
        self.whole = False


class FakeCuda:
    """What `rlkernel_triton.capture` uses of torch.cuda, for the CPU."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.default_generators = {None: torch.default_generator}
        self.users: dict[Any, int] = {}  # pool -> graphs that hold it
        self.open_pools: list[Any] = []  # that the allocator believes to be captured into
        self.stuck_generators = False
        self.capturing: Graph | None = None
        self.allocator = "native"
        self.replays: list[int] = []  # stream of each

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802  torch's name
        return Stream(self)

    def CUDAGraph(self) -> Graph:  # noqa: N802  torch's name
        return Graph(self)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def get_allocator_backend(self) -> str:
        return self.allocator

    def synchronize(self, device: torch.device | None = None) -> None:
        if self.capturing is not None:
            self.capturing.tape.broken = True
            raise RuntimeError(REFUSED)

    def graph_pool_handle(self) -> tuple[int, int]:
        self.handles = getattr(self, "handles", 0) + 1
        return 0, self.handles

    def end_allocate(self, index: int | None, pool: Any) -> None:
        if pool not in self.open_pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.open_pools.remove(pool)

    def release(self, index: int | None, pool: Any) -> None:
        self.users[pool] -= 1

    def install(self, monkeypatch) -> None:
        """Put this in torch's place."""
        for module in ("capture_stream", "cuda_capture", "recording", "recorder"):
            monkeypatch.setattr(f"rlkernel_triton.capture.{module}.cuda", self)
        monkeypatch.setattr("rlkernel_triton.capture.capture_stream.stream_number", lambda index: self.current.number)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in, in torch's place."""
    world = FakeCuda()
    world.install(monkeypatch)
    return world
