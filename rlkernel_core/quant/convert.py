"""A weight into a packed format and back: what the operators `quantize` and `dequantize` mean, over the codecs.

Legend: weight [Nout, K].
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import layouts
from rlkernel_core.quant.codec import ALIGN, Codec, codec_of, row_blocks
from rlkernel_core.quant.spec import QuantSpec, spec_of
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor, check_layout

_CONSTANTS: Final[dict[tuple[QuantSpec, torch.device], dict[str, Tensor]]] = {}


def quantize(
    weight: Tensor,  # [Nout, K]
    format: str | QuantSpec,  # noqa: A002  the operator's argument
    *,
    dtype: torch.dtype | None = None,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """Quantize a weight, a parameter included; the contract is `rlkernel_core.spec.quantize.QuantizeCall`.

    Args:
        weight: [Nout, K] floating, on any device.
        format: a name of FORMATS, or a QuantSpec.
        dtype: what `dequantize` gives by default; the weight's own, fp32 for float64.
        out: a weight of the same spec and shape that is written to, and returned.
    """
    spec = spec_of(format)
    weight = weight.detach()
    if out is not None:
        update_(out, weight)
        return out
    rows, columns = weight.shape
    codec = codec_of(spec)
    parts = {
        name: torch.empty(size, dtype=kind, device=weight.device)
        for name, (size, kind) in codec.storage(spec, (rows, columns)).items()
    }
    for name, table in _constants(codec, spec, next(iter(parts.values()))).items():
        parts[name].copy_(table)
    codec.encode_(parts, weight, spec)
    default = torch.float32 if weight.dtype == torch.float64 else weight.dtype
    return QuantTensor(spec, (rows, columns), dtype or default, parts)


def _constants(codec: Codec, spec: QuantSpec, like: Tensor) -> dict[str, Tensor]:
    """The codec's constant parts beside `like`; moved there once, since a copy from the host is a synchronization."""
    key = (spec, like.device)
    remembered = type(like) is Tensor  # a fake tensor must not meet a real one, nor be remembered
    if remembered and key in _CONSTANTS:
        return _CONSTANTS[key]
    with torch.device("cpu"):  # whatever the caller's default device is
        made = codec.constants(spec)
    if not remembered:
        return made
    return _CONSTANTS.setdefault(key, {name: table.to(like.device) for name, table in made.items()})


def update_(w: QuantTensor, weight: Tensor) -> None:
    """Quantize a new weight [Nout, K] into the storage of `w`, whatever its layout: no address changes.

    Raises:
        ArgumentError: the weight has another shape or device.
        LayoutError: `w` has the layout of another backend.
    """
    if tuple(weight.shape) != w.shape or weight.device != w.device:
        got = f"{list(weight.shape)} on {weight.device}"
        want = f"must be {list(w.shape)} on {w.device}, as what it replaces"
        raise ArgumentError("weight", got, want, "Quantize it anew, without out=.")
    if w.layout == CANONICAL:
        codec_of(w.spec).encode_(w.parts, weight.detach(), w.spec)
        return
    check_layout("out", w, layouts.KNOWN)
    fresh = layouts.pack(quantize(weight, w.spec), w.layout)
    for name, part in fresh.parts.items():
        w.parts[name].copy_(part)


def dequantize(w: QuantTensor, *, dtype: torch.dtype | None = None) -> Tensor:  # -> [Nout, K]
    """The weight [Nout, K] that `w` stands for, in `dtype`; None: as `w.dtype` says. See DequantizeCall."""
    w = layouts.unpack(w)
    result = torch.empty(w.shape, dtype=dtype or w.dtype, device=w.device)
    for start, stop in row_blocks(w.shape):
        result[start:stop] = decode_rows(w, start, stop)
    return result


def decode_rows(w: QuantTensor, start: int, stop: int) -> Tensor:  # -> [stop - start, K] fp32
    """Rows of a canonical weight before they are rounded to any other dtype."""
    aligned = start // ALIGN * ALIGN
    return codec_of(w.spec).decode(w.parts, w.spec, w.shape, aligned, stop)[start - aligned :]


def error_bound(w: QuantTensor, weight: Tensor) -> Tensor:  # [Nout, K] -> float64 [Nout, K]
    """How far `w`, quantized from `weight` [Nout, K], may be from it: [Nout, K] float64, the format's own error."""
    w = layouts.unpack(w)
    return codec_of(w.spec).error_bound(w.parts, weight, w.spec)
