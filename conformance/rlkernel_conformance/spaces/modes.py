"""What a call may be made under: modes and defaults of the process that must not change what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

__all__ = ["GRADLESS", "MODES", "under"]


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


def _autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


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
}
GRADLESS: Final = ("no_grad", "inference")


def under(mode: str, device: str) -> AbstractContextManager[Any]:
    """The scope of a mode."""
    return MODES[mode](device)
