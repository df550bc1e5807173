"""How long candidate and baseline take: each in its own worker, in turn, in random order, on the same fresh inputs.

A round draws new arguments in both workers, from secret seeds, and then runs each side once through all of them, in a
random order. The clock that decides runs here, around the whole burst: no function that a candidate may have replaced
is asked. The worker's own clock (device events on a GPU) must agree, or the time is not believed. Results of every
timed burst, chosen at random, are compared with the reference.

    floor    bytes of arguments and results / copy bandwidth of this device, measured here, times a margin:
             what is faster has not read its arguments
"""

from __future__ import annotations

import random
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rlkernel_judge.reference_check import difference, reference_of
from rlkernel_judge.verdict import Spread, Times
from rlkernel_judge.worker_client import Worker
from rlkernel_judge.workloads import Workload, defaults, draw, nbytes

ROUNDS: Final = 12
WARM_UP: Final = 2
_CHECKED: Final = 2  # results of every round; nobody knows which
_PINGS: Final = 5
_RESAMPLES: Final = 1000
# Share of the time of a copy of the same bytes below which a time is impossible. A GPU reads a little faster than it
# copies (4.6 against 4.3 TB/s on an H200); toy sizes of a CPU lie in caches that read several times as fast.
FLOOR: Final = {"cuda": 0.85, "cpu": 0.25}
# The worker's clock must account for this share of the time outside, beyond what a call costs in Python.
_ACCOUNTED: Final = 0.5
_PER_CALL_S: Final = 1e-4


@dataclass
class _Side:
    """One worker in a measurement."""

    worker: Worker
    outside: list[float] = field(default_factory=list)  # seconds per call, this process's clock
    inside: list[float] = field(default_factory=list)  # the worker's

    def burst(self, order: Sequence[int], plain: dict[str, Any], round_trip_s: float) -> None:
        """One burst, timed from here; `round_trip_s` is what a request without work takes."""
        began = time.perf_counter()
        reply, _, _ = self.worker.ask("burst", order=list(order), defaults=plain)
        took = time.perf_counter() - began - round_trip_s
        self.outside.append(max(took, 1e-9) / len(order))
        self.inside.append(sum(float(s) for s in reply["seconds"]) / len(order))

    def ping(self) -> float:
        """Seconds of a round trip without work."""
        spans = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            self.worker.ask("ping")
            spans.append(time.perf_counter() - began)
        return min(spans)

    def spread(self) -> Spread:
        low, median, high = statistics.quantiles(self.outside, n=4)
        return Spread(median=median, low=low, high=high, second_clock=statistics.median(self.inside))


@dataclass(frozen=True)
class Measured:
    """What timing found; `fault` where the times are not to be believed."""

    times: Times | None
    speedup: float | None = None
    interval: tuple[float, float] | None = None
    fault: str | None = None
    message: str = ""


def measure(candidate: Worker, baseline: Worker, work: Workload, *, rounds: int = ROUNDS) -> Measured:
    """Time two loaded workers on a workload.

    Raises:
        WorkerLost, CandidateError: as the workers end.
    """
    device, plain, run = candidate.device, defaults(work.op), reference_of(work.op)
    sides, rng = (_Side(candidate), _Side(baseline)), random.Random(secrets.randbits(64))
    round_trip_s, moved = 0.0, 0
    for turn in range(-WARM_UP, rounds):
        seeds = [secrets.randbelow(1 << 30) for _ in range(work.sets)]
        order = rng.sample(range(work.sets), work.sets)
        for side in sides:
            side.worker.ask("draw", workload=work, seeds=seeds, new=turn == -WARM_UP)
        if turn == 0:
            round_trip_s = min(side.ping() for side in sides)
            for side in sides:
                side.outside.clear()
                side.inside.clear()
        for side in rng.sample(sides, 2):
            side.burst(order, plain, round_trip_s)
        for at in rng.sample(range(work.sets), min(_CHECKED, work.sets)):
            given = draw(work, seeds[at], device)
            with torch.no_grad():
                expected = run(**given)
            moved = nbytes(given) + nbytes(expected)
            if wrong := difference(candidate.fetched(at), expected, work.dtype):
                return Measured(None, fault="cheating", message=f"in a timed call {wrong}")
            del given, expected
        _release(device)
    return _concluded(sides, work, moved, rounds)


def _release(device: str) -> None:
    """Leave the device to the workers: nothing of ours may run beside them."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _concluded(sides: tuple[_Side, _Side], work: Workload, moved: int, rounds: int) -> Measured:
    candidate, baseline = sides
    device = candidate.worker.device
    floor = FLOOR[device.partition(":")[0]] * moved / copy_bandwidth(device, moved)
    times = Times(
        workload=str(work),
        rounds=rounds,
        calls=work.sets,
        candidate=candidate.spread(),
        baseline=baseline.spread(),
        moved_bytes=moved,
        floor_s=floor,
    )
    if text := clock_mismatch(candidate.outside, candidate.inside):
        return Measured(times, fault="cheating", message=text)
    if times.candidate.median < floor:
        text = f"{times.candidate.median:.3g} s a call; moving its {moved} bytes takes {floor:.3g} s at the least"
        return Measured(times, fault="too_fast", message=text)
    speedup = times.baseline.median / times.candidate.median
    return Measured(times, speedup, bootstrap_interval(candidate.outside, baseline.outside))


def clock_mismatch(outside: Sequence[float], inside: Sequence[float]) -> str:
    """How two clocks disagree, or "": work after the call's end, or a clock that was changed."""
    took, inner = statistics.median(outside), statistics.median(inside)
    if inner < _ACCOUNTED * took - _PER_CALL_S:
        return f"a call takes {took:.3g} s by the judge's clock and {inner:.3g} s by the clock beside it"
    if inner > 2 * took + _PER_CALL_S:
        return f"the clock beside the candidate shows {inner:.3g} s, the judge's {took:.3g} s"
    return ""


def bootstrap_interval(candidate: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the ratio of medians, by resampling rounds; the same for the same times."""
    rng, ratios, n = random.Random(0), [], len(candidate)
    for _ in range(_RESAMPLES):
        at = [rng.randrange(n) for _ in range(n)]
        ratios.append(statistics.median(baseline[i] for i in at) / statistics.median(candidate[i] for i in at))
    cuts = statistics.quantiles(ratios, n=40)
    return cuts[0], cuts[-1]


def copy_bandwidth(device: str, size: int) -> float:
    """Bytes read and written per second by a copy that moves `size` bytes in all; the best of several."""
    source = torch.ones(max(1 << 16, size // 2) // 4, device=device)
    target, best = torch.empty_like(source), float("inf")
    cuda = device.startswith("cuda")
    for _ in range(10):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * source.numel() * source.element_size() / best
