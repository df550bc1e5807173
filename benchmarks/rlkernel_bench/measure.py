"""One workload on one device: right or wrong first, then memory, then time, each candidate beside the others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch

from rlkernel.discover import brief, guarded
from rlkernel_bench import timing
from rlkernel_bench.candidates import Candidate
from rlkernel_bench.ceilings import SLACK, Ceilings
from rlkernel_bench.environment import gpu_state
from rlkernel_bench.gates import verdict
from rlkernel_bench.results import best
from rlkernel_bench.telemetry import Telemetry
from rlkernel_bench.timing import Spread, Stopwatch
from rlkernel_bench.work import Goal, Inputs, Outputs, Problem, Work
from rlkernel_conformance.memory import peak
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import RLKernelError
from rlkernel_core.tree import flatten

_SETS: Final = 64  # most sets of inputs
_PROCESSES: Final = 5  # fresh interpreters a reading each


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    seconds: float  # each candidate, each way of measuring
    memory: bool = True  # of every workload, not only of those that ask for it
    rested: bool = True


@dataclass
class Run:
    """A candidate and what has been found out about it."""

    candidate: Candidate
    found: dict[str, Any]
    slow: bool = False  # a call takes so long that it is made as few times as can be

    def __call__(self, inputs: Inputs) -> Outputs:
        """Carry out the workload."""
        if self.candidate.run is None:
            raise RLKernelError(f"{self.candidate.name} cannot run")
        return self.candidate.run(inputs)


def measure(
    problem: Problem, candidates: list[Candidate], device: str, ceilings: Ceilings, effort: Effort
) -> dict[str, Any]:
    """The result of one workload, JSON-ready."""
    work, watch = problem.work, Stopwatch(device)
    sets = _sets(problem, ceilings)
    runs = [Run(c, _said(c)) for c in candidates]
    alive = judged(problem, watch, sets[0], [r for r in runs if r.candidate.run is not None])
    if work.clock == "device" and (effort.memory or work.memory_at):
        for run in alive:
            run.found["memory"] = memory(problem, run, device, sets[0])
    state = timed(work, watch, alive, sets, effort) if alive else None
    fits = sum(_bytes(s) for s in sets) <= 2 * ceilings.cache_bytes
    floor = ceilings.floor_us(work.floor(work.bytes), work.floor(work.flops), work.rate, cached=fits)
    for run in alive:
        if run.candidate.kind != "ruler":  # which carries out another, smaller task
            run.found.update(rates(work, run.found, floor))
    compared(work, alive)
    for run in alive:
        run.found["goals"] = [g for goal in work.goals if (g := reached(goal, work, run.found, ceilings, device))]
    return {
        "suite": work.suite,
        "op": work.op,
        "work": work.name,
        "sizes": dict(work.sizes),
        "dtype": work.dtype,
        "task": work.task,
        "options": {k: str(v) for k, v in work.options.items()},
        "why": work.why,
        "clock": work.clock,
        "ruler": work.ruler,
        "floor": {"bytes": work.bytes, "flops": work.flops, "us": round(floor, 4)},
        "goals": [asdict(g) for g in work.goals],
        "input_sets": len(sets),
        "gpu": state,
        "candidates": [r.found for r in runs],
    }


def _said(c: Candidate) -> dict[str, Any]:
    said = {"name": c.name, "kind": c.kind, "version": c.version, "status": c.status, "message": c.message}
    return said | ({"adapter_ran": c.ran or "never"} if c.kind != "backend" else {})


def _sets(problem: Problem, ceilings: Ceilings) -> list[Inputs]:
    """Sets of inputs that together are more than twice the cache, so that none is met there again; at least two."""
    first = problem.make(0)
    if problem.work.clock != "device":
        return [first]
    size = _bytes(first)
    if size > 2 * ceilings.cache_bytes:
        return [first]
    wanted = 2 * ceilings.cache_bytes // max(size, 1) + 2
    on_gpu = any(x.is_cuda for x in _tensors(first))
    return [first, *(problem.make(i) for i in range(1, min(wanted, _SETS) if on_gpu else 2))]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for leaf in flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _bytes(value: Any) -> int:
    """Bytes of the distinct storages in a nested value."""
    held = {(x.device, x.untyped_storage().data_ptr()): x.untyped_storage().nbytes() for x in _tensors(value)}
    return sum(held.values())


def judged(problem: Problem, watch: Stopwatch, inputs: Inputs, runs: list[Run]) -> list[Run]:
    """Run each candidate once and hold its results against the definition; those that may be timed."""
    expected, error = guarded(lambda: problem.expected(inputs))
    if error is not None:
        for run in runs:
            run.found.update(status="error", message=f"the definition could not be computed: {brief(error)}")
        return []
    good = []
    for run in runs:
        outputs, error = guarded(lambda r=run: r(inputs))
        if error is None:
            found, error = guarded(lambda o=outputs: problem.judge(inputs, expected, o))
        if error is not None:
            run.found.update(status=_fault(error), message=brief(error))
        elif found is not None:
            peer = run.candidate.kind != "backend"
            say = {"right": "measured", "coarse": "coarse", "wrong": "wrong"}[verdict(found, peer=peer)]
            run.found.update(status=say, errors={k: asdict(j) for k, j in found.items()})
            if say == "wrong":
                worst = max(found, key=lambda k: found[k].over)
                run.found["message"] = f"{worst} is {found[worst].over:.3g} times its tolerance off"
            else:
                again, _ = guarded(lambda r=run: watch.once(lambda: r(inputs)))  # the first call compiled
                run.slow = again is not None and again / 1e6 > timing.SLOW_S
                good.append(run)
        del outputs, error  # whose traceback holds what the call had allocated
        gc.collect()
    return good


def _fault(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    return "refused" if isinstance(error, RLKernelError | NotImplementedError) else "error"


def memory(problem: Problem, run: Run, device: str, inputs: Inputs) -> dict[str, Any]:
    """Bytes at the peak of a call beyond its inputs, and without its results; at several sizes where the work asks."""
    where = Subject(run.candidate.name, problem.work.op, device)

    def once(given: Inputs) -> tuple[int, int] | None:
        most, error = guarded(lambda: peak(where, lambda: run(given)))
        return None if error is not None or most is None else (most[0], most[0] - _bytes(most[1]))

    here = once(inputs)
    if here is None:
        return {"message": "could not be measured"}
    found: dict[str, Any] = {"peak_bytes": here[0], "extra_bytes": max(0, here[1])}
    if problem.work.memory_at is not None and not run.slow:
        size, values = problem.work.memory_at
        at: dict[str, int | None] = {}
        for value in values:
            smaller = cut(inputs, problem.work, size, value)
            got = once(smaller)
            at[str(value)] = None if got is None else max(0, got[1])
        known = [(int(k), v) for k, v in at.items() if v is not None]
        per_row = (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0]) if len(known) > 1 else None
        found |= {f"extra_bytes_at_{size}": at, f"extra_bytes_per_{size}": per_row}
    return found


def cut(inputs: Inputs, work: Work, size: str, value: int) -> Inputs:
    """The inputs with that many rows: everything whose first dimension is the size, cut."""
    n = work.sizes[size]
    return {
        k: x[:value] if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == n else x for k, x in inputs.items()
    }


def timed(work: Work, watch: Stopwatch, runs: list[Run], sets: list[Inputs], effort: Effort) -> dict[str, Any] | None:
    """All the ways of measuring that mean something for the workload; the state of the card under the mixed calls."""
    if work.clock != "device":
        off_the_device(work, watch, runs, sets[0], effort)
        return gpu_state(str(watch.device))
    by_name = {r.candidate.name: r for r in runs}
    at: dict[str, Callable[[int], Any]] = {n: lambda i, r=r: r(sets[i % len(sets)]) for n, r in by_name.items()}
    for run in runs:  # warm: packing and first allocations are no part of the time
        for inputs in () if run.slow else sets:
            run(inputs)
    with Telemetry() as seen:
        rounds = timing.mixed(watch, at, seconds=effort.seconds, queued=work.compute_bound)
    state = (gpu_state(str(watch.device)) or {}) | seen.noted()
    for name, run in by_name.items():
        run.found["eager"] = Spread.of(list(rounds[name].values())).as_dict()
        if not run.slow:
            with Telemetry() as seen:
                run.found |= alone(work, watch, at[name], sets, effort, run.found["eager"]["median"] / 1e6)
            run.found |= seen.noted()
    if work.ruler in rounds:
        ruler = by_name[work.ruler].found.get("graph", {})
        for name, run in by_name.items():
            shared = rounds[name].keys() & rounds[work.ruler].keys()
            ratios = [rounds[name][i] / rounds[work.ruler][i] for i in shared]
            mine = run.found.get("graph", {})
            if "median" in mine and "median" in ruler and not work.compute_bound:  # launches are no part of either
                ratios = [mine[q] / ruler["median"] for q in ("low", "median", "high")]
            run.found["times_ruler"] = Spread.of(ratios).as_dict() if ratios else None
    return state or None


def off_the_device(work: Work, watch: Stopwatch, runs: list[Run], inputs: Inputs, effort: Effort) -> None:
    """What fresh processes say; or what a call costs the calling thread, and the ratio to the ruler's of the round.

    Where the goal is a difference the ratio says nothing: the ruler is next to no time.
    """
    if work.clock == "process":
        for run in runs:
            said = [run(inputs) for _ in range(int(work.options.get("processes", _PROCESSES)))]
            run.found["process"] = Spread.of([1e3 * each["milliseconds"] for each in said]).as_dict()
            if "peak_bytes" in said[0]:
                run.found["memory"] = {"peak_bytes": said[0]["peak_bytes"]}
        return
    calls = {r.candidate.name: partial(r, inputs) for r in runs}
    batch = int(work.options.get("batch", 20))
    rounds = timing.on_the_host(watch, calls, seconds=effort.seconds, batch=batch)
    ruler = rounds.get(work.ruler or "") if all(goal.unit != "over" for goal in work.goals) else None
    for run in runs:
        mine = rounds[run.candidate.name]
        run.found["host"] = Spread.of(mine).as_dict() | {"best": round(min(mine), 4)}
        if ruler is not None:
            run.found["times_ruler"] = Spread.of([t / r for t, r in zip(mine, ruler, strict=True)]).as_dict()


def alone(
    work: Work, watch: Stopwatch, run: Callable[[int], Any], sets: list[Inputs], effort: Effort, seconds: float
) -> dict[str, Any]:
    """A candidate by itself: with its inputs in the cache, in a graph, rested; `seconds` is what a call takes."""
    found: dict[str, Any] = {}
    if watch.gpu and not work.backward and seconds <= timing.LONG_GRAPH_S:
        found["graph"] = graphed(watch, run, len(sets), effort)
    if not work.compute_bound and _bytes(sets[0]) <= _hot(watch):
        if "median" in found.get("graph", {}):
            found["hot"] = graphed(watch, run, 1, effort)
        else:
            found["hot"] = Spread.of([watch.once(lambda: run(0)) for _ in range(9)]).as_dict()
    if watch.gpu and work.compute_bound and effort.rested:
        found["rested"] = Spread.of(timing.rested(watch, lambda: run(0))).as_dict()
    return found


def _hot(watch: Stopwatch) -> int:
    return torch.cuda.get_device_properties(watch.device).L2_cache_size if watch.gpu else 32 << 20


def graphed(watch: Stopwatch, run: Callable[[int], Any], inputs: int, effort: Effort) -> dict[str, Any]:
    """Time in a graph, or why there is none."""
    readings, error = guarded(lambda: timing.replayed(watch, run, inputs, seconds=effort.seconds))
    if error is not None or readings is None:
        return {"message": f"not capturable: {brief(error) if error is not None else ''}"}
    return Spread.of(readings).as_dict()


def rates(work: Work, found: dict[str, Any], floor: float) -> dict[str, Any]:
    """Share of the floor, bytes and operations a second; or that the number cannot be."""
    known = best(found)
    if known is None or not floor or work.clock != "device":
        return {}
    median = known[1]["median"]
    out: dict[str, Any] = {"tokens_s": round(1e6 * work.floor(work.tokens) / median, 1)} if work.tokens else {}
    out |= {
        "percent_of_floor": round(100 * floor / median, 2),
        "gb_s": round(work.floor(work.bytes) / median / 1e3, 2),
        "tflop_s": round(work.floor(work.flops) / median / 1e6, 3),
    }
    if median < SLACK * floor:
        out["status"] = "impossible"
        out["message"] = f"{median:.4g} us is below the floor of {floor:.4g} us: the workload or the clock is wrong"
    return out


def compared(work: Work, runs: list[Run]) -> None:
    """Time above the ruler, where the ruler is what a call costs anyway; speed-up over plain torch."""
    times = {r.candidate.name: known[1]["median"] for r in runs if (known := best(r.found))}
    for run in runs:
        name = run.candidate.name
        if work.clock != "device" and work.ruler in times and name in times:
            run.found["us_over_ruler"] = round(times[name] - times[work.ruler], 4)
        if "torch" in times and name in times:
            run.found["speedup_over_torch"] = round(times["torch"] / times[name], 4)


def reached(goal: Goal, work: Work, found: Mapping[str, Any], ceilings: Ceilings, device: str) -> dict[str, Any] | None:
    """A goal, how far this candidate is, and whether that is enough; None where it is not judged.

    Goals are for kernels: the reference, which is plain torch, has none.
    """
    known = best(found)
    elsewhere = goal.device and goal.device not in _device_name(device)
    other = goal.variant and found["name"].rpartition(":")[2] != goal.variant
    ours = found["kind"] == "backend" and found["name"].partition(":")[0] != "reference"
    if known is None or not ours or elsewhere or other:
        return None
    median = known[1]["median"]
    have: float | None = {
        "us": median,
        "times": (found.get("times_ruler") or {}).get("median"),
        "over": found.get("us_over_ruler"),
        "of copy": work.floor(work.bytes) / (median / 1e6) / ceilings.copy,
        "MiB": found.get("memory", {}).get("extra_bytes", 0) / 2**20 if "memory" in found else None,
    }[goal.unit]
    if have is None:
        return None
    met = have >= goal.number if goal.unit == "of copy" else have <= goal.number
    return {**asdict(goal), "have": round(have, 4), "met": met}


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
