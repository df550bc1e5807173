"""The module of an operator that is yet to be written: a function of its record that raises NotWrittenError.

Everything comes from the spec: the record, what the operator returns, features with their words.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib import import_module
from typing import Any, Final

from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import OpSpec

_WIDTH: Final = 118


def source(op: str, name: str, package: str) -> str:
    """Source of the module `package.op` of the backend `name`."""
    spec = OPERATORS[op]
    record, result = spec.record.__name__, str(spec.signature.return_annotation)
    return "\n".join(
        [
            *_wrapped(f'"""{spec.id}, yet to be written: {spec.summary}.'),
            "",
            *_wrapped(
                f"The contract is `{spec.record.__module__}`: shapes, dtypes, errors, and the clauses that "
                f"`rlkernel conformance run {name} --op {op}` attacks once the manifest claims the operator. "
                "The operator's check has passed every call that comes here. "
                "Features that it may claim; a call that needs another one is refused before it comes here:"
            ),
            "",
            *(line for f in spec.features for line in _wrapped(f"{f.name}: {f.text}", "    ")),
            '"""',
            "",
            "from __future__ import annotations",
            "",
            *_imports(spec, result),
            "",
            "",
            f"def {op}(call: {record}) -> {result}:",
            '    """Raise NotWrittenError."""',
            "    raise NotWrittenError(",
            f'        "{spec.id} of {name} is yet to be written: write {package}/{op}.py, claim it in "',
            f'        "{package}/__init__.py, then run `rlkernel conformance run {name} --op {op}`"',
            "    )",
            "",
        ]
    )


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent and indent + "    ")


def _imports(spec: OpSpec[Any, Any], result: str) -> list[str]:
    """Import lines for the error, the record and the result, as the record's own module gets them."""
    record = spec.record
    names = {"rlkernel_core.errors": {"NotWrittenError"}}
    names.setdefault(record.__module__, set()).add(record.__name__)
    names.setdefault(_home(record.__module__, result), set()).add(result)
    return [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]


def _home(module: str, result: str) -> str:
    """The module that an operator's result is imported from."""
    for node in ast.walk(ast.parse(inspect.getsource(import_module(module)))):
        if isinstance(node, ast.ImportFrom) and node.module and any(a.name == result for a in node.names):
            return node.module
    return module
