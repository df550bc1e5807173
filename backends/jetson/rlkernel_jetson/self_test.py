"""Does it really run here? A look at the device and at the allocator's settings, then one of the portable kernels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlkernel_core.errors import RLKernelError
from rlkernel_jetson.detect import Detected, detect


def inspect(device: str, accelerator: Any, root: Path = Path("/")) -> Detected:
    """What a device is.

    Args:
        device: torch device string.
        accelerator: `torch.cuda`.
        root: where the file system starts.

    Raises:
        RLKernelError: torch sees no GPU, this one is no Jetson's, or a setting makes its first allocation fail.
    """
    if not accelerator.is_available():
        board = detect(root).board
        here = f"the files name {board.name}: " if board else ""
        raise RLKernelError(f"{here}torch sees no GPU; rlkernel doctor says whether its build has code for it")
    found = detect(root, os.environ, accelerator.get_device_properties(int(device.partition(":")[2] or 0)))
    fatal = [p for p in found.problems if p.code != "allocator-risk"]
    if fatal:
        raise RLKernelError("; ".join(f"{p.text}. {p.fix}" for p in fatal))
    if not found.jetson:
        raise RLKernelError(f"{device} is {found.arch}, no GPU of a Jetson: another backend serves it")
    return found


def self_test(device: str) -> None:
    """Compute log-probabilities on a device and hold them against their definition.

    Raises:
        RLKernelError: what is wrong with the device or the settings, or that the kernel's result is wrong.
    """
    import torch

    from rlkernel_core.reference.logprob import logprob as definition
    from rlkernel_triton.logprob import logprob

    inspect(device, torch.cuda)
    g = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(4, 1000, generator=g) * 3, torch.randint(0, 1000, (4,), generator=g)
    got = logprob(logits.to(device, torch.bfloat16), ids.to(device)).logprob.cpu()
    want = definition(logits.bfloat16().double(), ids).logprob
    error = (got.double() - want).abs().max().item()
    if not error < 1e-4:
        raise RLKernelError(f"log-probabilities on {device} are off by {error:.3g}; expected below 1e-4")
