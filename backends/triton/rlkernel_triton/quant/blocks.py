"""Formats of blocks (mxfp4, mxfp8, nvfp4, the k-quants): codecs, and `triton_e2m1`, a layout of the 4-bit floats.

`triton_e2m1` wants N and K in multiples of 64 (see `float4_tiles`); other weights stay canonical.

Legend: N rows · K columns.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant.kquants import SUB
from rlkernel_core.quant.mx import form_of
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launch, Launcher, Plan, plain_launcher_for, planned
from rlkernel_triton.quant import (
    block_encode_kernels,
    block_kernels,
    decode_kernels,
    float4_tiles,
    super_encode_kernels,
)

F4: Final = "triton_e2m1"
TILE: Final = (16, 256)  # rows and columns of a program that quantises, where a larger one does not fit
# Bits are promised: nothing is contracted.
_EXACT: Final = {"enable_fp_fusion": False}
KINDS: Final = {
    "mxfp4": block_kernels.MXFP4,
    "mxfp8": block_kernels.MXFP8,
    "nvfp4": block_kernels.NVFP4,
    "gguf_q4_k": block_kernels.Q4_K,
    "gguf_q5_k": block_kernels.Q5_K,
    "gguf_q6_k": block_kernels.Q6_K,
}
SUPER: Final = 256  # columns of a super-block of the k-quants
_RULES: Final = {"floor": 0, "rceil": 1, "even": 2}
_PARTS: Final = ("codes", "high", "scale", "d", "min", "dmin", "global_scale")  # in the order of kernels


def reads(spec: QuantSpec) -> bool:
    """The format is one of blocks."""
    return spec.format in KINDS


def tiles(spec: QuantSpec, shape: tuple[int, int]) -> bool:
    """A weight of this format and shape can be held as `triton_e2m1`."""
    return spec.element == "e2m1" and shape[0] % 64 == 0 and shape[1] % 64 == 0


def form(spec: QuantSpec) -> dict[str, Any]:
    """The constants of a format."""
    mantissa, bias = (2, 15) if spec.element == "e5m2" else (3, 7)
    return {"FORMAT": KINDS[spec.format].value, "MANTISSA": mantissa, "BIAS": bias}


def arguments(w: QuantTensor) -> tuple[Tensor, ...]:
    """The parts of a canonical weight in the kernels' order; what a format lacks is any tensor."""
    raw = {name: _raw(part.contiguous()) for name, part in w.parts.items()}
    return tuple(raw.get(name, raw["codes"]) for name in _PARTS)


def _raw(part: Tensor) -> Tensor:
    return part.view(torch.uint8) if part.dtype.itemsize == 1 and part.dtype != torch.int8 else part


