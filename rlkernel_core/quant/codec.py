"""The interface of a codec, and the codec of each format.

A codec is the meaning of one family of formats. It says which tensors hold a weight (`storage`), fills them from a
weight (`encode_`, in place: recorded graphs keep addresses), gives fp32 rows back (`decode`) and says how far a value
may be from the weight (`error_bound`). All arithmetic is fp32, in the order that the codec's docstring states, every
operation rounded to nearest even and none contracted, so that any backend can give the same bits.

Legend: weight [Nout, K]. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol

from rlkernel_core.quant.spec import QuantSpec, row_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGN: Final = 128  # codecs decode from multiples of this row: a whole number of every group, byte and tile
_BLOCK: Final = 1 << 20  # weight elements worked on at once: 4 MiB of fp32
Storage = dict[str, tuple[tuple[int, ...], "torch.dtype"]]


class Codec(Protocol):
    """The meaning of a family of formats."""

    def storage(self, spec: QuantSpec, shape: tuple[int, int]) -> Storage:
        """Name -> sizes and dtype of every tensor that holds a weight of this shape."""
        ...

    def constants(self, spec: QuantSpec) -> dict[str, Tensor]:
        """Parts that are the same for every weight, such as a code table; stored so that no call makes them anew."""
        ...

    def encode_(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> None:
        """Quantize a weight [Nout, K] into existing parts."""
        ...

    def decode(
        self, parts: dict[str, Tensor], spec: QuantSpec, shape: tuple[int, int], start: int, stop: int
    ) -> Tensor:
        """Rows start..stop as fp32 [stop - start, K]; `start` is a multiple of ALIGN."""
        ...

    def error_bound(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> Tensor:
        """Largest |weight - decoded| that a right quantizer may leave, per element, float64 [Nout, K]."""
        ...


def codec_of(spec: QuantSpec) -> Codec:
    """The codec of a format."""
    module, _, name = row_of(spec.format).codec.partition(":")
    found: Codec = getattr(import_module(module), name)
    return found


def row_blocks(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Row ranges that cover a weight, each of a bounded number of elements and aligned; depends on the shape alone."""
    rows, columns = shape
    step = max(1, _BLOCK // max(1, columns) // ALIGN) * ALIGN
    return ((start, min(start + step, rows)) for start in range(0, rows, step))
