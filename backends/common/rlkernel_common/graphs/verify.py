"""Comparing a replay with a plain run, bit for bit: outputs, mutated tensors, generator states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlkernel_core.tree import flatten


def clone_tensors(value: Any) -> Any:
    """The same nested value with every tensor cloned."""
    leaves, structure = flatten(value)
    return structure.build([x.detach().clone() if isinstance(x, Tensor) else x for x in leaves])


def outputs_differ(expected: Any, actual: Any) -> str | None:
    """None if bitwise equal (NaN equals NaN), else where they differ and by how much."""
    wanted, structure = flatten(expected)
    got, shape = flatten(actual)
    if structure != shape:
        return f"a plain run returns {structure.names()}, the replay {shape.names()}"
    for name, a, b in zip(structure.names(), wanted, got, strict=True):
        where = f"output {name}" if name else "the output"
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if not same_bits(a, b):
                return f"{where} differs {_by_how_much(a, b)}"
        elif a != b and (a == a or b == b):  # noqa: PLR0124  NaN is the same as NaN
            return f"{where} is {b!r}, a plain run gives {a!r}"
    return None


def tensors_differ(what: str, expected: Sequence[Tensor], actual: Sequence[Tensor]) -> str | None:
    """None if all are bitwise equal, else a sentence."""
    return None if all(map(same_bits, expected, actual)) else f"the replay left {what} different from a plain run"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Shapes, dtypes and values agree; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = a == b
    return bool((same | ((a != a) & (b != b))).all())  # noqa: PLR0124  NaN


def _by_how_much(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"in kind: {a.dtype} {list(a.shape)} by a plain run, {b.dtype} {list(b.shape)} by the replay"
    worst = (a.to(torch.float64) - b.to(torch.float64)).abs().nan_to_num(nan=float("inf")).max().item()
    return f"by up to {worst:.3g}"
