"""The sources of an operator's kernels, as one hash: what a report judged, and whether it is still what is there.

Counted are the definitions that an implementation reaches by name, its own and those of other modules, without
comments and docstrings. So a change of claims, of tables for offline compilation or of another operator's kernel in the
same module leaves the hash as it was.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from rlkernel_triton.claims import CLAIMS

TRITON: Final = Path(__file__).resolve().parents[2] / "triton"
_Places = list[tuple[str, str]]  # modules and names in them; no name for all of a module


class Module(NamedTuple):
    """A module's top-level definitions, and the names that it imports from its package."""

    defined: dict[str, list[ast.stmt]]
    imported: dict[str, _Places]


def sources(op: str) -> str:
    """Hash of what an operator of rlkernel-triton runs, and of its check of arguments."""
    return hash_of(entries(op), TRITON)


def entries(op: str) -> _Places:
    """Where the code of an operator begins."""
    claim = CLAIMS[op]
    halves = [target.partition(":") for target in (claim.target, claim.check) if target]
    return [(module, name) for module, _, name in halves]


def hash_of(places: _Places, root: Path) -> str:
    """Hash of the definitions that are reached from some, in packages below a folder."""
    found = sorted((module, ast.unparse(node)) for module, node in reached(places, root))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def reached(places: _Places, root: Path) -> Iterator[tuple[str, ast.stmt]]:
    """The definitions that some reach by name, themselves included, each with its module."""
    due, seen = list(places), set(places)
    nodes: set[ast.stmt] = set()
    while due:
        at, name = due.pop()
        module = _module(root, at)
        if module is None:
            continue
        for node in module.defined.get(name, []) if name else [n for ns in module.defined.values() for n in ns]:
            if node in nodes:
                continue
            nodes.add(node)
            yield at, node
            more = [place for word in _words(node) for place in _named(module, at, word)]
            due += [place for place in more if place not in seen]
            seen.update(more)


def _words(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Names that a definition uses, each with the attribute that is taken of it, if any."""
    of = {id(n.value): n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    for n in ast.walk(node):
        if isinstance(n, ast.Name):
            yield n.id, of.get(id(n), "")


def _named(module: Module, at: str, word: tuple[str, str]) -> _Places:
    """Where the definition of a word may stand: here, in the module it is imported from, or in one that it names."""
    name, attribute = word
    here = [(at, name)] if name in module.defined else []
    return here + [(m, n or attribute) for m, n in module.imported.get(name, [])]


@cache
def _module(root: Path, name: str) -> Module | None:
    path = root / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return None
    tree = _Bare().visit(ast.parse(file.read_bytes()))
    package = name.partition(".")[0]
    module = Module({}, {})
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            for alias in node.names:
                places = [(str(node.module), alias.name), (f"{node.module}.{alias.name}", "")]
                module.imported[alias.asname or alias.name] = places
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            for word in _bound(node):
                module.defined.setdefault(word, []).append(node)
    return module


def _bound(node: ast.stmt) -> set[str]:
    """Names that a top-level statement binds; where it binds none, all that it mentions, since it may change them."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return {n.id for n in names if isinstance(n.ctx, ast.Store)} or {n.id for n in names}


class _Bare(ast.NodeTransformer):
    """Without docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if text else node
