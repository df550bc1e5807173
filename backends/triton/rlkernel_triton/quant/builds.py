"""Builds of the kernels of quantised weights: what rollouts and weight updates launch, at the shapes of an 8B model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rlkernel_triton.builds import Build
from rlkernel_triton.quant import decode_kernels, encode_kernels, product_kernels, word_kernels
from rlkernel_triton.quant.choice import DEVICES, Cut, kind_of

_INT4, _INT8, _FLOAT8, _NF4, _FP4 = range(5)
_SIZES: Final = {"N": "i32", "K": "i32"}
_STORED: Final = {
    "row_bytes": "i32", "scale": "*bf16", "zero": "*u8", "scale_row": "i32", "scale_group": "i32",
}  # fmt: skip
_TABLES: Final = {"table": "*fp32", "nested_table": "*fp32", "nested_absmax": "*fp32", "nested_offset": "*fp32"}
_ENCODED: Final = {
    "w": "*bf16", "row_stride": "i32", "codes": "*u8", **_STORED, "cells": "*fp32", "partial": "*i32",
    "parts": "i32", "largest": "fp32", **_SIZES,
}  # fmt: skip
_ELEMENT: Final = {"ELEMENT": _INT4, "MANTISSA": 0, "BIAS": 0, "FNUZ": False}
_E4M3: Final = {"ELEMENT": _FLOAT8, "MANTISSA": 3, "BIAS": 7, "FNUZ": False, "LARGEST": 448.0}
_INTEGERS: Final = {
    "LEAST": 0,
    "MOST": 15,
    "SYMMETRIC": True,
    "FLOAT_ZERO": False,
    "ROUNDING": 0,
    "WHOLE": True,
    "INTERPRETED": False,
    "column_stride": 1,
}
_AFTER: Final = {
    "bias": "*bf16", "xa": "*bf16", "lora_b": "*bf16", "lora_row": "i32", "lora_rank": "i32", "lora_scale": "fp32",
    "residual": "*bf16", "residual_row": "i32",
}  # fmt: skip
_PLAIN: Final = {
    "BIAS": False, "RANK": 0, "WIDE_LORA": False, "RESIDUAL": False, "PAIR": False, "ACTIVATION": "none",
    "INTERPRETED": False,
}  # fmt: skip
_ALL: Final = {"BIAS": True, "RANK": 16, "RESIDUAL": True}
_PRODUCT: Final = {
    "x": "*bf16", "x_row": "i32", "x_scale": "*fp32", "x_scale_row": "i32", "codes": "*u8", **_STORED, **_TABLES,
    "y": "*bf16", "partial": "*fp32", "tickets": "*i32", **_AFTER, "M": "i32", **_SIZES,
}  # fmt: skip


def _build(
    kernel: Any, label: str, types: dict[str, str], constants: dict[str, Any], warps: int = 4, stages: int = 2
) -> Build:
    """The build of a kernel that takes some of these parameters."""
    names = kernel.arg_names
    given = {n: constants[n] for n in names if n in constants}
    kinds = {n: types[n] for n in names if n in types and n not in given}
    whole = ("N", "K", "row_stride", "x_row", "row_bytes", "first")
    divisible = tuple(n for n, t in kinds.items() if t.startswith("*") or n in whole)
    return Build(kernel, label, kinds, given, warps, stages, divisible)


def builds(arch: str) -> Iterator[Build]:
    """Every build that is compiled for an architecture."""
    yield from _codecs()
    yield from _products(arch)


def _codecs() -> Iterator[Build]:
    groups = {**_INTEGERS, **_ELEMENT, "GROUP": 128, "R": 16, "C": 512, "TILED": False}
    words = {**_ENCODED, "codes": "*i32"}
    nf4 = {"ELEMENT": _NF4, "GROUP": 64, "C": 256}
    encode = encode_kernels.encode_groups
    yield _build(encode, "int4_g128_asym", _ENCODED, {**groups, "SYMMETRIC": False})
    yield _build(encode, "int4_g128, tiles", words, {**groups, "TILED": True})
    half = {**_ENCODED, "scale": "*fp16", "zero": "*fp16"}
    yield _build(encode, "hqq4", half, {**groups, "GROUP": 64, "SYMMETRIC": False, "FLOAT_ZERO": True})
    bytes_ = {"ELEMENT": _INT8, "LEAST": -127, "MOST": 127}
    yield _build(encode, "gguf_q8_0", {**half, "codes": "*i8"}, {**groups, **bytes_, "GROUP": 32, "ROUNDING": 1})
    yield _build(
        encode, "gguf_q4_0, tiles", {**half, "codes": "*i32"}, {**groups, "GROUP": 32, "ROUNDING": 2, "TILED": True}
    )
    yield _build(encode, "fp4", {**_ENCODED, "scale": "*fp32"}, {**groups, "ELEMENT": _FP4, "GROUP": 64})
    yield _build(encode, "nf4, tiles", {**words, "scale": "*fp32"}, {**groups, **nf4, "TILED": True})
    rows = {
        **_INTEGERS,
        **_ELEMENT,
        "R": 4,
        "C": 1024,
        "ROWS": 1,
        "POWER": False,
        "PARTS": 1,
        "TILED": False,
        "CAST": False,
    }
    rows |= {"LEAST": -127, "MOST": 127, "LARGEST": 0.0}
    wide = {**_ENCODED, "scale": "*fp32"}
    encode = encode_kernels.encode_rows
    yield _build(encode, "int8_channel", {**wide, "codes": "*i8"}, {**rows, "ELEMENT": _INT8})
    yield _build(encode, "fp8_tensor", wide, {**rows, **_E4M3, "ROWS": 0, "PARTS": 1024})
    yield _build(encode, "fp8_block128", wide, {**rows, **_E4M3, "ROWS": 2, "R": 128, "C": 128}, warps=8)
    yield _build(encode_kernels.largest_bits, "bf16", wide, rows)
    decoded = {**_STORED, **_TABLES, "codes": "*u8", "out": "*bf16", "first": "i32", **_SIZES}
    value = {**_INTEGERS, **_ELEMENT, "GROUP": 128, "SCALE_ROWS": 1, "NESTED": False, "R": 8, "C": 512, "TILED": False}
    tiles = {**value, "R": 16, "C": 256, "TILED": True}
    decode = decode_kernels.dequantise
    yield _build(decode, "int4_g128, tiles", {**decoded, "codes": "*i32"}, tiles)
    nested = {**decoded, "codes": "*i32", "scale": "*u8"}
    yield _build(decode, "nf4, double_quant, tiles", nested, {**tiles, **nf4, "NESTED": True})
    yield _build(decode, "fp8_channel", {**decoded, "scale": "*fp32"}, {**value, **_E4M3, "GROUP": 0})
    moved = {"source": "*u8", "target": "*i32", "row_bytes": "i32", **_SIZES}
    whole = {"TO_TILES": True, "HIGH_FIRST": False, "FLOATS": False, "R": 64, "C": 128}
    yield _build(decode_kernels.move, "to tiles", moved, whole)


def _products(arch: str) -> Iterator[Build]:
    device = DEVICES[kind_of(arch)]
    nvidia = arch.startswith("sm")
    words = {**_PRODUCT, "codes": "*i32"}
    base = {**_PLAIN, "GROUP": 128, "SYMMETRIC": True, "ASM": nvidia}
    base |= {"PERMUTED": nvidia and arch != "sm90", "TABLE": False, "NESTED": False}

    def word(label: str, cut: Cut, **more: Any) -> Build:
        given = {**base, **more}
        step = min(given["GROUP"] or cut.step, cut.step)
        shape = {"BM": cut.BM, "BN": cut.BN, "BK": step, "PARTS": cut.parts or 4, "STAGES": cut.stages}
        return _build(
            word_kernels.word_product, label, words, {**given, **shape, "FOLD": cut.fold}, cut.warps, cut.stages
        )

    for M, row in device.table.items():
        for name, cut in zip(("wide", "narrow"), row, strict=True):
            if name == "wide" or cut != row.wide:
                yield word(f"int4_g128, M <= {M}, {name}", cut)
    few = device.table[16].narrow
    if nvidia:
        for nested in (False, True):
            given = {**base, "GROUP": 64, "TABLE": True, "NESTED": nested}
            shape = {"BM": few.BM, "BN": few.BN, "BK": 64, "PARTS": 4, "STAGES": few.stages, "FOLD": False}
            yield _build(
                word_kernels.word_product, f"nf4, M <= 16{', double_quant' if nested else ''}",
                {**words, "scale": "*u8" if nested else "*fp32"}, {**given, **shape}, few.warps, few.stages,
            )  # fmt: skip
    yield word("int4_g128_asym, M <= 16", few, SYMMETRIC=False)
    yield word("int4_g128, swiglu, LoRA, bias, residual", device.unrounded, PAIR=True, ACTIVATION="swiglu", **_ALL)
    byte = {**_PLAIN, "BM": 16, "BN": 64, "BK": 64, "STAGES": 2, "GROUP": 0, "SCALE_ROWS": 1, "SYMMETRIC": True}
    byte |= {"NESTED": False, "RAGGED": False, "FOLD": False, "WIDE": False, "X_SCALE": 0, "ELEMENT": _INT4}
    byte |= {"MANTISSA": 0, "FLOAT_BIAS": 0, "FNUZ": False, "CAST": False}
    wide = {"BK": 128, "STAGES": 3} if arch == "sm90" else {"BK": 128}
    product = product_kernels.byte_product
    yield _build(product, "int4_g128, any shape", _PRODUCT, {**byte, "GROUP": 128})
    integers = {**_PRODUCT, "codes": "*i8", "scale": "*fp32"}
    yield _build(
        product,
        "int8_w8a8, M > 32",
        {**integers, "x": "*i8"},
        {**byte, **wide, "ELEMENT": _INT8, "BM": 64, "X_SCALE": 1},
    )
    float8 = {"ELEMENT": _FLOAT8, "MANTISSA": 3, "FLOAT_BIAS": 7, "CAST": arch == "sm90", **wide}
    yield _build(product, "fp8_channel", {**_PRODUCT, "scale": "*fp32"}, {**byte, **float8})
    yield _build(
        product_kernels.follow, "swiglu, LoRA, bias, residual", {**_PRODUCT, "h": "*fp32"},
        {**_PLAIN, **_ALL, "PAIR": True, "ACTIVATION": "swiglu", "BM": 32, "BN": 64},
    )  # fmt: skip
