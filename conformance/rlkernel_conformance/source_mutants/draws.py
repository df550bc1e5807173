"""Which mutations matter to an operator, and which of them are drawn."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from rlkernel_conformance.source_mutants.kinds import KINDS
from rlkernel_conformance.source_mutants.mutations import Mutation, mutations_of
from rlkernel_conformance.source_mutants.plugin_copy import files, original, source_of
from rlkernel_conformance.source_mutants.trials import ClauseRun
from rlkernel_core.spec import OPERATORS


@dataclass(frozen=True)
class Site:
    """A mutation of a file, and the clauses of an operator whose calls execute it."""

    file: str
    mutation: Mutation
    clauses: tuple[str, ...]

    @property
    def where(self) -> tuple[Path, frozenset[int]]:
        """The file of the original, and the lines of it that run where the change does."""
        return original(self.file), frozenset(_lines(self.file, self.mutation))


def sites(runs: Sequence[ClauseRun]) -> list[Site]:
    """Every mutation that calls of an operator execute, with the clauses that make them."""
    found = []
    for file in files():
        by_clause = {r.clause: r.lines.get(file, frozenset()) for r in runs}
        if not any(by_clause.values()):
            continue
        for m in mutations(file):
            mine = tuple(c for c, lines in by_clause.items() if not lines.isdisjoint(_lines(file, m)))
            if mine:
                found.append(Site(file, m, mine))
    return found


def unexecuted(runs: Sequence[ClauseRun]) -> list[str]:
    """Lines that hold mutations and that no clause executes, of the functions that some clause calls: file:line."""
    found = []
    for file in files():
        executed = frozenset[int]().union(*(r.lines.get(file, frozenset()) for r in runs))
        if not executed:
            continue
        called = [f for f in _functions(file) if not executed.isdisjoint(range(f.body[0].lineno, _end(f) + 1))]
        for line, m in {m.span[0]: m for m in mutations(file)}.items():
            inside = any(f.lineno < line <= _end(f) for f in called)
            if inside and executed.isdisjoint(_lines(file, m)):
                found.append(f"{file}:{line}")
    return found


@cache
def mutations(file: str) -> tuple[Mutation, ...]:
    """Every mutation of a file of the copy."""
    return tuple(mutations_of(source_of(file), _defaults()))


def drawn(found: Sequence[Site], seed: int, op: str) -> Iterator[Site]:
    """Sites without end in an order that the seed gives: a kind after the other, and of a kind any line alike.

    More of them begin with the same ones, and no other operator changes them.
    """
    random = Random(f"{seed} {op}")
    of_kind: dict[str, dict[tuple[str, int], list[Site]]] = defaultdict(lambda: defaultdict(list))
    for site in found:
        of_kind[site.mutation.kind][site.file, site.mutation.line].append(site)
    kinds = [kind for kind in KINDS if kind in of_kind]
    random.shuffle(kinds)
    while kinds:
        for kind in tuple(kinds):
            lines = of_kind[kind]
            while lines:
                line = random.choice(list(lines))
                site = lines[line].pop(random.randrange(len(lines[line])))
                if not lines[line]:
                    del lines[line]
                if site.mutation.changes(source_of(site.file)):
                    yield site
                    break
            if not lines:
                kinds.remove(kind)


def _lines(file: str, m: Mutation) -> range | frozenset[int]:
    """Lines that run where the mutation does: its own; for a table of a module, those that name it."""
    names = _tables(file).get(m.span)
    return range(m.span[0], m.span[1] + 1) if names is None else names


@cache
def _tables(file: str) -> Mapping[tuple[int, int], frozenset[int]]:
    """Statements of a module that give names values -> lines of the module that use these names."""
    text = source_of(file)
    lines = text.decode().splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            words = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            word = re.compile(rf"\b(?:{'|'.join(words)})\b") if words else None
            used = {i for i, line in enumerate(lines, 1) if word is not None and word.search(line)}
            found[node.lineno, node.end_lineno or node.lineno] = frozenset(used)
    return found


@cache
def _functions(file: str) -> tuple[ast.FunctionDef, ...]:
    return tuple(n for n in ast.walk(ast.parse(source_of(file))) if isinstance(n, ast.FunctionDef))


def _end(function: ast.FunctionDef) -> int:
    return function.end_lineno or function.lineno


@cache
def _defaults() -> Mapping[str, tuple[Any, ...]]:
    """Defaults of the operators' arguments that are plain values, by name."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for spec in OPERATORS.values():
        for name, parameter in spec.parameters.items():
            if parameter.default is None or isinstance(parameter.default, bool | int | float | str):
                found[name].setdefault(repr(parameter.default), parameter.default)
    return {name: tuple(values.values()) for name, values in found.items()}
