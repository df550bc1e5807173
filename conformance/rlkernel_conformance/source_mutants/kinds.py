"""Kinds of changes of source: what may stand in the place of a node, by where it stands."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlkernel_conformance.source_mutants.replacements import (
    CASTS,
    COMPARISONS,
    DROPPED,
    EPSILON,
    OPERATIONS,
    OTHER_DTYPES,
    OTHER_FUNCTIONS,
    PLUMBING,
    RECORDS,
    REDUCTIONS,
)

Choices = Iterator[ast.AST | str]


@dataclass(frozen=True)
class Place:
    """Where a node stands."""

    node: Any
    parents: tuple[Any, ...]  # nearest first
    fields: tuple[str, ...]  # of each parent, in which the node or its next parent stands
    defaults: Mapping[str, tuple[Any, ...]]  # argument of an operator -> its defaults

    @property
    def parent(self) -> Any:
        """The node that it is part of."""
        return self.parents[0]

    @property
    def field(self) -> str:
        """The field of its parent in which it stands."""
        return self.fields[0]

    def with_(self, **changes: Any) -> Any:
        """A copy of the node with other fields."""
        new = copy.copy(self.node)
        for name, value in changes.items():
            setattr(new, name, value)
        return new


def _comparison(p: Place) -> Choices:
    if isinstance(p.node, ast.Compare) and len(p.node.ops) == 1:
        other = COMPARISONS.get(type(p.node.ops[0]))
        if other is not None:
            yield p.with_(ops=[other()])
    elif isinstance(p.node, ast.Compare):
        for i, op in enumerate(p.node.ops):
            if type(op) in COMPARISONS:
                yield p.with_(ops=[*p.node.ops[:i], COMPARISONS[type(op)](), *p.node.ops[i + 1 :]])


def _arithmetic(p: Place) -> Choices:
    if isinstance(p.node, ast.BinOp | ast.AugAssign) and type(p.node.op) in OPERATIONS:
        yield p.with_(op=OPERATIONS[type(p.node.op)]())
    minus = isinstance(p.node, ast.UnaryOp) and isinstance(p.node.op, ast.USub)
    if minus and not isinstance(p.node.operand, ast.Constant):
        yield p.node.operand


def _term(p: Place) -> Choices:
    node = p.node
    if isinstance(node, ast.BinOp):
        yield node.left
        if isinstance(node.op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr):
            yield node.right
    if isinstance(node, ast.BoolOp):
        for i in range(len(node.values)):
            rest = [v for j, v in enumerate(node.values) if j != i]
            yield rest[0] if len(rest) == 1 else p.with_(values=rest)
    builtin = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"max", "min"}
    if builtin and len(node.args) == 2 and not node.keywords:
        yield from node.args


def _constant(p: Place) -> Choices:
    if not isinstance(p.node, ast.Constant) or _is_dimension(p) or _is_index(p):
        return
    value = p.node.value
    if isinstance(value, bool):
        yield str(not value)
    elif isinstance(value, int):
        yield from map(str, {0: (1,), 1: (0, 2)}.get(value, (value + 1, value - 1)))
    elif isinstance(value, float):
        yield repr(1.0 if value == 0 else value * 2)
        if 0 < abs(value) < EPSILON:
            yield "0.0"


def _index(p: Place) -> Choices:
    node = p.node
    if isinstance(node, ast.Slice):
        for side, step in (("lower", 1), ("upper", -1)):
            bound = getattr(node, side)
            if bound is not None:
                yield p.with_(**{side: None})
                if _integer(bound) != -step:  # from 0, or to 0: as without it, or nothing
                    yield p.with_(**{side: _plus(bound, step)})
        if node.step is not None:
            yield p.with_(step=None)
    elif _is_index(p) and not any(isinstance(q, ast.Slice) for q in p.parents[:2]):
        value = _integer(node)
        if value is not None:
            yield str({0: 1, -1: 0}.get(value, value - 1))


def _condition(p: Place) -> Choices:
    if p.field == "test" and isinstance(p.parent, ast.If | ast.IfExp | ast.While):
        yield ast.UnaryOp(ast.Not(), p.node)
    if p.field == "ifs" and isinstance(p.parent, ast.comprehension):
        yield "True"
    if isinstance(p.node, ast.IfExp):
        yield p.node.body
        yield p.node.orelse
    if isinstance(p.node, ast.UnaryOp) and isinstance(p.node.op, ast.Invert | ast.Not):
        yield p.node.operand
    if _called(p, "where", 3):
        yield p.node.args[1]
        yield p.node.args[2]


def _statement(p: Place) -> Choices:
    node = p.node
    if isinstance(node, ast.AugAssign | ast.Continue | ast.Break):
        yield "pass"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "pass"
    if isinstance(node, ast.If) and not node.orelse and not any(isinstance(n, ast.Raise) for n in ast.walk(node)):
        yield "pass"
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        if isinstance(target, ast.Subscript) or _known_before(target, p):
            yield "pass"


def _dtype(p: Place) -> Choices:
    node = p.node
    if isinstance(node, ast.Attribute) and node.attr in OTHER_DTYPES and ast.unparse(node.value) == "torch":
        yield f"torch.{OTHER_DTYPES[node.attr]}"
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
    if method and node.func.attr in CASTS:
        yield f"{ast.unparse(node.func.value)}.{CASTS[node.func.attr]}()"
    yield from _without_keyword(p, {"dtype"})


def _dimension(p: Place) -> Choices:
    if _is_dimension(p):
        value = _integer(p.node)
        if value is not None:
            yield {0: "1", 1: "0", -1: "0"}.get(value, str(value - 1))
    node = p.node
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and bool(node.args)
    if (
        method
        and node.func.attr in {"sum", "amax", "amin", "any", "all", "mean"}
        and _integer(node.args[0]) is not None
    ):
        yield p.with_(args=[], keywords=[])


def _swap(p: Place) -> Choices:
    node = p.node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.MatMult):
        yield p.with_(left=node.right, right=node.left)
    if isinstance(node, ast.Call):
        for i in range(len(node.args) - 1):
            a, b = node.args[i : i + 2]
            plain = not isinstance(a, ast.Starred | ast.Constant) and not isinstance(b, ast.Starred)
            if plain and ast.dump(a) != ast.dump(b) and _named(node) not in {"isinstance", "getattr", "zip"}:
                yield p.with_(args=[*node.args[:i], b, a, *node.args[i + 2 :]])


def _without_call(kind: str) -> Callable[[Place], Choices]:
    """Calls that are dropped: what they are called on, or their first argument, is taken as it is."""

    def choices(p: Place) -> Choices:
        node = p.node
        if not isinstance(node, ast.Call) or DROPPED.get(_named(node)) != kind:
            return
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "torch":
            yield node.func.value
        elif node.args:
            yield node.args[0]

    return choices


def _function(p: Place) -> Choices:
    if p.field == "func" and isinstance(p.node, ast.Attribute | ast.Name) and isinstance(p.parent, ast.Call):
        other = OTHER_FUNCTIONS.get(_named(p.parent))
        if other is not None and isinstance(p.node, ast.Attribute):
            yield p.with_(attr=other)
        elif other in {"max", "min", "any", "all"}:
            yield str(other)
    yield from _without_call("function")(p)


def _detach(p: Place) -> Choices:
    yield from _without_call("detach")(p)
    if p.field == "decorator_list" and ast.unparse(p.node) == "torch.no_grad()":
        yield "torch.enable_grad()"
    if isinstance(p.parent, ast.withitem) and ast.unparse(p.node) == "torch.no_grad()":
        yield "torch.enable_grad()"


def _copy(p: Place) -> Choices:
    yield from _without_call("copy")(p)
    yield from _without_keyword(p, {"copy"})


def _keepdim(p: Place) -> Choices:
    yield from _without_keyword(p, {"keepdim"})


def _argument(p: Place) -> Choices:
    """An argument of a call or of the operator is ignored: its default is taken."""
    node = p.node
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in {*PLUMBING, "dtype", "keepdim", "copy", "dim"}:
                yield from _without_keyword(p, {keyword.arg})
    name: object = None
    base: Any = None
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        name, base = node.attr, node.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant):
        name, base = node.slice.value, node.value
    if isinstance(name, str) and base is not None and ast.unparse(base) in RECORDS and p.field != "func":
        yield from (repr(value) for value in p.defaults.get(name, ()))


def _gradient(p: Place) -> Choices:
    """A result of a backward pass is missing."""
    backward = any(isinstance(q, ast.FunctionDef) and re.search("backward|grad|finished", q.name) for q in p.parents)
    returned = p.field == "elts" and isinstance(p.parent, ast.Tuple) and isinstance(p.parents[1], ast.Return)
    if backward and returned and not isinstance(p.node, ast.Constant | ast.Starred):
        yield "None"


KINDS: Final[Mapping[str, Callable[[Place], Choices]]] = {
    "comparison": _comparison,
    "arithmetic": _arithmetic,
    "term": _term,
    "constant": _constant,
    "index": _index,
    "condition": _condition,
    "statement": _statement,
    "dtype": lambda p: iter([*_dtype(p), *_without_call("dtype")(p)]),
    "dimension": _dimension,
    "shape": _without_call("shape"),
    "swap": _swap,
    "function": _function,
    "detach": _detach,
    "copy": _copy,
    "keepdim": _keepdim,
    "argument": _argument,
    "gradient": _gradient,
}


def _integer(node: Any) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _integer(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


def _plus(bound: Any, step: int) -> ast.AST:
    value = _integer(bound)
    if value is not None:
        return ast.Constant(value + step)
    return ast.BinOp(bound, ast.Add() if step > 0 else ast.Sub(), ast.Constant(1))


def _named(call: Any) -> str:
    """Name of the function that a call calls."""
    return str(getattr(call.func, "attr", None) or getattr(call.func, "id", ""))


def _called(p: Place, name: str, arguments: int) -> bool:
    return isinstance(p.node, ast.Call) and _named(p.node) == name and len(p.node.args) == arguments


def _is_dimension(p: Place) -> bool:
    """Whether a number says which dimension."""
    above = p.parents[1:] if isinstance(p.parent, ast.UnaryOp) else p.parents
    node, at = above[0], p.fields[len(p.parents) - len(above)]
    if isinstance(node, ast.keyword):
        return node.arg in {"dim", "dims"}
    if not isinstance(node, ast.Call) or at != "args" or _named(node) not in REDUCTIONS:
        return False
    place = [i for i, a in enumerate(node.args) if a is p.node or a is p.parent]
    of_torch = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "torch"
    return isinstance(node.func, ast.Attribute) and place == [1 if of_torch else 0]


def _is_index(p: Place) -> bool:
    """Whether a node is an index of a subscript, alone or in a tuple, or a bound of a slice."""
    for node, at in zip(p.parents, p.fields, strict=True):
        if isinstance(node, ast.UnaryOp | ast.Tuple | ast.Slice):
            continue
        return isinstance(node, ast.Subscript) and at == "slice"
    return False


def _without_keyword(p: Place, names: set[str]) -> Choices:
    if isinstance(p.node, ast.Call) and any(k.arg in names for k in p.node.keywords):
        yield p.with_(keywords=[k for k in p.node.keywords if k.arg not in names])


def _known_before(target: Any, p: Place) -> bool:
    """Whether a name has a value before this statement gives it another: a parameter, or assigned above."""
    if not isinstance(target, ast.Name):
        return False
    function = next((q for q in p.parents if isinstance(q, ast.FunctionDef)), None)
    if function is None:
        return False
    args = function.args
    if target.id in {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}:
        return True
    stored = (n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return any(n.id == target.id and n.lineno < p.node.lineno for n in stored)
