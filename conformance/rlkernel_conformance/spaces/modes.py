"""What a call may be made under: modes and defaults of the process that must not change what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from rlkernel_common.graphs.audit import Audit

__all__ = ["GRADLESS", "MODES", "WITHOUT_SYNCHRONIZATION", "under"]


@contextmanager
def _set(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    """A setting of the process has a value within the scope, and its own afterwards."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _without_synchronization(device: str) -> AbstractContextManager[Any]:
    """What waits for the device, or a shape that depends on values, is an error."""
    if not device.startswith("cuda"):
        return Audit([], collectives=False)
    return _set(torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode, "error")


def _autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


# For operators that may be captured, after a call of the same shape.
WITHOUT_SYNCHRONIZATION: Final = "no synchronization"
# By the device of the arguments.
MODES: Final[Mapping[str, Callable[[str], AbstractContextManager[Any]]]] = {
    "plain": lambda _: nullcontext(),
    "no_grad": lambda _: torch.no_grad(),
    "inference": lambda _: torch.inference_mode(),
    "autocast": _autocast,
    "float64 by default": lambda _: _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "meta by default": lambda _: torch.device("meta"),
    # `use_deterministic_algorithms` would load the compiler.
    "deterministic": lambda _: _set(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "error"),
    "more threads": lambda _: _set(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 2),
    WITHOUT_SYNCHRONIZATION: _without_synchronization,
}
GRADLESS: Final = ("no_grad", "inference")


@contextmanager
def under(mode: str, device: str, *, autocast: bool = False) -> Iterator[None]:
    """The scope of a mode, and of autocast in it."""
    with MODES[mode](device), _autocast(device) if autocast else nullcontext():
        yield
