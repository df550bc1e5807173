"""How much extra memory a call of linear_logprob takes, and how it is cut so that a caller's limit is kept.

Up to one block of rows it grows by the fp32 sums of dX and a sixteenth of a row of logits, beyond it by a few numbers.
A block of gradients of logits may take `FREE` bytes anyway, so that a small head is not cut into many launches.

Legend: N rows · D hidden · V vocabulary, or this rank's shard.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from rlkernel_core.errors import ArgumentError
from rlkernel_triton.launchers.planning import current
from rlkernel_triton.linear_logprob.head_rows import SPARE

# Rows and columns of a block of gradients, largest first. Bits do not depend on them. The first keeps a batch of 16384
# rows in one block, so that its logits are made again once and not twice.
BLOCKS: Final = ((16384, 4096), (8192, 4096), (4096, 2048), (2048, 1024), (1024, 512), (256, 256), (64, 64))
PER_ROW: Final = (
    256  # bytes: ids, order, temperatures, what the gradient needs; each part of the statistics takes 64 more
)
PER_LISTED: Final = 64  # bytes: an id as given and as a shard counts it, its logit and its gradient
SMALL: Final = 1 << 16  # counts, and what an allocator rounds up
FREE: Final = 1 << 17  # bytes of gradients of logits that a block may always take


class Size(NamedTuple):
    """What the need of a call depends on."""

    N: int
    D: int
    V: int
    item: int  # bytes of an operand
    tiles: int  # of V
    support: bool
    parts: int  # of a row's statistics, all ranks together
    M: int = 0  # listed ids of all rows; 0 where a row has one that is not listed
    r: int = 0  # rank of a low-rank addition; 0 where there is none
    decoded: int = 0  # least rows of a quantized head that are decoded at a time; 0 where it is stored


class Plan(NamedTuple):
    """How a call is cut."""

    block: int  # rows
    columns: int
    save: bool


def workspace(plan: Plan, size: Size) -> int:
    """Most bytes of a call, forward and backward, beyond its results and gradients."""
    N, D, V, item, tiles, support, parts, M, r, decoded = size
    block, columns = min(plan.block, N), min(plan.columns, V)
    of_tiles = (8 if support else 4) * 4 * block * tiles
    dz = block * columns * max(item, 2)
    sums = 4 * D * (block + (columns if plan.block < N else 0))
    rows = N * (PER_ROW + 64 * parts) + PER_LISTED * M + (4 * N * -(-V // 32) if support else 0)
    saved = N * (V * item + 4 * tiles) if plan.save else 0
    copied = 2 * block * D * item  # hidden states of two blocks, where they do not lie together
    low_rank = 4 * r * (3 * N + 2 * block + columns + 2 * D)  # the inner product, its parts and gradient; dA and dB
    panel = 4 * D * (decoded_rows(columns, decoded) + SPARE) if decoded else 0
    return max(of_tiles, dz + sums + 4 * columns) + copied + rows + saved + low_rank + panel + SMALL


def decoded_rows(columns: int, least: int) -> int:
    """Rows of a quantized head that are decoded at a time: as many as a block has columns, or those of a tile."""
    return max(columns, least)


def plan(backward: str, limit: int | None, size: Size) -> Plan:
    """The mode and blocks that run: the largest that the limit allows.

    Without a limit the largest; within a scope that limits pieces of work the largest that it allows, or the least.

    Raises:
        ArgumentError: the limit is below the least; the message names it.
    """
    most = 64 * -(-size.V // (16 * 64))  # a sixteenth of a row of logits, or memory would grow by rows of them
    most = max(most, FREE // (max(1, min(size.N, BLOCKS[0][0])) * max(size.item, 2)) // 64 * 64)
    blocks = [(block, min(columns, most)) for block, columns in BLOCKS]
    if limit is None:
        piece, every = current().piece, [Plan(*cut, save=backward == "save") for cut in blocks]
        return every[0] if piece is None else next((p for p in every if workspace(p, size) <= piece), every[-1])
    for mode in ("save", "recompute") if backward == "auto" else (backward,):
        for block, columns in blocks:
            found = Plan(block, columns, save=mode == "save")
            if workspace(found, size) <= limit:
                return found
    least = workspace(found, size)
    remedy = f"Pass at least {least}" + (", or backward='recompute'." if backward == "save" else ", or None.")
    raise ArgumentError("max_workspace_bytes", limit, f"is below what backward={backward!r} needs, {least}", remedy)
