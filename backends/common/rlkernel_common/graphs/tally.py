"""Counters behind `CaptureStats`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlkernel_core.spec.graphed import CaptureStats


@dataclass
class Tally:
    """Counts while running; `snapshot` is what users see."""

    uses: int = 0  # of graphs: captures, look-ups and replays, in one order
    captures: int = 0
    replays: int = 0
    evictions: int = 0
    warmup_calls: int = 0
    verified: int = 0
    copied_bytes: int = 0
    pad_rows: int = 0
    capture_ns: int = 0
    guard_ns: int = 0
    last_error: str | None = None
    eager_calls: Counter[str] = field(default_factory=Counter)
    recaptures: Counter[str] = field(default_factory=Counter)

    def use(self) -> int:
        """One use more; its number."""
        self.uses += 1
        return self.uses

    def snapshot(self, state: str, graphs: int, pool_bytes: int) -> CaptureStats:
        """The counters now."""
        return CaptureStats(
            state=state,
            graphs=graphs,
            captures=self.captures,
            replays=self.replays,
            eager_calls=dict(self.eager_calls),
            recaptures=dict(self.recaptures),
            evictions=self.evictions,
            warmup_calls=self.warmup_calls,
            verified=self.verified,
            copied_bytes=self.copied_bytes,
            pad_rows=self.pad_rows,
            capture_ms=self.capture_ns / 1e6,
            guard_ns=self.guard_ns,
            pool_bytes=pool_bytes,
            last_error=self.last_error,
        )
