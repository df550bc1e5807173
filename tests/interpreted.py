"""Triton's interpreter, without the work that it does for nothing.

A launch puts the interpreter's operations in the place of the language's, and takes them back at its end. A call of
another @triton.jit function inside it looks through the language for what is left to replace, which is nothing; that
search takes more time than all the arithmetic of a small kernel. Every sum, difference and product of integers is
computed once more in 64 bits for an assertion against overflow, which only kernels in debug mode carry out. And each
value describes its type and its shape anew, though a kernel has a few of them.
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
    """Searches of the language inside a launch that has replaced it are left out, and what is computed for nothing."""
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
        patch.setattr(interpreter, "_patch_lang", once)
        patch.setattr(executor, "__call__", alone)
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        describe_types_once(patch, interpreter)
        yield


def describe_types_once(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """One object for each type of block but of pointers, and one description of each type's values."""
    core, numpy_type = interpreter.tl.core, interpreter._get_np_dtype
    block, describe_block, describe_tensor = core.block_type, core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, Any] = {}
    numpy_types: dict[str, Any] = {}

    def known_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        if element_ty.is_ptr():
            return object.__new__(cls)
        key = (element_ty.name, *(s.value if isinstance(s, core.constexpr) else s for s in shape))
        return blocks[key] if key in blocks else blocks.setdefault(key, object.__new__(cls))

    def block_once(self: Any, element_ty: Any, shape: Any) -> None:
        if "numel" not in vars(self):
            describe_block(self, element_ty, shape)

    def tensor_once(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 Triton's name
        if "of_values" not in vars(type):
            describe_tensor(self, handle, type)
            type.of_values = {name: value for name, value in vars(self).items() if name != "handle"}
        vars(self).update(type.of_values, handle=handle)

    def numpy_type_once(of: Any) -> Any:
        if of.name not in numpy_types:
            numpy_types[of.name] = numpy_type(of)
        return numpy_types[of.name]

    patch.setattr(block, "__new__", staticmethod(known_block))
    patch.setattr(block, "__init__", block_once)
    patch.setattr(core.tensor, "__init__", tensor_once)
    patch.setattr(interpreter, "_get_np_dtype", numpy_type_once)
