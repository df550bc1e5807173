"""Where the values of an argument lie in memory: the same tensor laid out in the ways in which callers have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

__all__ = ["ANY", "LAYOUTS", "SAME_VALUES", "laid_out"]


def _unused(x: Tensor) -> float:
    """What lies between values, where nothing may be read."""
    return torch.nan if x.is_floating_point() else 1 if x.dtype is torch.bool else 101


def _room(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, _unused(x), dtype=x.dtype, device=x.device)


def _padded(x: Tensor) -> Tensor:
    wide = _room(x, (*x.shape[:-1], x.shape[-1] + 3))
    view = wide[..., 1:-2]
    view.copy_(x)
    return view


def _spread(x: Tensor) -> Tensor:
    view = _room(x, (*x.shape[:-1], 2 * x.shape[-1]))[..., ::2]
    view.copy_(x)
    return view


def _transposed(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def _offset(x: Tensor) -> Tensor:
    flat = _room(x, (x.numel() + 1,))
    flat[1:] = x.reshape(-1)
    return flat[1:].view(x.shape)


LAYOUTS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "contiguous": lambda x: x.contiguous(),
    "padded": _padded,  # rows in wider storage, the first value not aligned
    "transposed": _transposed,  # the last dimension is the slowest
    "offset": _offset,  # contiguous, the first value not aligned
    "spread": _spread,  # every second value of a last dimension
    "expanded": lambda x: x[:1].expand(x.shape) if x.shape[0] else x,  # one row for all: other values
}
ANY: Final = tuple(LAYOUTS)
SAME_VALUES: Final = tuple(name for name in LAYOUTS if name != "expanded")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of a tensor in a layout; a number stays as it is."""
    return LAYOUTS[layout](x) if x.dim() else x
