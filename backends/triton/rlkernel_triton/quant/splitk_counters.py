"""Counters of arrived programs for split-K launches, zero before a launch and zero again after it, and partial sums.

Two launches that may run at the same time must not share either. Launches on one stream follow one another, so a
stream has one set; a launch that is being captured may be replayed beside anything, so it gets counters of its own,
which are never given to another: graphs hold their addresses, so that no pool of counters is ever freed. Its partial
sums lie in the graph's own memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from rlkernel_triton.common.host import lasting

_POOL: Final = 1 << 20  # counters that are reserved at once: 4 MiB
_FEWEST: Final = 4096  # counters that a stream has
_MOST_PARTIALS: Final = 1 << 21  # partial sums that a stream keeps room for, at most: 8 MiB
_of_stream: Final[dict[tuple[int, int], Tensor]] = {}
_partials: Final[dict[tuple[int, int], Tensor]] = {}
_unused: Final[dict[int, Tensor]] = {}
_running_out: Final[set[int]] = set()  # devices whose pool is to be followed by another outside of a capture
_pools: Final[list[Tensor]] = []
# The stream that is current on a device of this index, as a number: a tenth of what asking for the object costs.
# `int` stands where torch was built for no GPU: nothing asks there.
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)  # noqa: SLF001


def splitk_counters(count: int, device: torch.device) -> Tensor:  # -> [count or more] int32
    """Counters for one launch on the current stream."""
    return splitk_workspace(count, 0, device)[0]


def splitk_workspace(count: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counters [count or more] int32 and partial sums [size or more] fp32 for one launch on the current stream."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device), _uninitialized(size, device)
    if torch.cuda.is_current_stream_capturing():
        return _captured(count, device), _uninitialized(size, device)
    place = (device.index, _stream(device.index))
    counters = _of_stream.get(place)
    if counters is None or counters.numel() < count or (_running_out and device.index in _running_out):
        counters = _reserved(count, device, place)
    if size > _MOST_PARTIALS:
        return counters, _uninitialized(size, device)
    partials = _partials.get(place)
    if partials is None or partials.numel() < size:
        partials = _partials[place] = _lasting(1 << max(size - 1, 0).bit_length(), device, torch.float32)
    return counters, partials


def _uninitialized(size: int, device: torch.device) -> Tensor:  # -> [size] fp32
    return torch.empty(size, dtype=torch.float32, device=device)


def _captured(count: int, device: torch.device) -> Tensor:  # -> [count or more] int32
    """Counters that no other launch gets."""
    count = -(-count // 4) * 4  # every address is a multiple of 16
    left = _unused.get(device.index)
    if left is None or left.numel() < count:
        # No memory outside of the graph's own may be asked for now: cleared at every replay instead.
        return torch.zeros(count, dtype=torch.int32, device=device)
    _unused[device.index] = left[count:]
    if left.numel() - count < _POOL // 4:
        _running_out.add(device.index)
    return left[:count]


def _reserved(count: int, device: torch.device, place: tuple[int, int]) -> Tensor:  # -> [count or more] int32
    """The counters of a stream; before them a pool for captures to come, where little is left of the last one."""
    if device.index not in _unused or device.index in _running_out:
        _unused[device.index] = _lasting(_POOL, device, torch.int32)
        _pools.append(_unused[device.index])
        _running_out.discard(device.index)
        torch.cuda.current_stream(device).synchronize()  # other streams find zeros
    found = _of_stream.get(place)
    if found is None or found.numel() < count:
        found = _of_stream[place] = _lasting(max(count, _FEWEST), device, torch.int32)
    return found


def _lasting(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:  # -> [count]
    """Zeros in memory that no graph owns."""
    made = lasting(lambda: torch.zeros(count, dtype=dtype, device=device), device)
    made.record_stream(torch.cuda.current_stream(device))  # a stream's are freed when it needs more of them
    return made
