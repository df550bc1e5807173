"""Triton's interpreter, without the work that it does for nothing.

A launch puts the interpreter's operations in the place of the language's, and takes them back at its end. A call of
another @triton.jit function inside it looks through the language for what is left to replace, which is nothing; that
search takes more time than all the arithmetic of a small kernel. Every sum, difference and product of integers is
computed once more in 64 bits for an assertion against overflow, which only kernels in debug mode carry out. Each
value describes its type and its shape anew, though a kernel has a few of them. Operands of one type are asked what type
both have, and every number becomes a block again each time it is read.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest

NUMBERS: Final = 4096  # that are kept as blocks


@pytest.fixture(scope="session", autouse=True)
def language_replaced_once_a_launch() -> Iterator[None]:
    """Searches of the language inside a launch that has replaced it are left out, and what is computed for nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    replace, executor = interpreter._patch_lang, interpreter.GridExecutor
    launch, nothing, replaced = executor.__call__, SimpleNamespace(restore=lambda: None), set()
    language: dict[str, frozenset[int]] = {}  # module of kernels -> which names of the language it sees

    def once(fn: Any) -> Any:
        if (key := language.get(fn.__module__)) is None:
            modules = {id(x) for x in fn.__globals__.values() if isinstance(x, ModuleType)}
            key = language[fn.__module__] = frozenset(modules & {id(interpreter.tl), id(interpreter.tl.core)})
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
        patch.setattr(interpreter, "_patch_attr", direct(interpreter))
        describe_types_once(patch, interpreter)
        convert_what_differs(patch, interpreter)
        yield


def direct(interpreter: Any) -> Callable[..., None]:
    """Puts an operation of the interpreter in the place of one of the language without the steps between the two."""
    semantic = interpreter.interpreter_semantic

    def patch_attr(obj: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        operation = getattr(member, "__wrapped__", member)  # without the question whether a kernel calls it

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return operation(*args, **kwargs)

        scope.set_attr(obj, name, interpreted)

    return patch_attr


def convert_what_differs(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Operands of one type stay as they are, and a number beside a block becomes a block once."""
    core, handle = interpreter.tl.core, interpreter.TensorHandle
    semantic = type(interpreter.interpreter_semantic)
    tensor, convert = core.tensor, semantic.binary_op_type_checking_impl
    kinds: dict[int, tuple[Any, bool, bool]] = {}  # id of a type -> itself, whether it stays, whether divided too
    numbers: dict[Any, tuple[Any, Any, Any, Any]] = {}  # ... -> type of the block; type, values and dtype of the number

    def stays(of: Any, div_or_mod: bool) -> bool:
        if id(of) not in kinds:
            scalar = of.scalar
            divided = not scalar.is_floating() or scalar.is_fp32() or scalar.is_fp64()  # others are divided in fp32
            kinds[id(of)] = of, not scalar.is_ptr(), not scalar.is_ptr() and divided
        return kinds[id(of)][2 if div_or_mod else 1]

    def converted(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        flags = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if type(lhs) is not tensor or not stays(lhs.type, div_or_mod):
            return convert(self, lhs, rhs, *flags)
        if type(rhs) is tensor and rhs.type is lhs.type:
            return lhs, rhs
        if type(rhs) not in {int, float, bool}:
            return convert(self, lhs, rhs, *flags)
        key = id(lhs.type), type(rhs), rhs or repr(rhs), flags  # 0.0 and -0.0 are equal
        if key in numbers:
            _, of, values, dtype = numbers[key]
            return lhs, tensor(handle(values, dtype), of)
        left, right = convert(self, lhs, rhs, *flags)
        if left is lhs:
            right.handle.data.flags.writeable = False
            if len(numbers) >= NUMBERS:
                numbers.clear()
            numbers[key] = lhs.type, right.type, right.handle.data, right.handle.dtype
        return left, right

    patch.setattr(semantic, "binary_op_type_checking_impl", converted)
    unwrap = core._unwrap_if_constexpr
    wrapped = core.constexpr

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        return value if kind is tensor or kind is int else value.value if kind is wrapped else unwrap(value)

    patch.setattr(core, "_unwrap_if_constexpr", unwrapped)


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
