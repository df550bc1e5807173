"""Inputs of the calls whose bits are compared: drawn on the CPU from seeds, so that they are equal on every device.

Copied from nowhere at run time: a change of the project's own tables of calls must not change what is compared.

Legend: N rows, B sequences, T time, V vocabulary, D hidden, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk

Given = dict[str, Any]
Table = dict[str, Callable[[], Given]]  # name of a call -> its arguments, made anew on the CPU


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    """Normal values."""
    return (std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def ids(*shape: int, below: int, seed: int = 0) -> Tensor:
    """Integers in [0, below)."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def logprobs(*shape: int, seed: int) -> Tensor:
    """Values that log-probabilities have."""
    return -0.1 - draw(*shape, seed=seed).abs()


def starts(*lengths: int) -> Tensor:
    """Bounds of packed sequences."""
    return torch.tensor([0, *lengths]).cumsum(0)


@dataclass(frozen=True)
class Size:
    """Sizes of the calls that go through features; no two are equal, so that nothing fits by chance."""

    T: int
    V: int
    D: int
    small: bool  # an interpreter runs it: features alone, few formats
    B: int = 6  # sequences, and rows; two groups of three

    def tokens(self) -> Tensor:
        """A mask [B, T] with a hole and rows of several lengths."""
        lengths = (torch.tensor([5, 3, 1, 5, 4, 2]) * self.T) // 5
        mask = torch.arange(self.T)[None] < lengths[:, None]
        return mask & (torch.arange(self.B * self.T).view(self.B, self.T) != 2)

    def lengths(self) -> Tensor:
        """Lengths [B]."""
        return (torch.tensor([5, 3, 1, 5, 4, 2]) * self.T) // 5

    def support(self, rows: int) -> rlk.Support:
        """Three ids for each row."""
        return rlk.Support(torch.arange(3 * rows) * 7 % self.V, 3 * torch.arange(rows + 1))


SMALL: Final = Size(T=5, V=64, D=32, small=True)
WHOLE: Final = Size(T=70, V=1111, D=256, small=False)


def changed(base: Callable[[], Given], changes: Mapping[str, Callable[[], Given]]) -> Table:
    """The base call, and the base call with some arguments replaced."""
    return {"plain": base} | {name: lambda c=change: {**base(), **c()} for name, change in changes.items()}


def larger(s: Size, name: str, given: Callable[[], Given]) -> Table:
    """A call that only a whole table has."""
    return {} if s.small else {name: given}


def head(s: Size) -> dict[str, Callable[[], Given]]:
    """What the operators on a head share."""
    return {
        "bias": lambda: {"bias": draw(s.V, seed=9)},
        "scale and cap": lambda: {"logit_scale": 0.5, "softcap": 2.0},
        "bfloat16": lambda: {
            "hidden": draw(s.B, s.D, std=0.2, dtype=torch.bfloat16),
            "weight": draw(s.V, s.D, seed=1, dtype=torch.bfloat16),
        },
    }
