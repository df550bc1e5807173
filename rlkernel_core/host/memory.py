"""How much memory there is to take where CPU and GPU share it, and the refusal before an allocation that would swap.

`torch.cuda.mem_get_info` is no answer there: it reports MemFree, which leaves out what the page cache would give back
and says nothing of swap, so it is small after reading a checkpoint and moves by itself. MemAvailable is the kernel's
own estimate of what can be taken without swapping. Sizes are bytes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rlkernel_core.errors import MemoryBudgetError
from rlkernel_core.host.board import read

_KIB: Final = 1024
_MIB: Final = 1024**2
_GIB: Final = 1024**3
# What is left to the system: a desktop takes 0.8 GiB, and the kernel kills where page cache and buffers cannot breathe.
_LEAST_RESERVE: Final = _GIB
_RESERVED_SHARE: Final = 0.15
_LEAST_PIECE: Final = 16 * _MIB
_NVMAP: Final = "sys/kernel/debug/nvmap/iovmm/clients"
_CGROUP: Final = "sys/fs/cgroup"


@dataclass(frozen=True)
class Memory:
    """The memory of a machine."""

    total: int
    available: int  # what can be taken without swapping, as the kernel estimates it
    free: int  # what nobody uses at all; what mem_get_info reports on a Jetson
    cached: int  # page cache and what else can be taken back
    swap_total: int = 0
    swap_free: int = 0
    zram: int = 0  # part of swap_total that is compressed memory: it takes from the same memory
    limit: int | None = None  # what the container may still take; None where it has no limit

    @property
    def reserve(self) -> int:
        """What is left to the system."""
        return max(_LEAST_RESERVE, int(_RESERVED_SHARE * self.total))

    @property
    def budget(self) -> int:
        """What this process may still take."""
        room = max(0, min(self.available, self.total) - self.reserve)
        return room if self.limit is None else min(room, self.limit)

    @property
    def piece(self) -> int:
        """What a call that works in pieces may take at a time beside its results.

        An eighth of the budget, as a power of two: calls are cut alike while the budget moves a little.
        """
        return max(_LEAST_PIECE, 1 << max(0, (self.budget // 8).bit_length() - 1))

    def require(self, nbytes: int, what: str, remedy: str = "Take a smaller model, batch or context.") -> None:
        """Refuse an allocation that would swap.

        Args:
            nbytes: what is about to be taken.
            what: what it is for.
            remedy: what makes it smaller.

        Raises:
            MemoryBudgetError: it is more than the budget. It carries both numbers.
        """
        if nbytes > self.budget:
            raise MemoryBudgetError(what, nbytes, self.budget, self.describe(), remedy)

    def describe(self) -> str:
        """Where the budget comes from, in a sentence."""
        said = f"{size(self.available)} of {size(self.total)} available, {size(self.reserve)} reserved for the system"
        return said + (f", {size(self.limit)} left in this container" if self.limit is not None else "")

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**asdict(self), "reserve": self.reserve, "budget": self.budget, "piece": self.piece}


def memory(root: Path = Path("/")) -> Memory | None:
    """The memory of a machine; None where its kernel does not tell (no Linux).

    Args:
        root: where its file system starts.
    """
    rows = dict(line.split(":", 1) for line in read(root / "proc/meminfo").splitlines() if ":" in line)
    if "MemTotal" not in rows or "MemAvailable" not in rows:
        return None
    kib = {name: int(text.split()[0]) * _KIB for name, text in rows.items() if text.split()[:1]}
    cached = sum(kib.get(name, 0) for name in ("Buffers", "Cached", "SReclaimable")) - kib.get("Shmem", 0)
    return Memory(
        total=kib["MemTotal"],
        available=kib["MemAvailable"],
        free=kib.get("MemFree", 0),
        cached=max(0, cached),
        swap_total=kib.get("SwapTotal", 0),
        swap_free=kib.get("SwapFree", 0),
        zram=_zram(root),
        limit=_container(root),
    )


def gpu_held(root: Path = Path("/")) -> int | None:
    """Bytes that a Jetson's GPU driver holds for all processes; None elsewhere, and for all but root."""
    found = re.search(r"^total\s+(\d+)K", read(root / _NVMAP), re.MULTILINE)
    return int(found[1]) * _KIB if found else None


def size(nbytes: float) -> str:
    """Bytes for people: `1.50 GiB`, `12.0 MiB`, `40 KiB`."""
    if abs(nbytes) >= _GIB:
        return f"{nbytes / _GIB:.2f} GiB"
    return f"{nbytes / _MIB:.1f} MiB" if abs(nbytes) >= _MIB else f"{nbytes / _KIB:.0f} KiB"


def _zram(root: Path) -> int:
    """Swap that is compressed memory."""
    lines = read(root / "proc/swaps").splitlines()[1:]
    words = [line.split() for line in lines]
    return sum(int(w[2]) * _KIB for w in words if len(w) > 2 and w[0].startswith("/dev/zram"))


def _container(root: Path) -> int | None:
    """What a control group (version 2) still allows; file pages that nobody maps are given back first."""
    limit, used = read(root / _CGROUP / "memory.max"), read(root / _CGROUP / "memory.current")
    if not limit.isdigit() or not used.isdigit():
        return None
    rows = dict(line.split() for line in read(root / _CGROUP / "memory.stat").splitlines() if len(line.split()) == 2)
    return max(0, int(limit) - int(used) + int(rows.get("inactive_file", 0)))
