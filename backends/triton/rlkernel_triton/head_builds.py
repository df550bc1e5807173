"""Builds of the matmul kernels: every tile shape, with what costs registers.

Legend as in head_kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import triton.language as tl

from rlkernel_triton import law_kernel
from rlkernel_triton.builds import Build
from rlkernel_triton.head_kernels import head_gradient, head_sweep, product
from rlkernel_triton.head_tiles import compiler_options, tile_for

_POINTERS: Final = {"index": "*i64", "count": "*i64", "ids": "*i64", "kept": "*u8"}
_SIZES: Final = dict.fromkeys(
    (
        "first",
        "n",
        "N",
        "M",
        "K",
        "C",
        "D",
        "V",
        "width",
        "start",
        "head_stride",
        "a_stride",
        "b_stride",
        "x_stride",
        "kept_stride",
    ),
    "i32",
)
_NUMBERS: Final = {"scale": "fp32", "softcap": "fp32", "T": "fp32"}
_ALIGNED: Final = (
    "x",
    "weight",
    "a",
    "b",
    "out",
    "D",
    "C",
    "M",
    "K",
    "V",
    "width",
    "x_stride",
    "b_stride",
    "head_stride",
    "a_stride",
)
_PLAIN: Final = {"HAS_BIAS": False, "HAS_INDEX": False, "HAS_T": False, "HAS_CAP": False, "SUPPORT": False}


def builds(arch: str) -> Iterator[Build]:
    """bf16 and fp32 operands; plainly with entropy, and with everything."""
    for dtype, operand in (("bf16", tl.bfloat16), ("fp32", tl.float32)):
        fixed = {"OPERAND": operand, "INTERPRETED": False, "head_step": 1}
        pointers = dict.fromkeys(("x", "weight", "bias", "saved", "out", "a", "b"), f"*{dtype}")
        floats = dict.fromkeys(("parts", "peaks", "rows", "g", "g_lse", "g_entropy", "g_mass"), "*fp32")
        kept = {"saved": "*fp16"} if operand is tl.bfloat16 else {}
        types = {**pointers, **floats, **_POINTERS, "invalid": "*i8", **_SIZES, **_NUMBERS}
        for kernel, label, kind, flags, more in _uses(arch):
            tile = tile_for(arch, "wide" if operand is tl.float32 and kind != "saved" else kind)
            shape = {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP": tile.GROUP}
            constants = {k: v for k, v in {**shape, **fixed, **flags}.items() if k in kernel.arg_names}
            known = {k: v for k, v in {**types, **kept, **more}.items() if k in kernel.arg_names and k not in constants}
            divisible = tuple(n for n in _ALIGNED if n in known)
            cut = (tile.num_warps, tile.num_stages)
            yield Build(kernel, f"{dtype}, {label}", known, constants, *cut, divisible, compiler_options(arch))
    for parts in (128, 1024):
        width = {"ROWS": law_kernel.rows_of_a_program(parts), "WIDTH": parts, "LOG": parts.bit_length() - 1}
        flags = {"HAS_INDEX": True, "SUPPORT": True, "MOMENT": True}
        kinds = {"parts": "*fp32", "out": "*fp32", "index": "*i64", "count": "*i64"}
        sizes = dict.fromkeys(("first", "n", "N", "P"), "i32")
        yield Build(law_kernel.join, f"{parts} tiles", {**kinds, **sizes}, {**flags, **width}, law_kernel.WARPS)


def _uses(arch: str) -> Iterator[tuple[Any, str, str, dict[str, Any], dict[str, str]]]:
    """(kernel, label, kind of tile, flags, types of its own)."""
    every = {**dict.fromkeys(_PLAIN, True), "HAS_T": False}
    upstream = {"G": True, "G_LSE": False, "G_ENTROPY": True, "G_MASS": False, "PEAK": tile_for(arch, "sweep").BN}
    wanted = {**dict.fromkeys(upstream, True), "PEAK": tile_for(arch, "rich").BN}
    yield head_sweep, "entropy", "sweep", {**_PLAIN, "MOMENT": True, "SAVE": False}, {}
    yield head_sweep, "saving", "sweep", {**_PLAIN, "MOMENT": True, "SAVE": True}, {}
    yield head_sweep, "everything", "rich", {**every, "MOMENT": True, "SAVE": False}, {}
    yield head_gradient, "recomputed", "slope", {**_PLAIN, **upstream, "SAVED": False}, {}
    yield head_gradient, "saved", "saved", {**_PLAIN, **upstream, "SAVED": True}, {}
    yield head_gradient, "everything", "slope", {**every, **wanted, "SAVED": False}, {}
    yield product, "to hidden", "product", {"LIMIT": "none", "ADD": True, "a_step": 1, "b_step": 1}, {"out": "*fp32"}
    yield (
        product,
        "to weight",
        "product",
        {"LIMIT": "none", "ADD": False, "a_stride": 1, "b_step": 1},
        {"a_step": "i32"},
    )
