"""Argument checks that every implementation shares, so that bad input gives the same typed error on every backend.

Each check names the argument, what it got and the remedy. They look at metadata only (rank, sizes, dtype, device):
none reads a value off the device, so all are allowed inside a captured graph.
Imports no torch until a device is named; tensors are used through their own attributes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core.errors import ArgumentError, ArgumentTypeError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor


_INT64: Final = 2**63


def is_tensor(x: object) -> bool:
    """True for torch tensors (fake and parameter included) without importing torch."""
    return hasattr(x, "dtype") and hasattr(x, "stride") and hasattr(x, "requires_grad")


def describe(x: Any) -> str:
    """`float32[4, 7] on cpu` for a tensor, else `repr`, for error messages."""
    if is_tensor(x):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}"
    text = repr(x)
    return text if len(text) <= 80 else text[:77] + "..."


def tensor(name: str, x: Any, *, ndim: int | Collection[int] | None = None, kind: str | None = None) -> Tensor:
    """`x` is a dense tensor of the given rank(s) and kind ('floating', 'integer', 'bool', 'real')."""
    if not is_tensor(x):
        raise ArgumentTypeError(name, describe(x), "must be a torch.Tensor", f"Pass torch.as_tensor({name}).")
    if str(x.layout) != "torch.strided":
        raise ArgumentTypeError(name, f"layout {x.layout}", "must be a dense tensor", f"Pass {name}.to_dense().")
    ranks = (ndim,) if isinstance(ndim, int) else ndim
    if ranks is not None and x.dim() not in ranks:
        want = " or ".join(str(r) for r in sorted(ranks))
        raise ArgumentError(name, describe(x), f"must have {want} dimension(s)", "Reshape it with .view or .reshape.")
    if kind == "floating" and not x.is_floating_point():
        raise ArgumentTypeError(name, describe(x), "must be a floating-point tensor", "Cast it with .float().")
    if kind == "floating" and x.element_size() < 2:
        raise ArgumentTypeError(
            name,
            describe(x),
            "must be bf16, fp16, fp32 or float64",
            "8-bit floats have no scale here: use .bfloat16().",
        )
    if x.is_quantized:
        raise ArgumentTypeError(name, describe(x), "is a quantized torch tensor", f"Pass {name}.dequantize().")
    if kind == "integer" and (x.is_floating_point() or x.is_complex() or str(x.dtype) == "torch.bool"):
        raise ArgumentTypeError(name, describe(x), "must be an integer tensor", "Cast it with .long().")
    if kind == "real" and x.is_complex():
        raise ArgumentTypeError(name, describe(x), "must be a tensor of real numbers", "Cast it with .float().")
    if kind == "bool" and str(x.dtype) != "torch.bool":
        raise ArgumentTypeError(
            name, describe(x), "must be a bool tensor (masks select, they never multiply)", f"Pass {name}.bool()."
        )
    result: Tensor = x
    return result


def shape(name: str, x: Tensor, want: Sequence[int], of: str) -> None:
    """`x` has exactly the shape `want`, which is the shape of `of`."""
    if tuple(x.shape) != tuple(want):
        raise ArgumentError(name, describe(x), f"must have the shape of {of}, {list(want)}", "Align the two.")


def same_device(name: str, x: Tensor, other: Tensor, of: str) -> None:
    """`x` lives where `other` lives."""
    if x.device != other.device:
        raise ArgumentError(name, describe(x), f"must be on the device of {of}, {other.device}", "Move one of them.")


def aligned(name: str, x: Any, want: Sequence[int], of: str, *, kind: str, beside: Tensor, where: str) -> None:
    """`x`, where it is given, has this kind and the shape of `of`, and lives where `beside`, named `where`, lives."""
    if x is not None:
        shape(name, tensor(name, x, kind=kind), want, of)
        same_device(name, x, beside, where)


def real(name: str, x: Any, remedy: str = "") -> None:
    """`x` is a Python number; NaN and inf are."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise ArgumentTypeError(name, describe(x), "must be a number", remedy or "Pass a Python float or int.")


