"""quantize@1, dequantize@1 and prepack@1 in Triton: the reference's bits, at the speed of memory.

A weight in the layout `triton_w4` is quantised again in place: codes are written as words, nothing in between.

Legend: N rows · K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
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
from rlkernel_triton.common.host import INTERPRETED, lasting
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for, planned
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
    """Prepare one call and run it."""
    return prepare_quantize(call)(call)


def prepare_quantize(call: QuantizeCall) -> Callable[[QuantizeCall], QuantTensor]:
    """What runs calls of this shape. See `rlkernel_core.spec.quantize.QuantizeCall`."""
    weight, spec = call.weight, spec_of(call.format)
    if weight.requires_grad and torch.is_grad_enabled():
        remedy = "Pass weight.detach(), or call under torch.no_grad()."
        raise ArgumentError("weight", "a tensor that requires grad", "cannot be differentiated through codes", remedy)
    plan = Plan(launcher_for(weight.device))
    if call.out is not None:
        storage.check_layouts("out", call.out)
        return lambda call: _into(call.out, call.weight.detach(), plan)  # type: ignore[arg-type]  # it is there
    make = _maker(weight, spec, call.dtype)

    def run(call: QuantizeCall) -> QuantTensor:
        made = make()
        _encode(made, call.weight.detach(), plan)
        return made

    return run


def _into(out: QuantTensor, weight: Tensor, plan: Plan) -> QuantTensor:
    """Quantise into the storage of another weight."""
    whole = {name: part.contiguous() for name, part in out.parts.items()}
    _encode(replace(out, parts=whole), weight, plan)
    for name, part in out.parts.items():
        if part is not whole[name]:  # strided: written beside it, then copied
            part.copy_(whole[name])
    return out


def encoded(weight: Tensor, spec: QuantSpec, dtype: torch.dtype | None = None) -> QuantTensor:
    """A new canonical weight of a format that kernels quantise to."""
    made = _maker(weight, spec, dtype)()
    _encode(made, weight)
    return made


def _maker(weight: Tensor, spec: QuantSpec, dtype: torch.dtype | None) -> Callable[[], QuantTensor]:
    """What makes room for weights like this one, with the tables of the format in it."""
    shape, device = (weight.shape[0], weight.shape[1]), weight.device
    rooms, tables = codec_of(spec).storage(spec, shape), _constants(spec, device)
    wide = dtype or (torch.float32 if weight.dtype == torch.float64 else weight.dtype)

    def make() -> QuantTensor:
        parts = {name: torch.empty(size, dtype=kind, device=device) for name, (size, kind) in rooms.items()}
        for name, table in tables.items():
            parts[name].copy_(table)
        return QuantTensor(spec, shape, wide, parts)

    return make


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


def _encode(w: QuantTensor, weight: Tensor, plan: Plan | None = None) -> None:
    """Quantise into the storage of `w`. With a plan all weights of it, and all that is given, are of one shape."""
    spec = w.spec
    by_group = spec.group > 0 and spec.rows == 1
    scale = w.parts[storage.scale_name(spec)]
    if spec.double_quant:  # scales in fp32 first
        scale = torch.empty(scale.shape, dtype=torch.float32, device=scale.device)
    if blocks.reads(spec):
        blocks.encode(w, weight, plan)
    elif by_group:
        _by_group(w, weight, scale, plan)
    else:
        _by_row(w, weight, scale, plan)
    if spec.double_quant:
        _nest(w, scale)


def _integers(spec: QuantSpec) -> dict[str, Any]:
    """Smallest and largest integer code as it is stored."""
    if spec.element == "int8":
        return {"LEAST": -127, "MOST": 127}
    return {"LEAST": 1 if spec.scale_rule == "absmax/7" else 0, "MOST": 15}


def _by_group(w: QuantTensor, weight: Tensor, scale: Tensor, plan: Plan | None) -> None:
    spec, (N, K) = w.spec, w.shape
    cells = scale
    if spec.element in {"nf4", "fp4"}:
        _constants(spec, weight.device)
        cells = _CONSTANTS[spec, weight.device]["cells"]
        if K % spec.group:  # blocks go on from row to row
            weight, N, K = weight.reshape(1, N * K), 1, N * K
    R, C = (1, 2048) if N == 1 else blocks.TILE if spec.element == "nf4" else blocks.tile_of(N, K, spec.group)
    weight, codes = blocks.near(weight, R, C), storage.codes(w)

    def bound(launcher: Launcher) -> Launch:
        grid = storage.scale_grid(w)
        row_stride, column_stride = weight.stride()
        return launcher.bind(
            encode_kernels.encode_groups, num_warps=4, options=EXACT, row_stride=row_stride,
            column_stride=column_stride, row_bytes=(K + 1) // 2, scale_row=grid["scale_row"],
            scale_group=grid["scale_group"], largest=_LARGEST[spec.scale_rule], N=N, K=K, GROUP=spec.group, R=R, C=C,
            ELEMENT=Element.of(spec).ELEMENT, TILED=w.layout == W4, SYMMETRIC=spec.symmetric,
            FLOAT_ZERO=spec.float_zero, ROUNDING=_ROUNDINGS[spec.rounding].value, **_integers(spec),
            WHOLE=N % R == 0 and K % C == 0 and codes.data_ptr() % 16 == 0, INTERPRETED=INTERPRETED,
        )  # fmt: skip

    launch = planned(plan, "groups", weight.device, bound)
    grid = (triton.cdiv(N, R) * triton.cdiv(K, C), 1, 1)
    launch(grid, weight, codes, scale, w.parts.get("zero", scale), cells)


def _by_row(w: QuantTensor, weight: Tensor, scale: Tensor, plan: Plan | None) -> None:
    spec, (N, K) = w.spec, w.shape
    R, C = (128, 128) if spec.rows == 128 else (16, 256) if w.layout == W4 else ROW_TILE
    tiles, weight = triton.cdiv(N, R), blocks.near(weight, R, K)

    def bound(launcher: Launcher) -> tuple[Launch | None, Launch]:
        from rlkernel_triton.quant import product  # which imports this module, to code tokens

        form = FLOAT8.get(spec.element)
        row_stride, column_stride = weight.stride()
        given: dict[str, Any] = {
            "row_stride": row_stride, "column_stride": column_stride, "N": N, "K": K, "R": R, "C": C,
            "WHOLE": N % R == 0 and K % C == 0, "INTERPRETED": INTERPRETED, "options": EXACT,
        }  # fmt: skip
        first = None
        if spec.rows == 0:
            first = launcher.bind(encode_kernels.largest_bits, num_warps=4, **given)
        rows = launcher.bind(
            encode_kernels.encode_rows, num_warps=8 if spec.rows == 128 else 4, **given, row_bytes=(K + 1) // 2,
            largest=_LARGEST.get(spec.scale_rule) or (form.max if form else 1.0), parts=tiles,
            ROWS={0: 0, 1: 1, 128: 2}[spec.rows], **Element.of(spec).constants, TILED=w.layout == W4,
            SYMMETRIC=spec.symmetric, POWER=spec.scale_rule == "absmax/max_pow2", **_integers(spec),
            LARGEST=form.max if form else 0.0, PARTS=triton.next_power_of_2(tiles) if spec.rows == 0 else 1,
            CAST=spec.element == "e4m3fn" and product.machine(weight.device).casts,
        )  # fmt: skip
        return first, rows

    first, rows = planned(plan, "rows", weight.device, bound)
    partial = scale
    if first is not None:
        partial = torch.empty(tiles, dtype=torch.int32, device=weight.device)
        first((tiles, 1, 1), weight, partial)
    grid = (tiles, triton.cdiv(K, C) if spec.rows == 128 else 1, 1)
    rows(grid, weight, storage.codes(w), scale, w.parts.get("zero", scale), partial)


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
