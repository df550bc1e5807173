"""What the conformance suite asks for certificates of the kernels on NVIDIA GPUs."""

from __future__ import annotations

from rlkernel_triton.orders.launcher import OrderLauncher, target_name
from rlkernel_triton.orders.trace import Trace


def nvidia(arch: str, level: str, op: str) -> Trace:
    """What derives the orders of one call on an NVIDIA GPU.

    Args:
        arch: "sm90".
        level: "bits" or "order".
        op: operator.

    Raises:
        UnknownNameError: there is no such architecture.
    """
    return Trace(OrderLauncher(target_name(arch), level), op)
