"""Tensors from a seed and the name of a distribution; the adversarial ones come from bugs that were found.

Legend: N rows · V columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Generator, Tensor


def _noise(rows: int, columns: int, g: Generator) -> Tensor:
    return torch.randn(rows, columns, generator=g, dtype=torch.float64)


def _peaked(rows: int, columns: int, g: Generator) -> Tensor:
    x = 3 * _noise(rows, columns, g)
    x[torch.arange(rows), torch.randint(columns, (rows,), generator=g)] += 30
    return x


def _tied(rows: int, columns: int, g: Generator) -> Tensor:
    return torch.randint(-2, 3, (rows, columns), generator=g).double()


def _holes(rows: int, columns: int, g: Generator) -> Tensor:
    x = 2 * _noise(rows, columns, g)
    x[torch.rand(rows, columns, generator=g) < 0.4] = -torch.inf
    x[:, 0] = x[:, 0].nan_to_num(neginf=0.0)  # at least one token is possible
    return x


# Values are multiples of 2^-6 within +-2^15 where it matters, so that every claimed dtype holds them or a rounding of
# them; the oracle sees what the dtype holds.
LOGITS: Final[Mapping[str, Callable[[int, int, Generator], Tensor]]] = {
    "normal": lambda n, v, g: 2 * _noise(n, v, g),
    "flat": lambda n, v, g: 1e-3 * _noise(n, v, g),
    "peaked": _peaked,
    "tied": _tied,
    "holes": _holes,
    "far_below": lambda n, v, g: 2 * _noise(n, v, g) - 1000,  # a running maximum that starts at 0 or -1e20 fails here
    "far_above": lambda n, v, g: 2 * _noise(n, v, g) + 1000,
    "denormal": lambda n, v, g: 1e-40 * _noise(n, v, g),
}


def logits(name: str, rows: int, columns: int, seed: int, dtype: str, device: str) -> Tensor:
    """[rows, columns] of a named distribution, rounded to the dtype."""
    g = torch.Generator().manual_seed(seed)
    return LOGITS[name](rows, columns, g).to(getattr(torch, dtype)).to(device)


def integers(shape: tuple[int, ...], high: int, seed: int, device: str) -> Tensor:
    """int64 below `high`."""
    g = torch.Generator().manual_seed(seed + 1)
    return torch.randint(high, shape, generator=g).to(device)


def normal(shape: tuple[int, ...], seed: int, device: str, dtype: str = "float64") -> Tensor:
    """Standard normal values, such as upstream gradients."""
    g = torch.Generator().manual_seed(seed + 2)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(getattr(torch, dtype)).to(device)


def strided(x: Tensor) -> Tensor:
    """The same values as a view with padded rows of NaN."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]
