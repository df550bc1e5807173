"""A run whose suites are shared out over devices: each takes the next one, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Final

from rlkernel_bench.results import FILE, joined, read
from rlkernel_core.errors import ConfigError

ALONE: Final = ("ranks", "trainers")  # suites that use several devices by themselves, after the others
_TAIL: Final = 400  # characters of what a process said that did not end as it should


@dataclass
class Shared:
    """Suites that are measured on several devices of one kind at a time.

    A device whose process does not end as it should takes no further suite.
    """

    suites: Sequence[str]
    devices: Sequence[str]  # one that stands there twice is two places
    words: Sequence[str]  # further words of `rlkernel bench run`
    watch: Callable[[str], Any]  # told what each process printed, when it has ended
    keep: Callable[[dict[str, Any]], Any]  # given everything so far after every suite
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def run(self) -> dict[str, Any]:
        """Sealed results, in the order of the suites.

        Raises:
            ConfigError: devices of several kinds, or no result at all.
        """
        if len({device.partition(":")[0] for device in self.devices}) != 1:
            given = ", ".join(self.devices)
            raise ConfigError(f"devices of several kinds, {given}: measure each kind in a run of its own")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            self._measure(self.devices, [s for s in self.suites if s not in ALONE], folder)
            self._measure(self.devices[:1], [s for s in self.suites if s in ALONE], folder)
        if not self.found:
            raise ConfigError(f"nothing was measured: {'; '.join(self.ended)}")
        return self._so_far()

    def _measure(self, devices: Sequence[str], suites: Iterable[str], folder: Path) -> None:
        waiting = deque(suites)
        with ThreadPoolExecutor(max_workers=len(devices)) as pool:
            for served in [pool.submit(self._serve, device, waiting, folder) for device in devices]:
                served.result()
        self.ended += [f"{suite}: no device was left" for suite in waiting]

    def _serve(self, device: str, waiting: deque[str], folder: Path) -> None:
        fine = True
        while fine:
            with self.lock:
                if not waiting:
                    return
                suite = waiting.popleft()
            command = [sys.executable, "-m", "rlkernel", "bench", "run", "--suite", suite, "--device", device]
            done = subprocess.run(  # noqa: S603 our own command
                [*command, *self.words, "--out", str(folder / suite)], capture_output=True, text=True, check=False
            )
            with self.lock:
                fine = self._settle(suite, device, done, folder / suite)

    def _settle(self, suite: str, device: str, done: subprocess.CompletedProcess[str], folder: Path) -> bool:
        """Keep what a process has left; whether its device can go on."""
        if (folder / FILE).exists():
            self.found[suite] = read(folder)
        said = str(self.found.get(suite, {}).get("ended", ""))
        if done.returncode not in {0, 1} and not said:
            said = f"{suite} on {device} ended with {done.returncode}: {done.stderr[-_TAIL:].strip()}"
            self.ended.append(said)
        self.watch(done.stdout)
        if self.found:
            self.keep(self._so_far())
        return not said

    def _so_far(self) -> dict[str, Any]:
        return joined([self.found[suite] for suite in self.suites if suite in self.found], self.ended)