def number(
    name: str,
    x: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    remedy: str = "",
) -> float:
    """`x` is a finite Python number within the bounds."""
    real(name, x, remedy)
    if isinstance(x, int) and not -_INT64 <= x < _INT64:
        raise ArgumentError(name, describe(x), "is beyond 64 bits", remedy or "Pass a float.")
    if not math.isfinite(x):
        raise ArgumentError(name, x, "must be finite", remedy or "Pass a finite number.")
    _bounds(name, x, above=above, at_least=at_least, at_most=at_most, remedy=remedy)
    return float(x)


def integer(name: str, x: Any, *, at_least: int = -_INT64, at_most: int = _INT64 - 1, remedy: str = "") -> int:
    """`x` is a Python int (not a bool) within the bounds; those of a 64-bit integer unless said."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise ArgumentTypeError(name, describe(x), "must be an integer", remedy or "Pass a Python int.")
    _bounds(name, x, at_least=at_least, at_most=at_most, remedy=remedy)
    return x


def _bounds(
    name: str,
    x: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    remedy: str = "",
) -> None:
    if above is not None and not x > above:
        raise ArgumentError(name, x, f"must be > {above}", remedy or f"Pass a number above {above}.")
    if at_least is not None and not x >= at_least:
        raise ArgumentError(name, x, f"must be >= {at_least}", remedy or f"Pass at least {at_least}.")
    if at_most is not None and not x <= at_most:
        raise ArgumentError(name, x, f"must be <= {at_most}", remedy or f"Pass at most {at_most}.")


def flags(**given: object) -> None:
    """The named arguments are True or False: what Python calls true may be a mistyped argument."""
    for name, x in given.items():
        if not isinstance(x, bool):
            raise ArgumentTypeError(name, describe(x), "must be True or False", f"Pass bool({name}).")


def pair(
    name: str, x: Any, *, above: float | None = None, at_least: float | None = None, infinite: bool = False
) -> tuple[float, float]:
    """`x` is a pair of numbers within the bounds, finite unless said otherwise."""
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise ArgumentTypeError(name, describe(x), "must be a pair of numbers", f"Pass {name}=(a, b).")
    for i, v in enumerate(x):
        if infinite and isinstance(v, float) and math.isinf(v):
            _bounds(f"{name}[{i}]", v, above=above, at_least=at_least)
        else:
            number(f"{name}[{i}]", v, above=above, at_least=at_least)
    return x[0], x[1]


def interval(name: str, x: Any) -> None:
    """`x` is (low, high) with low <= high, either of which may be infinite."""
    low, high = pair(name, x, infinite=True)
    if low > high:
        raise ArgumentError(name, x, "is empty", "Pass (low, high).")


def instance(name: str, x: object, cls: type) -> None:
    """`x` is one of our own dataclasses."""
    if not isinstance(x, cls):
        raise ArgumentTypeError(name, describe(x), f"must be a {cls.__name__}", f"Pass {cls.__name__}(...).")


def device(name: str, x: Any) -> None:
    """`x` names a device of this machine, or is None."""
    if x is None:
        return
    import torch

    remedy = 'Pass None, "cpu", "cuda:0" or a torch.device.'
    if isinstance(x, bool) or not isinstance(x, (str, int, torch.device)):
        raise ArgumentTypeError(name, describe(x), "must be a device", remedy)
    try:
        torch.device(x)
    except RuntimeError as error:
        raise ArgumentError(name, repr(x), "is no device of this machine", remedy) from error


def process_group(name: str, x: Any) -> None:
    """`x` is a process group, or None."""
    if x is not None and not (callable(getattr(x, "rank", None)) and callable(getattr(x, "size", None))):
        raise ArgumentTypeError(
            name, describe(x), "must be a torch.distributed.ProcessGroup", "Pass dist.new_group(...), or None."
        )


def choice(name: str, x: object, choices: Collection[str]) -> str:
    """`x` is one of the names in `choices`."""
    if not isinstance(x, str) or x not in choices:
        hint = did_you_mean(str(x), choices).removeprefix("; ")
        raise ArgumentError(
            name, repr(x), "is not a known choice", hint[0].upper() + hint[1:] + ("" if hint.endswith("?") else ".")
        )
    return x


def exclusive(**given: object) -> None:
    """At most one of the named arguments is not None."""
    names = [n for n, v in given.items() if v is not None]
    if len(names) > 1:
        raise ArgumentError(
            " and ".join(names), "both", "are two ways to say the same thing", f"Pass only one of {', '.join(given)}."
        )
