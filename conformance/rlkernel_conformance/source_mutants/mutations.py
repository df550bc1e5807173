"""Mutations of Python source: one small change each, of a kind, in a text that is otherwise kept byte by byte.

Not changed are docstrings and strings, annotations, imports, base classes, what a `raise` says, and f-strings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlkernel_conformance.source_mutants.kinds import KINDS, Place
from rlkernel_conformance.source_mutants.replacements import NO_ARRAYS


@dataclass(frozen=True)
class Mutation:
    """One change of a file."""

    kind: str  # a name of KINDS
    span: tuple[int, int]  # first and last line of the statement, header or lambda that holds it
    line: int  # of what is replaced
    start: int  # of what is replaced, in bytes
    stop: int
    new: str  # its replacement

    def applied(self, source: bytes) -> bytes:
        """The file with the change."""
        return source[: self.start] + self.new.encode() + source[self.stop :]

    def changes(self, source: bytes) -> bool:
        """Whether Python reads the changed file, and reads another program."""
        try:
            return ast.dump(ast.parse(self.applied(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False

    def diff(self, source: bytes) -> str:
        """The changed lines of the file as they were and as they are."""
        first, last = source.rfind(b"\n", 0, self.start) + 1, source.find(b"\n", self.stop)
        last = len(source) if last < 0 else last
        old = source[first:last].decode()
        new = (source[first : self.start] + self.new.encode() + source[self.stop : last]).decode()
        return "\n".join([*(f"- {x.strip()}" for x in old.splitlines()), *(f"+ {x.strip()}" for x in new.splitlines())])


def mutations_of(source: bytes, defaults: Mapping[str, tuple[Any, ...]]) -> list[Mutation]:
    """Every mutation of a file.

    Args:
        source: its text.
        defaults: of the operators' arguments, by name.
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[tuple[int, int, str], Mutation] = {}
    for p in _places(ast.parse(source), defaults):
        node, span = p.node, _span(p)
        start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        for kind, choices in KINDS.items():
            for choice in choices(p):
                new = choice if isinstance(choice, str) else _text(choice)
                found.setdefault((start, stop, new), Mutation(kind, span, node.lineno, start, stop, new))
    return list(found.values())


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    if isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Constant | ast.stmt | ast.Slice):
        return text
    return f"({text})"


# Fields of nodes that hold no arithmetic.
_SKIPPED: Final = frozenset(("annotation", "returns", "bases", "type_params", "type"))


def _places(tree: ast.Module, defaults: Mapping[str, tuple[Any, ...]]) -> Iterator[Place]:
    def below(node: Any, parents: tuple[Any, ...], fields: tuple[str, ...]) -> Iterator[Place]:
        for name, value in ast.iter_fields(node):
            if name in _SKIPPED or (isinstance(node, ast.FunctionDef) and name == "decorator_list" and not value):
                continue
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or _is_no_code(child, node):
                    continue
                above, at = (node, *parents), (name, *fields)
                if isinstance(child, ast.expr | ast.stmt):
                    yield Place(child, above, at, defaults)
                yield from below(child, above, at)

    return below(tree, (), ())


def _is_no_code(node: ast.AST, parent: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise | ast.JoinedStr | ast.Assert | ast.Global):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    if isinstance(node, ast.Call) and re.search(r"(Error|warn|cast|TypeVar)\b", ast.unparse(node.func)):
        return True
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in NO_ARRAYS


def _span(p: Place) -> tuple[int, int]:
    """Lines of the statement, of the header of a block, or of the lambda, that holds a node."""
    for node in (p.node, *p.parents):
        if isinstance(node, ast.Lambda | ast.stmt):
            body = getattr(node, "body", None)
            decorated = isinstance(node, ast.FunctionDef)
            if isinstance(body, list) and body and not decorated:
                return node.lineno, max(node.lineno, body[0].lineno - 1)
            if decorated and isinstance(body, list):
                return body[0].lineno, body[-1].end_lineno or body[-1].lineno
            return node.lineno, node.end_lineno or node.lineno
    return p.node.lineno, p.node.lineno
