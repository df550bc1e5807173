"""How long the demo still takes, from the steps it has made, and how many steps fit into its time."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rlkernel.demo.train import FIT_BATCH, Recipe

LATEST: Final = 8  # the pace is the median of so many steps: load comes and goes
FIRST: Final = 3  # steps before a pace is told: the first ones compile, load and capture
FIT_SHARE: Final = 0.4  # of the time, at most for fitting
# Fewer steps than these teach nothing; they are made even if time is over.
LEAST: Final = {"fit": 40, "improve": 10}


@dataclass
class Clock:
    """The time of one run; `seconds` None where every step is made, however long it takes."""

    recipe: Recipe
    seconds: float | None = None
    now: Callable[[], float] = time.perf_counter
    began: float = field(init=False)
    _last: float = field(init=False)
    _took: dict[str, deque[float]] = field(init=False)
    _done: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.began = self._last = self.now()
        self._took = {phase: deque(maxlen=LATEST) for phase in LEAST}
        self._done = dict.fromkeys(LEAST, 0)

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self.now() - self.began

    def tick(self, phase: str) -> None:
        """A step of a phase has been made."""
        now = self.now()
        self._took[phase].append(now - self._last)
        self._last = now
        self._done[phase] += 1

    def total(self, phase: str) -> int:
        """Steps that the phase will have made at its end, as far as is known now."""
        wanted, done, pace = self._wanted(phase), self._done[phase], self._pace(phase)
        if self.seconds is None or pace is None:
            return wanted
        until = self.seconds * (FIT_SHARE if phase == "fit" else 1.0)
        more = int(max(0.0, until - self.elapsed) / pace)
        return min(wanted, max(done + more, LEAST[phase]))

    def left(self, phase: str) -> float | None:
        """Seconds until the run's end; None before there is a pace."""
        pace = self._pace(phase)
        if pace is None:
            return None
        left = (self.total(phase) - self._done[phase]) * pace
        if phase == "improve":
            return left
        update = self._pace("improve") or pace * self._work()
        after = self._wanted("improve") * update
        if self.seconds is not None:
            least = min(self._wanted("improve"), LEAST["improve"]) * update
            after = max(least, min(after, self.seconds - self.elapsed - left))
        return left + after

    def _wanted(self, phase: str) -> int:
        return self.recipe.fit_steps if phase == "fit" else self.recipe.steps

    def _pace(self, phase: str) -> float | None:
        """Seconds a step."""
        return statistics.median(self._took[phase]) if self._done[phase] >= FIRST else None

    def _work(self) -> float:
        """Work of an update by that of a step of fitting; a backward pass counts as two forward passes."""
        passes = 1 + 1 + 3 * self.recipe.epochs  # the rollout, the log-probabilities before, the epochs
        return passes * self.recipe.prompts * self.recipe.group / (3 * FIT_BATCH)
