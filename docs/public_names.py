"""The public names, and what each of their docstrings has to say; the reference has a section for each module here.

A name is public where its module's `__all__` has it (of `rlkernel`, `dir` has it). `complaints` is the rule:

    a class, function or constant   says what it is: docstring, or for a constant a comment
    an argument                     is named in the docstring of its function
    a field                         has a comment beside it, a docstring below it, or a description
    a tensor, argument or field     has its shape in brackets: [N, V]
    seconds, nats, bytes            are named wherever one of UNITS is the name
    an error                        that the body raises is named

The build of the site stops at a complaint, and tests/test_public_names.py holds that there is none. Needs no mkdocs.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from rlkernel_core.errors import RLKernelError
from rlkernel_core.spec import OPERATORS

# title of a page -> modules whose names it has
PAGES: Final = {
    "rlkernel": (
        "rlkernel",
        "rlkernel.distributed",
        "rlkernel.context_parallel",
        "rlkernel.lock",
        "rlkernel.record",
        "rlkernel.agree",
        "rlkernel.rollouts",
    ),
    "rlkernel.nn and rlkernel.checkpoints": ("rlkernel.nn", "rlkernel.checkpoints"),
    "rlkernel.integrations": ("rlkernel.integrations", "rlkernel.integrations.trl"),
    "rlkernel_core": ("rlkernel_core", "rlkernel_core.spec", "rlkernel_core.gradients", "rlkernel_core.quant"),
    "rlkernel_conformance": (
        "rlkernel_conformance.run",
        "rlkernel_conformance.report",
        "rlkernel_conformance.parity",
        "rlkernel_conformance.attack",
        "rlkernel_conformance.clauses",
        "rlkernel_conformance.subject",
        "rlkernel_conformance.compare",
    ),
}
# A parameter or field of this name is a quantity in the unit.
UNITS: Final = {"timeout": "second", "entropy": "nat", "kl": "nat", "kl_ref": "nat", "rollout_kl": "nat"}
# A shape is written [N, V], or by a word that the docstring explains, or taken over: "as logprob", "shape of x".
_SHAPE: Final = re.compile(r"\[[^\]]*\]|0-dim|token-level")
_TAKEN_OVER: Final = re.compile(r"\b(?:as in|as|shape of) ([a-z_]+)\b|\b([a-z_]+)'s shape")


class Public(NamedTuple):
    """A public name, and where it is defined."""

    module: str
    name: str
    found: Any

    @property
    def path(self) -> str:
        """Module and name of the definition: what a reader of sources looks up."""
        if not hasattr(self.found, "__qualname__"):
            return f"{_defining(import_module(self.module), self.name).__name__}.{self.name}"
        return f"{self.found.__module__}.{self.found.__qualname__}"


def public(module: str) -> list[Public]:
    """The public names of a module in order, without those that are operators: each of these has a page of its own."""
    found = import_module(module)
    names = getattr(found, "__all__", None) or dir(found)
    operators = set(OPERATORS) if module == "rlkernel" else set()
    return [Public(module, n, getattr(found, n)) for n in names if n != "__version__" and n not in operators]


def records() -> list[Public]:
    """The call records: what the operators' arguments are."""
    return [Public("rlkernel", name, spec.record) for name, spec in OPERATORS.items()]


def complaints(entry: Public) -> list[str]:
    """What a name's documentation lacks."""
    where, found = f"{entry.module}.{entry.name}", entry.found
    if inspect.isclass(found):
        return list(_about_class(where, found))
    if inspect.isroutine(found):
        return list(_about_function(where, found, ""))
    module = _defining(import_module(entry.module), entry.name)
    return [] if described(*_assignment(module, entry.name)) else [f"{where}: no comment says what this constant is"]


def _about_class(where: str, cls: type) -> Iterator[str]:
    text = vars(cls).get("__doc__") or ""
    if not text or text.startswith(f"{cls.__name__}("):  # what dataclasses write by themselves
        yield f"{where}: no docstring"
        return
    if issubclass(cls, BaseException):
        return
    fields = _fields(cls)
    for name, (kind, told) in fields.items():
        yield from _about_value(f"{where}.{name}", name, kind, told or _entry(text, name), text, fields)
    for name, member in vars(cls).items():
        if name in fields:
            continue
        function = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "func", member))
        function = getattr(function, "__func__", function)
        if not name.startswith("_") and inspect.isfunction(function):
            yield from _about_function(f"{where}.{name}", function, text)
    init = vars(cls).get("__init__")
    if inspect.isfunction(init) and init.__module__ == cls.__module__ and not _generated(init):
        yield from _about_function(where, init, text + (init.__doc__ or ""), whole=True)


