"""Counters that programs of one launch draw tickets from: zero before a launch, and zero again after it.

Two launches that may run at the same time must not share counters. Launches on one stream follow one another, so a
stream has one set; a launch that is being captured may be replayed beside anything, so it gets counters of its own,
which are never given to another: graphs hold their addresses, so that no arena is ever freed.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlkernel_triton.launch import lasting

_ARENA: Final = 1 << 20  # counters that are set aside at once: 4 MiB
_of_stream: Final[dict[tuple[torch.device, int], Tensor]] = {}
_unused: Final[dict[torch.device, Tensor]] = {}
_arenas: Final[list[Tensor]] = []


def tickets(count: int, device: torch.device) -> Tensor:  # -> [count] int32
    """Counters for one launch on the current stream."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        left = _unused.get(device)
        if left is None or left.numel() < count:
            # No memory outside of the graph's own may be asked for now: cleared at every replay instead.
            return torch.zeros(count, dtype=torch.int32, device=device)
        _unused[device] = left[count:]
        return left[:count]
    if device not in _unused or _unused[device].numel() < _ARENA // 4:
        _unused[device] = _lasting(_ARENA, device)
        _arenas.append(_unused[device])
        torch.cuda.current_stream(device).synchronize()  # other streams find zeros
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    found = _of_stream.get(key)
    if found is None or found.numel() < count:
        found = _of_stream[key] = _lasting(max(count, 4096), device)
    return found[:count]


def _lasting(count: int, device: torch.device) -> Tensor:  # -> [count] int32
    """Zeros in memory that no graph owns."""
    made = lasting(lambda: torch.zeros(count, dtype=torch.int32, device=device), device)
    made.record_stream(torch.cuda.current_stream(device))  # a stream's are let go when it needs more of them
    return made
