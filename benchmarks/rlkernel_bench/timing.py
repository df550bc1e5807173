"""Time: device events on a GPU, the monotonic clock elsewhere; medians with quartiles, never a single reading."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch

Run = Callable[[], Any]
REST_S: Final = 0.12  # idle before each rested call; a power-capped card is back at its clock by then
SLOW_S: Final = 0.3  # a call that takes longer is measured as few times as can be
LONG_GRAPH_S: Final = 5e-3  # above this, launches are no part of the time and a graph would show nothing
SAMPLES: Final = 512  # most batches of host time
LONG_BATCH_S: Final = 0.01  # of a batch of calls that take the host's time


@dataclass(frozen=True)
class Spread:
    """A time in microseconds: median and quartiles of `n` readings."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, readings: Sequence[float]) -> Spread:
        """From readings in microseconds."""
        if len(readings) < 2:
            return cls(readings[0], readings[0], readings[0], len(readings))
        low, median, high = statistics.quantiles(readings, n=4, method="inclusive")
        return cls(median, low, high, len(readings))

    def as_dict(self) -> dict[str, float]:
        """JSON-ready form, rounded to what the clocks give."""
        return {k: round(v, 4) for k, v in asdict(self).items()}


class Stopwatch:
    """Readings in microseconds on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.gpu = self.device.type == "cuda"

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def once(self, run: Run) -> float:
        """One call, launch included, with the queue empty before it."""
        if not self.gpu:
            start = time.perf_counter_ns()
            run()
            return (time.perf_counter_ns() - start) / 1e3
        self.wait()
        return self._read([self._record(run)])[0]

    def back_to_back(self, runs: Sequence[Run]) -> list[float]:
        """Calls of several kinds queued one behind the other: what each took on the device."""
        if not self.gpu:
            return [self.once(run) for run in runs]
        return self._read([self._record(run) for run in runs])

    def _record(self, run: Run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        return start, end

    def _read(self, pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        self.wait()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def mixed(
    watch: Stopwatch, runs: dict[str, Callable[[int], Any]], *, seconds: float, queued: bool, seed: int = 0
) -> dict[str, dict[int, float]]:
    """Rounds of all candidates in an order drawn anew, the i-th round on the i-th inputs; candidate -> round -> us.

    Args:
        watch: the clock.
        runs: candidate -> call on the inputs of a number.
        seconds: about how long each candidate is measured: three rounds to two hundred, two of slow calls.
        queued: keep the device busy from call to call, as a training step does.
        seed: of the orders.
    """
    order = random.Random(seed)
    first = {name: watch.once(lambda r=run: r(0)) / 1e6 for name, run in runs.items()}
    rounds = {name: 2 if t > SLOW_S else max(3, min(200, int(seconds / max(t, 1e-7)))) for name, t in first.items()}
    readings: dict[str, dict[int, float]] = {name: {} for name in runs}
    longest = max(rounds.values(), default=0)
    for i in range(longest):
        # A candidate of k rounds takes part in k of the longest's, evenly spread.
        due = [name for name, k in rounds.items() if i * k // longest != (i - 1) * k // longest]
        order.shuffle(due)
        calls = [lambda n=name: runs[n](i) for name in due]  # noqa: B023 called within the round
        took = watch.back_to_back(calls) if queued else [watch.once(call) for call in calls]
        for name, t in zip(due, took, strict=True):
            readings[name][i] = t
    return readings


def rested(watch: Stopwatch, run: Run, times: int = 3) -> list[float]:
    """Calls after a pause each: the card at its full clock."""
    readings = []
    for _ in range(times):
        watch.wait()
        time.sleep(REST_S)
        readings.append(watch.once(run))
    return readings


def recorded(watch: Stopwatch, calls: Sequence[Run]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, one after the other; each was made once before, since some compile or allocate then."""
    stream = torch.cuda.Stream(watch.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replayed(watch: Stopwatch, run: Callable[[int], Any], inputs: int, *, seconds: float) -> list[float]:
    """Microseconds a call inside a graph that goes through all inputs, again and again."""
    calls = max(inputs, 8)
    graph = recorded(watch, [partial(run, i % inputs) for i in range(calls)])
    first = watch.once(graph.replay) / 1e6
    times = max(5, min(100, int(seconds / max(first, 1e-7))))
    readings = [t / calls for t in watch.back_to_back([graph.replay] * times)]
    del graph
    return readings


def on_the_host(
    watch: Stopwatch, runs: Mapping[str, Run], *, seconds: float, batch: int, seed: int = 0
) -> dict[str, list[float]]:
    """What the calling thread spends on a call; candidate -> microseconds of each round.

    Batches of calls, those of all candidates in turns in an order drawn anew each round, the queue drained before each
    and not after it. Slow calls, which keep the thread busy themselves, come in smaller batches.

    Args:
        watch: the clock.
        runs: candidate -> one call.
        seconds: about how long each candidate is measured: five rounds at least.
        batch: calls in a batch; with all that they launch fewer than the queue of a stream holds.
        seed: of the orders.
    """
    clock, order = time.perf_counter_ns, random.Random(seed)
    batches: dict[str, int] = {}
    for name, run in runs.items():
        for _ in range(3):
            start = clock()
            run()
        batches[name] = max(1, min(batch, int(LONG_BATCH_S * 1e9 / max(clock() - start, 1))))
    readings: dict[str, list[float]] = {name: [] for name in runs}
    until, rounds = time.monotonic() + seconds * len(runs), 0
    while rounds < 5 or (time.monotonic() < until and rounds < SAMPLES):
        for name in order.sample(list(runs), len(runs)):
            run, n = runs[name], batches[name]
            watch.wait()
            start = clock()
            for _ in range(n):
                run()
            readings[name].append((clock() - start) / n / 1e3)
        rounds += 1
    watch.wait()
    return readings
