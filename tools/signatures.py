"""Write registry/rlkernel/signatures.pyi: every public operator with its real signature, for editors.

    python tools/signatures.py

The call records are where arguments are written down; editors that do not run code (jedi among them) do not see through
the types that make a function of a record. A test holds the file against the records.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from rlkernel_core.files import write_text

ROOT = Path(__file__).parents[1]
FILE = ROOT / "registry" / "rlkernel" / "signatures.pyi"
HEAD = """# The public operators with their signatures. Written by tools/signatures.py; do not edit.
# Each is a function of its call's arguments; `bind`, of the same, gives one that keeps to the implementation that
# takes this call.
# ruff: noqa: A002 arguments are named by the records

"""
COMMON = """
_R_co = TypeVar("_R_co", covariant=True)

class Operator(Protocol):
    spec: OpSpec[Any, Any]
    last: Choice | None
    __name__: str

"""


@cache
def homes(module: str) -> dict[str, str]:
    """Where the names of a module come from: its imports, those for type checkers included, and its own classes."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(str(import_module(module).__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {name.asname or name.name: node.module for name in node.names}
        elif isinstance(node, ast.ClassDef):
            found[node.name] = module
    return found


def used(annotation: str, modules: list[str]) -> set[tuple[str, str]]:
    """(module, name) of the names in an annotation that these modules import or define; ("torch", "") imports torch."""
    out = {("torch", "")} if "torch." in annotation else set()
    for name in re.findall(r"(?<![\w.])[A-Za-z_]\w*(?!\.)", annotation):
        home = next((homes(m)[name] for m in modules if name in homes(m)), None)
        if home is not None:
            out.add((home, name))
    return out


def parameters(spec: Any) -> list[str]:
    """A line for each parameter."""
    lines, starred = [], False
    for p in spec.parameters.values():
        if p.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            lines, starred = [*lines, "*"], True
        plain = p.default is None or isinstance(p.default, bool | int | float | str)
        default = "" if p.default is p.empty else f" = {p.default!r}" if plain else " = ..."
        lines.append(f"{p.name}: {p.annotation}{default}".replace(chr(39), chr(34)))
    return lines


def operator(spec: Any) -> str:
    """A class of functions with an operator's arguments, the operator's own, and its name."""
    result = spec.signature.return_annotation
    takes = "".join(f"        {line},\n" for line in ("self", *parameters(spec)))
    name = "".join(word.title() for word in spec.name.split("_"))
    return (
        f"class _{name}Function(Protocol[_R_co]):\n    def __call__(\n{takes}    ) -> _R_co: ...\n\n"
        f"class _{name}(_{name}Function[{result}], Operator, Protocol):\n"
        f"    bind: _{name}Function[_{name}Function[{result}]]\n\n"
        f"{spec.name}: _{name}\n"
    )


def text() -> str:
    """The file's content."""
    from rlkernel_core.spec import OPERATORS

    needed = {("typing", "Any"), ("typing", "Protocol"), ("typing", "TypeVar"), ("rlkernel.plans", "Choice")}
    needed.add(("rlkernel_core.spec.form", "OpSpec"))
    for spec in OPERATORS.values():
        modules = [base.__module__ for base in spec.record.__mro__ if base.__module__.startswith("rlkernel_core")]
        for annotation in (*(p.annotation for p in spec.parameters.values()), spec.signature.return_annotation):
            needed |= used(str(annotation), modules)
    by_module: dict[str, set[str]] = {}
    for module, name in needed:
        by_module.setdefault(module, set()).add(name)
    imports: dict[int, list[str]] = {}
    for module, names in sorted(by_module.items()):
        top = module.partition(".")[0]
        group = 0 if top in sys.stdlib_module_names else 2 if top.startswith("rlkernel") else 1
        if "" in names:
            imports.setdefault(group, []).insert(0, f"import {module}\n")
        if given := sorted(names - {""}):
            imports.setdefault(group, []).append(f"from {module} import {', '.join(given)}\n")
    blocks = "\n".join("".join(lines) for _, lines in sorted(imports.items()))
    return HEAD + blocks + COMMON + "\n".join(operator(OPERATORS[name]) for name in sorted(OPERATORS))


if __name__ == "__main__":
    write_text(FILE, text())
    print(FILE.relative_to(ROOT))
