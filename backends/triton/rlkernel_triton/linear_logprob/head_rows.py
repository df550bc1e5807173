"""Rows of the output head as products read them: of a stored head where they lie, of a quantized one decoded.

A quantized head is decoded to fp32 by the kernel of `dequantize`, as many rows at a time as a block of columns has,
into one room that the next rows overwrite: 4 D bytes a row, whatever V is. Every row is decoded once forward, once for
each block of rows backward, and once more for the gradient of a bias or of B where there are several blocks of rows.
Decoding inside the product would repeat it for every 128 rows of hidden states. Beside hidden states of 16 bits the
products take each decoded number as two of bf16 (`common.linear_tile.dot_of_decoded`).

Legend: D hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.quantize import STORED
from rlkernel_triton.claims import FORMATS
from rlkernel_triton.launchers import Launcher
from rlkernel_triton.quant.dequantize import dequantizer
from rlkernel_triton.quant.layouts import check_layout

Weight = Tensor | QuantTensor
ALIGNED: Final = 16  # rows of a layout of tiles begin and end at multiples of it
SPARE: Final = 2 * ALIGNED  # rows that are decoded besides those that are asked for, at most


def unread(weight: Weight) -> Reason | None:
    """Why the kernels cannot decode a quantized head; None if they can, or if it is stored."""
    if isinstance(weight, Tensor):
        return None
    missing = sorted(weight.spec.features(*STORED) - FORMATS)
    if not missing:
        return None
    text = f"a head of {weight.spec}; {', '.join(missing)} is not read here"
    return Reason("shape", "unsupported", text, "Quantize the head to another format.")


def stored(weight: Weight) -> Tensor | None:
    """A head that is a tensor; None for a quantized one."""
    return weight if isinstance(weight, Tensor) else None


def parts_of(weight: Weight) -> list[Tensor]:
    """The tensors of a quantized head; none of a stored one."""
    return [] if isinstance(weight, Tensor) else weight.flatten()[0]


def head_like(hidden: Tensor, weight: Weight) -> Tensor:
    """A stored head, or for a quantized one a tensor without memory, of the type by which its products are tiled."""
    if isinstance(weight, Tensor):
        return weight
    return torch.empty(weight.shape, dtype=hidden.dtype, device="meta")


class HeadRows:
    """What hands out rows of heads like this one.

    Args:
        launcher: what binds the kernel that decodes.
        weight: [V, D]; none of its values is read.
        most: rows that are asked for at a time.

    Raises:
        LayoutError: the layout of a quantized head is not known here.
    """

    def __init__(self, launcher: Launcher, weight: Weight, most: int) -> None:
        self.decoded = not isinstance(weight, Tensor)
        if not isinstance(weight, Tensor):
            check_layout("weight", weight)
        self._launcher, self._size = launcher, (min(most, weight.shape[0]) + SPARE, weight.shape[1])
        self._bound: dict[tuple[int, int], tuple[int, int, Callable[..., Tensor]]] = {}

    def room(self, weight: Weight) -> Tensor | None:
        """Room for decoded rows; None where none are."""
        if isinstance(weight, Tensor):
            return None
        return torch.empty(self._size, dtype=torch.float32, device=weight.device)

    def __call__(self, weight: Weight, room: Tensor | None, start: int, width: int) -> Tensor:
        """Rows from `start` on: those of a stored head go on to its end, decoded ones are `width`, in `room`."""
        if isinstance(weight, Tensor):
            return weight[start:] if start else weight
        found = self._bound.get((start, width))
        if found is None:
            aligned = 1 if weight.layout == CANONICAL else ALIGNED
            before, after = start % aligned, -(start + width) % aligned
            rows = (start - before, start + width + after)
            found = before, rows[1] - rows[0], dequantizer(weight, torch.float32, rows, self._launcher)
            self._bound[start, width] = found
        before, count, decode = found
        decoded = decode(weight, None if room is None else room[:count])
        return decoded[before : before + width]
