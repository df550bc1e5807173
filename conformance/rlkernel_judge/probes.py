"""Probes for results that no kernel made of these inputs: cached, shared, late, or made of other memory.

Each sends arguments to the candidate, changes them where they lie, and compares what comes back with the reference,
computed here on our own copies. None asks the candidate's process for its opinion.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_conformance.compare import Violation
from rlkernel_core.errors import ArgumentError, LayoutError
from rlkernel_judge.reference_check import by_value, definition, difference
from rlkernel_judge.verdict import ProbeTold
from rlkernel_judge.worker_client import CandidateError, Seat, gathered
from rlkernel_judge.workloads import SHARES, defaults, draw, leaves, small

REPLACED: Final = "nothing replaced"
STRAY_S: Final = 2e-4  # work that the caller's stream does not wait for; synchronising an idle GPU takes a tenth


class _Bench:
    """Two sets of arguments that lie in the host and here, and calls on them."""

    def __init__(self, seat: Seat, op: str, dtype: str) -> None:
        self.seat, self.op, self.dtype = seat, op, dtype
        work, seed = small(op, dtype), secrets.randbelow(1 << 30)
        self.sets = [draw(work, seed + i, seat.device) for i in range(2)]
        self.plain = defaults(op)
        self.run = definition(op)
        seat.ask("keep", sets=self.sets, rewrite=False)

    def call(self, *order: int) -> None:
        """Call in an order."""
        self.seat.ask("burst", order=list(order), defaults=self.plain)

    def rewrite(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the arguments where they lie, here and there."""
        for given in self.sets:
            rows = next(x.shape[0] for x in leaves(given) if x.dim())
            for x in leaves(given):
                if x.dim() and x.shape[0] == rows:
                    x.copy_(change(x).clone())
        self.seat.ask("keep", sets=self.sets, rewrite=True)

    def wrong(self, index: int) -> str:
        """What is wrong with the result of a set, or ""."""
        with torch.no_grad():
            expected = self.run(**by_value(self.sets[index]))
        return difference(self.fetched(index), expected, self.dtype)

    def fetched(self, index: int) -> Any:
        """The result of a set as it is now."""
        said, blocks, _ = self.seat.ask("fetch", index=index)
        return self.seat.result(said, blocks)


def probed(seat: Seat, op: str, dtype: str) -> Iterator[ProbeTold]:
    """Carry out every probe, in order.

    Raises:
        Lost: the host is gone.
    """
    bench = _Bench(seat, op, dtype)
    for name, probe in _PROBES.items():
        try:
            found = probe(bench)
        except (Violation, CandidateError, ArgumentError, LayoutError) as error:
            found = str(error)
        yield ProbeTold(name=name, held=not found, message=found)


def _shape(bench: _Bench) -> str:
    """Two inputs of one shape, one after the other; both results are looked at after both calls."""
    bench.call(0, 1)
    return bench.wrong(1) or bench.wrong(0)


def _address(bench: _Bench) -> str:
    """The same memory with its rows in another order: sums over rows and shapes stay."""
    bench.rewrite(lambda x: x.flip(0))
    bench.call(1, 0)
    return bench.wrong(0) or bench.wrong(1)


def _fingerprint(bench: _Bench) -> str:
    """One row in the middle takes the values of its neighbour; first and last stay."""

    def change(x: Tensor) -> Tensor:
        middle = x.shape[0] // 2
        changed = x.clone()
        changed[middle] = x[middle - 1]
        return changed

    bench.rewrite(change)
    bench.call(0, 1)
    return bench.wrong(0) or bench.wrong(1)


def _held(bench: _Bench) -> str:
    """Results stay what they are when arguments change and time passes."""
    if bench.op in SHARES:
        return ""
    before = [by_value({"r": bench.fetched(i)}) for i in (0, 1)]
    bench.rewrite(lambda x: x.roll(1, 0))
    after = [{"r": bench.fetched(i)} for i in (0, 1)]
    for old, new in zip(before, after, strict=True):
        for x, y in zip(leaves(old), leaves(new), strict=True):
            if x.shape != y.shape or not torch.equal(x.nan_to_num(), y.nan_to_num()):
                return "a result changed after the call: it shares memory with an argument, or was computed later"
    return ""


def _written(bench: _Bench) -> str:
    """No result depends on what fresh memory holds."""
    with torch.no_grad():
        expected = bench.run(**by_value(bench.sets[0]))
        found = [gathered(bench.seat, by_value(bench.sets[0]), fresh=high) for high in (True, False)]
    wrong = next((text for f in found if (text := difference(f, expected, bench.dtype))), "")
    return f"on fresh memory it {wrong}" if wrong else ""


def _stray(bench: _Bench) -> str:
    """No work is left where the caller's stream does not wait for it."""
    given = by_value(bench.sets[0])
    said, _, _ = bench.seat.ask("call", given=given, defaults=bench.plain, grad=False, fresh=None)
    seconds = float(said["conduct"]["stray_s"])
    return f"{seconds * 1e3:.2f} ms of work lie on another stream" if seconds > STRAY_S else ""


def _unborrowed(bench: _Bench) -> str:
    """The candidate loaded nothing of ours that computes for it."""
    said, _, _ = bench.seat.ask("look")
    return f"it imported {', '.join(str(n) for n in said['imported'][:5])}" if said["imported"] else ""


def _unreplaced(bench: _Bench) -> str:
    """The candidate changed no function outside itself."""
    said, _, _ = bench.seat.ask("look")
    return f"it replaced {', '.join(str(n) for n in said['touched'][:5])}" if said["touched"] else ""


_PROBES: Final[dict[str, Callable[[_Bench], str]]] = {
    "not cached by shape": _shape,
    "not cached by address": _address,
    "not cached by fingerprint": _fingerprint,
    "results stay": _held,
    "all written": _written,
    "no stray work": _stray,
    "nothing borrowed": _unborrowed,
    REPLACED: _unreplaced,
}
