"""Reading damaged documents of one format: how many are accepted, how many refused, and what else happened."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from rlkernel_core.errors import RLKernelError, RLKernelWarning
from tests.fuzz.damage import Case, Parts, cases

GIB = 1 << 30
SLOW_S = 20.0  # for one document


COLUMNS = ("cases", "typed", "accepted", "tracebacks", "over 1 GiB", "slowest, s", "MiB more")
HEAD = f"| {'format':28} | " + " | ".join(f"{name:>10}" for name in COLUMNS) + " |\n|---" + "|---:" * len(COLUMNS) + "|"


@dataclass
class Outcome:
    """What came of the cases of a format."""

    format: str
    cases: int = 0
    typed: int = 0
    accepted: int = 0
    found: dict[str, tuple[str, Parts]] = field(default_factory=dict)  # where it broke -> traceback, the smallest input
    broken: Counter[str] = field(default_factory=Counter)  # the same -> how often
    levels: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    grown: int = 0  # bytes of peak memory over that before the first case

    @property
    def over(self) -> int:
        """Cases that wanted more memory than there was."""
        return sum(n for where, n in self.broken.items() if where.startswith("MemoryError"))

    def add(self, other: Outcome) -> None:
        """Count another's cases too."""
        self.cases, self.typed, self.accepted = (
            self.cases + other.cases, self.typed + other.typed, self.accepted + other.accepted
        )  # fmt: skip
        self.found |= other.found
        self.broken += other.broken
        self.levels += other.levels
        self.slowest_s, self.grown = max(self.slowest_s, other.slowest_s), max(self.grown, other.grown)

    @staticmethod
    def total(outcomes: Iterable[Outcome]) -> Outcome:
        """All formats as one."""
        whole = Outcome("all")
        for outcome in outcomes:
            whole.add(outcome)
        return whole

    def line(self) -> str:
        """A row of the table."""
        broken = sum(self.broken.values()) - self.over
        cells = (self.cases, self.typed, self.accepted, broken, self.over, f"{self.slowest_s:.1f}", self.grown >> 20)
        return f"| {self.format:28} | " + " | ".join(f"{cell:>10}" for cell in cells) + " |"

    def take(self, case: Case, read: Callable[[Path], object], folder: Path) -> None:
        """Write a document, read it, and see that reading left nothing."""
        before = set(case.files)
        for name, data in case.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        began = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", RLKernelWarning)
                read(folder)
        except RLKernelError as error:
            self.typed += 1
            if len(str(error)) > 4000:
                self._broke("message", f"a message of {len(str(error))} characters", case)
        except Exception as error:  # noqa: BLE001 that is what is looked for
            frames = traceback.extract_tb(error.__traceback__)
            ours = [f for f in frames if "/tests/" not in f.filename and "site-packages" not in f.filename] or frames
            self._broke(
                f"{type(error).__name__} {Path(ours[-1].filename).name}:{ours[-1].lineno}", traceback.format_exc(), case
            )
        else:
            self.accepted += 1
        took = time.monotonic() - began
        self.slowest_s = max(self.slowest_s, took)
        if took > SLOW_S:
            self._broke("slow", f"{took:.1f} s", case)
        left = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - before
        if left:
            self._broke("left", f"reading left {sorted(left)}", case)
        self.cases += 1
        self.levels[case.level] += 1
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def _broke(self, where: str, text: str, case: Case) -> None:
        self.broken[where] += 1
        old = self.found.get(where)
        if old is None or sum(map(len, case.files.values())) < sum(map(len, old[1].values())):
            self.found[where] = text, case.files


def limit_memory(more: int = GIB) -> None:
    """This process may take so many bytes more than it has."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


def attacked(
    name: str, parts: Parts, join: Callable[[Parts], Parts], read: Callable[[Path], object], count: int, number: int
) -> Outcome:
    """Read so many damaged documents, drawn from a seed."""
    outcome = Outcome(name)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        @seed(number)
        @settings(
            max_examples=count, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=cases(parts, join))
        def one(case: Case) -> None:
            if outcome.cases < count:
                outcome.take(case, read, folder)

        one()
    outcome.grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    return outcome
