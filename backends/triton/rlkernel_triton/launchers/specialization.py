"""What Triton assumes of an argument when it compiles a kernel: its type, "equals 1", "a multiple of 16".

Triton asks this of every argument at every launch. A launcher asks it when a kernel is compiled, and afterwards of
numbers alone: of a tensor, type and alignment are part of the shape that a plan was made for. A wrong assumption is
silent corruption, so the tests hold these rules against Triton's own, and a checked launcher asks them at every launch.

Imports torch, and neither Triton nor an operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

ALIGNMENT: Final = 16  # bytes of a pointer, or the divisor of a number
POINTER_TYPES: Final[Mapping[torch.dtype, str]] = {
    torch.bool: "*u1",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.uint32: "*u32",
    torch.uint64: "*u64",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
_WITHIN_32_BITS: Final = 2**31 - 1  # bytes that a buffer instruction of an AMD GPU reaches


class Specialization(NamedTuple):
    """What one argument is compiled for."""

    type: str  # "*bf16", "i32", "fp32"; "constexpr" for None and for a number known to be 1
    divisible: bool = False  # a pointer aligned to 16 bytes, a number that is a multiple of 16
    constant: int | None = None  # the value of a constexpr: 1, or None


class Parameter(NamedTuple):
    """A parameter of a kernel."""

    name: str
    constexpr: bool
    specialize: bool  # False where the kernel is declared `do_not_specialize` in it
    align: bool  # False where it is declared `do_not_specialize_on_alignment`


def parameters(kernel: Any) -> tuple[Parameter, ...]:
    """The parameters of what `triton.jit` made, interpreted or not.

    Raises:
        TypeError: it is no kernel, or declares the type of a run-time parameter, which launchers do not know.
    """
    function = getattr(kernel, "fn", None)
    if not inspect.isfunction(function):
        raise TypeError(f"{kernel!r} is no kernel of triton.jit; autotuned kernels are launched through Triton")
    declared = getattr(kernel, "kwargs", None)  # of an interpreted kernel
    if declared is None:
        declared = {n: getattr(kernel, n, None) for n in ("do_not_specialize", "do_not_specialize_on_alignment")}
    plain, unaligned = (tuple(declared.get(n) or ()) for n in ("do_not_specialize", "do_not_specialize_on_alignment"))
    return _parameters(function, plain, unaligned)


@cache
def _parameters(
    function: Callable[..., Any], plain: tuple[str | int, ...], unaligned: tuple[str | int, ...]
) -> tuple[Parameter, ...]:
    found = []
    for i, (name, p) in enumerate(inspect.signature(function).parameters.items()):
        annotation = "" if p.annotation is inspect.Parameter.empty else str(p.annotation)
        constexpr = "constexpr" in annotation.lower()
        if annotation and not constexpr:
            raise TypeError(f"{function.__name__} declares {name}: {annotation}; launchers know constexpr alone")
        specialize, align = (name not in names and i not in names for names in (plain, unaligned))
        found.append(Parameter(name, constexpr, specialize, align))
    return tuple(found)


def specialization_of(value: Any, *, specialize: bool = True, align: bool = True) -> Specialization:
    """What Triton assumes of one run-time argument.

    Args:
        value: a tensor, a number, None, or a descriptor of a tensor for the copy engine.
        specialize: False for a parameter declared `do_not_specialize`: only its type matters.
        align: False for one declared `do_not_specialize_on_alignment`.

    Raises:
        TypeError: Triton takes no such argument.
    """
    if isinstance(value, torch.Tensor):
        return Specialization(POINTER_TYPES[value.dtype], specialize and align and aligned(value))
    if is_descriptor(value):
        return Specialization(f"tensordesc<{POINTER_TYPES[value.base.dtype][1:]}{list(value.block_shape)}>")
    return specialization_of_number(value, specialize=specialize, align=align)


def is_descriptor(value: Any) -> bool:
    """Whether a value describes a tensor for the copy engine: Triton's class, or another that has its fields."""
    return hasattr(value, "block_shape")


_NONE: Final = Specialization("constexpr")
_ONE: Final = Specialization("constexpr", constant=1)
_BOOL: Final = Specialization("u1")
_FLOAT: Final = Specialization("fp32")
_I32, _I64, _U64 = ((Specialization(t), Specialization(t, divisible=True)) for t in ("i32", "i64", "u64"))


def specialization_of_number(value: float | None, *, specialize: bool = True, align: bool = True) -> Specialization:
    """What Triton assumes of a number, or of None.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, float):
        return _FLOAT
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return _BOOL
    if not isinstance(value, int):
        raise TypeError(f"a kernel takes tensors, numbers and None; got {type(value).__name__}")
    if specialize and value == 1:
        return _ONE
    if -(2**31) <= value < 2**31:
        kinds = _I32
    elif 2**63 <= value < 2**64:
        kinds = _U64
    else:
        kinds = _I64
    return kinds[specialize and align and value % ALIGNMENT == 0]


def aligned(x: torch.Tensor) -> bool:
    """Whether a tensor begins at a multiple of 16 bytes. One without memory is taken for allocated by torch."""
    if x.is_meta or isinstance(x, FakeTensor):
        return x.storage_offset() * x.element_size() % ALIGNMENT == 0
    return x.data_ptr() % ALIGNMENT == 0


def within_32_bits(x: torch.Tensor) -> bool:
    """Whether all of a tensor's storage lies within 2 GiB, which Triton tells the compiler of AMD GPUs."""
    return x.untyped_storage().nbytes() <= _WITHIN_32_BITS
