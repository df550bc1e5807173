"""What a kernel was compiled from: a hash of its source and of every function of ours that it calls.

The same with Triton and without: it is taken of the functions as they stand in their files, and of the numbers of their
modules that they name. Imports nothing heavy.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any


def digest(function: Callable[..., Any]) -> str:
    """Hash of a Python function that a kernel is made of, and of what it reaches."""
    parts = sorted(set(_reached(function, set())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def python_function(value: Any) -> Callable[..., Any] | None:
    """The Python function behind a kernel, whoever decorated it."""
    found = getattr(value, "fn", None)
    return found if inspect.isfunction(found) else None


@cache
def _source(function: Callable[..., Any]) -> tuple[str, frozenset[str]]:
    text = textwrap.dedent(inspect.getsource(function))
    text = text[text.index("def ") :]
    return text, frozenset(n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name))


def _reached(function: Callable[..., Any], seen: set[Any]) -> Iterator[str]:
    if function in seen:
        return
    seen.add(function)
    text, names = _source(function)
    yield text
    for name in sorted(names):
        value: Any = function.__globals__.get(name)
        called = python_function(value)
        if called is not None:
            yield from _reached(called, seen)
        elif type(value).__name__.lower() == "constexpr":  # Triton's, or what stands for it
            yield f"{name} = {value.value!r}"
