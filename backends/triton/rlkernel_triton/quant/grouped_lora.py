"""Low-rank additions of several groups of rows, as of adapters or of experts, and their gradients.

Legend: M rows of x · G groups · K inputs · N outputs · r rank · S numbers of a long sum · C columns.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import torch
from torch import Tensor

from rlkernel_core.spec.linear import CHUNKS, GRAIN
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import tl, triton
from rlkernel_triton.common.matmul_tiles import OPERAND_TYPES, options_of, tile_of
from rlkernel_triton.grouped_linear.kernels import grouped_outer
from rlkernel_triton.launchers import Grid, Launch, Launcher, Plan, planned
from rlkernel_triton.quant.grouped_lora_kernels import low_rank_in, low_rank_out
from rlkernel_triton.quant.tile_config import machine, splitk_parts

MOST_RANKS: Final = 64  # of a tile


def add_low_rank(x: Tensor, lora: LoRA, ends: Tensor, out: Tensor, plan: Plan | None = None) -> None:
    """Write scale (x A_g^T) B_g^T of each row's group into `out`, 0 in rows of no group.

    One product is rounded: x A^T where x and B are bfloat16 and `out` is fp32, else the result.

    Args:
        x: [M, K], contiguous.
        lora: A [G, r, K] and B [G, N, r].
        ends: [G] int32: one past the last row of each group.
        out: [M, N] contiguous, fp32 or of the dtype of x.
        plan: of calls of one shape.
    """
    A, B = _factor(lora.A).transpose(1, 2), _factor(lora.B).transpose(1, 2)
    t = _multiply_in(x, A, ends, plan, "x A^T")
    rounds = rounds_low_rank(x.dtype, B.dtype, out.dtype)
    _multiply_out(t, B, ends, float(lora.scale), out, plan, "t B^T", rounds=rounds)


def add_low_rank_backward(
    x: Tensor, lora: LoRA, ends: Tensor, dh: Tensor, wanted: tuple[bool, bool, bool], plan: Plan
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x [M, K] (what the additions have to it), A [G, r, K] and B [G, N, r], in fp32, from that of h.

    Args:
        x: [M, K], any strides.
        lora: A [G, r, K], B [G, N, r].
        ends: [G] int32.
        dh: [M, N], any strides.
        wanted: which of the three.
        plan: of backward passes of one shape.
    """
    x, dh, A, B, scale = x.contiguous(), dh.contiguous(), _factor(lora.A), _factor(lora.B), float(lora.scale)
    dx = da = db = None
    if wanted[0] or wanted[1]:
        low = _multiply_in(dh, B, ends, plan, "dh B", any_alignment=("a",))  # a gradient may arrive at any address
        if wanted[0]:
            dx = torch.empty(x.shape, dtype=torch.float32, device=x.device)
            rounds = rounds_low_rank(x.dtype, A.dtype, dx.dtype)
            _multiply_out(low, A, ends, scale, dx, plan, "low A", rounds=rounds)
        if wanted[1]:
            da = _over_rows(low.sum(0), x, ends, plan, "low^T x") * scale
    if wanted[2]:
        t = _multiply_in(x, A.transpose(1, 2), ends, plan, "x A^T again")
        db = _over_rows(dh, t.sum(0), ends, plan, "dh^T t") * scale
    return dx, da, db


def _factor(x: Tensor) -> Tensor:
    """A or B as kernels read it. fp64 becomes fp32: no product is in fp64, and gfx950 cannot load it into its LDS."""
    return (x.float() if x.dtype == torch.float64 else x).contiguous()


def rounds_low_rank(x: torch.dtype, c: torch.dtype, out: torch.dtype) -> bool:
    """Whether x A^T is rounded to bfloat16: if x and the other factor c are. It could overflow fp16."""
    return x == c == torch.bfloat16 and out == torch.float32


