"""What a Jetson's sensors say while something is measured: a thread reads them a few times a second.

Its sensors show the moment, so that a look afterwards shows an idle board. One look takes a few milliseconds of one CPU
core; on any other machine nothing runs. The first and the last look are taken before and after the work.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final, Self

from rlkernel_core.host.board import board
from rlkernel_core.host.power import PowerState, power

EVERY_S: Final = 0.2


class Telemetry:
    """Reads a board's sensors while its block runs.

    Args:
        root: where the file system starts.
        every_s: seconds between two looks.
    """

    def __init__(self, root: Path = Path("/"), every_s: float = EVERY_S) -> None:
        self.root, self.every_s = root, every_s
        self.states: list[PowerState] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if board(self.root) is not None:
            self._look()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._look()

    def noted(self) -> dict[str, Any]:
        """Means and extremes of what was read, under the key `during`; nothing where there was no board."""
        watts = [s.watts for s in self.states if s.watts is not None]
        clocks = [s.gpu.mhz for s in self.states if s.gpu is not None]
        heat = [c for s in self.states for c in s.celsius.values()]
        if not self.states:
            return {}
        found = {
            "looks": len(self.states),
            "watts_mean": sum(watts) / len(watts) if watts else None,
            "watts_max": max(watts, default=None),
            "watts_of": self.states[0].watts_of,
            "sm_mhz_min": min(clocks, default=None),
            "sm_mhz_max": max(clocks, default=None),
            "celsius_max": max(heat, default=None),
            "over_current": _grown(self.states),
        }
        return {"during": found}

    def _run(self) -> None:
        while not self._stop.wait(self.every_s):
            self._look()

    def _look(self) -> None:
        self.states.append(power(self.root))


def _grown(states: list[PowerState]) -> int | None:
    """Times the board cut its clocks for its supply meanwhile."""
    counts = [s.over_current for s in states if s.over_current is not None]
    return counts[-1] - counts[0] if counts else None
