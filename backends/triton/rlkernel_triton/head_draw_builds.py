"""Builds of the kernels of lm_head_sample: the head in bf16 and fp32, few rows and many, with and without edits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import triton.language as tl

from rlkernel_triton.builds import Build
from rlkernel_triton.head_draw_kernels import draw_row, draw_slab
from rlkernel_triton.head_product_kernels import described_logits, head_logits
from rlkernel_triton.head_tiles import Tile, tile_for

_ALIGNED: Final = (
    *("x", "weight", "bias", "out", "D", "width", "x_stride", "head_stride", "slab", "raw", "groups", "raw_groups"),
    *("seed", "step", "floats", "blocks"),
)
_TYPES: Final = {
    **dict.fromkeys(("n", "D", "width", "x_stride", "head_stride", "first", "piece", "N", "V", "S", "P"), "i32"),
    **dict.fromkeys(("allowed_stride", "last_slot", "noise_stream", "invalid_token"), "i32"),
    **dict.fromkeys(("slab", "raw", "temperature", "groups", "raw_groups", "floats", "out"), "*fp32"),
    **dict.fromkeys(("allowed", "ints", "blocks", "spoiled"), "*i32"),
    **dict.fromkeys(("seed", "step", "longs", "slot"), "*i64"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}
_LAW: Final = {"T_EACH": 1, "SEED_EACH": 1, "STEP_EACH": 1}


def builds(arch: str) -> Iterator[Build]:
    """Every build that is compiled for an architecture."""
    for dtype, operand in (("bf16", tl.bfloat16), ("fp32", tl.float32)):
        kinds = ("wide",) if dtype == "fp32" else ("product", "few")
        if tile_for(arch, kinds[-1]) == tile_for(arch, kinds[0]):
            kinds = kinds[:1]
        types = _TYPES | dict.fromkeys(("x", "weight", "bias"), f"*{dtype}")
        for kind, (label, full) in ((k, f) for k in kinds for f in (("plain", False), ("everything", True))):
            if kind == "few" and full:
                continue  # a cap over stored logits has one tile, whatever the rows
            tile = tile_for(arch, "rich" if kind == "product" and full else kind)
            product = {"HAS_BIAS": full, "HAS_CAP": full, "OPERAND": operand, "head_step": 1} | _off(full, "bias")
            yield _build(head_logits, f"{dtype}, {kind}, {label}", types, product | _cut(tile), tile)
    for kind in ("product", "few") if arch == "sm90" else ():
        tile = tile_for(arch, f"described {kind}")
        operands = {"x": f"tensordesc<bf16[{tile.BM}, {tile.BK}]>", "weight": f"tensordesc<bf16[{tile.BN}, {tile.BK}]>"}
        product = {"HAS_BIAS": False, **_off(False, "bias"), **_cut(tile)}
        yield _build(described_logits, f"bf16, {kind}", _TYPES | operands, product, tile)
    slab = {"HAS_SLOT": False, "RAW": False, "EDITED": False, "HAS_CAP": False, "HAS_ALLOWED": False, **_LAW}
    slab |= {"WHOLE": True, "QUICK": arch.startswith("sm")}
    yield _build(draw_slab, "plain", _TYPES, slab | _off(False, "slot", "allowed", "raw"), None)
    more = slab | {"HAS_SLOT": True, "RAW": True}
    yield _build(draw_slab, "mask and cap", _TYPES, more | {"HAS_CAP": True, "HAS_ALLOWED": True, "raw": None}, None)
    yield _build(draw_slab, "edited", _TYPES, more | {"EDITED": True, "allowed": None}, None)
    for label, full in (("plain", False), ("everything", True)):
        row = {"HAS_SPOILED": full, "HAS_SLOT": full, "RAW": full, **_LAW, "SP": 2048, "PP": 64}
        yield _build(draw_row, label, _TYPES, row | _off(full, "slot", "spoiled"), None)


def _off(full: bool, *names: str) -> dict[str, None]:
    return {} if full else dict.fromkeys(names)


def _cut(tile: Tile) -> dict[str, int]:
    return {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP": tile.GROUP}


def _build(kernel: Any, label: str, types: dict, constants: dict, tile: Tile | None) -> Build:
    names = kernel.arg_names
    constants = {n: v for n, v in constants.items() if n in names}
    known = {n: t for n, t in types.items() if n in names and n not in constants}
    warps, stages = (tile.num_warps, tile.num_stages) if tile else (4, 2)
    aligned = tuple(n for n in _ALIGNED if n in known and not known[n].startswith("tensordesc"))
    return Build(kernel, label, known, constants, warps, stages, aligned)
