"""The sources of an implementation as one fingerprint: what a result was made from, and whether that is still there.

Counted are the definitions that an implementation's functions reach by name: its own, those of other modules of its
package, and those of the packages that backends share (`rlkernel_*`); native sources (CUDA, HIP) and tables in files
count where a counted definition names their file, with what they include. Comments, docstrings and layout do not count,
nor does the module that holds a definition: a move changes nothing. Libraries are identified by their versions.

Files are read, nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.requirements import Requirement

from rlkernel.discover import guarded

if TYPE_CHECKING:
    from rlkernel_core.manifest import Backend, Impl

DIGITS: Final = 16
CLONE: Final = Path(__file__).resolve().parents[2]  # where this runs from one; its backends need not be installed
_TARGET: Final = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_FILE: Final = re.compile(r"(?:[\w./-]*/)?([\w-]*\.(?:cu|cuh|h|hip|hpp|cpp|json|toml))")
_INCLUDE: Final = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_NATIVE: Final = (".cu", ".cuh", ".h", ".hip", ".hpp", ".cpp")
# A string or character literal, which is kept, or a comment.
_COMMENT: Final = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\')|//[^\n]*|/\*.*?\*/', re.DOTALL)
_CATALOG: Final = ("rlkernel_core.spec", "_WHERE")  # which operators there are changes no other operator
_UNSAID: Final = ("ctx", "kind", "type_comment")  # fields of a node that change no meaning

Place = tuple[str, str]  # a module and a name in it; no name for all of the module


@dataclass(frozen=True)
class Scope:
    """Which definitions count beside those of the targets' own packages, and which of those do not."""

    shared: str = "rlkernel_"  # what the names of further modules begin with that count
    apart: frozenset[str] = frozenset()  # modules that do not count, whoever names them
    bare_calls: bool = True  # whether `f(x)` at the top of a module is part of f and of x, which it may change
    others: frozenset[str] = frozenset()  # operators; of a table with rows of several operators, theirs do not count


EVERYTHING: Final = Scope()


def fingerprint(targets: Iterable[str], elsewhere: frozenset[str] = frozenset(), scope: Scope = EVERYTHING) -> str:
    """Hash of what some functions reach.

    Args:
        targets: "package.module:function".
        elsewhere: targets of other operators. They are not followed, and a definition that names one is a table of
            claims, which is no code of this operator.
        scope: which definitions count.
    """
    told = sorted({digest for digest, _ in reached(targets, elsewhere, scope)})
    return sha256("\n".join(told).encode()).hexdigest()[:DIGITS]


def targets_of(impl: Impl) -> Iterator[str]:
    """The functions and classes that an implementation names."""
    return filter(None, (impl.target, impl.check, impl.gradient, impl.workspace))


@cache
def _own_fingerprint(manifest: Backend, impl: Impl) -> str:
    own = frozenset(targets_of(impl))
    others = frozenset(t for i in manifest.impls if i.op != impl.op for t in targets_of(i))
    return fingerprint(own, others - own)


def made_of(manifest: Backend, impl: Impl, packages: Mapping[str, str]) -> str:
    """What the bits of an implementation depend on, as a lock pins it; empty for one that names no `sums`.

    "sources 245fb0785173d194, torch 2.13.0, triton 3.7.1": the fingerprint, and the versions of torch and of the
    packages that the implementation requires.
    """
    if impl.sums is None:
        return ""
    names = dict.fromkeys(("torch", *(Requirement(text).name for text in impl.requires.packages)))
    versions = (f"{name} {packages[name].partition('+')[0]}" for name in names if name in packages)
    return ", ".join((f"sources {_own_fingerprint(manifest, impl)}", *versions))


def reached(
    targets: Iterable[str], elsewhere: frozenset[str] = frozenset(), scope: Scope = EVERYTHING
) -> Iterator[tuple[str, str]]:
    """The definitions and files that some functions reach: a hash of each, and its place, "module:name" or a path."""
    first = [match.groups() for target in targets if (match := _TARGET.fullmatch(target))]
    modules = _Counted((module.partition(".")[0] for module, _ in first), scope)
    due: list[Place] = [(module, name) for module, name in first]
    seen, met = {*due, _CATALOG}, set[int]()
    files: dict[Path, None] = {}
    while due:
        at, name = due.pop()
        module = modules[at]
        if module is None:
            continue
        definitions, more = module.found(name)
        for definition in (_without(d, scope.others) for d in definitions):
            if isinstance(definition.node, ast.Expr) and not scope.bare_calls:
                continue
            if id(definition) in met:
                continue
            met.add(id(definition))
            if elsewhere.isdisjoint(definition.targets):
                yield definition.digest, f"{at}:{name}"
            more += [place for target, place in definition.targets.items() if target not in elsewhere]
            more += definition.places
            files |= dict.fromkeys(definition.files)
        due += [place for place in dict.fromkeys(more) if place not in seen]
        seen.update(more)
    yield from ((_hash(_file_form(file)), str(file)) for file in _with_includes(files))


