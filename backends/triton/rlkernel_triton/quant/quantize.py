"""quantize@1 in Triton, for weights and for the tokens of a product: the reference's bits, at the speed of memory.

A weight in tiles is quantized again in place: codes are written as words, nothing in between. Tokens of 8 bits are
coded by the kernel that quantizes a weight by rows, a token being a row; blocks of 128 columns are left to the core.
MX and NVFP4 tokens are coded as rows of such a weight, NVFP4 with a second scale for each.

Legend: N rows · K columns · M tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import activations
from rlkernel_core.quant.activations import QuantActivation
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.float8 import FLOAT8
from rlkernel_core.quant.kquants import SUB
from rlkernel_core.quant.mx import form_of
from rlkernel_core.quant.spec import QuantSpec, spec_of
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.quantize import QuantizeCall
from rlkernel_triton.common.host import INTERPRETED, lasting
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for, planned
from rlkernel_triton.quant import formats
from rlkernel_triton.quant.block_quantize_kernels import (
    absmax_finite_kernel,
    quantize_kquants_kernel,
    quantize_mx_kernel,
    quantize_nvfp4_kernel,
)
from rlkernel_triton.quant.dequantize import dequantizer
from rlkernel_triton.quant.layouts import check_layout
from rlkernel_triton.quant.quantize_kernels import (
    AWAY,
    EVEN,
    UP,
    absmax_kernel,
    quantize_groups_kernel,
    quantize_rows_kernel,
)
from rlkernel_triton.quant.tile_config import machine

_LARGEST: Final = {
    "absmax/7.5": 7.5, "absmax/7": 7.0, "minmax/15": 15.0, "absmax/127": 127.0, "absmax": 1.0,
    "absmax/127_then_round": 127.0, "signed_max/-8_then_round": -8.0,
}  # fmt: skip
_ROUNDINGS: Final = {"even": EVEN, "away": AWAY, "up": UP}
_MX_RULES: Final = {"floor": 0, "rceil": 1, "even": 2}
_CONSTANTS: Final[dict[tuple[QuantSpec, torch.device], dict[str, Tensor]]] = {}
ROW_TILE: Final = (4, 1024)  # rows and columns of a program, where scales belong to rows
TILE: Final = (16, 256)  # the same where they belong to groups, if no larger one fits
SUPER_BLOCK: Final = 256  # columns of a super-block of the k-quants
_NESTED: Final = 256  # nf4 scales that share a scale


def quantize(call: QuantizeCall) -> QuantTensor:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: QuantizeCall) -> Callable[[QuantizeCall], QuantTensor]:
    """What runs calls of this shape. See `rlkernel_core.spec.quantize.QuantizeCall`."""
    weight, spec = call.weight, spec_of(call.format)
    if weight.requires_grad and torch.is_grad_enabled():
        remedy = "Pass weight.detach(), or call under torch.no_grad()."
        raise ArgumentError("weight", "a tensor that requires grad", "cannot be differentiated through codes", remedy)
    plan = Plan(launcher_for(weight.device))
    if call.out is not None:
        check_layout("out", call.out)
        return lambda call: _quantize_into(call.out, call.weight.detach(), plan)  # type: ignore[arg-type]  # it is there
    allocate = _allocator(weight, spec, call.dtype)

    def run(call: QuantizeCall) -> QuantTensor:
        made = allocate()
        _encode(made, call.weight.detach(), plan)
        return made

    return run


def quantize_activation(x: Tensor, spec: QuantSpec) -> QuantActivation:  # x [M, K]
    """Quantize x as `spec.act` says, with the bits of `rlkernel_core.quant.activations`."""
    if spec.act == "block128_fp8" or 0 in x.shape:
        return activations.quantize_activation(x.float(), spec)
    made = _allocator(x, activations.row_format(spec), None)()
    _encode(made, x)
    return QuantActivation(made.parts["codes"], made.parts["scale"])


def quantize_in_blocks(
    x: Tensor, spec: QuantSpec, dtype: torch.dtype, plan: Plan | None = None
) -> tuple[Tensor, Tensor | None]:
    """x [M, K] as `spec.act` quantizes it in blocks of columns: values in a dtype that holds them, scales of tokens.

    The values of "mxfp8" are whole. Those of "nvfp4" are products of codes and the scales of blocks, which any type
    holds; the second scale [M] of each token remains to be multiplied with.
    """
    made, of_tokens = _allocator(x, activations.row_format(spec), None)(), None
    if spec.act == "nvfp4":
        of_tokens = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        _encode(replace(made, parts=made.parts | {"global_scale": of_tokens}), x, plan)
        made = replace(made, parts=made.parts | {"global_scale": _one(x.device)})
    else:
        _encode(made, x, plan)
    run = planned(plan, "values of x", x.device, lambda launcher: dequantizer(made, dtype, None, launcher))
    return run(made), of_tokens


@cache
def _one(device: torch.device) -> Tensor:
    return lasting(lambda: torch.ones(1, device=device), device)


def _quantize_into(out: QuantTensor, weight: Tensor, plan: Plan) -> QuantTensor:
    """Quantize into the storage of another weight."""
    whole = {name: part.contiguous() for name, part in out.parts.items()}
    _encode(replace(out, parts=whole), weight, plan)
    for name, part in out.parts.items():
        if part is not whole[name]:  # strided: written beside it, then copied
            part.copy_(whole[name])
    return out


def _allocator(weight: Tensor, spec: QuantSpec, dtype: torch.dtype | None) -> Callable[[], QuantTensor]:
    """What allocates canonical weights like this one, with the tables of the format in it."""
    shape, device = (weight.shape[0], weight.shape[1]), weight.device
    sizes, tables = codec_of(spec).storage(spec, shape), _constants(spec, device)
    wide = dtype or (torch.float32 if weight.dtype == torch.float64 else weight.dtype)

    def allocate() -> QuantTensor:
        parts = {name: torch.empty(size, dtype=kind, device=device) for name, (size, kind) in sizes.items()}
        for name, table in tables.items():
            parts[name].copy_(table)
        return QuantTensor(spec, shape, wide, parts)

    return allocate


def _constants(spec: QuantSpec, device: torch.device) -> dict[str, Tensor]:
    """Tables of a format; moved to a device once, since a copy from the host is a synchronization."""
    key = (spec, device)
    if key not in _CONSTANTS:
        found = codec_of(spec).constants(spec)
        if "table" in found:
            found["cells"] = _cells(*(found["table"][:8] if spec.element == "fp4" else found["table"]).sort())
        _CONSTANTS[key] = lasting(lambda: {name: table.to(device) for name, table in found.items()}, device)
    return {name: table for name, table in _CONSTANTS[key].items() if name != "cells"}


def _cells(values: Tensor, codes: Tensor) -> Tensor:  # ascending [V], [V] -> [2, 64] fp32
    """The table of `quantize_kernels.nearest_code` for the nearest of some values, a tie taking the lower."""
    middles = (values[:-1] + values[1:]) / 2
    numbers = (middles * 16).round() + 16  # of the cells that hold them, all different
    cells = torch.arange(64, device=values.device).unsqueeze(1)
    own = torch.where(numbers == cells, middles, torch.inf).amin(1)
    low, high = (codes[how(numbers, cells).sum(1)] for how in (torch.lt, torch.le))
    return torch.stack([own, (low + 16 * high).float()])


def _encode(w: QuantTensor, weight: Tensor, plan: Plan | None = None) -> None:
    """Quantize into the storage of `w`. With a plan all weights of it, and all that is given, are of one shape."""
    spec = w.spec
    scale = w.parts[formats.scale_name(spec)]
    if spec.double_quant:  # scales in fp32 first
        scale = torch.empty(scale.shape, dtype=torch.float32, device=scale.device)
    if formats.is_of_blocks(spec):
        _encode_blocks(w, weight, plan)
    elif spec.group > 0 and spec.rows == 1:
        _encode_groups(w, weight, scale, plan)
    else:
        _encode_rows(w, weight, scale, plan)
    if spec.double_quant:
        _nest(w, scale)


def _integers(spec: QuantSpec) -> dict[str, Any]:
    """Smallest and largest integer code as it is stored."""
    if spec.element == "int8":
        return {"LEAST": -127, "MOST": 127}
    return {"LEAST": 1 if spec.scale_rule == "absmax/7" else 0, "MOST": 15}


def _tile_of(N: int, K: int, group: int, size: int = 8192) -> tuple[int, int]:
    """Rows and columns of a program with `size` weights or fewer; tiles that divide a weight need no masks."""
    columns = (c for c in (512, 256, 128, 64) if c % group == 0 and K % c == 0)
    return next(((size // c, c) for c in columns if N % (size // c) == 0), (min(TILE[0], size // TILE[1]), TILE[1]))


def _within_31_bits(weight: Tensor, R: int, C: int) -> Tensor:
    """The weight, contiguous where offsets in a tile of R x C would not fit 31 bits."""
    row, column = weight.stride()
    return weight if (R - 1) * row + (C - 1) * column < 2**31 else weight.contiguous()


def _tile_arguments(weight: Tensor, N: int, K: int, R: int, C: int, *, aligned: bool = True) -> dict[str, Any]:
    """What every kernel that quantizes is bound with."""
    return {
        "row_stride": weight.stride(0), "column_stride": weight.stride(1), "N": N, "K": K, "R": R, "C": C,
        "WHOLE": N % R == 0 and K % C == 0 and aligned, "INTERPRETED": INTERPRETED, "options": formats.EXACT,
    }  # fmt: skip


def _encode_groups(w: QuantTensor, weight: Tensor, scale: Tensor, plan: Plan | None) -> None:
    """A scale for each group of columns of a row: integers, nf4, fp4."""
    spec, (N, K) = w.spec, w.shape
    cells = scale
    if spec.element in {"nf4", "fp4"}:
        _constants(spec, weight.device)
        cells = _CONSTANTS[spec, weight.device]["cells"]
        if K % spec.group:  # blocks go on from row to row
            weight, N, K = weight.reshape(1, N * K), 1, N * K
    R, C = (1, 2048) if N == 1 else TILE if spec.element == "nf4" else _tile_of(N, K, spec.group)
    weight, codes = _within_31_bits(weight, R, C), formats.codes_of(w)

    def bound(launcher: Launcher) -> Launch:
        grid = formats.scale_grid(w)
        return launcher.bind(
            quantize_groups_kernel, num_warps=4,
            **_tile_arguments(weight, N, K, R, C, aligned=codes.data_ptr() % 16 == 0), row_bytes=(K + 1) // 2,
            scale_row=grid["scale_row"], scale_group=grid["scale_group"], largest=_LARGEST[spec.scale_rule],
            GROUP=spec.group, ELEMENT=formats.Element.of(spec).ELEMENT, TILED=w.layout == formats.W4,
            SYMMETRIC=spec.symmetric, FLOAT_ZERO=spec.float_zero, ROUNDING=_ROUNDINGS[spec.rounding].value,
            **_integers(spec),
        )  # fmt: skip

    launch = planned(plan, "groups", weight.device, bound)
    grid = (triton.cdiv(N, R) * triton.cdiv(K, C), 1, 1)
    launch(grid, weight, codes, scale, w.parts.get("zero", scale), cells)


def _encode_rows(w: QuantTensor, weight: Tensor, scale: Tensor, plan: Plan | None) -> None:
    """A scale for each row, for each block of 128 x 128, or for the whole weight."""
    spec, (N, K) = w.spec, w.shape
    R, C = (128, 128) if spec.rows == 128 else (16, 256) if w.layout == formats.W4 else ROW_TILE
    tiles, weight = triton.cdiv(N, R), _within_31_bits(weight, R, K)

    def bound(launcher: Launcher) -> tuple[Launch | None, Launch]:
        form = FLOAT8.get(spec.element)
        given = _tile_arguments(weight, N, K, R, C)
        first = None
        if spec.rows == 0:
            first = launcher.bind(absmax_kernel, num_warps=4, **given)
        rows = launcher.bind(
            quantize_rows_kernel, num_warps=8 if spec.rows == 128 else 4, **given, row_bytes=(K + 1) // 2,
            largest=_LARGEST.get(spec.scale_rule) or (form.max if form else 1.0), parts=tiles,
            ROWS={0: 0, 1: 1, 128: 2}[spec.rows], **formats.Element.of(spec).constants, TILED=w.layout == formats.W4,
            SYMMETRIC=spec.symmetric, POWER=spec.scale_rule == "absmax/max_pow2", **_integers(spec),
            LARGEST=form.max if form else 0.0, PARTS=triton.next_power_of_2(tiles) if spec.rows == 0 else 1,
            CAST=spec.element == "e4m3fn" and machine(weight.device).casts,
        )  # fmt: skip
        return first, rows

    first, rows = planned(plan, "rows", weight.device, bound)
    partial = scale
    if first is not None:
        partial = torch.empty(tiles, dtype=torch.int32, device=weight.device)
        first((tiles, 1, 1), weight, partial)
    grid = (tiles, triton.cdiv(K, C) if spec.rows == 128 else 1, 1)
    rows(grid, weight, formats.codes_of(w), scale, w.parts.get("zero", scale), partial)


def _encode_blocks(w: QuantTensor, weight: Tensor, plan: Plan | None) -> None:
    """MX, NVFP4 and the k-quants."""
    spec, (N, K) = w.spec, w.shape
    tokens = spec.format == "nvfp4" and w.parts["global_scale"].shape[0] != 1
    R, C = TILE if spec.format == "nvfp4" else _tile_of(N, K, spec.group)
    weight = _within_31_bits(weight, R, C)
    parts = {name: formats.as_bytes(part) for name, part in w.parts.items()}
    aligned = all(part.data_ptr() % 16 == 0 for part in parts.values())  # words are written
    given = _tile_arguments(weight, N, K, R, C, aligned=aligned)
    stored: dict[str, Any] = {"GROUP": spec.group, "TILED": w.layout == formats.E2M1, "AWAY": spec.rounding == "away"}
    grid, of_rows = (triton.cdiv(N, R) * triton.cdiv(K, C), 1, 1), (triton.cdiv(N, R), 1, 1)
    codes, scale, device = parts["codes"], w.parts["scale"], weight.device

    def supers(launcher: Launcher) -> Launch:
        bits = {"int4": 4, "int5": 5, "int6": 6}[spec.element]
        return launcher.bind(
            quantize_kquants_kernel,
            **given,
            BITS=bits,
            SUB=SUB[spec.element],
            SIGNED=spec.symmetric,
        )

    def scaled(launcher: Launcher) -> tuple[Launch, Launch]:
        first = launcher.bind(absmax_finite_kernel, **given, GROUP=spec.group, TOKENS=tokens)
        return first, launcher.bind(quantize_nvfp4_kernel, **given, **stored, TOKENS=tokens)

    def powers(launcher: Launcher) -> Launch:
        element, four = form_of(spec.element), spec.element == "e2m1"
        return launcher.bind(
            quantize_mx_kernel, **given, **stored, FOUR=four, RULE=_MX_RULES[spec.scale_rule],
            MANTISSA=element.mantissa, BIAS=1 if four else formats.block_constants(spec)["BIAS"],
            TOP=element.largest_exponent, FRACTION=int((element.largest_fraction - 1) * (1 << 23)), LARGEST=element.max,
        )  # fmt: skip

    if spec.group == SUPER_BLOCK:
        high, least, d = (parts.get(name, codes) for name in ("high", "min", "d"))
        launch = planned(plan, "supers", device, supers)
        launch(grid, weight, codes, high, parts["scale"], least, d, parts.get("dmin", d))
        return
    scale = scale.view(torch.uint8)  # that of tiles is in words
    if spec.format == "nvfp4":
        most = torch.zeros(N if tokens else 1, dtype=torch.int32, device=device)
        first, last = planned(plan, "scaled", device, scaled)
        first(of_rows, weight, most)
        last(grid, weight, codes, scale, w.parts["global_scale"], most)
    else:
        planned(plan, "powers", device, powers)(grid, weight, codes, scale)


def _nest(w: QuantTensor, absmax: Tensor) -> None:
    """Quantize the scales of nf4 blocks: 1/64 of the weight's size, in torch, in the order of the flat weight."""
    parts = w.parts
    tiled = w.layout == formats.W4
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
