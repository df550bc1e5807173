"""How long candidate and baseline take: each in its own worker, one at a time, the other stopped, on fresh values.

A call is timed so that nothing but its work in that time can make it right:

    1. Both workers' process trees are stopped.
    2. The trial writes values that nobody has seen to the memory that it shares with a worker.
    3. The trial starts its clock and lets that worker go on, alone.
    4. The worker calls the function and writes the results to the shared memory.
    5. The trial stops the worker's tree; once nothing of it runs, it stops the clock and copies the results.

Then the other worker has its turn with the same values, in random order. Results of calls drawn by lot are compared
with the reference. A stopped tree must not have computed: the kernel's own account of its threads says so.

On a GPU the values are made in the worker, from seeds that the trial sends when its time comes, before the clock; step
4 ends when the device is idle. A worker whose own code was changed could look at them early: what is replaced is looked
for, and cannot be ruled out.

The machine is measured around each round, by work that is always the same. Rounds in which it was slow do not count; if
too few are left, the candidate is not measurable here, which says nothing against it.

No call is faster than the floor of the machine for its work (`machine.py`).
"""

from __future__ import annotations

import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.compare import Violation
from rlkernel_judge.arena import SLACK, Arena, aligned, places, put
from rlkernel_judge.machine import Machine, floor_s
from rlkernel_judge.process_tree import NotStoppedError
from rlkernel_judge.reference_check import difference, reference_of
from rlkernel_judge.verdict import Spread, Times
from rlkernel_judge.worker_client import Worker
from rlkernel_judge.workloads import Workload, defaults, draw, leaves, nbytes

ROUNDS: Final = 12
WARM_UP: Final = 2
_MOST_ROUNDS: Final = 2 * ROUNDS  # with those in which the machine was slow
_FEWEST_ROUNDS: Final = 6  # quiet ones, without which there is no speedup
_CHECKED: Final = 3  # results of every round; nobody knows which
_GRACE_S: Final = 1.0
_SENT: Final = 256 << 20  # bytes of arguments that are sent to a GPU's worker; larger ones are drawn there
_RESAMPLES: Final = 1000
_IDLE_S: Final = 1e-3  # that a stopped tree may seem to have computed: the kernel counts up to the stop


@dataclass
class _Side:
    """One worker in a measurement."""

    worker: Worker
    given: Any = None  # arguments in the memory shared with it
    seconds: list[float] = field(default_factory=list)  # of each round that counts, per call
    cpu: list[float] = field(default_factory=list)  # seconds that its threads computed, the same
    ran_s: float = 0.0  # what its threads computed in the last call
    stopped_at_s: float = 0.0  # what its threads had computed when they were stopped
    idle_s: float = 0.0  # most that they computed while they were stopped

    @property
    def arena(self) -> Arena:
        """The memory that is shared with the worker."""
        if self.worker.arena is None:
            raise ValueError("this worker shares no memory")
        return self.worker.arena

    def stop(self) -> None:
        """Stop the whole tree.

        Raises:
            Violation: some of it goes on.
        """
        try:
            self.worker.tree.freeze()
        except NotStoppedError as error:
            raise Violation(str(error)) from error

    def look(self) -> None:
        """See that nothing of the stopped tree has computed since it was stopped."""
        self.idle_s = max(self.idle_s, self.worker.tree.cpu_s() - self.stopped_at_s)

    def timed(self, what: str, **content: Any) -> tuple[float, dict[str, Any]]:
        """Seconds from letting the tree go on to its stop, and its reply to one request."""
        tree = self.worker.tree
        self.look()
        before = self.stopped_at_s
        began = time.perf_counter()
        tree.thaw()
        reply, _, _ = self.worker.ask(what, **content)
        self.stop()
        took = time.perf_counter() - began
        self.stopped_at_s = tree.cpu_s()
        self.ran_s = self.stopped_at_s - before
        return took, reply

    def ask(self, what: str, **content: Any) -> None:
        """A request that is not timed."""
        self.worker.tree.thaw()
        self.worker.ask(what, **content)
        self.stop()
        self.stopped_at_s = self.worker.tree.cpu_s()

    def spread(self) -> Spread:
        low, median, high = statistics.quantiles(self.seconds, n=4)
        return Spread(median=median, low=low, high=high, cpu=statistics.median(self.cpu))


@dataclass(frozen=True)
class Measured:
    """What timing found; `fault` where the times are not to be believed."""

    times: Times | None
    speedup: float | None = None
    interval: tuple[float, float] | None = None
    fault: str | None = None
    message: str = ""


