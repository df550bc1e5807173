"""Rows in which every pair of levels of any two factors stands together: a covering array of strength two.

Most bugs that need more than one option need two (Kuhn, Wallace, Gallo, IEEE TSE 2004). The rows are found greedily,
those that cover most first, as in the AETG system (Cohen et al., IEEE TSE 1997), under rules that some combinations
break.

Legend: L levels of all factors together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from types import MappingProxyType
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
    masking: frozenset[tuple[str, int]] = frozenset()  # levels that mask other pairs

    def covered(self, factors: Mapping[str, Sequence[Any]], rows: Sequence[Levels]) -> frozenset[Any]:
        """The pairs that stand in some of `rows`."""
        at = {name: {level: i for i, level in enumerate(levels)} for name, levels in factors.items()}
        found = set[tuple[tuple[str, int], ...]]()
        for row in rows:
            levels = [(name, at[name][row[name]]) for name in factors if name in row]
            seen = self.masking.intersection(levels)
            found.update(p for p in combinations(levels, 2) if not seen or not seen.isdisjoint(p))
        return self.pairs & found


def covering(
    factors: Mapping[str, Sequence[Any]],
    rules: Sequence[Rule] = (),
    seed: int = 0,
    *,
    masking: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> Array:
    """Rows in which every possible pair of levels stands.

    Args:
        factors: levels of each, hashable, the simplest first.
        rules: what a row must keep.
        seed: of the order in which ties are broken.
        masking: levels by factor that mask a bug in the others, e.g. a size of 0. A pair without one of them is covered
            only by a row without them.

    Returns:
        The rows; `pairs` leaves out those that the rules make impossible.
    """
    empty = frozenset((f, i) for f, levels in factors.items() for i, x in enumerate(levels) if x in masking.get(f, ()))
    search = _Search(factors, rules, seed, empty)
    rows = []
    while (row := search.next()) is not None:
        rows.append({name: factors[name][level] for name, level in row.items()})
    return Array(tuple(rows), search.possible(), search.masking_levels())


class _Search:
    def __init__(
        self,
        factors: Mapping[str, Sequence[Any]],
        rules: Sequence[Rule],
        seed: int,
        masking: frozenset[tuple[str, int]],
    ) -> None:
        self.factors, self.names = factors, list(factors)
        self.random = np.random.default_rng(seed)
        starts = np.cumsum([0, *(len(levels) for levels in factors.values())])
        self.start = {name: int(s) for name, s in zip(self.names, starts, strict=False)}
        self.levels = {name: slice(self.start[name], self.start[name] + len(factors[name])) for name in self.names}
        self.owner = np.repeat(np.arange(len(self.names)), [len(levels) for levels in factors.values()])
        self.rules = {name: [_Known(r) for r in rules if name in r.factors] for name in self.names}
        self.agree = self._agreeing(rules)
        self.impossible = ~self.agree
        # [L, L] pairs that no row has yet, either way round
        self.open = self.agree & (self.owner[:, None] != self.owner[None, :])
        self.masking = np.zeros(len(self.owner), bool)
        self.masking[[self.start[name] + i for name, i in masking]] = True
        for name in self.names:  # a level that the rules allow beside masking ones alone masks too
            levels = self.levels[name]
            self.masking |= ~(self.agree[:, levels] & ~self.masking[levels]).any(1)
        self.last = self.masking * len(self.owner) ** 2  # more than any level can gain: masking ones are tried last

    def _agreeing(self, rules: Sequence[Rule]) -> Any:  # [L, L] bool
        """Pairs that no rule of two factors forbids, nor any third factor that has no level for both."""
        agree = (self.owner[:, None] != self.owner[None, :]) | np.eye(len(self.owner), dtype=bool)
        for rule in (r for r in rules if len(r.factors) == 2):
            one, other = ((self.start[f], self.factors[f]) for f in rule.factors)
            for i, j in product(range(len(one[1])), range(len(other[1]))):
                at = one[0] + i, other[0] + j
                agree[at] = agree[at[::-1]] = agree[at] and rule.holds(one[1][i], other[1][j])
        while True:
            before = agree.copy()
            for name in self.names:
                levels = self.levels[name]
                agree &= agree[:, levels].astype(np.float32) @ agree[levels].astype(np.float32) > 0
            if np.array_equal(agree, before):
                return agree

    def next(self) -> dict[str, int] | None:
        """Indices of the levels of another row; None where no pair is open."""
        while True:
            left = self.open.sum(1) + self.random.random(len(self.owner)) / 2
            a = int(left.argmax())
            if not self.open[a].any():
                return None
            b = int(np.where(self.open[a], left, -1).argmax())
            tries = (self._row(a, b) for _ in range(TRIES))
            row = next((r for r in tries if r is not None), None)
            if row is None:
                self.open[a, b] = self.open[b, a] = False
                self.impossible[a, b] = self.impossible[b, a] = True
                continue
            at = np.array([self.start[name] + level for name, level in row.items()])
            seen = at[self.masking[at]] if self.masking[at].any() else at
            if not np.isin((a, b), seen).any():  # every row that the rules allow masks the two
                self.open[a, b] = self.open[b, a] = False
                self.impossible[a, b] = self.impossible[b, a] = True
                continue
            self.open[np.ix_(seen, at)] = self.open[np.ix_(at, seen)] = False
            return {name: row[name] for name in self.names}

    def possible(self) -> frozenset[Any]:
        """Pairs that the rules leave."""
        pairs = np.argwhere(np.triu(self.owner[:, None] != self.owner[None, :]) & ~self.impossible)
        return frozenset((self._named(int(a)), self._named(int(b))) for a, b in pairs)

    def masking_levels(self) -> frozenset[tuple[str, int]]:
        """Levels that mask other pairs."""
        return frozenset(self._named(int(i)) for i in np.flatnonzero(self.masking))

    def _named(self, at: int) -> tuple[str, int]:
        name = self.names[self.owner[at]]
        return name, at - self.start[name]

    def _row(self, a: int, b: int) -> dict[str, int] | None:
        """A row with two levels, completed greedily; None where the rules leave no way on."""
        row: dict[str, int] = {}
        fits, gain = np.ones(len(self.owner), bool), np.zeros(len(self.owner))

        def put(name: str, level: int) -> None:
            row[name], at = level, self.start[name] + level
            np.logical_and(fits, self.agree[at], out=fits)
            np.add(gain, self.open[at], out=gain)

        for at in (a, b):
            name, level = self._named(at)
            put(name, level)
            if not self._keeps(row, name):
                return None
        rest = [self.names[i] for i in self.random.permutation(len(self.names)) if self.names[i] not in row]
        rest.sort(key=lambda name: -len(self.rules[name]))  # on which most depends
        for name in rest:
            levels = self.levels[name]
            worth = gain[levels] + self.random.random(levels.stop - levels.start) / 2
            fitting = fits[levels].tolist()
            for level in np.argsort(self.last[levels] - worth).tolist():
                row[name] = level
                if fitting[level] and self._keeps(row, name):
                    break
            else:
                return None
            put(name, level)
        return row

    def _keeps(self, row: Mapping[str, int], name: str) -> bool:
        """Whether the rules about a factor hold, those whose factors are all in the row."""
        return all(r.holds(self.factors, row) for r in self.rules[name])


class _Known:
    """A rule that remembers what it said of levels."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.said = rule, dict[tuple[int, ...], bool]()

    def holds(self, factors: Mapping[str, Sequence[Any]], row: Mapping[str, int]) -> bool:
        """Whether it holds of a row, or the row is not so far yet."""
        try:
            at = tuple([row[f] for f in self.rule.factors])
        except KeyError:
            return True
        if at not in self.said:
            levels = (factors[f][i] for f, i in zip(self.rule.factors, at, strict=True))
            self.said[at] = bool(self.rule.holds(*levels))
        return self.said[at]
