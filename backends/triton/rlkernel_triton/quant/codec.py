"""quantize@1, dequantize@1 and prepack@1 in Triton: the reference's bits, at the speed of memory.

A weight in the layout `triton_w4` is quantised again in place: codes are written as words, nothing in between.

Legend: N rows · K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
import triton
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.float8 import FLOAT8
from rlkernel_core.quant.spec import QuantSpec, spec_of
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.quantize import (
    DequantizeCall,
    PrepackCall,
    QuantizeCall,
)
from rlkernel_triton.launch import INTERPRETED, lasting, on_device_of
from rlkernel_triton.quant import blocks, encode_kernels, encode_tiles, storage
from rlkernel_triton.quant.storage import EXACT, W4, Element

_LARGEST: Final = {
    "absmax/7.5": 7.5, "absmax/7": 7.0, "minmax/15": 15.0, "absmax/127": 127.0, "absmax": 1.0,
    "absmax/127_then_round": 127.0, "signed_max/-8_then_round": -8.0,
}  # fmt: skip
_ROUNDINGS: Final = {"even": encode_tiles.EVEN, "away": encode_tiles.AWAY, "up": encode_tiles.UP}
_CONSTANTS: Final[dict[tuple[QuantSpec, torch.device], dict[str, Tensor]]] = {}
ROW_TILE: Final = (4, 1024)  # rows and columns of a program, where scales belong to rows
_NESTED: Final = 256  # nf4 scales that share a scale


def quantize(call: QuantizeCall) -> QuantTensor:
    """See `rlkernel_core.spec.quantize.QuantizeCall`."""
    weight, out = call.weight, call.out
    spec = spec_of(call.format)
    if weight.requires_grad and torch.is_grad_enabled():
        remedy = "Pass weight.detach(), or call under torch.no_grad()."
        raise ArgumentError("weight", "a tensor that requires grad", "cannot be differentiated through codes", remedy)
    weight = weight.detach()
    if out is not None:
        storage.check_layouts("out", out)
    if out is not None:
        whole = {name: part.contiguous() for name, part in out.parts.items()}
        _encode(replace(out, parts=whole), weight)
        for name, part in out.parts.items():
            if part is not whole[name]:  # strided: written beside it, then copied
                part.copy_(whole[name])
        return out
    return encoded(weight, spec, call.dtype)


def encoded(weight: Tensor, spec: QuantSpec, dtype: torch.dtype | None = None) -> QuantTensor:
    """A new canonical weight of a format that kernels quantise to."""
    shape = (weight.shape[0], weight.shape[1])
    parts = {
        name: torch.empty(size, dtype=kind, device=weight.device)
        for name, (size, kind) in codec_of(spec).storage(spec, shape).items()
    }
    for name, table in _constants(spec, weight.device).items():
        parts[name].copy_(table)
    default = torch.float32 if weight.dtype == torch.float64 else weight.dtype
    made = QuantTensor(spec, shape, dtype or default, parts)
    _encode(made, weight)
    return made


def dequantize(call: DequantizeCall) -> Tensor:  # -> [N, K]
    """Prepare one call and run it."""
    return prepare_dequantize(call)(call)


def prepare_dequantize(call: DequantizeCall) -> Callable[[DequantizeCall], Tensor]:
    """What runs calls of this shape. See `rlkernel_core.spec.quantize.DequantizeCall`."""
    storage.check_layouts("w", call.w)
    run = storage.dequantiser(call.w, call.dtype or call.w.dtype)
    return lambda call: run(call.w)


def prepack(call: PrepackCall) -> QuantTensor:
    """See `rlkernel_core.spec.quantize.PrepackCall`; the preferred one is tiles where a weight fits them."""
    w = call.w
    storage.check_layouts("w", w)
    return storage.packed(w, call.layout or storage.preferred(w))


def _constants(spec: QuantSpec, device: torch.device) -> dict[str, Tensor]:
    """Tables of a format; moved to a device once, since a copy from the host is a synchronisation."""
    key = (spec, device)
    if key not in _CONSTANTS:
        found = codec_of(spec).constants(spec)
        if "table" in found:
            found["cells"] = _cells(*(found["table"][:8] if spec.element == "fp4" else found["table"]).sort())
        _CONSTANTS[key] = lasting(lambda: {name: table.to(device) for name, table in found.items()}, device)
    return {name: table for name, table in _CONSTANTS[key].items() if name != "cells"}


def _cells(values: Tensor, codes: Tensor) -> Tensor:  # ascending [V], [V] -> [2, 64] fp32
    """The table of `encode_kernels.nearest_code` for the nearest of some values, a tie taking the lower."""
    middles = (values[:-1] + values[1:]) / 2
    numbers = (middles * 16).round() + 16  # of the cells that hold them, all different
    cells = torch.arange(64).unsqueeze(1)
    own = torch.where(numbers == cells, middles, torch.inf).amin(1)
    low, high = (codes[how(numbers, cells).sum(1)] for how in (torch.lt, torch.le))
    return torch.stack([own, (low + 16 * high).float()])


def _encode(w: QuantTensor, weight: Tensor) -> None:
    """Quantise into the storage of `w`."""
    spec = w.spec
    by_group = spec.group > 0 and spec.rows == 1
    scale = w.parts[storage.scale_name(spec)]
    if spec.double_quant:  # scales in fp32 first
        scale = torch.empty(scale.shape, dtype=torch.float32, device=scale.device)
    with on_device_of(weight):
        if blocks.reads(spec):
            blocks.encode(w, weight)
        elif by_group:
            _by_group(w, weight, scale)
        else:
            _by_row(w, weight, scale)
    if spec.double_quant:
        _nest(w, scale)


def _integers(spec: QuantSpec) -> dict[str, int]:
    """Smallest and largest integer code as it is stored."""
    if spec.element == "int8":
        return {"LEAST": -127, "MOST": 127}
    return {"LEAST": 1 if spec.scale_rule == "absmax/7" else 0, "MOST": 15}


def _by_group(w: QuantTensor, weight: Tensor, scale: Tensor) -> None:
    spec, (N, K) = w.spec, w.shape
    cells = scale
    if spec.element in {"nf4", "fp4"}:
        _constants(spec, weight.device)
        cells = _CONSTANTS[spec, weight.device]["cells"]
        if K % spec.group:  # blocks go on from row to row
            weight, N, K = weight.reshape(1, N * K), 1, N * K
    R, C = (1, 2048) if N == 1 else blocks.TILE if spec.element == "nf4" else blocks.tile_of(N, K, spec.group)
    weight = blocks.near(weight, R, C)
    grid = storage.scale_grid(w)
    encode_kernels.encode_groups[(triton.cdiv(N, R) * triton.cdiv(K, C),)](
        w=weight,
        row_stride=weight.stride(0),
        column_stride=weight.stride(1),
        codes=storage.codes(w),
        row_bytes=(K + 1) // 2,
        scale=scale,
        zero=w.parts.get("zero", scale),
        scale_row=grid["scale_row"],
        scale_group=grid["scale_group"],
        cells=cells,
        largest=_LARGEST[spec.scale_rule],
        N=N,
        K=K,
        GROUP=spec.group,
        R=R,
        C=C,
        ELEMENT=Element.of(spec).ELEMENT,
        TILED=w.layout == W4,
        SYMMETRIC=spec.symmetric,
        FLOAT_ZERO=spec.float_zero,
        ROUNDING=_ROUNDINGS[spec.rounding].value,
        **_integers(spec),
        WHOLE=N % R == 0 and K % C == 0 and storage.codes(w).data_ptr() % 16 == 0,
        INTERPRETED=INTERPRETED,
        num_warps=4,
        **EXACT,
    )


def _by_row(w: QuantTensor, weight: Tensor, scale: Tensor) -> None:
    from rlkernel_triton.quant import product  # which imports this module, to code tokens

    spec, (N, K) = w.spec, w.shape
    form = FLOAT8.get(spec.element)
    largest = _LARGEST.get(spec.scale_rule) or (form.max if form else 1.0)
    R, C = (128, 128) if spec.rows == 128 else (16, 256) if w.layout == W4 else ROW_TILE
    tiles = triton.cdiv(N, R)
    weight = blocks.near(weight, R, K)
    given: dict[str, Any] = {
        "w": weight,
        "row_stride": weight.stride(0),
        "column_stride": weight.stride(1),
        "N": N,
        "K": K,
        "WHOLE": N % R == 0 and K % C == 0,
        "INTERPRETED": INTERPRETED,
    }
    partial = scale
    if spec.rows == 0:
        partial = torch.empty(tiles, dtype=torch.int32, device=weight.device)
        encode_kernels.largest_bits[(tiles,)](**given, partial=partial, R=R, C=C, num_warps=4, **EXACT)
    encode_kernels.encode_rows[(tiles, triton.cdiv(K, C) if spec.rows == 128 else 1)](
        **given,
        codes=storage.codes(w),
        row_bytes=(K + 1) // 2,
        scale=scale,
        zero=w.parts.get("zero", scale),
        largest=largest,
        partial=partial,
        parts=tiles,
        R=R,
        C=C,
        ROWS={0: 0, 1: 1, 128: 2}[spec.rows],
        **Element.of(spec).constants,
        TILED=w.layout == W4,
        SYMMETRIC=spec.symmetric,
        POWER=spec.scale_rule == "absmax/max_pow2",
        **_integers(spec),
        LARGEST=form.max if form else 0.0,
        PARTS=triton.next_power_of_2(tiles) if spec.rows == 0 else 1,
        CAST=spec.element == "e4m3fn" and product.machine(weight.device).casts,
        num_warps=8 if spec.rows == 128 else 4,
        **EXACT,
    )


def _nest(w: QuantTensor, absmax: Tensor) -> None:
    """Quantise the scales of nf4 blocks: 1/64 of the weight's size, in torch, in the order of the flat weight."""
    parts = w.parts
    tiled = w.layout == W4
    flat = absmax.t().reshape(-1) if tiled else absmax
    finite = flat.isfinite()
    total = torch.where(finite, flat, 0).double().sum() / finite.sum().clamp(min=1)
    parts["nested_offset"].copy_(total)
    rest = flat - parts["nested_offset"]
    padded = torch.nn.functional.pad(rest, (0, -rest.numel() % _NESTED)).view(-1, _NESTED)
    nested = padded.abs().amax(1)
    nested = torch.where(nested.isfinite(), nested, torch.nan)
    parts["nested_absmax"].copy_(nested)
    ratio = padded / torch.where(nested > 0, nested, torch.inf).unsqueeze(1)
    table = parts["nested_table"]
    ratio = ratio.flatten()[: rest.numel()].nan_to_num_(nan=0.0)
    coded = torch.bucketize(ratio, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)
    parts["absmax"].copy_(coded.view(absmax.shape[::-1]).t() if tiled else coded)
