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
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

NUMBERS: Final = 4096  # that are kept as blocks


@pytest.fixture(scope="session", autouse=True)
def language_replaced_once_a_launch() -> Iterator[None]:
    """The interpreter without that work, for all tests of a process."""
    with without_needless_work():
        yield


@contextmanager
def without_needless_work() -> Iterator[None]:
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
        look_for_operations_once(patch, interpreter)
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


def look_for_operations_once(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Which members of the language are operations is asked once, not before each launch."""
    core = interpreter.tl.core
    places = (interpreter.tl, core, core.tensor, interpreter.tl.math, core.tensor_descriptor_base)
    known = {place: [n for n, x in inspect.getmembers(place) if core.is_builtin(x)] for place in places}

    def replace(place: Any, builder: Any, scope: Any) -> None:
        for name in known[place]:
            member = getattr(place, name)
            if core.is_builtin(member):  # not replaced yet
                interpreter._patch_attr(place, name, member, builder, scope)

    patch.setattr(interpreter, "_patch_builtin", replace)


def convert_what_differs(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Operands become what they became before, of the same types: a number becomes a block once.

    NumPy broadcasts the values of operands of different shapes itself; the types say the shape that both have.
    """
    core, handle = interpreter.tl.core, interpreter.TensorHandle
    semantic = type(interpreter.interpreter_semantic)
    tensor, convert = core.tensor, semantic.binary_op_type_checking_impl
    kinds: dict[int, tuple[Any, bool, bool]] = {}  # id of a type -> itself, whether it stays, whether divided too
    numbers: dict[Any, tuple[Any, Any, Any, Any]] = {}  # ... -> type of the block; type, values and dtype of the number
    pairs: dict[Any, tuple[Any, ...] | None] = {}  # ids of types -> the types; what each becomes, None: not known

    def stays(of: Any, div_or_mod: bool) -> bool:
        if id(of) not in kinds:
            scalar = of.scalar
            divided = not scalar.is_floating() or scalar.is_fp32() or scalar.is_fp64()  # others are divided in fp32
            kinds[id(of)] = of, not scalar.is_ptr(), not scalar.is_ptr() and divided
        return kinds[id(of)][2 if div_or_mod else 1]

    def became(before: Any, after: Any) -> tuple[Any, Any, Any] | None:
        """The type, and the dtypes of the values where they were converted; none where that is more than a cast."""
        old, new = before.handle, after.handle
        if old.dtype.scalar == new.dtype.scalar:
            return after.type, None, new.dtype
        exact = new.data.dtype.kind in "iuf" and new.data.dtype.itemsize >= 4 and old.data.dtype.kind in "biuf"
        cast = old.data.astype(new.data.dtype)
        same = exact and bool((np.broadcast_to(cast, new.data.shape) == new.data).all())
        return (after.type, new.data.dtype, new.dtype) if same and old.data.dtype.itemsize >= 4 else None

    def turned(value: Any, to: tuple[Any, Any, Any]) -> Any:
        of, dtype, scalar = to
        if dtype is not None:
            return tensor(handle(value.handle.data.astype(dtype), scalar), of)
        return value if value.type is of else tensor(value.handle, of)

    def pair(self: Any, lhs: Any, rhs: Any, flags: tuple[bool, ...]) -> tuple[Any, Any]:
        key = id(lhs.type), id(rhs.type), flags
        known = pairs.get(key)
        if known is not None:
            return turned(lhs, known[2]), turned(rhs, known[3])
        left, right = convert(self, lhs, rhs, *flags)
        if len(pairs) >= NUMBERS:
            pairs.clear()
        both = became(lhs, left), became(rhs, right)
        if None not in both:
            pairs[key] = lhs.type, rhs.type, *both
        return left, right

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
        if type(lhs) is not tensor:
            if type(rhs) is not tensor or type(lhs) not in {int, float, bool} or not stays(rhs.type, div_or_mod):
                return convert(self, lhs, rhs, *flags)
            return number(self, rhs, lhs, flags, first=True)
        if type(rhs) is tensor:
            if rhs.type is lhs.type and stays(lhs.type, div_or_mod):
                return lhs, rhs
            return pair(self, lhs, rhs, flags)
        if type(rhs) not in {int, float, bool} or not stays(lhs.type, div_or_mod):
            return convert(self, lhs, rhs, *flags)
        return number(self, lhs, rhs, flags, first=False)

    def number(self: Any, block: Any, value: Any, flags: tuple[bool, ...], *, first: bool) -> tuple[Any, Any]:
        """A block and a number, in that order or, `first`, the number before the block."""
        key = id(block.type), type(value), value or repr(value), flags, first  # 0.0 and -0.0 are equal
        if key in numbers:
            _, of, values, dtype = numbers[key]
            found = tensor(handle(values, dtype), of)
            return (found, block) if first else (block, found)
        left, right = convert(self, value, block, *flags) if first else convert(self, block, value, *flags)
        stayed, made = (right, left) if first else (left, right)
        if stayed is block:
            made.handle.data.flags.writeable = False
            if len(numbers) >= NUMBERS:
                numbers.clear()
            numbers[key] = block.type, made.type, made.handle.data, made.handle.dtype
        return left, right

    patch.setattr(semantic, "binary_op_type_checking_impl", converted)
    broadcast = semantic.broadcast_impl_value

    def broadcast_what_differs(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        of, other = lhs.type, rhs.type
        if of is other or (of.is_block() and other.is_block() and of.shape == other.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    patch.setattr(semantic, "broadcast_impl_value", broadcast_what_differs)
    unwrap = core._unwrap_if_constexpr
    wrapped, whole = core.constexpr, {tensor, int, float, bool, str, type(None), core.dtype, core.block_type, slice}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        return value if kind in whole else value.value if kind is wrapped else unwrap(value)

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
