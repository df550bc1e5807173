"""The module of an operator that is yet to be written: the spec's signature, its checks, and an error that says so.

Everything comes from the spec: parameters in order, what their annotations name, features with their words.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from importlib import import_module
from typing import Any, Final

from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import OpSpec

_WIDTH: Final = 118
# Not part of every build of torch: for annotations alone.
_TYPING_ONLY: Final = "torch.distributed"


def source(op: str, name: str, package: str) -> str:
    """Source of the module `package.op` of the backend `name`."""
    spec = OPERATORS[op]
    needed = _imports(spec)
    typing_only = {line for line in needed if _TYPING_ONLY in line}
    runtime = {"from rlkernel_core.errors import NotWrittenError", "from rlkernel_core.spec import OPERATORS"}
    runtime |= needed - typing_only
    if typing_only:
        runtime.add("from typing import TYPE_CHECKING")
    guarded = [""] + ["if TYPE_CHECKING:"] + [f"    {line}" for line in sorted(typing_only)] if typing_only else []
    return "\n".join(
        [
            *_wrapped(f'"""{spec.id}, yet to be written: {spec.summary}.'),
            "",
            *_wrapped(
                f"The contract is `{spec.signature.__module__}`: shapes, dtypes, errors, and the clauses that "
                f"`rlkernel conformance run {name} --op {op}` attacks once the manifest claims the operator. "
                "Features that it may claim; a call that needs another one is refused before it comes here:"
            ),
            "",
            *(line for f in spec.features for line in _wrapped(f"{f.name}: {f.text}", "    ")),
            '"""',
            "",
            "from __future__ import annotations",
            "",
            *_sorted(runtime),
            *guarded,
            "",
            "",
            *_signature(spec),
            '    """Raise NotWrittenError, once the arguments are checked as they are on every backend."""',
            f'    OPERATORS["{op}"].check(**locals())',
            "    raise NotWrittenError(",
            f'        "{spec.id} of {name} is yet to be written: write {package}/{op}.py, claim it in "',
            f'        "{package}/__init__.py, then run `rlkernel conformance run {name} --op {op}`"',
            "    )",
            "",
        ]
    )


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent and indent + "    ")


def _signature(spec: OpSpec[Any, Any]) -> list[str]:
    """The definition's lines, a parameter each."""
    lines, starred = [f"def {spec.name}("], False
    for p in spec.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            lines.append("    *,")
            starred = True
        default = "" if p.default is p.empty else f" = {_literal(p.default)}"
        lines.append(f"    {p.name}: {p.annotation}{default},")
    return [*lines, f") -> {inspect.signature(spec.signature).return_annotation}:"]


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _imports(spec: OpSpec[Any, Any]) -> set[str]:
    """Import lines for the names in the signature's annotations, as the spec's own module gets them."""
    signature = inspect.signature(spec.signature)
    said = [str(p.annotation) for p in signature.parameters.values()] + [str(signature.return_annotation)]
    words = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", " ".join(said)))
    module = import_module(spec.signature.__module__)
    lines: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            lines |= {f"import {a.name}" for a in node.names if a.name in words}
        elif isinstance(node, ast.ImportFrom):
            lines |= {f"from {node.module} import {a.name}" for a in node.names if a.name in words}
        elif isinstance(node, ast.ClassDef) and node.name in words:
            lines.add(f"from {module.__name__} import {node.name}")
    return lines


def _sorted(lines: set[str]) -> list[str]:
    """Standard library, then the rest; one line for each module."""
    names: dict[str, set[str]] = {}
    plain = sorted(line for line in lines if line.startswith("import "))
    for line in lines - set(plain):
        module, _, name = line.removeprefix("from ").partition(" import ")
        names.setdefault(module, set()).add(name)
    joined = [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]
    library = [line for line in joined if line.split()[1].partition(".")[0] in {"collections", "typing"}]
    rest = plain + [line for line in joined if line not in library]
    return [*library, *([""] if library else []), *rest]
