"""Is the device itself all right? A tiny known computation, in a fresh process before any tested code is loaded."""

from __future__ import annotations

from typing import Final

from rlkernel.discover import brief, guarded

_N: Final = 1024


def complaint(device: str) -> str | None:
    """What is wrong with a device; None where it computes what it should. No reset is attempted."""

    def squares() -> int:
        import torch

        x = torch.arange(_N, device=device)
        return int((x * x).sum().item())

    found, error = guarded(squares)
    right = (_N - 1) * _N * (2 * _N - 1) // 6
    if error is not None:
        return f"{device} cannot add numbers: {brief(error)}"
    return None if found == right else f"{device} says that the squares below {_N} add up to {found}, not {right}"
