"""Triton's interpreter, without the work that it does for nothing.

A launch puts the interpreter's operations in the place of the language's, and takes them back at its end. A call of
another @triton.jit function inside it looks through the language for what is left to replace, which is nothing; that
search takes more time than all the arithmetic of a small kernel. And every sum, difference and product of integers is
computed once more in 64 bits for an assertion against overflow, which only kernels in debug mode carry out.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def language_replaced_once_a_launch() -> Iterator[None]:
    """Searches of the language inside a launch that has replaced it, and operands of no assertion, are left out."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    replace, executor = interpreter._patch_lang, interpreter.GridExecutor
    launch, nothing, replaced = executor.__call__, SimpleNamespace(restore=lambda: None), set()

    def once(fn: Any) -> Any:
        modules = {id(x) for x in fn.__globals__.values() if isinstance(x, ModuleType)}
        key = frozenset(modules & {id(interpreter.tl), id(interpreter.tl.core)})
        if key in replaced:
            return nothing
        replaced.add(key)
        return replace(fn)

    def alone(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            replaced.clear()

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(executor, "__call__", alone)
        yield
