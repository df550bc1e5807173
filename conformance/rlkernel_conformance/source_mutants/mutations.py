"""Mutations of Python source: one small change each, of a kind, in a text that is otherwise kept byte by byte.

Not changed are docstrings and strings, annotations, imports, base classes, what a `raise` says, and f-strings.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Choices = Iterator[ast.AST | str]  # what may stand in the place of a node


@dataclass(frozen=True)
class Mutation:
    """One change of a file."""

    kind: str  # a name of KINDS
    span: tuple[int, int]  # first and last line of the statement, header or lambda that holds it
    line: int  # of what is replaced
    start: int  # of what is replaced, in bytes
    stop: int
    new: str  # what stands there instead

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


@dataclass(frozen=True)
class _Place:
    """Where a node stands."""

    node: Any
    parents: tuple[Any, ...]  # nearest first
    fields: tuple[str, ...]  # of each parent, in which the node or its next parent stands
    defaults: Mapping[str, tuple[Any, ...]]  # argument of an operator -> its defaults

    @property
    def parent(self) -> Any:
        return self.parents[0]

    @property
    def field(self) -> str:
        return self.fields[0]

    def with_(self, **changes: Any) -> Any:
        """A copy of the node with other fields."""
        new = copy.copy(self.node)
        for name, value in changes.items():
            setattr(new, name, value)
        return new


_COMPARISONS: Final[dict[type, type]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_ARITHMETIC: Final[dict[type, type]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_DTYPES: Final = {
    "float64": "float32",
    "float32": "bfloat16",
    "float16": "bfloat16",
    "bfloat16": "float16",
    "int64": "int32",
    "int32": "int16",
    "int16": "int8",
    "uint8": "int8",
    "int8": "uint8",
}
_CASTS: Final = {"float": "bfloat16", "double": "float", "long": "int", "int": "short"}
# Methods and functions with a dimension: as a method the first argument, as a function of torch the second.
_REDUCTIONS: Final = frozenset(
    (
        "sum",
        "mean",
        "amax",
        "amin",
        "any",
        "all",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "logsumexp",
        "logcumsumexp",
        "softmax",
        "log_softmax",
        "max",
        "min",
        "argmax",
        "argmin",
        "norm",
        "prod",
        "flip",
        "diff",
        "cat",
        "stack",
        "unbind",
        "select",
        "narrow",
        "roll",
        "unsqueeze",
        "squeeze",
        "sort",
        "argsort",
        "gather",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "scatter_reduce_",
        "index_select",
        "index_add",
        "index_add_",
        "index_fill",
        "repeat_interleave",
        "size",
        "chunk",
        "split",
    )
)
_FUNCTIONS: Final = {
    "amax": "amin",
    "amin": "amax",
    "max": "min",
    "min": "max",
    "maximum": "minimum",
    "minimum": "maximum",
    "cummax": "cummin",
    "cummin": "cummax",
    "argmax": "argmin",
    "argmin": "argmax",
    "any": "all",
    "all": "any",
    "sum": "mean",
    "mean": "sum",
    "floor": "ceil",
    "ceil": "floor",
    "round": "floor",
    "round_": "floor_",
    "floor_": "ceil_",
    "exp": "expm1",
    "expm1": "exp",
    "exp_": "expm1_",
    "log": "log1p",
    "log1p": "log",
    "sin": "cos",
    "cos": "sin",
    "rsqrt": "sqrt",
    "tanh": "sigmoid",
    "sigmoid": "tanh",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "zeros": "ones",
    "ones": "zeros",
    "new_zeros": "new_ones",
    "new_ones": "new_zeros",
    "empty": "zeros",
    "add_": "sub_",
    "sub_": "add_",
    "mul_": "div_",
    "div_": "mul_",
    "isfinite": "isinf",
    "isnan": "isinf",
    "isinf": "isnan",
    "searchsorted": "bucketize",
    "addmm_": "addmm",
}
# Methods without which a value is what it was before; functions of torch and builtins, which give their first argument.
_DROPPED: Final = {
    "detach": "detach",
    "clone": "copy",
    "contiguous": "copy",
    "copy": "copy",
    "expand": "shape",
    "expand_as": "shape",
    "t": "shape",
    "transpose": "shape",
    "permute": "shape",
    "unsqueeze": "shape",
    "squeeze": "shape",
    "flatten": "shape",
    "reshape": "shape",
    "to": "dtype",
    "float": "dtype",
    "double": "dtype",
    "type_as": "dtype",
    "sqrt": "function",
    "abs": "function",
    "square": "function",
    "clamp": "function",
    "clamp_min": "function",
    "clamp_max": "function",
    "clamp_": "function",
    "exp": "function",
    "log": "function",
    "neg": "function",
    "reciprocal": "function",
    "nan_to_num": "function",
    "masked_fill": "function",
    "masked_fill_": "function",
    "flip": "function",
    "cumsum": "function",
    "cummax": "function",
    "tanh": "function",
    "round": "function",
    "floor": "function",
    "logical_not": "function",
    "reversed": "function",
    "sorted": "function",
}
_NO_ARRAYS: Final = frozenset(
    ("tuple", "list", "dict", "set", "type", "Final", "Literal", "Callable", "Mapping", "Iterator", "Any", "Sequence")
)
_PLUMBING: Final = frozenset(("strict", "stacklevel", "device", "key", "name", "out", "memory_format", "encoding"))
_RECORDS: Final = frozenset(("call", "config", "c", "args", "self.args", "self.call", "self.config", "how", "params"))
_EPSILON: Final = 1e-3  # constants below it keep something from being 0


def _comparison(p: _Place) -> Choices:
    if isinstance(p.node, ast.Compare) and len(p.node.ops) == 1:
        other = _COMPARISONS.get(type(p.node.ops[0]))
        if other is not None:
            yield p.with_(ops=[other()])
    elif isinstance(p.node, ast.Compare):
        for i, op in enumerate(p.node.ops):
            if type(op) in _COMPARISONS:
                yield p.with_(ops=[*p.node.ops[:i], _COMPARISONS[type(op)](), *p.node.ops[i + 1 :]])


def _arithmetic(p: _Place) -> Choices:
    if isinstance(p.node, ast.BinOp | ast.AugAssign) and type(p.node.op) in _ARITHMETIC:
        yield p.with_(op=_ARITHMETIC[type(p.node.op)]())
    minus = isinstance(p.node, ast.UnaryOp) and isinstance(p.node.op, ast.USub)
    if minus and not isinstance(p.node.operand, ast.Constant):
        yield p.node.operand


def _term(p: _Place) -> Choices:
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


def _constant(p: _Place) -> Choices:
    if not isinstance(p.node, ast.Constant) or _is_dimension(p) or _is_index(p):
        return
    value = p.node.value
    if isinstance(value, bool):
        yield str(not value)
    elif isinstance(value, int):
        yield from map(str, {0: (1,), 1: (0, 2)}.get(value, (value + 1, value - 1)))
    elif isinstance(value, float):
        yield repr(1.0 if value == 0 else value * 2)
        if 0 < abs(value) < _EPSILON:
            yield "0.0"


def _index(p: _Place) -> Choices:
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


def _condition(p: _Place) -> Choices:
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


def _statement(p: _Place) -> Choices:
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


def _dtype(p: _Place) -> Choices:
    node = p.node
    if isinstance(node, ast.Attribute) and node.attr in _DTYPES and ast.unparse(node.value) == "torch":
        yield f"torch.{_DTYPES[node.attr]}"
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
    if method and node.func.attr in _CASTS:
        yield f"{ast.unparse(node.func.value)}.{_CASTS[node.func.attr]}()"
    yield from _without_keyword(p, {"dtype"})


def _dimension(p: _Place) -> Choices:
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


def _swap(p: _Place) -> Choices:
    node = p.node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.MatMult):
        yield p.with_(left=node.right, right=node.left)
    if isinstance(node, ast.Call):
        for i in range(len(node.args) - 1):
            a, b = node.args[i : i + 2]
            plain = not isinstance(a, ast.Starred | ast.Constant) and not isinstance(b, ast.Starred)
            if plain and ast.dump(a) != ast.dump(b) and _named(node) not in {"isinstance", "getattr", "zip"}:
                yield p.with_(args=[*node.args[:i], b, a, *node.args[i + 2 :]])


def _without_call(kind: str) -> Callable[[_Place], Choices]:
    """Calls that are dropped: what they are called on, or their first argument, is taken as it is."""

    def choices(p: _Place) -> Choices:
        node = p.node
        if not isinstance(node, ast.Call) or _DROPPED.get(_named(node)) != kind:
            return
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "torch":
            yield node.func.value
        elif node.args:
            yield node.args[0]

    return choices


def _function(p: _Place) -> Choices:
    if p.field == "func" and isinstance(p.node, ast.Attribute | ast.Name) and isinstance(p.parent, ast.Call):
        other = _FUNCTIONS.get(_named(p.parent))
        if other is not None and isinstance(p.node, ast.Attribute):
            yield p.with_(attr=other)
        elif other in {"max", "min", "any", "all"}:
            yield str(other)
    yield from _without_call("function")(p)


def _detach(p: _Place) -> Choices:
    yield from _without_call("detach")(p)
    if p.field == "decorator_list" and ast.unparse(p.node) == "torch.no_grad()":
        yield "torch.enable_grad()"
    if isinstance(p.parent, ast.withitem) and ast.unparse(p.node) == "torch.no_grad()":
        yield "torch.enable_grad()"


def _copy(p: _Place) -> Choices:
    yield from _without_call("copy")(p)
    yield from _without_keyword(p, {"copy"})


def _keepdim(p: _Place) -> Choices:
    yield from _without_keyword(p, {"keepdim"})


def _argument(p: _Place) -> Choices:
    """An argument of a call or of the operator is ignored: its default is taken."""
    node = p.node
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in {*_PLUMBING, "dtype", "keepdim", "copy", "dim"}:
                yield from _without_keyword(p, {keyword.arg})
    name: object = None
    base: Any = None
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        name, base = node.attr, node.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant):
        name, base = node.slice.value, node.value
    if isinstance(name, str) and base is not None and ast.unparse(base) in _RECORDS and p.field != "func":
        yield from (repr(value) for value in p.defaults.get(name, ()))


def _gradient(p: _Place) -> Choices:
    """A result of a backward pass is missing."""
    backward = any(isinstance(q, ast.FunctionDef) and re.search("backward|grad|finished", q.name) for q in p.parents)
    returned = p.field == "elts" and isinstance(p.parent, ast.Tuple) and isinstance(p.parents[1], ast.Return)
    if backward and returned and not isinstance(p.node, ast.Constant | ast.Starred):
        yield "None"


KINDS: Final[Mapping[str, Callable[[_Place], Choices]]] = {
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


def _places(tree: ast.Module, defaults: Mapping[str, tuple[Any, ...]]) -> Iterator[_Place]:
    def below(node: Any, parents: tuple[Any, ...], fields: tuple[str, ...]) -> Iterator[_Place]:
        for name, value in ast.iter_fields(node):
            if name in _SKIPPED or (isinstance(node, ast.FunctionDef) and name == "decorator_list" and not value):
                continue
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or _is_no_code(child, node):
                    continue
                above, at = (node, *parents), (name, *fields)
                if isinstance(child, ast.expr | ast.stmt):
                    yield _Place(child, above, at, defaults)
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
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in _NO_ARRAYS


def _span(p: _Place) -> tuple[int, int]:
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


def _called(p: _Place, name: str, arguments: int) -> bool:
    return isinstance(p.node, ast.Call) and _named(p.node) == name and len(p.node.args) == arguments


def _is_dimension(p: _Place) -> bool:
    """Whether a number says which dimension."""
    above = p.parents[1:] if isinstance(p.parent, ast.UnaryOp) else p.parents
    node, at = above[0], p.fields[len(p.parents) - len(above)]
    if isinstance(node, ast.keyword):
        return node.arg in {"dim", "dims"}
    if not isinstance(node, ast.Call) or at != "args" or _named(node) not in _REDUCTIONS:
        return False
    place = [i for i, a in enumerate(node.args) if a is p.node or a is p.parent]
    of_torch = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "torch"
    return isinstance(node.func, ast.Attribute) and place == [1 if of_torch else 0]


def _is_index(p: _Place) -> bool:
    """Whether a node is an index of a subscript, alone or in a tuple, or a bound of a slice."""
    for node, at in zip(p.parents, p.fields, strict=True):
        if isinstance(node, ast.UnaryOp | ast.Tuple | ast.Slice):
            continue
        return isinstance(node, ast.Subscript) and at == "slice"
    return False


def _without_keyword(p: _Place, names: set[str]) -> Choices:
    if isinstance(p.node, ast.Call) and any(k.arg in names for k in p.node.keywords):
        yield p.with_(keywords=[k for k in p.node.keywords if k.arg not in names])


def _known_before(target: Any, p: _Place) -> bool:
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
