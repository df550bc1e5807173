"""Builds of every kernel that ships, as they are launched: what the tests compile offline for sm_90a.

Imports Triton; no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from triton.experimental.gluon import language as gl

from rlkernel_cuda.common import quantize_tokens
from rlkernel_cuda.common.tiles import SINGLE, Tile
from rlkernel_cuda.fa3 import finish_kernel
from rlkernel_cuda.linear_divergence import row_kernels as divergence_rows
from rlkernel_cuda.linear_divergence.compare import GRADIENT, MERGED
from rlkernel_cuda.linear_logprob import row_kernels
from rlkernel_cuda.linear_logprob.logits_kernel import GRAD, SAVE, STATS, logits_kernel
from rlkernel_cuda.linear_logprob.plan import COLS


@dataclass(frozen=True)
class Build:
    """One kernel, compiled one way."""

    kernel: Any  # what triton.jit or gluon.jit made
    label: str
    types: Mapping[str, str]  # parameter -> Triton's type
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4


_LOGITS_TYPES: Final = {
    "target": "*i32",
    "count": "*i32",
    **dict.fromkeys(("bias", "row_scale", "tops", "sums", "chosen", "coef"), "*fp32"),
    **dict.fromkeys(("first_row", "N", "V", "stride", "k_tiles"), "i32"),
    **dict.fromkeys(("cap", "cap_in"), "fp32"),
}


def described(row_count: int, cols: int, dtype: str = "bf16") -> str:
    """Triton's type of a TMA descriptor."""
    return f"tensordesc<{dtype}[{row_count}, {cols}],{gl.NVMMASharedLayout(128, 16, 2)!r}>"


def logits(tile: Tile, mode: int, *, bias: bool = False, cap: bool = False, counted: bool = False) -> Build:
    """One build of the logits kernel."""
    label = " ".join(
        [
            ["STATS", "SAVE", "GRAD"][mode],
            *(n for n, on in zip(("bias", "cap", "counted"), (bias, cap, counted), strict=True) if on),
        ]
    )
    return Build(
        logits_kernel,
        label,
        {
            **_LOGITS_TYPES,
            "x_desc": described(tile.rows, tile.depth),
            "w_desc": described(tile.cols, tile.depth),
            "out_desc": described(
                tile.rows, tile.depth if mode == STATS else tile.cols // 2, "fp16" if mode == SAVE else "bf16"
            ),
        },
        {
            "NC": tile.consumers,
            "BM": tile.rows,
            "BN": tile.cols,
            "BK": tile.depth,
            "STAGES": tile.stages,
            "GROUP_M": tile.group,
            "MODE": mode,
            "BIAS": bias,
            "CAP": cap,
            "COUNTED": counted,
        },
    )  # fmt: skip


