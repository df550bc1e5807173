"""What this machine can do at most, measured in the same run: the denominators of every "percent of the floor"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from rlkernel_bench.timing import Stopwatch

# A result this much faster than the floor is an error of the benchmark: ceilings are measured to about 2 %.
SLACK: Final = 0.95
_CPU_CACHE: Final = 32 << 20  # bytes of a last-level cache; no portable way to ask
_BUFFER: Final = {"cpu": 64 << 20, "cuda": 2 << 30}
_CACHED: Final = {"cpu": 128 << 10, "cuda": 8 << 20}
_SIDE: Final = {"cpu": 384, "cuda": 8192}
_DTYPES: Final = {"cpu": ("bfloat16", "float32"), "cuda": ("bfloat16", "float16", "float32")}


@dataclass(frozen=True)
class Ceilings:
    """Bytes and operations a second."""

    copy: float  # device to device, bytes read plus bytes written
    read: float  # the quickest of some reductions over a large buffer: none of torch's is always that
    cached: float  # a copy that stays in the cache
    flops: Mapping[str, float]  # by dtype: a large square product on random data, rested
    cache_bytes: int

    def floor_us(self, nbytes: float, flops: float, rate: str, *, cached: bool = False) -> float:
        """Microseconds below which no implementation can be."""
        bandwidth = max(self.copy, self.read, self.cached if cached else 0.0)
        peak = self.flops.get(rate, 0.0)
        return max(nbytes / bandwidth, flops / peak if peak else 0.0) * 1e6

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {k: v if isinstance(v, Mapping) else round(v) for k, v in asdict(self).items()}


def measure(device: str) -> Ceilings:
    """Measure all of them; a second or two on a GPU."""
    watch, kind = Stopwatch(device), torch.device(device).type
    big = torch.randint(0, 100, (_BUFFER[kind] // 8,), device=device, dtype=torch.int64).view(torch.float32)
    other = torch.empty_like(big)
    small, beside = (torch.zeros(_CACHED[kind] // 4, device=device) for _ in range(2))
    numbers = torch.ones_like(other)
    rows, ones = numbers.view(-1, 4096), torch.ones(4096, device=device)
    reads = (lambda: torch.amax(rows, -1), lambda: rows.sum(-1), numbers.sum, lambda: rows @ ones)
    flops = {dtype: _product(watch, dtype, _SIDE[kind]) for dtype in _DTYPES[kind]}
    return Ceilings(
        copy=2 * big.nbytes / _best(watch, lambda: other.copy_(big)),
        read=big.nbytes / min(_best(watch, read) for read in reads),
        cached=2 * small.nbytes / _best(watch, lambda: beside.copy_(small), times=200),
        flops=flops,
        cache_bytes=torch.cuda.get_device_properties(device).L2_cache_size if kind == "cuda" else _CPU_CACHE,
    )


def _product(watch: Stopwatch, dtype: str, side: int) -> float:
    a, b = (torch.randn(side, side, device=watch.device).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * side**3 / _best(watch, lambda: a @ b)


def _best(watch: Stopwatch, run: Any, times: int = 10) -> float:
    """Seconds of the quickest of some calls: a ceiling is what was possible once."""
    for _ in range(3):
        run()
    return min(watch.once(run) for _ in range(times)) / 1e6
