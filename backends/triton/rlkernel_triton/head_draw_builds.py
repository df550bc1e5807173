"""Builds of the kernels of lm_head_sample: the head in bf16 and fp32, draws with and without edits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import triton.language as tl

from rlkernel_triton.builds import Build
from rlkernel_triton.head_draw_kernels import draw_row, draw_tile, head_logits
from rlkernel_triton.head_tiles import tile_for

_ALIGNED: Final = ("x", "weight", "bias", "out", "D", "width", "x_stride", "head_stride", "slab", "raw", "T", "seed")
_SIZES: Final = dict.fromkeys(("n", "D", "width", "x_stride", "head_stride", "first", "N", "V", "S"), "i32")
_ROW: Final = {
    **dict.fromkeys(("slab", "raw", "T", "parts", "floats"), "*fp32"),
    **dict.fromkeys(("allowed", "places", "greedy", "flags", "ints"), "*i32"),
    **dict.fromkeys(("seed", "step", "longs"), "*i64"),
    **dict.fromkeys(("allowed_stride", "noise_stream", "invalid_token"), "i32"),
}


def builds(arch: str) -> Iterator[Build]:
    """Every build that is compiled for an architecture."""
    for dtype, operand in (("bf16", tl.bfloat16), ("fp32", tl.float32)):
        for label, full in (("plain", False), ("bias and cap", True)):
            tile = tile_for(arch, "wide" if dtype == "fp32" else "rich" if full else "sweep")
            types = dict.fromkeys(("x", "weight", "bias"), f"*{dtype}") | {"out": "*fp32"} | _SIZES
            types |= {"scale": "fp32", "softcap": "fp32"}
            constants = {"HAS_BIAS": full, "HAS_CAP": full, "OPERAND": operand, "INTERPRETED": False, "head_step": 1}
            constants |= {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP": tile.GROUP}
            constants |= {} if full else {"bias": None}
            yield _build(head_logits, f"{dtype}, {label}", types, constants, tile.num_warps, tile.num_stages)
    for label, edited, allowed in (("plain", False, False), ("bitmask", False, True), ("edited", True, False)):
        constants = {"HAS_ALLOWED": allowed, "EDITED": edited, "TILE": 1024}
        constants |= {} if allowed else {"allowed": None, "allowed_stride": 0}
        constants |= {} if edited else {"raw": None}
        yield _build(draw_tile, label, _ROW | _SIZES, constants, 4, 2)
    yield _build(draw_row, "128 tiles", _ROW | _SIZES, {"SP": 128}, 4, 2)


def _build(kernel, label: str, types: dict, constants: dict, warps: int, stages: int) -> Build:
    names = kernel.arg_names
    known = {n: t for n, t in types.items() if n in names and n not in constants}
    return Build(kernel, label, known, constants, warps, stages, tuple(n for n in _ALIGNED if n in known))
