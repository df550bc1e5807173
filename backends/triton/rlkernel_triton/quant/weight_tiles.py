"""A tile of a quantized weight of any format and layout as fp32 numbers, for products that decode as they go.

    GROUPS   codes with scales of groups, rows or all, canonical or in `triton_w4`
    FLAT     the same of tables whose blocks go on from row to row
    BLOCKS   canonical mxfp4, mxfp8, nvfp4 and k-quants
    E2M1     mxfp4 and nvfp4 in `triton_e2m1`

Values have the bits of `dequantize(w, dtype=torch.float32)` where the kernel is launched with `formats.EXACT`.

Legend: N rows · K columns · R x C a tile.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_triton.common.host import INTERPRETED as IN_INTERPRETER
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.quant import formats
from rlkernel_triton.quant.canonical_product_kernels import load_canonical_scales, load_canonical_values
from rlkernel_triton.quant.code_tiles import NVFP4
from rlkernel_triton.quant.dequantize import is_flat
from rlkernel_triton.quant.dequantize_kernels import load_block_values, load_group_values
from rlkernel_triton.quant.operand_tiles import decode_e2m1_tile, load_e2m1_scales

GROUPS: Final = tl.constexpr(0)
FLAT: Final = tl.constexpr(1)
BLOCKS: Final = tl.constexpr(2)
E2M1: Final = tl.constexpr(3)


def kind_of(w: QuantTensor) -> int:
    """How the weight is read."""
    if formats.is_of_blocks(w.spec):
        kind: int = (E2M1 if w.layout == formats.E2M1 else BLOCKS).value
    else:
        kind = (FLAT if is_flat(w) else GROUPS).value
    return kind


def tile_parts(w: QuantTensor) -> tuple[Tensor, ...]:
    """The seven tensors that `load_weight_values` reads; what a format lacks is any of them."""
    if formats.is_of_blocks(w.spec):
        if w.layout != formats.E2M1:
            return formats.block_parts(w)
        codes, scale = w.parts["codes"].contiguous(), w.parts["scale"].contiguous().view(torch.int32)
        return codes, scale, w.parts.get("global_scale", scale), *[scale] * 4
    names = formats.part_names(formats.as_nf4(w))[1:]
    return formats.codes_of(w), *(w.parts[n].contiguous() for n in names)


def tile_constants(w: QuantTensor) -> dict[str, Any]:
    """What `load_weight_values` takes beside tensors and the place of the tile."""
    w = formats.as_nf4(w)
    found: dict[str, Any] = {
        "KIND": kind_of(w), "FORMAT": 0, "GROUP": 0, "SCALE_ROWS": 0, "ELEMENT": 0, "TILED": w.layout == formats.W4,
        "SYMMETRIC": w.spec.symmetric, "NESTED": w.spec.double_quant, "MANTISSA": 0, "BIAS": 0, "FNUZ": False,
        "INTERPRETED": IN_INTERPRETER, "row_bytes": (w.shape[1] + 1) // 2, "scale_row": 0, "scale_group": 0,
    }  # fmt: skip
    if formats.is_of_blocks(w.spec):
        return {**found, **formats.block_constants(w.spec)}
    return {**found, **formats.scale_grid(w), **formats.Element.of(w.spec).constants}


@triton.jit
def load_weight_values(
    codes, p1, p2, p3, p4, p5, p6, row_bytes, scale_row, scale_group, row, column, N, K, KIND: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ELEMENT: tl.constexpr, TILED: tl.constexpr,
    SYMMETRIC: tl.constexpr, NESTED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """[R, C] fp32: rows from `row` on, a multiple of R, columns from `column` on, a multiple of C = 64.

    Parts are as `tile_parts` has them. What lies outside of the weight is any number.
    """
    n, k = row + tl.arange(0, R), column + tl.arange(0, C)
    if KIND == GROUPS:
        value = load_group_values(
            codes, row_bytes, p1, p2, scale_row, scale_group, p3, p4, p5, p6, row, column, N, K, GROUP, SCALE_ROWS,
            ELEMENT, TILED, SYMMETRIC, NESTED, MANTISSA, BIAS, FNUZ, R, C, INTERPRETED,
        )  # fmt: skip
    elif KIND == FLAT:
        value = load_canonical_values(
            codes, row_bytes, p3, p2, scale_row, scale_group, row, column, N, K, GROUP, ELEMENT, SYMMETRIC, MANTISSA,
            BIAS, FNUZ, True, False, R, C,
        )  # fmt: skip
        value *= load_canonical_scales(
            p1, scale_row, scale_group, p4, p5, p6, n, k, column, N, K, GROUP, SCALE_ROWS, ELEMENT, NESTED, True,
            INTERPRETED,
        )  # fmt: skip
    elif KIND == BLOCKS:
        value = load_block_values(
            codes, p1, p2, p3, p4, p5, p6, row, n, column, N, K, FORMAT, MANTISSA, BIAS, R, C, INTERPRETED
        )
    else:
        tile = (row // 16 + tl.arange(0, R // 16)).to(tl.int64)[:, None] * (K * 2)
        words = tl.load(codes + tile + (column * 2 + tl.arange(0, C * 2))[None, :])
        s = load_e2m1_scales(p1, row // 16, column, K, FORMAT, R // 16, C)
        factor = 1.0
        if FORMAT == NVFP4:
            factor = tl.load(p2)
        value = decode_e2m1_tile(
            words, s, factor, FORMAT, tl.float32, tl.float32, R // 16, C, False, False, INTERPRETED
        )
    return value