def _multiply_in(
    a: Tensor, b: Tensor, ends: Tensor, plan: Plan | None, place: str, any_alignment: Collection[str] = ()
) -> Tensor:
    """Rows of a [M, S] times b [G, S, r] of their group, 0 for others; parts of the sum over S: [parts, M, r]."""
    (M, S), (G, _, r) = a.shape, b.shape

    def bound(launcher: Launcher) -> tuple[Launch, Grid, int]:
        operand = a.dtype if a.dtype == b.dtype and not INTERPRETED else torch.float32
        BM, m_tiles = _rows_of_tiles(M, G)
        BR, BK = _ranks_of_tile(r), 64 if operand.itemsize == 2 else 32
        rank_tiles, steps = triton.cdiv(r, BR), triton.cdiv(S, BK)
        parts = splitk_parts(m_tiles * rank_tiles, steps, machine(a.device).multiprocessors)
        launch = launcher.bind(
            low_rank_in, num_stages=3, options=options_of(a), any_alignment=any_alignment, M=M, S=S, R=r, G=G,
            a_row=S, b_group=b.stride(0), b_step=b.stride(1), b_rank=b.stride(2), m_tiles=m_tiles, PARTS=parts,
            OPERAND=OPERAND_TYPES[operand], INTERPRETED=INTERPRETED, EB=_above(G), BM=BM, BR=BR, BK=BK,
        )  # fmt: skip
        return launch, (m_tiles * parts, rank_tiles, 1), parts

    launch, grid, parts = planned(plan, place, a.device, bound)
    t = torch.empty(parts, M, r, dtype=torch.float32, device=a.device)
    if t.numel():
        launch(grid, a, b, ends.contiguous(), t)
    return t


def _multiply_out(
    t: Tensor, c: Tensor, ends: Tensor, scale: float, out: Tensor, plan: Plan | None, place: str, *, rounds: bool
) -> None:  # [parts, M, r], [G, r, C] -> [M, C]
    (parts, M, r), (G, _, C) = t.shape, c.shape

    def bound(launcher: Launcher) -> tuple[Launch, Grid]:
        BM, m_tiles = _rows_of_tiles(M, G)
        operand, BC = (tl.bfloat16, 128) if rounds and not INTERPRETED else (tl.float32, 64)
        launch = launcher.bind(
            low_rank_out, num_stages=2, options=options_of(out), M=M, C=C, R=r, G=G, c_group=c.stride(0),
            c_rank=c.stride(1), c_column=c.stride(2), scale=scale, m_tiles=m_tiles, PARTS=parts, OPERAND=operand,
            INTERPRETED=INTERPRETED, EB=_above(G), BM=BM, BR=_ranks_of_tile(r), BC=BC,
        )  # fmt: skip
        return launch, (m_tiles * triton.cdiv(C, BC), 1, 1)

    launch, grid = planned(plan, place, out.device, bound)
    if out.numel():
        launch(grid, t, c, ends.contiguous(), out)


def _over_rows(a: Tensor, b: Tensor, ends: Tensor, plan: Plan, place: str) -> Tensor:
    """a^T b over the rows of each group: [M, N], [M, C] contiguous -> [G, N, C] fp32."""
    if INTERPRETED:  # which loses subnormal bfloat16 numbers
        a, b = a.float(), b.float()
    (M, N), C, G = a.shape, b.shape[1], ends.shape[0]
    out = torch.empty(G, N, C, dtype=torch.float32, device=a.device)

    def bound(launcher: Launcher) -> tuple[Launch, Grid]:
        tile = tile_of(out, out, "fp32")
        launch = launcher.bind(
            grouped_outer, num_warps=tile.num_warps, num_stages=tile.num_stages, options=options_of(a),
            any_alignment=("a",), M=M, N=N, C=C, E=G, a_stride=N, a_step=1, b_stride=C, b_step=1, GRAIN=GRAIN,
            CHUNKS=CHUNKS, OPERAND=OPERAND_TYPES[torch.float32], EB=_above(G), BM=tile.BM, BN=tile.BN, BK=tile.BK,
            GROUP=tile.GROUP,
        )  # fmt: skip
        return launch, (G * triton.cdiv(N, tile.BM) * triton.cdiv(C, tile.BN), 1, 1)

    launch, grid = planned(plan, place, a.device, bound)
    if out.numel():
        launch(grid, a, b, ends.contiguous(), out)
    return out


def _rows_of_tiles(M: int, G: int) -> tuple[int, int]:
    """Rows of a tile, and how many tiles any ends need; rows of no group have tiles as well."""
    BM = next((b for b in (16, 32) if b * G >= M), 64)
    return BM, M // BM + min(M, G + 1)


def _ranks_of_tile(r: int) -> int:
    return int(min(MOST_RANKS, max(16, triton.next_power_of_2(r))))


def _above(G: int) -> int:
    """A power of two above G."""
    return int(triton.next_power_of_2(G + 1))