def shared_memory(work: Workload, device: str) -> int:
    """Bytes that a worker shares with the trial, for the arguments and results of a call; 0 on a GPU."""
    if not device.startswith("cpu"):
        return 0
    given = draw(work, 0, device)
    _, size = places(leaves(given))
    with torch.no_grad():
        return aligned(size + 2 * nbytes(reference_of(work.op)(**given)) + SLACK)


def measure(
    candidate: Worker,
    baseline: Worker,
    work: Workload,
    *,
    until: float,
    call_s: float,
    noise: float,
    leaves_out: frozenset[str] = frozenset(),
    rounds: int = ROUNDS,
) -> Measured:
    """Time two loaded workers on a workload.

    Args:
        candidate: the one whose results are compared.
        baseline: the one it is compared with.
        work: the call.
        until: time of time.monotonic by which it ends.
        call_s: seconds that one call may take.
        noise: times as long as at its best that the machine's own work may take, in a round that counts.
        leaves_out: results that the candidate need not give.
        rounds: how many quiet ones are wanted.

    Raises:
        WorkerLost, CandidateError: as the workers end.
        Violation: a result of a timed call is wrong, or the candidate cannot be stopped.
    """
    sides = _Side(candidate), _Side(baseline)
    rig = _Shared(sides, work) if candidate.arena is not None else _OnDevice(sides, work)
    rig.until, rig.call_s = until, call_s
    machine = Machine(candidate.device, noise)
    for side in sides:
        side.stop()
        side.stopped_at_s = side.worker.tree.cpu_s()
    try:
        rig.allow_a_call()
        rig.attach()
        quiet = _rounds(rig, machine, leaves_out, rounds)
    finally:
        for side in sides:
            side.worker.tree.thaw()
    if sides[0].idle_s > _IDLE_S:
        text = f"it computed for {sides[0].idle_s:.3g} s while it was stopped for the baseline's turn"
        return Measured(None, fault="cheating", message=text)
    if quiet < min(rounds, _FEWEST_ROUNDS):
        text = f"the machine was busy or the time was short: {quiet} rounds were quiet, {_FEWEST_ROUNDS} are needed"
        return Measured(None, fault="not_measurable", message=text)
    return _concluded(rig, work, quiet)


def _rounds(rig: _Rig, machine: Machine, leaves_out: frozenset[str], rounds: int) -> int:
    """Carry out rounds until so many were quiet; how many were."""
    for turn in range(-WARM_UP, _MOST_ROUNDS):
        machine.look()
        found = rig.round(leaves_out)
        machine.look()
        _release(machine.device)
        if turn >= 0 and machine.quiet():
            rig.keep(found)
        quiet, left = len(rig.sides[0].seconds), _MOST_ROUNDS - 1 - turn
        if quiet == rounds or quiet + left < min(rounds, _FEWEST_ROUNDS) or time.monotonic() > rig.until:
            break
    return len(rig.sides[0].seconds)


class _Rig:
    """Both sides on one workload."""

    def __init__(self, sides: tuple[_Side, _Side], work: Workload) -> None:
        self.sides, self.work, self.plain, self.run = sides, work, defaults(work.op), reference_of(work.op)
        self.rng = random.Random(secrets.randbits(64))
        self.until, self.call_s = float("inf"), float("inf")
        self.moved = 0  # bytes of arguments and results
        self.overhead_s = float("inf")  # least that stopping, going on and a message took the baseline

    def allow_a_call(self) -> None:
        """Give both workers the time of one call from now on; what earlier stages left them may be over."""
        for side in self.sides:
            side.worker.deadline = min(self.until + _GRACE_S, time.monotonic() + self.call_s)

    def attach(self) -> None:
        """Prepare both workers."""
        raise NotImplementedError

    def call(self, side: _Side, seed: int, given: Any) -> tuple[float, Callable[[], Any]]:
        """Seconds of one call, and what gives its result."""
        raise NotImplementedError

    def round(self, leaves_out: frozenset[str]) -> list[tuple[float, float]]:
        """Seconds a call, and of its threads, for each side; results drawn by lot are compared.

        Raises:
            Violation: one is wrong.
        """
        calls, work, device = self.work.sets, self.work, self.sides[0].worker.device
        spans: list[list[tuple[float, float]]] = [[], []]
        checked = set(self.rng.sample(range(calls), min(_CHECKED, calls)))
        for turn in range(calls):
            seed = secrets.randbelow(1 << 30)
            given = draw(work, seed, device)
            self.allow_a_call()
            self.overhead_s = min(self.overhead_s, self.sides[1].timed("ping")[0])
            for number in self.rng.sample((0, 1), 2):
                side = self.sides[number]
                took, result = self.call(side, seed, given)
                spans[number].append((took, side.ran_s))
                if number == 0 and turn in checked:
                    self._check(given, result(), leaves_out)
            del given
        return [(statistics.fmean(t for t, _ in s), statistics.fmean(c for _, c in s)) for s in spans]

    def _check(self, given: Any, found: Any, leaves_out: frozenset[str]) -> None:
        with torch.no_grad():
            expected = self.run(**given)
        self.moved = nbytes(given) + nbytes(expected)
        if wrong := difference(found, expected, self.work.dtype, self.work.op, leaves_out):
            raise Violation(f"in a timed call {wrong}")

    def keep(self, found: Sequence[tuple[float, float]]) -> None:
        """A round that counts."""
        for side, (took, ran) in zip(self.sides, found, strict=True):
            side.seconds.append(max(took - self.overhead_s, 1e-9))
            side.cpu.append(ran)


