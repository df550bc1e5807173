"""Builds of the kernels of blocks and experts: what rollouts on MX, NVFP4 and GGUF weights launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlkernel_triton.builds import Build
from rlkernel_triton.quant import (
    block_encode_kernels,
    block_kernels,
    expert_kernels,
    float4_tiles,
    super_encode_kernels,
)
from rlkernel_triton.quant.block_products import LARGE, NARROW, OF_EXPERTS, WIDE, Cut, cut_of
from rlkernel_triton.quant.builds import _AFTER, _PLAIN, _build

_SIZES: Final = {"M": "i32", "N": "i32", "K": "i32", "E": "i32", "m_tiles": "i32", "rows": "i32", "first": "i32"}
_BLOCKS: Final = {
    "codes": "*u8", "high": "*u8", "scale": "*u8", "d": "*fp16", "least": "*u8", "dmin": "*fp16", "factor": "*fp32",
    "out": "*bf16", **_SIZES,
}  # fmt: skip
_CALL: Final = {
    "x": "*bf16", "x_row": "i32", "ends": "*i32", "first_expert": "i32", "y": "*bf16", "partial": "*fp32",
    "tickets": "*i32", "zero": "*u8", "global_scale": "*fp32", **_AFTER, **_SIZES,
}  # fmt: skip
_TILES: Final = {**_CALL, "codes": "*i32", "scale": "*i32"}
_FORM: Final = {"MANTISSA": 3, "BIAS": 7, "FLOAT_BIAS": 7, "R": 8, "C": 256, "INTERPRETED": False}
_KINDS: Final = {"mxfp4": 0, "mxfp8": 1, "nvfp4": 2, "gguf_q4_k": 3, "gguf_q5_k": 4, "gguf_q6_k": 5}
_DENSE: Final = 6
_INT4: Final = 7


def builds(arch: str) -> Iterator[Build]:
    """Every build that is compiled for an architecture."""
    yield from _encoded()
    for name, kind in _KINDS.items():
        signed = {"scale": "*i8"} if name == "gguf_q6_k" else {}
        types = {**_BLOCKS, **signed}
        yield _build(block_kernels.dequantise_blocks, name, types, {**_FORM, "FORMAT": kind})
        canonical = {**_PLAIN, **_FORM, "FORMAT": kind, "BM": 16, "BN": 64, "BK": 64, "STAGES": 2, "EB": 0}
        yield _build(block_kernels.block_product, f"{name}, M <= 16", {**types, **_CALL}, {**canonical, "WIDE": False})
    dense = {**_PLAIN, **_FORM, "FORMAT": _DENSE, "BM": 64, "BN": 64, "BK": 64, "STAGES": 2, "EB": 32, "WIDE": False}
    values = {**_BLOCKS, **_CALL, **dict.fromkeys(("codes", "high", "scale", "d", "least", "dmin", "factor"), "*bf16")}
    yield _build(block_kernels.block_product, "dense, 32 experts", values, dense)
    for name in ("mxfp4", "nvfp4"):
        yield _build(
            float4_tiles.dequantise_tiles, f"{name}, tiles", {**_BLOCKS, "codes": "*i32", "scale": "*i32"},
            {"FORMAT": _KINDS[name], "C": 256, "INTERPRETED": False},
        )  # fmt: skip
    yield from _tiles(arch)


def _encoded() -> Iterator[Build]:
    types = {"w": "*bf16", "row_stride": "i32", "most": "*i32", "global_scale": "*fp32", **_BLOCKS, "scale": "*u8"}
    words = {**types, "codes": "*i32"}
    base = {"column_stride": 1, "R": 16, "C": 512, "GROUP": 32, "AWAY": False, "WHOLE": True, "RULE": 0}
    base |= {"INTERPRETED": False, "TILED": False}
    four = {"FOUR": True, "MANTISSA": 1, "BIAS": 1, "TOP": 2, "FRACTION": 1 << 22, "LARGEST": 6.0}
    eight = {"FOUR": False, "MANTISSA": 3, "BIAS": 7, "TOP": 8, "FRACTION": 3 << 21, "LARGEST": 448.0}
    encode = block_encode_kernels.encode_powers
    yield _build(encode, "mxfp4", types, {**base, **four})
    yield _build(encode, "mxfp4, tiles", words, {**base, **four, "TILED": True})
    yield _build(encode, "mxfp8", types, {**base, **eight})
    blocks = {**base, "GROUP": 16, "C": 256}
    yield _build(block_encode_kernels.largest_finite, "bf16", types, blocks)
    yield _build(block_encode_kernels.encode_scaled, "nvfp4", types, blocks)
    yield _build(block_encode_kernels.encode_scaled, "nvfp4, tiles", words, {**blocks, "TILED": True})
    for name, bits, sub in (("gguf_q4_k", 4, 32), ("gguf_q5_k", 5, 32), ("gguf_q6_k", 6, 16)):
        yield _build(
            super_encode_kernels.encode_supers, name, {**types, **({"scale": "*i8"} if bits == 6 else {})},
            {**base, "SUB": sub, "BITS": bits, "SIGNED": bits == 6},
        )  # fmt: skip


def _tiles(arch: str) -> Iterator[Build]:
    nvidia = arch.startswith("sm")
    base: dict[str, Any] = {**_PLAIN, "FORMAT": _KINDS["mxfp4"], "PARTS": 1, "GROUP": 32, "SYMMETRIC": True, "EB": 32}
    base |= {"FACTORED": False, "ASM": nvidia, "PERMUTED": nvidia and arch != "sm90"}

    def tile(label: str, rows: int, cuts: Mapping[int, Cut], **more: Any) -> Build:
        cut = cut_of(rows, arch, cuts)
        shape = {"BM": cut.BM, "BN": cut.BN, "BK": 64, "STAGES": cut.stages}
        return _build(expert_kernels.tile_product, label, _TILES, {**base, **shape, **more}, cut.warps, cut.stages)

    for rows in OF_EXPERTS:
        yield tile(f"mxfp4, 32 experts, M <= {rows} of each", rows, OF_EXPERTS)
    for rows, cut in NARROW.items():
        step, parts = 64 if cut.BM * cut.BN >= LARGE else 128, 2 if rows <= 16 else 1
        yield tile(f"mxfp4, M <= {rows}", rows, NARROW, EB=0, BK=step, PARTS=parts)
        if WIDE[rows] != cut:
            step = 64 if WIDE[rows].BM * WIDE[rows].BN >= LARGE else 128
            yield tile(f"mxfp4, M <= {rows}, wide", rows, WIDE, EB=0, BK=step, PARTS=1)
    yield tile("nvfp4, M <= 16", 16, NARROW, EB=0, PARTS=4, BK=128, FORMAT=_KINDS["nvfp4"], GROUP=16)
    yield tile("mxfp4, 32 experts, swiglu, bias", 32, OF_EXPERTS, PAIR=True, ACTIVATION="swiglu", BIAS=True)
    int4 = {"FORMAT": _INT4, "GROUP": 128, "BK": 128}
    given = {**_TILES, "scale": "*bf16"}
    cut = cut_of(16, arch, OF_EXPERTS)
    shape = {"BM": cut.BM, "BN": cut.BN, "STAGES": cut.stages, **int4}
    yield _build(expert_kernels.tile_product, "int4_g128, 32 experts", given, {**base, **shape}, cut.warps, cut.stages)
