"""A whole run: workloads, candidates, one file of results."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from rlkernel import policy
from rlkernel.discover import brief, guarded
from rlkernel_bench import ceilings as limits
from rlkernel_bench import suites
from rlkernel_bench.candidates import Candidate, backends, peers
from rlkernel_bench.environment import environment, gpu_state
from rlkernel_bench.evidence import Present
from rlkernel_bench.measure import Effort, measure
from rlkernel_bench.peers import PEERS
from rlkernel_bench.results import seal
from rlkernel_bench.work import Problem, Work
from rlkernel_core.errors import RLKernelError, UnknownNameError

EFFORTS: Final = {
    "toy": Effort(0.02, memory=False),
    "full": Effort(0.5),
    "sweep": Effort(0.1, memory=False, rested=False),
}
Watch = Callable[[dict[str, Any]], None]


def run(
    names: Sequence[str],
    *,
    size: str = "toy",
    device: str = "cpu",
    ops: Sequence[str] = (),
    only: Sequence[str] = (),
    use: Sequence[str] = (),
    against: Sequence[str] | None = None,
    effort: Effort | None = None,
    watch: Watch = lambda _: None,
    keep: Watch = lambda _: None,
) -> dict[str, Any]:
    """Measure the workloads of some suites; returns sealed results.

    Args:
        names: suites.
        size: "toy", "full" or "sweep".
        device: torch device.
        ops: only workloads of these operators; all where empty.
        only: only workloads whose name holds one of these texts.
        use: backends; all that are installed where empty.
        against: peers; None for all.
        effort: how long; by size where None.
        watch: told every result as it comes.
        keep: given everything so far, sealed, after every result: a run that is ended leaves what it has.

    Raises:
        UnknownNameError: no such suite, size, operator, backend or peer.
    """
    works = chosen(names, size, ops, only)
    for backend in use:
        policy.installed()[backend]  # raises where there is none
    for peer in against or ():
        if peer not in PEERS:
            raise UnknownNameError("peer", peer, PEERS)
    known = limits.measure(device)
    results: list[dict[str, Any]] = []
    present = Present(device)
    about: dict[str, Any] = {
        "size": size,
        "device": device,
        "suites": list(names),
        "environment": environment(device),
        "ended": "",  # why the run ended before its last workload
    }

    def sealed() -> dict[str, Any]:
        return seal({**about, "gpu": gpu_state(device), "ceilings": known.as_dict(), "results": list(results)})

    for work in works:
        results.append(_stamped(_one(work, device, known, effort or EFFORTS[size], use, against), present))
        about["ended"] = _tidied(device)
        watch(results[-1])
        keep(sealed())
        if about["ended"]:
            break
    return sealed()


def chosen(names: Sequence[str], size: str, ops: Sequence[str] = (), only: Sequence[str] = ()) -> list[Work]:
    """Workloads of suites at a size, of some operators and with one of these texts in their names."""
    return [w for w in suites.works(names, size, ops) if not only or any(text in w.name for text in only)]


def _one(
    work: Work, device: str, known: limits.Ceilings, effort: Effort, use: Sequence[str], against: Sequence[str] | None
) -> dict[str, Any]:
    def whole() -> dict[str, Any]:
        problem = suites.problem(work, device)
        with problem.within():
            return measure(problem, candidates(problem, device, use, against), device, known, effort)

    result, error = guarded(whole)
    if result is not None:
        return result
    status = "refused" if isinstance(error, RLKernelError) else "error"
    said = {"suite": work.suite, "op": work.op, "work": work.name, "why": work.why}
    return {**said, "status": status, "message": brief(error) if error else "", "candidates": []}


def _stamped(result: dict[str, Any], present: Present) -> dict[str, Any]:
    """A result that says when and where it was measured, and of which sources its backends are."""
    for candidate in result["candidates"]:
        if candidate["kind"] == "backend":
            candidate["sources"] = present.of(candidate["name"], result["op"].split(","))
    return {**result, "device": present.device, "date": datetime.now(UTC).date().isoformat()}


def candidates(problem: Problem, device: str, use: Sequence[str], against: Sequence[str] | None) -> list[Candidate]:
    """What the suite itself brings along, else the backends and the peers."""
    own = getattr(suites.module(problem.work.suite), "candidates", None)
    if own is not None:
        found: list[Candidate] = own(problem, device, use, against)
        return found
    return [*peers(problem, against, device), *backends(problem, use, device)]


def _tidied(device: str) -> str:
    """Free what a workload left on the device; why that cannot be, where it broke the device for this process."""
    gc.collect()
    if not device.startswith("cuda"):
        return ""
    import torch

    _, error = guarded(lambda: (torch.cuda.synchronize(device), torch.cuda.empty_cache()))
    return f"the device was lost: {brief(error)}" if error is not None else ""


def fails(content: dict[str, Any]) -> list[str]:
    """What a run must not have: a backend that is wrong or raised, a number below its floor, work not carried out."""
    found = [f"{r['suite']} {r['work']}: {r['message']}" for r in content["results"] if r.get("status") == "error"]
    found += [content["ended"]] if content["ended"] else []
    for result in content["results"]:
        for c in result["candidates"]:
            bad = c["status"] == "impossible" or (c["kind"] == "backend" and c["status"] in {"wrong", "error", "oom"})
            if bad:
                found.append(f"{result['suite']} {result['work']}: {c['name']} {c['status']}: {c['message']}")
    return found
