"""Rows in which every pair of levels of any two factors stands together: a covering array of strength two.

Most bugs that need more than one option need two (Kuhn, Wallace, Gallo, IEEE TSE 2004). The rows are found greedily,
those that cover most first, as in the AETG system (Cohen et al., IEEE TSE 1997), under rules that some combinations
break.

Legend: L levels of all factors together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np

__all__ = ["Array", "Rule", "covering"]

TRIES: Final = 12  # of completing a row around a pair, before the pair counts as impossible
Levels = Mapping[str, Any]  # factor -> level


@dataclass(frozen=True)
class Rule:
    """A combination of levels has a meaning only where `holds` of the levels of `factors`, in their order."""

    factors: tuple[str, ...]
    holds: Callable[..., bool]


@dataclass(frozen=True)
class Array:
    """The rows, and the pairs that they cover."""

    rows: tuple[dict[str, Any], ...]
    pairs: frozenset[tuple[tuple[str, int], tuple[str, int]]]  # (factor, index of its level), twice

    def covered(self, factors: Mapping[str, Sequence[Any]], rows: Sequence[Levels]) -> frozenset[Any]:
        """The pairs that stand in some of `rows`."""
        at = {name: {level: i for i, level in enumerate(levels)} for name, levels in factors.items()}
        found = {
            pair
            for row in rows
            for pair in combinations([(name, at[name][row[name]]) for name in factors if name in row], 2)
        }
        return self.pairs & found


def covering(factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule] = (), seed: int = 0) -> Array:
    """Rows in which every possible pair of levels stands.

    Args:
        factors: levels of each, hashable, the simplest first.
        rules: what a row must keep.
        seed: of the order in which ties are broken.

    Returns:
        The rows; `pairs` leaves out those that the rules make impossible.
    """
    search = _Search(factors, rules, seed)
    rows = []
    while (row := search.next()) is not None:
        rows.append({name: factors[name][level] for name, level in row.items()})
    return Array(tuple(rows), search.possible())


class _Search:
    def __init__(self, factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule], seed: int) -> None:
        self.factors, self.names = factors, list(factors)
        self.random = np.random.default_rng(seed)
        starts = np.cumsum([0, *(len(levels) for levels in factors.values())])
        self.start = {name: int(s) for name, s in zip(self.names, starts, strict=False)}
        self.owner = np.repeat(np.arange(len(self.names)), [len(levels) for levels in factors.values()])
        self.open = np.triu(self.owner[:, None] != self.owner[None, :])  # [L, L] pairs that no row has yet
        self.impossible = np.zeros_like(self.open)
        self.rules = {name: [r for r in rules if name in r.factors] for name in self.names}

    def next(self) -> dict[str, int] | None:
        """Indices of the levels of another row; None where no pair is open."""
        while True:
            left = np.argwhere(self.open)
            if not len(left):
                return None
            a, b = (int(i) for i in left[0])
            tries = (self._row(a, b) for _ in range(TRIES))
            row = next((r for r in tries if r is not None), None)
            if row is None:
                self.open[a, b], self.impossible[a, b] = False, True
                continue
            at = np.array([self.start[name] + level for name, level in row.items()])
            self.open[np.minimum(*(g := np.meshgrid(at, at))), np.maximum(*g)] = False
            return {name: row[name] for name in self.names}

    def possible(self) -> frozenset[Any]:
        """Pairs that the rules leave."""
        pairs = np.argwhere(np.triu(self.owner[:, None] != self.owner[None, :]) & ~self.impossible)
        return frozenset((self._named(int(a)), self._named(int(b))) for a, b in pairs)

    def _named(self, at: int) -> tuple[str, int]:
        name = self.names[self.owner[at]]
        return name, at - self.start[name]

    def _row(self, a: int, b: int) -> dict[str, int] | None:
        """A row with two levels, completed greedily; None where the rules leave no way on."""
        row: dict[str, int] = {}
        gain = self.random.random(len(self.owner)) / 2  # [L] open pairs of each level with the row; ties by chance
        for name, level in map(self._named, (a, b)):
            row[name] = level
            gain += self._open_with(self.start[name] + level)
            if not self._keeps(row, name):
                return None
        rest = [self.names[i] for i in self.random.permutation(len(self.names)) if self.names[i] not in row]
        for name in rest:
            start, levels = self.start[name], range(len(self.factors[name]))
            fits = [i for i in levels if self._keeps({**row, name: i}, name)] if self.rules[name] else levels
            if not fits:
                return None
            row[name] = max(fits, key=gain[start : start + len(levels)].__getitem__)
            gain += self._open_with(start + row[name])
        return row

    def _open_with(self, at: int) -> Any:
        return self.open[at] | self.open[:, at]  # [L] one of them holds the pair

    def _keeps(self, row: Mapping[str, int], name: str) -> bool:
        """Whether the rules about a factor hold, those whose factors are all in the row."""
        due = (r for r in self.rules[name] if all(f in row for f in r.factors))
        return all(r.holds(*(self.factors[f][row[f]] for f in r.factors)) for r in due)
