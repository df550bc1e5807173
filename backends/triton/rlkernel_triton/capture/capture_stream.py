"""Where the graphs of a group live: one stream to record on, one memory pool, one order of replays.

Graphs that share a pool write to the same memory between their outputs, so their replays must follow each other. On
one stream they do by themselves; a caller that changes streams is made to wait for the stream it was on before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import cuda

from rlkernel_core.errors import CaptureError
from rlkernel_core.spec.graphed import CaptureGroup
from rlkernel_triton.capture.cuda_capture import capture_graph

ASYNC_ALLOCATOR: Final = "cudaMallocAsync"  # its allocations become nodes of a graph, which then cannot share a pool

# The stream that is current on a device of this index, as a number: a tenth of what asking for the object costs.
stream_number: Callable[[int | None], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001


class Pool:
    """Memory that graphs share, alive while one of them is.

    torch ends a pool with the last graph in it, and its handle then serves no further capture. An empty graph of our
    own keeps it alive, whatever becomes of a user's graphs.
    """

    def __init__(self, stream: CaptureStream) -> None:
        self.handle = cuda.graph_pool_handle()
        self.users = 0
        with stream.on_side_stream():
            self._keeper, _ = capture_graph(lambda: None, self.handle, stream.device, ())

    def close(self) -> None:
        """Give the memory back to torch's allocator."""
        self._keeper.reset()


class CaptureStream:
    """The side stream and the pool of one group on one device, and the stream of its latest replay."""

    def __init__(self, device: torch.device) -> None:
        if stream_number is None:
            raise CaptureError("This torch was built without CUDA and HIP, so it records no graphs.")
        if (allocator := cuda.get_allocator_backend()) == ASYNC_ALLOCATOR:
            raise CaptureError(
                f"Graphs would hold allocations of {allocator}: they are recorded in memory of torch's own allocator. "
                f"Take backend:{allocator} out of PYTORCH_CUDA_ALLOC_CONF."
            )
        self.device = device
        self.side = cuda.Stream(device)
        self._ask, self._index = stream_number, device.index
        self._pool: Pool | None = None
        self._number: int | None = None
        self._latest: cuda.Stream | None = None

    def order(self) -> None:
        """Let the current stream wait for the one that the group's memory was last used on."""
        number = self._ask(self._index)
        if number != self._number:
            current = cuda.current_stream(self.device)
            if self._latest is not None:
                current.wait_stream(self._latest)
            self._number, self._latest = number, current

    @contextmanager
    def on_side_stream(self) -> Iterator[None]:
        """The side stream is current: after what was there before, before what comes after."""
        here = cuda.current_stream(self.device)
        self.side.wait_stream(here)
        try:
            with cuda.stream(self.side):
                yield
        finally:
            here.wait_stream(self.side)

    def acquire_pool(self) -> Pool:
        """The group's pool, with one user more."""
        if self._pool is None:
            self._pool = Pool(self)
        self._pool.users += 1
        return self._pool

    def release_pool(self, pool: Pool) -> None:
        """One user less. A pool without users waits for the next one, unless it was retired."""
        pool.users -= 1
        if pool is not self._pool and pool.users == 0:
            pool.close()

    def retire_pool(self, pool: Pool) -> None:
        """Use another pool from now on; graphs that are in this one stay."""
        if self._pool is pool:
            self._pool = None

    def release(self) -> None:
        """End the pool if nobody uses it."""
        if self._pool is not None and self._pool.users == 0:
            self._pool.close()
            self._pool = None


def capture_stream_of(group: CaptureGroup, device: torch.device) -> CaptureStream:
    """The stream of a group on a device."""
    with group.lock:
        stream: CaptureStream | None = group.pools.get(f"torch {device}")
        if stream is None:
            stream = group.pools[f"torch {device}"] = CaptureStream(device)
        return stream