@dataclass(frozen=True, eq=False)
class _Definition:
    """A statement at the top of a module."""

    node: ast.stmt
    module: _Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Itself and all within."""
        return list(ast.walk(self.node))

    @property
    def bound(self) -> set[str]:
        """Names that it binds; where it binds none, all that it mentions, since it may change them."""
        if isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return {self.node.name}
        made = {n.name for n in self.nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        names = [n for n in self.nodes if isinstance(n, ast.Name)]
        return made | {n.id for n in names if isinstance(n.ctx, ast.Store)} or {n.id for n in names}

    @cached_property
    def digest(self) -> str:
        """The same for two statements that mean the same to Python, whichever version of it reads them."""
        return _hash(repr(_form(self.node)))

    @cached_property
    def places(self) -> list[Place]:
        """Where the definitions may stand of the names that it uses, each with the attribute that is taken of it."""
        of = {id(n.value): n.attr for n in self.nodes if isinstance(n, ast.Attribute)}
        words = {(n.id, of.get(id(n), "")): 0 for n in self.nodes if isinstance(n, ast.Name)}
        return [place for word in words for place in self.module.places(*word)]

    @cached_property
    def strings(self) -> list[str]:
        """Its strings, docstrings apart."""
        prose = {id(n.value) for n in self.nodes if isinstance(n, ast.Expr)}
        found = (n for n in self.nodes if isinstance(n, ast.Constant) and id(n) not in prose)
        return [n.value for n in found if isinstance(n.value, str)]

    @cached_property
    def targets(self) -> dict[str, Place]:
        """The functions that it names in strings, as manifests do."""
        found = (_TARGET.fullmatch(text) for text in self.strings)
        return {match.group(): (match.group(1), match.group(2)) for match in found if match}

    @cached_property
    def files(self) -> list[Path]:
        """The files that it names."""
        return [file for text in self.strings for file in _files(text, self.module.file)]


@cache
def _without(definition: _Definition, names: frozenset[str]) -> _Definition:
    """A definition; of a table that has rows "name" or "name.more" of two of these names or more, the other rows."""
    table = getattr(definition.node, "value", None)
    if not names or not isinstance(table, ast.Dict):
        return definition
    of = [str(key.value).partition(".")[0] if isinstance(key, ast.Constant) else "" for key in table.keys]
    if len(names.intersection(of)) < 2:
        return definition
    kept: list[Any] = [row for name, *row in zip(of, table.keys, table.values, strict=True) if name not in names]
    node: Any = copy(definition.node)
    node.value = ast.Dict([key for key, _ in kept], [value for _, value in kept])
    return _Definition(node, definition.module)


@dataclass(frozen=True, eq=False)
class _Module:
    """The definitions of a module, and where the names stand that it imports from packages that count."""

    name: str
    file: Path
    defined: dict[str, list[_Definition]] = field(default_factory=dict)
    imported: dict[str, list[Place]] = field(default_factory=dict)

    def note(self, node: ast.Import | ast.ImportFrom, package: str) -> None:
        """Where the names stand that a statement imports into a module of a package."""
        origin = ""
        if isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
        for alias in node.names:
            if origin:
                name, places = alias.asname or alias.name, [(origin, alias.name), (f"{origin}.{alias.name}", "")]
            else:  # `import a.b` binds `a`, of which nobody says here what is taken
                name, places = (
                    alias.asname or alias.name.partition(".")[0],
                    [(alias.name, "*" if "." in alias.name and not alias.asname else "")],
                )
            self.imported.setdefault(name, []).extend(places)

    def found(self, name: str) -> tuple[list[_Definition], list[Place]]:
        """The definitions of a name here (of all, without one), and the places where it may stand instead."""
        if name in {"", "*"}:
            return [d for ds in self.defined.values() for d in ds], []
        if name in self.defined:
            return self.defined[name], []
        if name in self.imported:
            return [], list(self.imported[name])
        if any((self.file.parent / name).with_suffix(end).exists() for end in (".py", "")):
            return [], []  # a module of the package, which is looked for by itself
        return self.defined.get("__getattr__", []), self._star(name)

    def places(self, name: str, attribute: str) -> list[Place]:
        """Where a word may be defined: here, in the module that it is imported from, or in the one that it names."""
        here = [(self.name, name)] if name in self.defined else []
        if name not in self.imported:
            return here or self._star(name)
        found = [(module, there or attribute) for module, there in self.imported[name]]
        within = [(f"{module}.{attribute}", "*") for module, there in self.imported[name] if attribute and not there]
        return here + found + within

    def _star(self, name: str) -> list[Place]:
        """The same in modules that everything is imported from."""
        return [(module, name) for module, there in self.imported.get("*", ()) if there == "*"]


class _Counted(dict[str, _Module | None]):
    """Modules by name, those whose sources count: of the targets' own packages, and the shared ones."""

    def __init__(self, own: Iterable[str], scope: Scope) -> None:
        super().__init__()
        self.own, self.scope, self.homes = frozenset(own), scope, dict[str, Path | None]()

    def __missing__(self, name: str) -> _Module | None:
        package, _, rest = name.partition(".")
        found = None
        if name not in self.scope.apart and (package in self.own or name.startswith(self.scope.shared)):
            if package not in self.homes:
                self.homes[package] = _home(package)
            found = _module(name, self.homes[package], rest)
        self[name] = found
        return found


