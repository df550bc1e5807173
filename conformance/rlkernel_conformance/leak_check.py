"""CO-01, a clause of every operator: calls leave nothing behind that grows from call to call.

It has no case of its own: the operator's first attack is carried out over and over on one case, and after each time
the process's memory, threads, descendants and open files are counted.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from rlkernel_conformance.attack import Attack
from rlkernel_conformance.clauses import attacks_on
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.process_reaper import own_descendants
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.form import Clause

CLAUSE: Final = Clause(
    "CO-01",
    "leaves nothing behind",
    "memory, threads, processes and open files do not grow from call to call",
    "side_effect",
)
WARM: Final = 3  # calls that may fill caches
ROUNDS: Final = 5  # a leak is what grows in every one of them
_SHARE: Final = 0.05  # of a profile's examples: every case is many calls
# What growth counts, in each round.
_LEAST: Final = {"bytes": 4096, "threads": 1, "processes": 1, "open files": 1}


def attacks_with_leak_check(op: str) -> dict[str, Attack]:
    """Every attack on an operator by clause, this one last: it repeats the first that applies to every backend."""
    attacks = attacks_on(op)
    first = next(a for a in attacks if a.clause.feature is None)
    own = Attack(op, CLAUSE, first.cases, nothing_grows(first.prop), scale=_SHARE)
    return {a.clause.id: a for a in (*attacks, own)}


def nothing_grows(prop: Callable[[Subject, Any], None]) -> Callable[[Subject, Any], None]:
    """A property that holds where repeating another one leaves nothing behind."""

    def made(subject: Subject, case: Any) -> None:
        with suppress(Violation):  # a wrong result is no leak; another clause refutes it
            prop(subject, case)

    @wraps(prop)
    def repeated(subject: Subject, case: Any) -> None:
        """Nothing grows from call to call."""
        for _ in range(WARM):
            made(subject, case)
        gc.collect()
        gc.freeze()  # what is there now need not be looked through again
        counts = [resources_held(subject.device)]
        for _ in range(ROUNDS):
            made(subject, case)
            counts.append(resources_held(subject.device))
        gc.unfreeze()
        for what, least in _LEAST.items():
            grown = [after[what] - before[what] for before, after in pairwise(counts)]
            if min(grown) >= least:
                raise Violation(f"every call leaves {min(grown)} {what} behind, or more")

    return repeated


def resources_held(device: str) -> dict[str, int]:
    """What this process holds: bytes on heap and device, threads, processes, open files; 0 where nobody can say."""
    gc.collect()
    memory = _heap()
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()
        memory += torch.cuda.memory_allocated()
    return {
        "bytes": memory,
        "threads": _entries("/proc/self/task"),
        "processes": len(own_descendants()),
        "open files": _entries("/proc/self/fd"),
    }


class _Heap(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _heap() -> int:
    """Bytes given out by malloc, which torch's CPU tensors and numpy's arrays come from."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = _Heap
    said = ask()
    return int(said.uordblks + said.hblkhd)


def _entries(folder: str) -> int:
    path = Path(folder)
    return sum(1 for _ in path.iterdir()) if path.is_dir() else 0