def tile_of(N: int, K: int, group: int) -> tuple[int, int]:
    """Rows and columns of a program that quantises groups; tiles that divide a weight need no masks."""
    columns = (c for c in (512, 256, 128, 64) if c % group == 0 and K % c == 0)
    return next(((8192 // c, c) for c in columns if N % (8192 // c) == 0), TILE)


def near(weight: Tensor, R: int, C: int) -> Tensor:
    """The weight, contiguous where offsets in a tile of R x C would not fit 31 bits."""
    row, column = weight.stride()
    return weight if (R - 1) * row + (C - 1) * column < 2**31 else weight.contiguous()


def encode(w: QuantTensor, weight: Tensor, plan: Plan | None = None) -> None:
    """Quantise into the storage of `w`. With a plan all weights of it, and all that is given, are of one shape."""
    spec, (N, K) = w.spec, w.shape
    R, C = TILE if spec.format == "nvfp4" else tile_of(N, K, spec.group)
    weight = near(weight, R, C)
    parts = {name: _raw(part) for name, part in w.parts.items()}
    aligned = all(part.data_ptr() % 16 == 0 for part in parts.values())  # words are written
    given: dict[str, Any] = {
        "row_stride": weight.stride(0), "column_stride": weight.stride(1), "N": N, "K": K, "R": R, "C": C,
        "WHOLE": N % R == 0 and K % C == 0 and aligned, "INTERPRETED": INTERPRETED, "num_warps": 4, "options": _EXACT,
    }  # fmt: skip
    grid, of_rows = (triton.cdiv(N, R) * triton.cdiv(K, C), 1, 1), (triton.cdiv(N, R), 1, 1)

    def supers(launcher: Launcher) -> Launch:
        bits = {"int4": 4, "int5": 5, "int6": 6}[spec.element]
        return launcher.bind(
            super_encode_kernels.encode_supers, **given, BITS=bits, SUB=SUB[spec.element], SIGNED=spec.symmetric
        )

    def scaled(launcher: Launcher) -> tuple[Launch, Launch]:
        first = launcher.bind(block_encode_kernels.largest_finite, **given, GROUP=spec.group)
        return first, launcher.bind(block_encode_kernels.encode_scaled, **given, **stored)

    def powers(launcher: Launcher) -> Launch:
        element, four = form_of(spec.element), spec.element == "e2m1"
        return launcher.bind(
            block_encode_kernels.encode_powers, **given, **stored, FOUR=four, RULE=_RULES[spec.scale_rule],
            MANTISSA=element.mantissa, BIAS=1 if four else form(spec)["BIAS"], TOP=element.largest_exponent,
            FRACTION=int((element.largest_fraction - 1) * (1 << 23)), LARGEST=element.max,
        )  # fmt: skip

    stored: dict[str, Any] = {"GROUP": spec.group, "TILED": w.layout == F4, "AWAY": spec.rounding == "away"}
    codes, scale, device = parts["codes"], w.parts["scale"], weight.device
    if spec.group == SUPER:
        high, least, d = (parts.get(name, codes) for name in ("high", "min", "d"))
        planned(plan, "supers", device, supers)(
            grid, weight, codes, high, parts["scale"], least, d, parts.get("dmin", d)
        )  # fmt: skip
        return
    scale = scale.view(torch.uint8)  # that of tiles is in words
    if spec.format == "nvfp4":
        most = torch.zeros(1, dtype=torch.int32, device=device)
        first, last = planned(plan, "scaled", device, scaled)
        first(of_rows, weight, most)
        last(grid, weight, codes, scale, w.parts["global_scale"], most)
    else:
        planned(plan, "powers", device, powers)(grid, weight, codes, scale)


def dequantised(
    w: QuantTensor,
    dtype: torch.dtype,
    rows: tuple[int, int] | None = None,
    out: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:  # -> [rows, K]
    """The weight, or a range of its rows, which starts at a multiple of 16 where it is in tiles.

    With a plan all of its calls are of one shape and one range.
    """
    first, last = rows or (0, w.shape[0])
    N, K = last - first, w.shape[1]
    result = torch.empty(N, K, dtype=dtype, device=w.device) if out is None else out
    given: dict[str, Any] = {"first": first, "N": last, "K": K, "INTERPRETED": INTERPRETED, "options": _EXACT}
    if w.layout == F4:
        C = next(size for size in (256, 128, 64) if K % size == 0)
        scale = w.parts["scale"].contiguous().view(torch.int32)
        launch = planned(
            plan, "tiles dequantised", result.device, lambda launcher: launcher.bind(
                float4_tiles.dequantise_tiles, **given, FORMAT=KINDS[w.spec.format].value, C=C
            ),
        )  # fmt: skip
        grid = (triton.cdiv(N, 16) * (K // C), 1, 1)
        launch(grid, w.parts["codes"].contiguous(), scale, w.parts.get("global_scale", scale), result)
        return result
    R, C = 8, 256
    launch = planned(
        plan, "blocks dequantised", result.device, lambda launcher: launcher.bind(
            block_kernels.dequantise_blocks, **given, **form(w.spec), R=R, C=C
        ),
    )  # fmt: skip
    launch((triton.cdiv(N, R) * triton.cdiv(K, C), 1, 1), *arguments(w), result)
    return result


def packed(w: QuantTensor, layout: str) -> QuantTensor:
    """The weight as `triton_e2m1`, or canonical."""
    if w.layout == layout:
        return w
    if layout != CANONICAL and not (layout == F4 and tiles(w.spec, w.shape)):
        need = f"{F4} holds mxfp4 and nvfp4 of N and K in multiples of 64, not {w.spec} of {w.shape}"
        raise ArgumentError("layout", layout, need, "Leave layout=None, which keeps such a weight canonical.")
    rows, columns = w.shape
    size, kind = (
        ((rows // 16, columns // 64, 128), torch.int32) if layout == F4 else ((rows, columns // 2), torch.uint8)
    )
    codes = torch.empty(size, dtype=kind, device=w.device)
    move_codes(w, codes, to_tiles=layout == F4)
    scale = (_scales_in_tiles if layout == F4 else _scales_in_rows)(w)
    return QuantTensor(w.spec, w.shape, w.dtype, {**w.parts, "codes": codes, "scale": scale}, layout)


def move_codes(w: QuantTensor, codes: Tensor, *, to_tiles: bool) -> None:
    """Write the codes of a weight as words of tiles, or as bytes; N and K are multiples of 64."""
    rows, columns = w.shape
    move = plain_launcher_for(codes.device).bind(
        decode_kernels.move, options=_EXACT, row_bytes=columns // 2, N=rows, K=columns, TO_TILES=to_tiles,
        HIGH_FIRST=False, R=64, C=64, FLOATS=True,
    )  # fmt: skip
    move((rows // 64 * (columns // 64), 1, 1), w.parts["codes"].contiguous(), codes)  # it writes whole tiles


def _scales_in_tiles(w: QuantTensor) -> Tensor:  # -> int16 [N / 16, K / 64, 8, B]
    rows, columns = w.shape
    byte = w.parts["scale"].view(torch.uint8).view(rows // 16, 2, 8, columns // 64, -1)  # tn rh r8 tk b
    found: Tensor = byte.permute(0, 3, 2, 4, 1).contiguous().view(torch.int16)  # tn tk r8 b (rh)
    return found.squeeze(-1)


def _scales_in_rows(w: QuantTensor) -> Tensor:  # -> [N, K / group]
    byte = w.parts["scale"].contiguous().view(torch.uint8).view(*w.parts["scale"].shape, 2)  # tn tk r8 b rh
    rows = byte.permute(0, 4, 2, 1, 3).reshape(w.shape[0], -1)
    return rows if w.spec.scale_dtype == "e8m0" else rows.view(torch.float8_e4m3fn)