def _module(name: str, home: Path | None, rest: str) -> _Module | None:
    if home is None:
        return None
    path = home.joinpath(*rest.split(".")) if rest else home
    file = path if path.suffix == ".py" else path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return None
    stat = file.stat()
    return _parsed(name, file, stat.st_mtime_ns, stat.st_size)


def _home(package: str) -> Path | None:
    """The folder of a package, or the file of a module that is none: installed, or in the clone."""
    spec, _ = guarded(lambda: find_spec(package))
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    if spec is not None and spec.origin is not None:
        return Path(spec.origin)
    return next(iter(sorted(CLONE.glob(f"backends/*/{package}/"))), None)


@cache
def _parsed(name: str, file: Path, *_: int) -> _Module:
    module = _Module(name, file)
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.parse(file.read_bytes()).body:
        definition = _Definition(node, module)
        for inner in definition.nodes:
            if isinstance(inner, ast.Import | ast.ImportFrom):
                module.note(inner, package)
        if not isinstance(node, ast.Import | ast.ImportFrom) and not _is_prose(node):
            for word in definition.bound:
                module.defined.setdefault(word, []).append(definition)
    return module


def _is_prose(node: Any) -> bool:
    """Whether a statement is a string and nothing else: a docstring, or the note on an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _form(x: Any) -> Any:
    """A node as tuples without what is empty: fields that a newer Python adds leave it as it was."""
    if isinstance(x, list):
        return [_form(item) for item in x if not _is_prose(item)]
    if not isinstance(x, ast.AST):
        return x
    fields = ((name, value) for name, value in ast.iter_fields(x) if name not in _UNSAID)
    return type(x).__name__, *((name, _form(value)) for name, value in fields if value is not None and value != [])


def _files(text: str, by: Path) -> list[Path]:
    """Files that a string in a file names: of that name in its package; with that ending beside it, as in ".cuh"."""
    match = _FILE.fullmatch(text)
    if match is None:
        return []
    name, folder = match.group(1), by.parent
    if name.startswith("."):
        return sorted(folder.glob(f"*{name}"))
    if (folder / name).is_file():
        return [folder / name]
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return sorted(folder.rglob(name)) if (folder / "__init__.py").exists() else []


def _with_includes(files: Iterable[Path]) -> list[Path]:
    due, found = list(files), dict.fromkeys(files)
    while due:
        file = due.pop()
        if file.suffix in _NATIVE:
            included = _INCLUDE.findall(file.read_text(encoding="utf-8"))
            more = [f for name in included for f in _files(name, file) if f not in found]
            due += more
            found |= dict.fromkeys(more)
    return list(found)


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _file_form(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix not in _NATIVE:
        return text
    bare = _COMMENT.sub(lambda match: match.group(1) or " ", text)
    lines = (" ".join(line.split()) for line in bare.splitlines())
    return "\n".join(line for line in lines if line)