def builds() -> Iterator[Build]:
    """Everything that a call may launch."""
    for mode, bias, cap, counted in product((STATS, SAVE, GRAD), (False, True), (False, True), (False, True)):
        yield logits(SINGLE, mode, bias=bias, cap=cap, counted=counted)
    vectors = ("target", "chosen", "row_scale", "inverse", "logprob", "lse", "entropy", "lse2", "mean2", "missed")
    floats = {**dict.fromkeys((*vectors, "tops", "sums", "coef", "own", "g_logprob", "g_lse", "g_entropy"), "*fp32")}
    types = {
        **floats,
        "target": "*i32",
        "count": "*i32",
        "place": "*i64",
        "cap": "fp32",
        **dict.fromkeys(("saved", "dz", "x", "out"), "*bf16"),
    }  # fmt: skip
    entered = {
        **floats, **dict.fromkeys(("ids", "before", "place", "position"), "*i64"),
        **dict.fromkeys(("mask",), "*u8"), "invalid": "*i8", "target": "*i32", "count": "*i32",
        **dict.fromkeys(("number", "factor", "scale"), "fp32"),
        **dict.fromkeys(("T", "out_logprob", "out_lse", "out_entropy", "out"), "*fp32"),
    }  # fmt: skip
    for counted, flag in product((False, True), (False, True)):
        some = {"COUNTED": counted, "ROWS": 256}
        yield Build(row_kernels.rows_kernel, f"rows each={flag} counted={counted}", entered, {"EACH": flag, **some})
        yield Build(
            row_kernels.results_kernel, f"results entropy={flag} counted={counted}", entered, {"ENTROPY": flag, **some}
        )
        there = dict.fromkeys(("G", "G_LSE", "G_ENTROPY"), flag)
        yield Build(row_kernels.upstream_kernel, f"upstream all={flag} counted={counted}", entered, {**there, **some})
    for part, biased in product((False, True), (False, True)):
        yield Build(
            row_kernels.merge_tiles_kernel,
            "merge tiles" + " of a part" * part + " bias" * biased,
            {**types, "bias": "*fp32"},
            {"ROWS": 32, "TILES": 32, "PART": part, "BIAS": biased},
        )
    yield Build(row_kernels.gather_kernel, "gather", types, {"COLS": 1024})
    yield Build(row_kernels.scatter_kernel, "scatter", {**types, "x": "*fp32"}, {"COLS": 1024})
    yield Build(row_kernels.clear_kernel, "clear", types, {"BM": 128, "ROWS": 64, "COLS": 256})
    for counted in (False, True):
        yield Build(row_kernels.chosen_kernel, f"chosen counted={counted}", types, {"ROWS": 256, "COUNTED": counted})
        for cap in (False, True):
            some = {"CAP": cap, "COUNTED": counted}
            yield Build(row_kernels.coefficient_kernel, f"coefficients {some}", types, {"ROWS": 256, **some})
            yield Build(row_kernels.saved_kernel, f"saved {some}", types, {"BN": 256, "TILES": 4, "LOOP": 16, **some})
    divergence: dict[str, str] = {
        **dict.fromkeys(("sums", "scale", "t_scale", "values", "rows_back", "g"), "*fp32"), "mask": "*u1",
        **dict.fromkeys(("first", "second"), "*fp16"), "dz": "*bf16",
    }  # fmt: skip
    for kind, masked in product(("forward_kl", "reverse_kl"), (False, True)):
        of_kind = {"KIND": kind, "HAS_MASK": masked}
        rows, tiles = MERGED
        for save in (False, True):
            of = {**of_kind, "SAVE": save, "ROWS": rows, "TILES": tiles}
            yield Build(divergence_rows.merge_tiles_kernel, f"divergences {of_kind} save={save}", divergence, of)
        tiles, loop = GRADIENT
        of = {**of_kind, "BN": COLS, "TILES": tiles, "LOOP": loop}
        yield Build(divergence_rows.gradient_kernel, f"gradient of divergences {of_kind}", divergence, of)
    coded = {"x": "*bf16", "codes": "*u8", "scale": "*fp32", "M": "i32", "K": "i32", "stride": "i32"}
    yield Build(
        quantize_tokens.code_blocks,
        "tokens by blocks",
        coded,
        {"ROWS": 16, "COLUMNS": quantize_tokens.BLOCK, "CAST": True},
    )
    finished = {
        **dict.fromkeys(("cu_q", "cu_k", "table"), "*i32"), "out": "*bf16", "by_head": "*fp32", "lse": "*fp32",
        **dict.fromkeys(("T", "B", "P", "N", "most"), "i32"),
    }  # fmt: skip
    for paged, causal in product((False, True), (False, True)):
        some = {"CAUSAL": causal, "PAGED": paged, "G": 128 if paged else 1}
        sizes = {"Hq": 28, "D": 128, "HEADS": 32, "STEPS": 7, "ROWS": 16}
        yield Build(finish_kernel.finish, f"finish {some}", finished, {**some, **sizes})
