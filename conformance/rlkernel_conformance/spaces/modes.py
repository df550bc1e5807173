"""What a call may be made under: modes and defaults of the process that must not change what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from rlkernel_common.graphs.audit import Audit

__all__ = ["GRADLESS", "MODES", "WITHOUT_SYNCHRONIZATION", "under"]


@contextmanager
def _default_dtype(_: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic(_: str) -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # `use_deterministic_algorithms` loads the compiler
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def _threads(_: str) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_synchronization(device: str) -> Iterator[None]:
    """What waits for the device, or a shape that depends on values, is an error."""
    if not device.startswith("cuda"):
        with Audit([], collectives=False):
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


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
    "float64 by default": _default_dtype,
    "meta by default": lambda _: torch.device("meta"),
    "deterministic": _deterministic,
    "more threads": _threads,
    WITHOUT_SYNCHRONIZATION: _without_synchronization,
}
GRADLESS: Final = ("no_grad", "inference")


def under(mode: str, device: str) -> AbstractContextManager[Any]:
    """The scope of a mode."""
    return MODES[mode](device)
