"""The machine that times: whether it is as fast as ever just now, and how long a piece of work takes at the least.

floor    the longer of bytes of arguments and results / copy bandwidth, and on a GPU operations / rate of a matmul,
         both measured here, times a margin: what is faster has not done the work
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from rlkernel_judge.workloads import Workload, flops

_LOOKS: Final = 5  # before the first round
# Share of the time of a copy of the same bytes below which a time is impossible. A GPU reads a little faster than it
# copies (4.6 against 4.3 TB/s on an H200); toy sizes of a CPU lie in caches that read several times as fast.
FLOOR: Final = {"cuda": 0.85, "cpu": 0.25}
_FLOPS_FLOOR: Final = 0.45  # of the time of a matmul in bfloat16 with as many operations; 8 bits are twice as fast


class Machine:
    """The machine itself, by work that is always the same: one matmul, and one copy that no cache holds."""

    def __init__(self, device: str, noise: float) -> None:
        self.device, self.noise = device, noise
        size = 4096 if device.startswith("cuda") else 160
        self.x = torch.ones(size, size, device=device)
        self.source = torch.ones(1 << (27 if device.startswith("cuda") else 20), device=device)
        self.target = torch.empty_like(self.source)
        self.least, self.last = float("inf"), [0.0, 0.0]
        for _ in range(_LOOKS):
            self.look()

    def look(self) -> None:
        """How long the work takes now."""
        spans = []
        for _ in range(3):
            took, _ = timed(self._work, self.device)
            spans.append(took)
        self.last = [self.last[1], statistics.median(spans)]
        self.least = min(self.least, *spans)

    def _work(self) -> None:
        for _ in range(4):
            self.x @ self.x
        self.target.copy_(self.source)

    def quiet(self) -> bool:
        """Whether the last two looks found it as fast as ever."""
        return max(self.last) <= self.noise * self.least


def timed(run: Callable[[], object], device: str) -> tuple[float, object]:
    """Seconds until a device has done what `run` asks for."""
    _synchronize(device)
    began = time.perf_counter()
    found = run()
    _synchronize(device)
    return time.perf_counter() - began, found


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def floor_s(work: Workload, device: str, moved: int) -> float:
    """Seconds below which a call is impossible: to move its bytes, and on a GPU to do its operations."""
    found = FLOOR[device.partition(":")[0]] * moved / copy_bandwidth(device, moved)
    if device.startswith("cuda") and (operations := flops(work)):
        found = max(found, _FLOPS_FLOOR * operations / matmul_rate(device))
    return found


def copy_bandwidth(device: str, size: int) -> float:
    """Bytes read and written per second by a copy that moves `size` bytes in all; the best of several."""
    source = torch.ones(max(1 << 16, size // 2) // 4, device=device)
    target = torch.empty_like(source)
    best = min(timed(lambda: target.copy_(source), device)[0] for _ in range(10))
    return 2 * source.numel() * source.element_size() / best


def matmul_rate(device: str, size: int = 8192) -> float:
    """Operations per second of a square matmul in bfloat16; the best of several."""
    x = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    return 2 * size**3 / min(timed(lambda: x @ x, device)[0] for _ in range(10))
