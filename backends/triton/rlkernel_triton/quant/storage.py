"""What the kernels are told of a format, and the layout `triton_w4` that qmatmul reads fastest.

`triton_w4` holds 4-bit codes as int32 words [N / 16, K / 64, 128] (see `code_tiles`), and scales and zero-points
transposed, [groups, N], so that neighbouring rows are neighbours in memory. It wants N in multiples of 64 and K in
multiples of 128, and of whole groups; other weights stay canonical. 8-bit formats are read fastest as they are.

Legend: N rows · K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError, LayoutError
from rlkernel_core.quant.float8 import FLOAT8 as FLOAT8_FORMS
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launcher, Plan, launcher_for, plain_launcher_for
from rlkernel_triton.quant import blocks, decode_kernels, encode_kernels

W4: Final = "triton_w4"
KNOWN: Final = (CANONICAL, W4, blocks.F4)
FORMER: Final = {
    "triton_f4": blocks.F4
}  # layouts of earlier builds, whose bits are in another order -> their successors
# No product is ever contracted with the sum that follows it: codecs promise bits.
EXACT: Final = {"enable_fp_fusion": False}
BIAS: Final = {"e4m3fn": 7, "e5m2": 15, "e4m3fnuz": 8, "e5m2fnuz": 16}


@dataclass(frozen=True)
class Element:
    """A stored element, as the kernels' constants say it."""

    ELEMENT: int
    MANTISSA: int = 0
    BIAS: int = 0
    FNUZ: bool = False

    @staticmethod
    def of(spec: QuantSpec) -> Element:
        """The element of a format."""
        if spec.element in FLOAT8_FORMS:
            form = FLOAT8_FORMS[spec.element]
            fnuz = spec.element.endswith("fnuz")
            return Element(encode_kernels.FLOAT8.value, form.mantissa, BIAS[spec.element], fnuz)
        kinds = {
            "int4": encode_kernels.INT4, "int8": encode_kernels.INT8, "nf4": encode_kernels.NF4,
            "fp4": encode_kernels.FP4,
        }  # fmt: skip
        return Element(kinds[spec.element].value)

    @property
    def constants(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {"ELEMENT": self.ELEMENT, "MANTISSA": self.MANTISSA, "BIAS": self.BIAS, "FNUZ": self.FNUZ}


def four_bits(spec: QuantSpec) -> bool:
    """Two codes a byte."""
    return spec.element in {"int4", "nf4"}


def tiles(spec: QuantSpec, shape: tuple[int, int]) -> bool:
    """A weight of this format and shape can be held as `triton_w4`; zero-points that are floats are not whole there."""
    rows, columns = shape
    return four_bits(spec) and not (spec.float_zero or blocks.reads(spec)) and rows % 64 == 0 and columns % 128 == 0


def table_of_nf4(w: QuantTensor) -> QuantTensor:
    """A weight of fp4 as one of nf4 with another table, which is all that tells them apart; others as they are."""
    return replace(w, spec=replace(w.spec, element="nf4")) if w.spec.element == "fp4" else w


def preferred(w: QuantTensor) -> str:
    """The layout that products read fastest."""
    if blocks.tiles(w.spec, w.shape):
        return blocks.F4
    return W4 if tiles(table_of_nf4(w).spec, w.shape) else CANONICAL


def scale_name(spec: QuantSpec) -> str:
    """The part that holds the scales of groups."""
    return "absmax" if spec.element in {"nf4", "fp4"} else "scale"


def scale_grid(w: QuantTensor) -> dict[str, Any]:
    """Where the scale of a row and a group stands: strides of both, and how many rows share one."""
    spec, (rows, columns) = w.spec, w.shape
    if w.layout == W4:
        return {"scale_row": 1, "scale_group": rows, "SCALE_ROWS": 1, "GROUP": spec.group}
    groups = -(-columns // spec.group) if spec.group else 1
    return {"scale_row": groups, "scale_group": 1, "SCALE_ROWS": spec.rows, "GROUP": spec.group}


def scales(w: QuantTensor) -> dict[str, Any]:
    """Scales, zero-points and tables as keyword arguments; what a format lacks is any tensor."""
    scale = w.parts[scale_name(w.spec)]
    names = ("zero", "table", "nested_table", "nested_absmax", "nested_offset")
    return {"scale": scale.contiguous(), **{name: w.parts.get(name, scale).contiguous() for name in names}}


def part_names(w: QuantTensor) -> tuple[str, ...]:
    """Parts as kernels are passed them: codes, scales, zero-points, tables; the scales for what a format lacks."""
    scale = scale_name(w.spec)
    names = ("zero", "table", "nested_table", "nested_absmax", "nested_offset")
    return "codes", scale, *(n if n in w.parts else scale for n in names)


def codes(w: QuantTensor) -> Tensor:
    """The codes as the kernels read them: float8 as bytes."""
    found = w.parts["codes"].contiguous()
    return found if found.dtype in (torch.int8, torch.int32) else found.view(torch.uint8)


def check_layouts(name: str, w: QuantTensor) -> None:
    """The layout of `w` is read here."""
    if w.layout in FORMER:
        raise LayoutError(
            f"{name}: is packed as {w.layout!r}, as earlier builds did; its bits are in another order now "
            f"({FORMER[w.layout]!r}). Quantise or load the weight again and pack that with prepack."
        )
    if w.layout not in KNOWN:
        raise LayoutError(
            f"{name}: is packed as {w.layout!r}; read here: {', '.join(KNOWN)}. Run it on the backend that packed it, "
            f"or undo that there with prepack({name}, layout={CANONICAL!r})."
        )


def packed(w: QuantTensor, layout: str) -> QuantTensor:
    """The weight in another layout; see `rlkernel_core.spec.quantize.PrepackCall`."""
    if layout not in KNOWN:
        raise LayoutError(f"layout: {layout!r} is not known here. Choose from {', '.join(KNOWN)}.")
    check_layouts("w", w)
    if w.layout == layout:
        return w
    if blocks.reads(w.spec):
        return blocks.packed(w, layout)
    if w.spec.element == "fp4":
        return replace(packed(table_of_nf4(w), layout), spec=w.spec)
    if layout == blocks.F4 or (layout == W4 and not tiles(w.spec, w.shape)):
        need = f"{W4} holds 4-bit codes of N in multiples of 64 and K in multiples of 128, not {w.spec} of {w.shape}"
        raise ArgumentError("layout", layout, need, "Leave layout=None, which keeps such a weight canonical.")
    parts = dict(w.parts)
    for name in (scale_name(w.spec), "zero"):
        if name in parts:
            parts[name] = _turned(parts[name], w, layout)
    parts["codes"] = torch.empty(_size(w, layout), dtype=_dtype(layout), device=w.device)
    rows, columns = w.shape
    move = plain_launcher_for(w.device).bind(
        decode_kernels.move, options=EXACT, row_bytes=columns // 2, N=rows, K=columns, TO_TILES=layout == W4,
        HIGH_FIRST=w.spec.element == "nf4", R=64, C=128, FLOATS=False,
    )  # fmt: skip
    move((rows // 64 * (columns // 128), 1, 1), codes(w), parts["codes"])
    return QuantTensor(w.spec, w.shape, w.dtype, parts, layout)


def written(out: QuantTensor, canonical: QuantTensor) -> None:
    """Write a weight into the storage of another of its format, in the layout which that has."""
    fresh = packed(canonical, out.layout)
    for name, part in out.parts.items():
        part.copy_(fresh.parts[name])


def _size(w: QuantTensor, layout: str) -> tuple[int, ...]:
    rows, columns = w.shape
    if layout == W4:
        return (rows // 16, columns // 64, 128)
    return (rows * columns // 2,) if w.spec.element == "nf4" else (rows, columns // 2)


def _dtype(layout: str) -> torch.dtype:
    return torch.int32 if layout == W4 else torch.uint8


def _turned(part: Tensor, w: QuantTensor, layout: str) -> Tensor:
    """[N, groups] as [groups, N], or back; nf4's are flat where canonical. Always memory of its own."""
    grid = part.view(w.shape[0], -1) if layout == W4 else part.view(-1, w.shape[0])
    found = grid.t().clone(memory_format=torch.contiguous_format)
    return found if layout == W4 or w.spec.element != "nf4" else found.view(-1)


def dequantised(
    w: QuantTensor, dtype: torch.dtype, rows: tuple[int, int] | None = None, out: Tensor | None = None
) -> Tensor:  # -> [rows, K]
    """The weight, or a range of its rows that starts at a multiple of 16."""
    if blocks.reads(w.spec):
        return blocks.dequantised(w, dtype, rows, out)
    w = table_of_nf4(w)
    first, last = rows or (0, w.shape[0])
    result = torch.empty(last - first, w.shape[1], dtype=dtype, device=w.device) if out is None else out
    N, K = last, w.shape[1]
    if w.spec.element == "nf4" and K % w.spec.group:  # blocks go on from row to row
        if rows is not None:
            return result.copy_(dequantised(w, dtype)[first:last])
        N, K = 1, w.shape[0] * K
    R, C = _decoded_tile(w, N)
    launch = plain_launcher_for(w.device).bind(
        decode_kernels.dequantise, options=EXACT, first=first, **_decoding(w, N, K, R, C)
    )
    launch((triton.cdiv(N - first, R) * triton.cdiv(K, C), 1, 1), codes(w), *scales(w).values(), result)
    return result


def dequantiser(
    w: QuantTensor, dtype: torch.dtype, rows: tuple[int, int] | None = None, launcher: Launcher | None = None
) -> Callable[[QuantTensor], Tensor]:
    """What dequantises weights like this one, or a range of their rows that starts at a multiple of 16; bound once.

    Args:
        w: the weight; none of its values is read.
        dtype: of the result.
        rows: first row and one past the last; None for all.
        launcher: what binds the kernel; None for that of the weight's device.
    """
    launcher = launcher_for(w.device) if launcher is None else launcher
    if blocks.reads(w.spec):
        plan = Plan(launcher)
        return lambda w: blocks.dequantised(w, dtype, rows, plan=plan)
    w, device = table_of_nf4(w), w.device
    first, last = rows or (0, w.shape[0])
    shape, ragged = (last - first, w.shape[1]), w.spec.element == "nf4" and bool(w.shape[1] % w.spec.group)
    if ragged and rows is not None and shape != w.shape:  # blocks go on from row to row
        whole = dequantiser(w, dtype, None, launcher)
        return lambda w: whole(w)[first:last]
    N, K = (1, shape[0] * shape[1]) if ragged else (last, shape[1])
    R, C = _decoded_tile(w, N)
    grid = (triton.cdiv(N - first, R) * triton.cdiv(K, C), 1, 1)
    launch = launcher.bind(
        decode_kernels.dequantise, num_warps=4, options=EXACT, first=first, **_decoding(w, N, K, R, C)
    )
    names = part_names(w)[1:]
    as_they_are = all(w.parts[n].is_contiguous() for n in names)

    def run(w: QuantTensor) -> Tensor:
        result = torch.empty(shape, dtype=dtype, device=device)
        given = [w.parts[n] for n in names]
        if not as_they_are:
            given = [x.contiguous() for x in given]
        launch(grid, codes(w), *given, result)
        return result

    return run


def _decoded_tile(w: QuantTensor, N: int) -> tuple[int, int]:
    """Rows and columns that a program dequantises."""
    return (16, 256) if w.layout == W4 else (1, 2048) if N == 1 else (8, 512)


def _decoding(w: QuantTensor, N: int, K: int, R: int, C: int) -> dict[str, Any]:
    """The parameters of a weight's format and size that its dequantisation takes."""
    return {
        "row_bytes": (K + 1) // 2, **scale_grid(w), "N": N, "K": K, "R": R, "C": C, "TILED": w.layout == W4,
        "SYMMETRIC": w.spec.symmetric, "NESTED": w.spec.double_quant, "INTERPRETED": INTERPRETED,
        **Element.of(w.spec).constants,
    }  # fmt: skip
