"""Layouts of packed codes: the canonical one, and the tiles that the reference backend's prepack makes.

A layout moves bytes and changes none: `unpack(pack(w, layout))` has the bits of `w`. A layout id belongs to whoever
made it; code that does not know it refuses with a LayoutError.

`reference_tiled` cuts the bytes of `codes` [Nout, B] into tiles of 16 rows x 64 bytes, each contiguous, padded with
zero bytes at the edges: the shape of a layout that matrix hardware wants, without tying it to any.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError, LayoutError
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.spec import row_of
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor, check_layout

TILED: Final = "reference_tiled"
KNOWN: Final = (CANONICAL, TILED)
_ROWS: Final = 16
_BYTES: Final = 64


def pack(w: QuantTensor, layout: str = TILED) -> QuantTensor:
    """The same weight in another layout.

    Raises:
        LayoutError: `w` has, or is to have, a layout that is not known here.
        ArgumentError: the format cannot be tiled at this K.
    """
    if layout not in KNOWN:
        raise LayoutError(f"layout: {layout!r} is not known here. Choose from {', '.join(KNOWN)}.")
    check_layout("w", w, KNOWN)
    if w.layout == layout:
        return w
    if layout == CANONICAL:
        return unpack(w)
    codes = _tile(_matrix(w))
    return QuantTensor(w.spec, w.shape, w.dtype, {**w.parts, "codes": codes}, layout)


def unpack(w: QuantTensor) -> QuantTensor:
    """The weight `w` in the canonical layout; itself if it is."""
    check_layout("w", w, KNOWN)
    if w.layout == CANONICAL:
        return w
    size, dtype = codec_of(w.spec).storage(w.spec, w.shape)["codes"]
    row_bytes = torch.Size(size).numel() // w.shape[0]
    codes = _untile(w.parts["codes"], w.shape[0], row_bytes).view(dtype).view(size)
    return QuantTensor(w.spec, w.shape, w.dtype, {**w.parts, "codes": codes})


def _matrix(w: QuantTensor) -> Tensor:  # -> [Nout, B] uint8
    codes = w.parts["codes"].view(torch.uint8)
    if codes.dim() == 1 and w.shape[1] % 2:
        text = f"rows of {row_of(w.format).spec.format} with an odd K = {w.shape[1]} start inside a byte"
        raise ArgumentError("w", w, text, "Use it as it is; only prepack needs an even K.")
    return codes.view(w.shape[0], -1)


def _tile(codes: Tensor) -> Tensor:  # [Nout, B] -> [row tiles, byte tiles, 16, 64]
    rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -columns % _BYTES, 0, -rows % _ROWS))
    tiles = padded.view(padded.shape[0] // _ROWS, _ROWS, padded.shape[1] // _BYTES, _BYTES)
    return _copied(tiles.permute(0, 2, 1, 3))


def _untile(tiles: Tensor, rows: int, columns: int) -> Tensor:  # inverse of _tile
    return _copied(tiles.permute(0, 2, 1, 3).flatten(2, 3).flatten(0, 1)[:rows, :columns])


def _copied(x: Tensor) -> Tensor:
    """Contiguous memory of its own, also where x is contiguous already: an update of one layout is none of another."""
    return x.clone(memory_format=torch.contiguous_format)
