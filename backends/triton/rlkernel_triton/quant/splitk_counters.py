"""Counters that programs of one launch draw tickets from, zero before a launch and zero again after it, and their room.

Two launches that may run at the same time must not share either. Launches on one stream follow one another, so a
stream has one set; a launch that is being captured may be replayed beside anything, so it gets counters of its own,
which are never given to another: graphs hold their addresses, so that no arena is ever freed. Its room lies in the
graph's own memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from rlkernel_triton.common.host import lasting

_ARENA: Final = 1 << 20  # counters that are set aside at once: 4 MiB
_LEAST: Final = 4096  # counters that a stream has
_KEPT: Final = 1 << 21  # numbers of a room that a stream keeps, at most: 8 MiB
_of_stream: Final[dict[tuple[int, int], Tensor]] = {}
_rooms: Final[dict[tuple[int, int], Tensor]] = {}
_unused: Final[dict[int, Tensor]] = {}
_low: Final[set[int]] = set()  # devices whose arena is to be followed by another outside of a capture
_arenas: Final[list[Tensor]] = []
# The stream that is current on a device of this index, as a number: a tenth of what asking for the object costs.
# `int` stands where torch was built for no GPU: nothing asks there.
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)  # noqa: SLF001


def tickets(count: int, device: torch.device) -> Tensor:  # -> [count or more] int32
    """Counters for one launch on the current stream."""
    return scratch(count, 0, device)[0]


def scratch(count: int, numbers: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counters [count or more] int32, and room for [numbers or more] fp32, for one launch on the current stream."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device), _fresh(numbers, device)
    if torch.cuda.is_current_stream_capturing():
        return _captured(count, device), _fresh(numbers, device)
    place = (device.index, _stream(device.index))
    counters = _of_stream.get(place)
    if counters is None or counters.numel() < count or (_low and device.index in _low):
        counters = _set_aside(count, device, place)
    if numbers > _KEPT:
        return counters, _fresh(numbers, device)
    room = _rooms.get(place)
    if room is None or room.numel() < numbers:
        room = _rooms[place] = _lasting(1 << max(numbers - 1, 0).bit_length(), device, torch.float32)
    return counters, room


def _fresh(numbers: int, device: torch.device) -> Tensor:  # -> [numbers] fp32
    return torch.empty(numbers, dtype=torch.float32, device=device)


def _captured(count: int, device: torch.device) -> Tensor:  # -> [count or more] int32
    """Counters that no other launch gets."""
    count = -(-count // 4) * 4  # every address is a multiple of 16
    left = _unused.get(device.index)
    if left is None or left.numel() < count:
        # No memory outside of the graph's own may be asked for now: cleared at every replay instead.
        return torch.zeros(count, dtype=torch.int32, device=device)
    _unused[device.index] = left[count:]
    if left.numel() - count < _ARENA // 4:
        _low.add(device.index)
    return left[:count]


def _set_aside(count: int, device: torch.device, place: tuple[int, int]) -> Tensor:  # -> [count or more] int32
    """The counters of a stream; before them an arena for captures to come, where little is left of the last one."""
    if device.index not in _unused or device.index in _low:
        _unused[device.index] = _lasting(_ARENA, device, torch.int32)
        _arenas.append(_unused[device.index])
        _low.discard(device.index)
        torch.cuda.current_stream(device).synchronize()  # other streams find zeros
    found = _of_stream.get(place)
    if found is None or found.numel() < count:
        found = _of_stream[place] = _lasting(max(count, _LEAST), device, torch.int32)
    return found


def _lasting(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:  # -> [count]
    """Zeros in memory that no graph owns."""
    made = lasting(lambda: torch.zeros(count, dtype=dtype, device=device), device)
    made.record_stream(torch.cuda.current_stream(device))  # a stream's are let go when it needs more of them
    return made