class _Shared(_Rig):
    """On a CPU: arguments and results in memory that trial and worker share."""

    def attach(self) -> None:
        given = draw(self.work, secrets.randbelow(1 << 30), "cpu")
        where, self.results_from = places(leaves(given))
        for side in self.sides:
            side.ask("attach", given=given)
            side.given = put(given, side.arena, where)

    def call(self, side: _Side, seed: int, given: Any) -> tuple[float, Callable[[], Any]]:
        del seed
        for ours, value in zip(leaves(side.given), leaves(given), strict=True):
            ours.copy_(value)
        side.arena.clear(self.results_from)
        took, reply = side.timed("timed", defaults=self.plain)
        tensors = side.worker.results_at(reply)
        unchanged = all(map(_same, leaves(side.given), leaves(given)))

        def result() -> Any:
            if not unchanged:
                raise Violation("in a timed call it wrote to its arguments")
            return side.worker.result(reply, tensors)

        return took, result


class _OnDevice(_Rig):
    """On a GPU: the worker makes its arguments from a seed, and keeps its results until they are asked for."""

    def attach(self) -> None:
        pass

    def call(self, side: _Side, seed: int, given: Any) -> tuple[float, Callable[[], Any]]:
        if nbytes(given) <= _SENT:
            side.ask("keep", sets=[given], rewrite=side.given is not None)
        else:
            side.ask("draw", workload=self.work, seeds=[seed], new=side.given is None)
        side.given = seed
        took, _ = side.timed("burst", order=[0], defaults=self.plain)

        def result() -> Any:
            side.worker.tree.thaw()
            found = side.worker.fetched(0)
            side.stop()
            side.stopped_at_s = side.worker.tree.cpu_s()
            return found

        return took, result


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same bits."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _release(device: str) -> None:
    """Leave the device to the workers: nothing of ours may run beside them."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _concluded(rig: _Rig, work: Workload, rounds: int) -> Measured:
    candidate, baseline = rig.sides
    device = candidate.worker.device
    floor = floor_s(work, device, rig.moved)
    times = Times(
        workload=str(work),
        rounds=rounds,
        calls=work.sets,
        candidate=candidate.spread(),
        baseline=baseline.spread(),
        moved_bytes=rig.moved,
        floor_s=floor,
        idle_s=candidate.idle_s,
        overhead_s=rig.overhead_s,
    )
    if times.candidate.median < floor:
        text = f"{times.candidate.median:.3g} s a call; its work takes {floor:.3g} s at the least"
        return Measured(times, fault="too_fast", message=text)
    speedup = times.baseline.median / times.candidate.median
    return Measured(times, speedup, bootstrap_interval(candidate.seconds, baseline.seconds))


def bootstrap_interval(candidate: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the ratio of medians, by resampling rounds; the same for the same times."""
    rng, ratios, n = random.Random(0), [], len(candidate)
    for _ in range(_RESAMPLES):
        at = [rng.randrange(n) for _ in range(n)]
        ratios.append(statistics.median(baseline[i] for i in at) / statistics.median(candidate[i] for i in at))
    cuts = statistics.quantiles(ratios, n=40)
    return cuts[0], cuts[-1]
