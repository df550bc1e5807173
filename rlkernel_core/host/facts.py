"""What a record of a run says of the Jetson board it ran on: its results mean nothing without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlkernel_core.host.board import board
from rlkernel_core.host.power import nvpmodel, power


def facts(root: Path = Path("/")) -> dict[str, Any] | None:
    """Board, release, power mode and clocks, JSON-ready, the same from run to run; None on anything but a Jetson.

    Args:
        root: where the file system starts.
    """
    found = board(root)
    if found is None:
        return None
    state = power(root, nvpmodel)
    return {
        "name": found.sold_as.name if found.sold_as else found.name,
        "l4t": found.l4t,
        "jetpack": found.release.jetpack if found.release else None,
        "power_mode": state.mode,
        "clocks_held": state.gpu.held if state.gpu else None,
    }
