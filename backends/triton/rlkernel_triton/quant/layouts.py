"""prepack@1 in Triton: the layouts that products read fastest, and weights moved between them.

`triton_w4` holds 4-bit integers and nf4 as int32 words [N / 16, K / 64, 128] (see `code_tiles`), and scales and
zero-points transposed, [groups, N], so that neighboring rows are neighbors in memory; N in multiples of 64, K of 128.
`triton_e2m1` holds mxfp4 and nvfp4 as such words with other bits (see `operand_tiles`); N and K in multiples of 64.
Other weights stay canonical. 8-bit formats are read fastest as they are.

Legend: N rows · K columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError, LayoutError
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_core.spec.quantize import PrepackCall
from rlkernel_triton.launchers import plain_launcher_for
from rlkernel_triton.quant.dequantize_kernels import repack_kernel
from rlkernel_triton.quant.formats import E2M1, EXACT, W4, as_nf4, codes_of, is_four_bits, is_of_blocks, scale_name

KNOWN: Final = (CANONICAL, W4, E2M1)
FORMER: Final = {"triton_f4": E2M1}  # layouts of earlier builds, whose bits are in another order -> their successors
_HOLDS: Final = {
    W4: f"{W4} holds 4-bit codes of N in multiples of 64 and K in multiples of 128",
    E2M1: f"{E2M1} holds mxfp4 and nvfp4 of N and K in multiples of 64",
}


def prepack(call: PrepackCall) -> QuantTensor:
    """See `rlkernel_core.spec.quantize.PrepackCall`; the preferred layout is tiles where a weight fits them."""
    check_layout("w", call.w)
    return packed(call.w, call.layout or preferred(call.w))


def fits_tiles(spec: QuantSpec, shape: tuple[int, int]) -> str | None:
    """The layout of tiles that can hold a weight of this format and shape; None: neither.

    Zero-points that are floats are not whole in `triton_w4`.
    """
    rows, columns = shape
    if is_of_blocks(spec):
        return E2M1 if spec.element == "e2m1" and rows % 64 == 0 and columns % 64 == 0 else None
    return W4 if is_four_bits(spec) and not spec.float_zero and rows % 64 == 0 and columns % 128 == 0 else None


def preferred(w: QuantTensor) -> str:
    """The layout that products read fastest."""
    return fits_tiles(as_nf4(w).spec, w.shape) or CANONICAL


def check_layout(name: str, w: QuantTensor) -> None:
    """The layout of `w` is read here.

    Raises:
        LayoutError: it is not.
    """
    if w.layout in FORMER:
        raise LayoutError(
            f"{name}: is packed as {w.layout!r}, as earlier builds did; its bits are in another order now "
            f"({FORMER[w.layout]!r}). Quantize or load the weight again and pack that with prepack."
        )
    if w.layout not in KNOWN:
        raise LayoutError(
            f"{name}: is packed as {w.layout!r}; read here: {', '.join(KNOWN)}. Run it on the backend that packed it, "
            f"or undo that there with prepack({name}, layout={CANONICAL!r})."
        )


def packed(w: QuantTensor, layout: str) -> QuantTensor:
    """The weight in another layout.

    Raises:
        LayoutError: one of the two layouts is not known.
        ArgumentError: the layout does not hold such weights.
    """
    if layout not in KNOWN:
        raise LayoutError(f"layout: {layout!r} is not known here. Choose from {', '.join(KNOWN)}.")
    check_layout("w", w)
    if w.layout == layout:
        return w
    if w.spec.element == "fp4":
        return replace(packed(as_nf4(w), layout), spec=w.spec)
    if layout not in (CANONICAL, fits_tiles(w.spec, w.shape)):
        need = f"{_HOLDS[layout]}, not {w.spec} of {w.shape}"
        raise ArgumentError("layout", layout, need, "Leave layout=None, which keeps such a weight canonical.")
    rows, columns = w.shape
    if layout == CANONICAL:
        size = (rows * columns // 2,) if w.spec.element == "nf4" else (rows, columns // 2)
        codes = torch.empty(size, dtype=torch.uint8, device=w.device)
    else:
        codes = torch.empty((rows // 16, columns // 64, 128), dtype=torch.int32, device=w.device)
    move_codes(w, codes, to_tiles=layout != CANONICAL)
    parts = {**w.parts, "codes": codes}
    if is_of_blocks(w.spec):
        parts["scale"] = (_block_scales_to_rows if layout == CANONICAL else _block_scales_to_tiles)(w)
    else:
        for name in {scale_name(w.spec), "zero"} & set(parts):
            parts[name] = _transposed(parts[name], w, layout)
    return QuantTensor(w.spec, w.shape, w.dtype, parts, layout)


def move_codes(w: QuantTensor, codes: Tensor, *, to_tiles: bool) -> None:
    """Write the codes of a weight as words of tiles, or as bytes."""
    rows, columns = w.shape
    floats = is_of_blocks(w.spec)
    C = 64 if floats else 128
    launch = plain_launcher_for(codes.device).bind(
        repack_kernel, options=EXACT, row_bytes=columns // 2, N=rows, K=columns, TO_TILES=to_tiles,
        HIGH_FIRST=w.spec.element == "nf4", R=64, C=C, FLOATS=floats,
    )  # fmt: skip
    launch((rows // 64 * (columns // C), 1, 1), codes_of(w), codes)  # it writes whole tiles


def _transposed(part: Tensor, w: QuantTensor, layout: str) -> Tensor:
    """[N, groups] as [groups, N], or back; nf4's are flat where canonical. Always memory of its own."""
    grid = part.view(w.shape[0], -1) if layout == W4 else part.view(-1, w.shape[0])
    found = grid.t().clone(memory_format=torch.contiguous_format)
    return found if layout == W4 or w.spec.element != "nf4" else found.view(-1)


def _block_scales_to_tiles(w: QuantTensor) -> Tensor:  # -> int16 [N / 16, K / 64, 8, B]
    rows, columns = w.shape
    byte = w.parts["scale"].view(torch.uint8).view(rows // 16, 2, 8, columns // 64, -1)  # tn rh r8 tk b
    found: Tensor = byte.permute(0, 3, 2, 4, 1).contiguous().view(torch.int16)  # tn tk r8 b (rh)
    return found.squeeze(-1)


def _block_scales_to_rows(w: QuantTensor) -> Tensor:  # -> [N, K / group]
    byte = w.parts["scale"].contiguous().view(torch.uint8).view(*w.parts["scale"].shape, 2)  # tn tk r8 b rh
    rows = byte.permute(0, 4, 2, 1, 3).reshape(w.shape[0], -1)
    return rows if w.spec.scale_dtype == "e8m0" else rows.view(torch.float8_e4m3fn)
