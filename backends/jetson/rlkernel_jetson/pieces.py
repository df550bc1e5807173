"""Calls that work in pieces, cut by what the board's memory allows when the first of them runs.

`linear_logprob` makes gradients of logits block by block, `logprob` keys of its most likely ids, and products with many
tokens dequantise a weight a piece at a time. Elsewhere the sizes of these are fixed; here they follow from
`Memory.piece`, which `rlkernel memory` and `rlkernel doctor` show. A process keeps what it began with. The order of a
sum does not depend on it, but in the gradient of a product's input, whose partial sums are added in fp32 a piece at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

from rlkernel_core.errors import ArgumentError
from rlkernel_core.host.memory import memory

# Module, the constant that says how many bytes it takes at a time, and how many of them there may be at once.
SIZES: Final = (
    ("rlkernel_triton.top_ids", "BLOCK_BYTES", 1),
    ("rlkernel_triton.quant.product", "PIECE", 2),
    ("rlkernel_triton.quant.qmatmul", "PIECE", 2),
    ("rlkernel_triton.quant.block_products", "_DENSE_EXPERTS", 1),
)


def cut(host: Any, root: Path = Path("/")) -> int | None:
    """Cut the work of host modules to the memory there is; bytes of a piece, None where the system does not tell.

    Args:
        host: `rlkernel_triton.aot.hosts.Host`.
        root: where the file system starts.
    """
    room = memory(root)
    if room is None:
        return None
    for name, size, parts in SIZES:
        module = host.module(name)
        setattr(module, size, min(getattr(module, size), room.piece // parts))
    head = host.module("rlkernel_triton.head_workspace")
    head.plan = within(room.piece, head)
    return room.piece


def within(piece: int, head: Any) -> Callable[..., Any]:
    """The plan of `head_workspace` where a caller names no limit: the largest blocks that a piece holds."""
    made: Callable[..., Any] = head.plan

    @wraps(made)
    def plan(backward: str, limit: int | None, size: Any) -> Any:
        if limit is not None:
            return made(backward, limit, size)
        mode = "save" if backward == "save" else "recompute"
        try:
            return made(mode, piece, size)
        except ArgumentError:  # a piece is no promise to the caller: the least there is
            return made(mode, head.workspace(head.Plan(*head.BLOCKS[-1], save=mode == "save"), size), size)

    return plan
