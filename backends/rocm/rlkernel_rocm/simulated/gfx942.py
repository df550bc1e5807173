"""The Triton kernels as gfx942 machine code on a CPU: `--manifest rlkernel_rocm.simulated.gfx942:backend`.

Claims only; an implementation is made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlkernel_rocm.simulated.manifests import manifest
from rlkernel_rocm.simulated.operators import on

backend = manifest("gfx942")


def __getattr__(op: str) -> Callable[..., Any]:
    if op.startswith("__"):
        raise AttributeError(op)
    return on("gfx942", op)
