"""Share clauses out to processes, cut tables of cases into parts, and join the outcomes of the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from statistics import median
from typing import Final

from rlkernel_conformance.attack import Attack, Table
from rlkernel_conformance.harness import Outcome
from rlkernel_conformance.subject import Subject

SHARE: Final = 2  # clauses that are worth another process
PARTS: Final = 16  # of a table at most: it has a hundred rows and more
_WORST_FIRST: Final = ("violated", "fault", "not_run", "held", "not_claimed")


def shares(due: list[Attack], most: int, took: Mapping[str, float]) -> list[tuple[Attack, ...]]:
    """Share attacks out to processes, each with a few clauses or a part of a table at least, and the longest first.

    Args:
        due: attacks on one operator.
        most: processes at most.
        took: seconds of clauses in an earlier run. A clause that is not there counts as the median; a table as all
            others together, and it is begun first: on a GPU, where kernels are compiled for each row, it takes that
            long, and an outcome of a part alone is lost.
    """
    tables = [a for a in due if isinstance(a.cases, Table) and a.cases.splits]
    others = [a for a in due if a not in tables]
    number = max(1, min(most, len(others) // SHARE + PARTS * len(tables)))
    parts = min(number, PARTS)
    middle = median(took.values()) if took else 1.0
    work = [(took.get(a.clause.id, middle), a) for a in others]
    usual = sum(seconds for seconds, _ in work) or middle
    for a in tables:
        work += [(took.get(a.clause.id, usual) / parts, replace(a, part=(i, parts))) for i in range(parts)]
    untimed = {a.clause.id for a in tables} - took.keys()
    loads, found = [0.0] * number, [list[Attack]() for _ in range(number)]
    for seconds, a in sorted(work, key=lambda w: (w[1].clause.id not in untimed, -w[0])):
        free = [i for i in range(number) if all(b.clause.id != a.clause.id for b in found[i])]
        least = min(free, key=lambda i: (loads[i], len(found[i])))
        found[least].append(a)
        loads[least] += seconds
    return [tuple(share) for share in found if share]


def joined(subject: Subject, attack: Attack, parts: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of a clause's parts: the worst of them, with the cases and the coverage of all.

    Args:
        subject: what was attacked.
        attack: on the clause; a table if there are several parts.
        parts: outcomes of processes that together took all rows.
    """
    if len(parts) == 1 or not isinstance(attack.cases, Table):
        return parts[0]
    worst = min(parts, key=lambda o: _WORST_FIRST.index(o.status))
    if worst.status in {"not_run", "not_claimed"}:
        return worst
    rows = attack.cases.rows(subject)
    taken = sorted(i for o in parts for i in o.coverage.get("rows", ()))
    return replace(
        worst,
        executed=sum(o.executed for o in parts),
        seconds=sum(o.seconds for o in parts),
        features=tuple(sorted({name for o in parts for name in o.features})),
        measures=reduce(_larger, (o.measures for o in parts), {}),
        coverage=asdict(attack.cases.coverage(subject, [rows[i] for i in taken])),
    )


def _larger(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return a | {name: max(error, a.get(name, error)) for name, error in b.items()}
