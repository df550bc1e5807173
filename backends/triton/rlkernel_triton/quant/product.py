"""Which kernel multiplies by a quantized weight, and its launch.

    weight                                  how                                             function
    4 bits in `triton_w4`, few tokens       codes decoded in registers, one launch          W4Product
    canonical, any shape                    codes read as bytes                             canonical_product
    above the largest class of M            dequantized in pieces, multiplied by torch      dequantized_product
    mxfp4, nvfp4 in tiles; experts of int4  decoded in registers, scales folded             tiled_product
    other formats of blocks                 decoded block by block                          block_product
    experts of any other format             some at a time dequantized, multiplied          dense_experts_product

Inputs that a format quantizes are coded first, and products of 8-bit floats are taken of their exact 16-bit values,
since the 8-bit instructions of some GPUs keep fewer bits of a sum than the contract allows.

Legend: M tokens · K inputs · N rows of the weight, or of an expert · R = N, or N / 2 for a pair · E experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_triton.common.host import blank
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Grid, Launch, Launcher, Plan, planned
from rlkernel_triton.quant import code_tiles, formats, tile_config
from rlkernel_triton.quant.canonical_product_kernels import block_product_kernel, canonical_product_kernel
from rlkernel_triton.quant.dequantized import dense_experts, dequantized_product
from rlkernel_triton.quant.epilogue import MOST_RANK, NO_EPILOGUE, Epilogue, apply_epilogue, lora_inner
from rlkernel_triton.quant.layouts import packed
from rlkernel_triton.quant.quantize import quantize_activation, quantize_in_blocks
from rlkernel_triton.quant.splitk_counters import splitk_workspace
from rlkernel_triton.quant.tile_config import TileConfig, W4Config, machine
from rlkernel_triton.quant.tiled_product_kernels import tiled_product_kernel, w4_product_kernel

IN_BLOCKS: Final = frozenset({"mxfp8", "nvfp4"})  # how x is quantized with a scale for a few columns
MOST_OF_TABLE: Final = 64  # tokens of a product with a weight of a table that is not dequantized first


def product(
    x: Tensor,
    w: QuantTensor,
    epilogue: Epilogue,
    rounding: str,
    ends: Tensor | None = None,
    dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> Tensor:  # -> [M, R]
    """act(x w'^T + lora + bias) + residual.

    Args:
        x: [M, K], contiguous.
        w: [N, K], or [E N, K] where there are experts.
        epilogue: what follows the product.
        rounding: `weight_rounding` of the call.
        ends: [E] integer: one past the last row of each expert.
        dtype: of the result; None for that of x.
        plan: of calls that all have one shape, format and layout.
    """
    if ends is None and not formats.is_of_blocks(w.spec):
        # A tuple, since a plan takes None for "not bound yet".
        (w4_product,) = planned(plan, "w4", x.device, lambda known: (bind_w4_product(known, x, w, epilogue, rounding),))
        if w4_product is not None:
            return w4_product(x, w, epilogue.with_addition(x, plan), dtype or x.dtype)
    M, N = x.shape[0], w.shape[0] // (1 if ends is None else ends.shape[0])
    make = torch.empty if ends is None else torch.zeros  # rows of no expert are 0
    y = make(M, N // 2 if epilogue.pair else N, dtype=dtype or x.dtype, device=x.device)
    if M == 0:
        return y
    with torch.cuda.device_of(x):
        tiles = _takes_tiles(x, w, rounding, ends, y)
        if epilogue.lora is not None and epilogue.rank > MOST_RANK:
            h = product(x, w, NO_EPILOGUE, rounding, dtype=torch.float32)
            inner = lora_inner(x, epilogue.lora.A).float()
            h.addmm_(inner, epilogue.lora.B.float().t(), alpha=epilogue.lora.scale)
            apply_epilogue(x, h, replace(epilogue, lora=None), y, plan)
            return y
        if ends is None and _is_better_dequantized(x, w, rounding, tiles=tiles):
            dequantized_product(x, w, epilogue, y, plan)
            return y
        epilogue, holds = epilogue.with_addition(x, plan), True
        if w.spec.act in IN_BLOCKS:
            holds = x.dtype != torch.float16 or w.spec.act == "nvfp4"  # powers of two go beyond the range of float16
            values, scale = quantize_in_blocks(x, w.spec, x.dtype if holds else torch.float32, plan)
            epilogue, x = replace(epilogue, x=x, x_scale=scale), values
            tiles = _takes_tiles(x, w, rounding, ends, y)
        if not holds and rounding == "dtype":  # the weight in float16, x in fp32
            dense_experts_product(x, w, epilogue, rounding, ends, y, plan)
        elif tiles:
            tiled_product(x, w, epilogue, rounding, ends, y, plan)
        elif formats.is_of_blocks(w.spec):
            block_product(x, w, epilogue, rounding, ends, y, plan)
        elif ends is None:
            canonical_product(x, packed(formats.as_nf4(w), CANONICAL), epilogue, rounding, y, plan)
        else:
            dense_experts_product(x, w, epilogue, rounding, ends, y, plan)
    return y


def _takes_tiles(x: Tensor, w: QuantTensor, rounding: str, ends: Tensor | None, y: Tensor) -> bool:
    """`tiled_product` takes this product."""
    if x.dtype == torch.float32 or y.shape[1] % 32:
        return False
    if w.layout == formats.E2M1:  # a product of code and scale is exact but for mxfp4 in float16
        return rounding != "none" or x.dtype == torch.bfloat16 or w.spec.format == "nvfp4"
    return ends is not None and w.layout == formats.W4 and w.spec.element == "int4" and rounding != "none"


def _is_better_dequantized(x: Tensor, w: QuantTensor, rounding: str, *, tiles: bool) -> bool:
    """So many rows, or codes of a table, that a weight is better dequantized; that rounds it."""
    if x.dtype == torch.float32 or w.spec.act != "none" or rounding == "none":
        return False
    if tiles:
        return x.shape[0] > tile_config.MOST_ROWS
    return formats.as_nf4(w).spec.element == "nf4" or tile_config.class_of(x.shape[0], machine(x.device).kind) is None


# Weights in `triton_w4`.


def bind_w4_product(
    launcher: Launcher, x: Tensor, w: QuantTensor, epilogue: Epilogue, rounding: str
) -> W4Product | None:
    """What multiplies contiguous x by weights like this one in one launch; None where that takes more."""
    if not x.shape[0] or epilogue.rank > MOST_RANK:
        return None
    if x.dtype == torch.float32 or w.spec.act != "none" or w.layout != formats.W4:
        return None
    on = machine(x.device)
    # Values of a table are looked up in registers, which takes PTX, and are rounded before their scales.
    if formats.as_nf4(w).spec.element == "nf4" and (rounding != "any" or x.shape[0] > MOST_OF_TABLE or not on.tables):
        return None
    config = tile_config.w4_config(
        x.shape[0], *w.shape, group=w.spec.group, pair=epilogue.pair, rounding=rounding, kind=on.kind,
        multiprocessors=on.multiprocessors,
    )  # fmt: skip
    return None if config is None else W4Product(launcher, x, w, epilogue, config)


class W4Product:
    """The product of a weight in `triton_w4`, bound for a shape."""

    def __init__(
        self, launcher: Launcher, x: Tensor, w: QuantTensor, epilogue: Epilogue, config: W4Config, *,
        permuted: bool | None = None,
    ) -> None:  # fmt: skip
        w = formats.as_nf4(w)
        spec, M, (N, K), on = w.spec, x.shape[0], w.shape, machine(x.device)
        self._width = N // 2 if epilogue.pair else N
        self._M, self._device = M, x.device
        self._tiles = triton.cdiv(M, config.BM) * (self._width // config.BN)
        partials = config.parts * self._tiles * (2 if epilogue.pair else 1)
        self._partial_sums = partials * config.BM * config.BN if config.parts > 1 else 0
        self._grid = (self._tiles * config.parts, 1, 1)
        self._plain = not epilogue.has_tensors
        self._nothing = (blank(x.dtype, x.device),) * 4  # bias, x A^T, B, residual
        self._parts = formats.part_names(w)
        self._contiguous = all(w.parts[n].is_contiguous() for n in self._parts)
        self._launch = launcher.bind(
            w4_product_kernel, num_warps=config.warps, num_stages=config.stages,
            **epilogue.constants(x), x_row=K, M=M, N=N, K=K, BM=config.BM, BN=config.BN,
            BK=min(spec.group or config.step, config.step), PARTS=config.parts, STAGES=config.stages,
            GROUP=spec.group, SYMMETRIC=spec.symmetric, FOLD=config.fold,
            PERMUTED=on.sync if permuted is None else permuted, ASM=on.ptx, TABLE=spec.element == "nf4",
            NESTED=spec.double_quant,
        )  # fmt: skip

    def __call__(self, x: Tensor, w: QuantTensor, epilogue: Epilogue, dtype: torch.dtype) -> Tensor:
        """The product of contiguous x."""
        y = torch.empty((self._M, self._width), dtype=dtype, device=self._device)
        sums = counters = x
        if self._partial_sums:
            counters, sums = splitk_workspace(self._tiles, self._partial_sums, self._device)
        parts = w.parts
        given = [parts[n] for n in self._parts]
        if not self._contiguous:
            given = [part.contiguous() for part in given]
        more = self._nothing if self._plain else epilogue.tensors(x)
        self._launch(self._grid, x, *given, y, sums, counters, *more)
        return y


# Canonical weights.


def canonical_product(
    x: Tensor, w: QuantTensor, epilogue: Epilogue, rounding: str, y: Tensor, plan: Plan | None = None
) -> None:
    """Codes read as bytes, or pairs of 4 bits; fp4 comes as nf4."""
    spec, M, (N, K) = w.spec, x.shape[0], w.shape
    scale, coded, x_scale = x, x, 0
    if spec.act != "none":
        q = quantize_activation(x, spec)
        scale, x_scale = q.scale.contiguous(), 2 if spec.act == "block128_fp8" else 1
        # Every code is exact in 16 bits; a rounded weight wants the type that it is rounded to.
        exact = torch.bfloat16 if x.dtype == torch.float32 and rounding != "dtype" else x.dtype
        coded = q.codes if spec.act == "token_int8" else q.codes.float().to(exact)

    def bound(launcher: Launcher) -> tuple[Launch, Grid, tuple[str, ...], bool]:
        element = formats.Element.of(spec)
        wide = coded.dtype == torch.float32 or (rounding == "none" and (spec.element == "nf4" or spec.float_zero))
        ragged = spec.element == "nf4" and K % spec.group != 0
        step = 32 if wide else 64 if spec.group else 128
        if spec.group and not ragged:
            step = min(step, spec.group) if x_scale != 2 else 128
        BM = next((b for b in (16, 32, 64) if b >= M), 128 if not wide else 64)
        on = machine(x.device)
        stages = 3 if step == 128 and on.kind == "sm90" else 2
        launch = launcher.bind(
            canonical_product_kernel, num_warps=4, num_stages=stages, **epilogue.constants(x),
            **formats.scale_grid(w), x_row=coded.stride(0), x_scale_row=scale.stride(0), row_bytes=(K + 1) // 2, M=M,
            N=N, K=K, BM=BM, BN=64, BK=step, STAGES=stages, ELEMENT=element.ELEMENT, SYMMETRIC=spec.symmetric,
            NESTED=spec.double_quant, MANTISSA=element.MANTISSA, FLOAT_BIAS=element.BIAS, FNUZ=element.FNUZ,
            RAGGED=ragged, FOLD=spec.element == "nf4" or (rounding == "dtype" and spec.act != "token_int8"), WIDE=wide,
            X_SCALE=x_scale, CAST=spec.element == "e4m3fn" and on.casts,
        )  # fmt: skip
        names = formats.part_names(w)[1:]
        grid = (triton.cdiv(M, BM) * triton.cdiv(y.shape[1], 64), 1, 1)
        return launch, grid, names, all(w.parts[n].is_contiguous() for n in names)

    launch, grid, names, contiguous = planned(plan, "canonical", x.device, bound)
    parts = [w.parts[n] for n in names]
    if not contiguous:
        parts = [part.contiguous() for part in parts]
    launch(grid, coded, scale, formats.codes_of(w), *parts, y, *epilogue.tensors(x))


def block_product(
    x: Tensor, w: QuantTensor, epilogue: Epilogue, rounding: str, ends: Tensor | None, y: Tensor,
    plan: Plan | None = None,
) -> None:  # fmt: skip
    """Canonical blocks, decoded beside the product."""
    w = packed(w, CANONICAL)
    form = formats.block_constants(w.spec)
    experts = 1 if ends is None else ends.shape[0]
    _blocks_launched(
        x, formats.block_parts(w), epilogue, ends, y, plan, "blocks", N=w.shape[0] // experts, K=w.shape[1],
        first_expert=0, E=experts, FORMAT=form["FORMAT"], MANTISSA=form["MANTISSA"], FLOAT_BIAS=form["BIAS"],
        WIDE=x.dtype == torch.float32 or rounding == "none",
    )  # fmt: skip


def _blocks_launched(
    x: Tensor, parts: tuple[Tensor, ...], epilogue: Epilogue, ends: Tensor | None, y: Tensor, plan: Plan | None,
    place: str, *, WIDE: bool, any_alignment: Collection[str] = (), **sizes_and_format: Any,
) -> None:  # fmt: skip
    def bound(launcher: Launcher) -> tuple[Launch, Grid]:
        M = x.shape[0]
        rows = M if ends is None else triton.cdiv(M, ends.shape[0])
        BM = next((b for b in (16, 32, 64) if b >= rows), 64)
        m_tiles = triton.cdiv(M, BM) if ends is None else M // BM + min(M, ends.shape[0])
        launch = launcher.bind(
            block_product_kernel, num_stages=2, any_alignment=any_alignment, **epilogue.constants(x),
            **sizes_and_format, x_row=x.stride(0), M=M, m_tiles=m_tiles, BM=BM, BN=64, BK=32 if WIDE else 64, STAGES=2,
            WIDE=WIDE, X_SCALE=epilogue.x_scale is not None,
            EB=0 if ends is None else triton.next_power_of_2(ends.shape[0]),
        )  # fmt: skip
        return launch, (m_tiles * triton.cdiv(y.shape[1], 64), 1, 1)

    launch, grid = planned(plan, place, x.device, bound)
    x_scale = x if epilogue.x_scale is None else epilogue.x_scale
    launch(grid, x, *parts, x_scale, x if ends is None else ends.contiguous(), y, *epilogue.tensors(x))


# Tiles whose scales are folded: `triton_e2m1`, and experts in `triton_w4`.


def tiled_product(
    x: Tensor, w: QuantTensor, epilogue: Epilogue, rounding: str, ends: Tensor | None, y: Tensor,
    plan: Plan | None = None,
) -> None:  # fmt: skip
    """Codes in tiles, decoded in registers."""
    rows = triton.cdiv(x.shape[0], 1 if ends is None else ends.shape[0])

    def bound(launcher: Launcher) -> TiledProduct:
        config = tile_config.tile_config(
            rows, y.shape[1], machine(x.device), experts=ends is not None, pair=epilogue.pair
        )
        return TiledProduct(launcher, x, w, epilogue, rounding, ends, y, config)

    planned(plan, "tiles", x.device, bound)(x, w, epilogue, ends, y)


class TiledProduct:
    """`tiled_product` in one configuration, bound for a shape; `parts` of K, 0 for as many as fill the GPU."""

    def __init__(
        self, launcher: Launcher, x: Tensor, w: QuantTensor, epilogue: Epilogue, rounding: str, ends: Tensor | None,
        y: Tensor, config: TileConfig, parts: int = 0,
    ) -> None:  # fmt: skip
        spec, M, (rows, K), BM, BN = w.spec, x.shape[0], w.shape, config.BM, config.BN
        experts = 1 if ends is None else ends.shape[0]
        m_tiles = triton.cdiv(M, BM) if ends is None else M // BM + min(M, experts)
        step = min(spec.group or 128, 128) if spec.element == "int4" else 128 if K % 128 == 0 else 64
        if BM * BN >= tile_config.LARGE:
            step = min(step, 64)
        on, tiles = machine(x.device), m_tiles * (y.shape[1] // BN)
        programs = tile_config.FEW_ROWS_PROGRAMS if BM == 16 and on.kind == "sm90" else tile_config.PROGRAMS
        if not parts:
            parts = tile_config.splitk_parts(tiles, K // step, on.multiprocessors, programs) if ends is None else 1
        self._tiles, self._grid = tiles, (tiles * parts, 1, 1)
        self._partial_sums = parts * tiles * (2 if epilogue.pair else 1) * BM * BN if parts > 1 else 0
        self._as_words = spec.element != "int4"
        factored = spec.format == "nvfp4" and rounding == "dtype"
        exact = x.dtype == torch.bfloat16 or (spec.element == "int4" and x.dtype == torch.float16)
        self._launch = launcher.bind(
            tiled_product_kernel, num_warps=config.warps, num_stages=config.stages, **epilogue.constants(x),
            x_row=x.stride(0), M=M, N=rows // experts, K=K, rows=rows, E=experts, m_tiles=m_tiles,
            FORMAT=(code_tiles.W4_INT4 if spec.element == "int4" else formats.BLOCK_FORMATS[spec.format]).value, BM=BM,
            BN=BN, BK=step, PARTS=parts, STAGES=config.stages, GROUP=spec.group, SYMMETRIC=spec.symmetric,
            FACTORED=factored, EB=0 if ends is None else triton.next_power_of_2(experts), PERMUTED=on.sync,
            ASM=on.ptx and exact and not factored, X_SCALE=epilogue.x_scale is not None,
        )  # fmt: skip

    def __call__(self, x: Tensor, w: QuantTensor, epilogue: Epilogue, ends: Tensor | None, y: Tensor) -> None:
        """The product of contiguous x, into y."""
        sums = counters = x
        if self._partial_sums:
            counters, sums = splitk_workspace(self._tiles, self._partial_sums, x.device)
        parts = w.parts
        scale = parts["scale"].contiguous()
        if self._as_words:
            scale = scale.view(torch.int32)
        self._launch(
            self._grid, x, parts["codes"].contiguous(), scale, parts.get("zero", scale),
            parts.get("global_scale", scale), x if epilogue.x_scale is None else epilogue.x_scale,
            x if ends is None else ends.contiguous(), y, sums, counters, *epilogue.tensors(x),
        )  # fmt: skip


# Experts dequantized to memory.


def dense_experts_product(
    x: Tensor, w: QuantTensor, epilogue: Epilogue, rounding: str, ends: Tensor | None, y: Tensor,
    plan: Plan | None = None,
) -> None:  # fmt: skip
    """Some experts at a time, dequantized and multiplied from memory."""
    kind = x.dtype if epilogue.x is None else epilogue.x.dtype
    # Integers that x is quantized to have no weight to round.
    rounded = w.spec.act == "none" if rounding == "any" else rounding == "dtype" and w.spec.act != "token_int8"
    kind = kind if rounded else torch.float32
    if w.spec.act not in {"none", *IN_BLOCKS}:
        x = quantize_activation(x, w.spec).value()
    experts = 1 if ends is None else ends.shape[0]
    N = w.shape[0] // experts
    for first, some, dense in dense_experts(w, experts, kind, plan):
        dense_product(x, dense, epilogue, ends, y, plan, "experts", first=first, experts=some, N=N)


def dense_product(
    x: Tensor, dense: Tensor, epilogue: Epilogue, ends: Tensor | None, y: Tensor, plan: Plan | None, place: str, *,
    first: int, experts: int, N: int, any_alignment: Collection[str] = (),
) -> None:  # fmt: skip
    """Rows of x times the dense rows of their experts, those of experts from `first` on."""
    _blocks_launched(
        x, (dense,) * 7, epilogue, ends, y, plan, f"{place} {first}:{experts}", N=N, K=dense.shape[1],
        first_expert=first, E=experts, FORMAT=code_tiles.DENSE.value, MANTISSA=0, FLOAT_BIAS=0,
        WIDE=torch.float32 in (x.dtype, dense.dtype), any_alignment=any_alignment,
    )  # fmt: skip