def _about_function(where: str, function: Any, around: str, *, whole: bool = False) -> Iterator[str]:
    text = around if whole else inspect.getdoc(function) or ""
    if not text:
        yield f"{where}: no docstring"
        return
    node = _tree(function)
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    for argument in arguments:
        name, kind = argument.arg, ast.unparse(argument.annotation) if argument.annotation else ""
        if name in {"self", "cls"} or name.startswith("_"):
            continue
        if not re.search(rf"\b{name}\b", text):
            yield f"{where}: the docstring does not name the argument {name!r}"
            continue
        known = [a.arg for a in arguments]
        yield from _about_value(f"{where}({name})", name, kind, _entry(text, name) or text, around, known)
    if node.returns and re.search(r"\bTensor\b", ast.unparse(node.returns)) and not _SHAPE.search(text + around):
        yield f"{where}: no shape of the tensor that it returns"
    for error in sorted(_raised(node, sys.modules[function.__module__])):
        if error not in text + around:
            yield f"{where}: the docstring does not name {error}, which it raises"


def _about_value(where: str, name: str, kind: str, told: str, around: str, beside: Iterable[str]) -> Iterator[str]:
    if not told:
        yield f"{where}: nothing says what it is"
    elif re.search(r"\bTensor\b", kind) and not _shaped(told, {*beside, *OPERATORS}) and "0-dim" not in around:
        yield f"{where}: a tensor without its shape"
    elif name in UNITS and kind != "bool" and UNITS[name] not in told:
        yield f"{where}: no unit; say {UNITS[name]}s"


def _shaped(told: str, known: Collection[str]) -> bool:
    taken = {name for found in _TAKEN_OVER.finditer(told) for name in found.groups()}
    return bool(_SHAPE.search(told)) or bool(taken & set(known))


def _fields(cls: type) -> dict[str, tuple[str, str]]:
    """Field -> its annotation and the comment beside it."""
    try:
        lines, _ = inspect.getsourcelines(cls)
    except OSError:
        return {}
    lines = textwrap.dedent("".join(lines)).splitlines()
    body = ast.parse("\n".join(lines)).body[0]
    found = {}
    for statement in getattr(body, "body", ()):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name, kind = statement.target.id, ast.unparse(statement.annotation)
            if not name.startswith("_") and "ClassVar" not in kind:
                found[name] = (kind, described(statement, lines))
    return found


def described(statement: ast.stmt | None, lines: Sequence[str]) -> str:
    """What the description of a field says, or the comment beside a statement, or else the one above it."""
    if statement is None:
        return ""
    value = getattr(statement, "value", None)
    for keyword in value.keywords if isinstance(value, ast.Call) else ():
        if keyword.arg == "description" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    last = lines[(statement.end_lineno or statement.lineno) - 1]
    beside = [last[statement.end_col_offset or 0 :].partition("#")[2]]
    beside += [lines[n].partition("#")[2] for n in range(statement.lineno - 1, (statement.end_lineno or 0) - 1)]
    above, at = [], statement.lineno - 2
    while at >= 0 and (line := lines[at].strip()).startswith("#"):
        above.insert(0, line.removeprefix("#"))
        at -= 1
    text = " ".join(part.strip() for part in beside if part.strip()) or " ".join(part.strip() for part in above)
    return re.sub(r"\s*(noqa|type: ignore)\S*( [A-Z]+\d+)?", "", text).strip()


def _entry(text: str, name: str) -> str:
    """What a docstring says of an argument: its entry under Args, or the sentences that hold its name."""
    entry = re.search(rf"^( *){name}: .*(?:\n\1 +.*)*", inspect.cleandoc(text), re.MULTILINE)
    if entry:
        return entry[0]
    return " ".join(part for part in re.split(r"(?<=[.;])\s", text) if re.search(rf"\b{name}\b", part))


def _raised(node: ast.AST, module: ModuleType) -> set[str]:
    """Names of our errors in the body's own `raise` statements."""
    raised = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call) and isinstance(part.exc.func, ast.Name):
            error = getattr(module, part.exc.func.id, None)
            if inspect.isclass(error) and issubclass(error, RLKernelError):
                raised.add(part.exc.func.id)
    return raised


def _generated(function: Any) -> bool:
    """Whether a dataclass wrote it."""
    return function.__code__.co_filename.startswith("<")


@cache
def _tree(function: Any) -> ast.FunctionDef:
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node  # type: ignore[return-value]


def _assignment(module: ModuleType, name: str) -> tuple[ast.stmt | None, list[str]]:
    """The statement that gives a module's constant its value, and the module's lines."""
    source = Path(inspect.getfile(module)).read_text(encoding="utf-8")
    for statement in ast.parse(source).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return statement, source.splitlines()
    return None, []


def _defining(module: ModuleType, name: str) -> ModuleType:
    """The module that assigns a constant: this one, or the one that it is imported from."""
    if _assignment(module, name)[0] is not None:
        return module
    for statement in ast.walk(ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8"))):
        if isinstance(statement, ast.ImportFrom) and any((a.asname or a.name) == name for a in statement.names):
            return _defining(import_module(statement.module or ""), name)
    return module


if __name__ == "__main__":
    everything = [p for modules in PAGES.values() for module in modules for p in public(module)]
    print("\n".join(line for p in (*everything, *records()) for line in complaints(p)))
