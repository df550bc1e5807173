"""torch's allocator held to the budget, and what running out is called on Tegra, said plainly.

Without a cap the GPU's allocations push the system into swap, and a board that swaps stands still. With one, torch
refuses before it asks the driver. The refusal has three spellings there (forum 370049, unsloth-zoo #1235), of which one
names NVML and none the memory. Imports torch inside functions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rlkernel_core.errors import MemoryBudgetError, RLKernelError
from rlkernel_core.host.memory import memory

_SPELLINGS: Final = (
    "CUDA out of memory",
    "CUDA driver error: out of memory",  # expandable segments
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED",  # torch asks NVML how much there is, and there is no NVML
)


def cap(device: str = "cuda:0", *, root: Path = Path("/"), accelerator: Any = None) -> int:
    """Let torch take the budget on a device and no more; returns the bytes it may hold.

    Call it before the model is loaded, and again where other programs came or went.

    Args:
        device: torch device string.
        root: where the file system starts.
        accelerator: `torch.cuda` unless given.

    Raises:
        RLKernelError: the system does not tell how much memory is available.
    """
    import torch

    accelerator = accelerator or torch.cuda
    room = memory(root)
    if room is None:
        raise RLKernelError("/proc/meminfo does not tell what is available; nothing was capped")
    total = int(accelerator.get_device_properties(device).total_memory)
    # What torch holds already is no longer available, and is its own.
    allowed = min(room.budget + int(accelerator.memory_reserved(device)), total)
    accelerator.set_per_process_memory_fraction(allowed / total, device)
    return allowed


@contextmanager
def told(what: str, *, root: Path = Path("/")) -> Iterator[None]:
    """Whatever running out of memory is called inside, it leaves as a MemoryBudgetError; other errors are themselves.

    Args:
        what: what is being done: "a training step".
        root: where the file system starts.

    Raises:
        MemoryBudgetError: memory ran out. `needed` is None: not every spelling says by how much.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not any(spelling in str(error) for spelling in _SPELLINGS):
            raise
        room = memory(root)
        budget, because = (room.budget, room.describe()) if room else (0, "this system does not tell its memory")
        remedy = f"Take a smaller model, batch or context; rlkernel memory shows what is used. torch: {error}"
        raise MemoryBudgetError(what, None, budget, because, remedy) from error
