"""For which machine a host plans its launches.

Host code asks the device how many multiprocessors it has, how wide a warp is and of which family it is. Over a bundle
the answer is that of the bundle's target: the configurations that it holds were recorded so, wherever it runs.
"""

from __future__ import annotations

from typing import Any

from rlkernel_triton.aot.hosts import Host
from rlkernel_triton.aot.targets import TARGETS


def plan_for(host: Host, target: str) -> None:
    """Let a host plan as on a target."""
    chip = TARGETS[target]
    nvidia = chip.kind == "cuda"
    product: Any = host.module("rlkernel_triton.quant.product")
    kind = product.choice.kind_of(target.replace("_", ""))
    planned = product.Machine(kind, chip.planned, ptx=nvidia, sync=nvidia and kind != "sm90")
    product.machine = lambda _: planned
    recursion: Any = host.module("rlkernel_triton.recursion")
    recursion.warps = lambda _: max(1, recursion.TILE // chip.warp)
    plan: Any = host.module("rlkernel_triton.sampling.plan")
    plan.lanes = lambda _: chip.warp
