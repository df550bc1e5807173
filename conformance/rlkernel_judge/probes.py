"""Probes for results that no kernel made of these inputs: cached, shared, late, or made of other memory.

Each sends arguments to the candidate, changes them where they lie, and compares what comes back with the reference,
computed here on our own copies.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

from rlkernel_conformance.compare import Violation
from rlkernel_core.errors import ArgumentError, LayoutError
from rlkernel_judge.reference_check import copied, difference, reference_of
from rlkernel_judge.verdict import ProbeReport
from rlkernel_judge.worker_client import CandidateError, Worker, call_candidate
from rlkernel_judge.workloads import MAY_ALIAS, defaults, draw, leaves, small

REPLACED: Final = "nothing replaced"
NOTHING_LEFT: Final = "nothing left running"
PROBE_FAULTS: Final = {REPLACED: "tampering", NOTHING_LEFT: "background_work"}  # all others: cheating
_SETTLE_S: Final = 0.05  # after a call, for pools of threads to fall asleep
_WATCHED_S: Final = 0.05
_IDLE_SHARE: Final = 0.2  # of that time that a worker without a request may compute
STRAY_S: Final = 2e-4  # work that the caller's stream does not wait for; synchronizing an idle GPU takes a tenth


class _Sets:
    """Two sets of arguments that lie in the worker and here, and calls on them."""

    def __init__(self, worker: Worker, op: str, dtype: str, leaves_out: frozenset[str]) -> None:
        self.worker, self.op, self.dtype, self.leaves_out = worker, op, dtype, leaves_out
        work, seed = small(op, dtype), secrets.randbelow(1 << 30)
        self.given = [draw(work, seed + i, worker.device) for i in range(2)]
        self.defaults = defaults(op)
        self.run = reference_of(op)
        worker.ask("keep", sets=self.given, rewrite=False)

    def call(self, *order: int) -> None:
        """Call in an order."""
        self.worker.ask("burst", order=list(order), defaults=self.defaults)

    def rewrite(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the arguments where they lie, here and there."""
        for given in self.given:
            rows = next(x.shape[0] for x in leaves(given) if x.dim())
            for x in leaves(given):
                if x.dim() and x.shape[0] == rows:
                    x.copy_(change(x).clone())
        self.worker.ask("keep", sets=self.given, rewrite=True)

    def wrong(self, index: int) -> str:
        """What is wrong with the result of a set, or ""."""
        with torch.no_grad():
            expected = self.run(**copied(self.given[index]))
        return difference(self.worker.fetched(index), expected, self.dtype, self.op, self.leaves_out)


def run_probes(worker: Worker, op: str, dtype: str, leaves_out: frozenset[str] = frozenset()) -> Iterator[ProbeReport]:
    """Carry out every probe, in order; `leaves_out` names results that the candidate need not give.

    Raises:
        WorkerLost: the worker is gone.
    """
    sets = _Sets(worker, op, dtype, leaves_out)
    for name, probe in _PROBES.items():
        try:
            found = probe(sets)
        except (Violation, CandidateError, ArgumentError, LayoutError) as error:
            found = str(error)
        yield ProbeReport(name=name, held=not found, message=found)


def _cache_by_shape(sets: _Sets) -> str:
    """Two inputs of one shape, one after the other; both results are looked at after both calls."""
    sets.call(0, 1)
    return sets.wrong(1) or sets.wrong(0)


def _cache_by_address(sets: _Sets) -> str:
    """The same memory with its rows in another order: sums over rows and shapes stay."""
    sets.rewrite(lambda x: x.flip(0))
    sets.call(1, 0)
    return sets.wrong(0) or sets.wrong(1)


def _cache_by_fingerprint(sets: _Sets) -> str:
    """One row in the middle takes the values of its neighbor; first and last stay."""

    def change(x: Tensor) -> Tensor:
        middle = x.shape[0] // 2
        changed = x.clone()
        changed[middle] = x[middle - 1]
        return changed

    sets.rewrite(change)
    sets.call(0, 1)
    return sets.wrong(0) or sets.wrong(1)


def _stays(sets: _Sets) -> str:
    """Results stay what they are when arguments change and time passes."""
    if sets.op in MAY_ALIAS:
        return ""
    before = [copied({"r": sets.worker.fetched(i)}) for i in (0, 1)]
    sets.rewrite(lambda x: x.roll(1, 0))
    after = [{"r": sets.worker.fetched(i)} for i in (0, 1)]
    for old, new in zip(before, after, strict=True):
        for x, y in zip(leaves(old), leaves(new), strict=True):
            if x.shape != y.shape or not torch.equal(x.nan_to_num(), y.nan_to_num()):
                return "a result changed after the call: it shares memory with an argument, or was computed later"
    return ""


def _written(sets: _Sets) -> str:
    """No result depends on what fresh memory holds."""
    with torch.no_grad():
        expected = sets.run(**copied(sets.given[0]))
        found = [call_candidate(sets.worker, copied(sets.given[0]), fresh=high) for high in (True, False)]
    wrong = next((text for f in found if (text := difference(f, expected, sets.dtype, sets.op, sets.leaves_out))), "")
    return f"on fresh memory it {wrong}" if wrong else ""


def _stray(sets: _Sets) -> str:
    """No work is left where the caller's stream does not wait for it."""
    given = copied(sets.given[0])
    reply, _, _ = sets.worker.ask("call", given=given, defaults=sets.defaults, grad=False, fresh=None)
    seconds = float(reply["conduct"]["stray_s"])
    return f"{seconds * 1e3:.2f} ms of work lie on another stream" if seconds > STRAY_S else ""


def _left_running(sets: _Sets) -> str:
    """After a call there are as many threads as before the candidate was loaded, and none computes."""
    sets.call(0, 1)
    time.sleep(_SETTLE_S)
    tree, on_cpu = sets.worker.tree, sets.worker.device.startswith("cpu")
    more = len(tree.tasks()) - sets.worker.tasks
    if more > 0 and on_cpu:  # the driver of a GPU starts threads when it likes
        return f"{more} threads or processes are left after a call"
    before = tree.cpu_s()
    time.sleep(_WATCHED_S)
    ran = tree.cpu_s() - before
    return f"it computes when no call runs: {ran:.2g} s in {_WATCHED_S} s" if ran > _IDLE_SHARE * _WATCHED_S else ""


def _look(sets: _Sets, found: str, verb: str) -> str:
    """What the worker reports that the candidate did outside itself."""
    reply, _, _ = sets.worker.ask("look")
    return f"it {verb} {', '.join(str(n) for n in reply[found][:5])}" if reply[found] else ""


_PROBES: Final[dict[str, Callable[[_Sets], str]]] = {
    "not cached by shape": _cache_by_shape,
    "not cached by address": _cache_by_address,
    "not cached by fingerprint": _cache_by_fingerprint,
    "results stay": _stays,
    "all written": _written,
    "no stray work": _stray,
    NOTHING_LEFT: _left_running,
    "nothing borrowed": partial(_look, found="borrowed", verb="reached for"),
    REPLACED: partial(_look, found="touched", verb="replaced"),
}
