"""How a product with a 4-bit weight is cut on Hopper.

A cut depends on the weight and on the class of M, so rows of a batch have the same bits in every batch of a class.

Legend: M tokens · N rows · K columns of the weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from rlkernel_cuda.quant.launch import ROWS, Narrow, Wide

FEW: Final = (8, 16)  # most tokens of the classes that `narrow` serves
WARPS: Final = 16  # of a block of `narrow`, at most
BUSY: Final = 12  # that fill a multiprocessor's memory pipes
RING: Final = 192 << 10  # bytes of x in shared memory
# (most tokens, cut, above which a class ends: None, it does not). Measured on an H200: benchmarks/notes/qmatmul.md.
MANY: Final = (
    (32, Wide(32, 2, 10, True)),
    (64, Wide(64, 2, 8, True)),
    (128, Wide(128, 2, 5, True)),
    (256, Wide(256, 1, 5, True)),
    (2**31, Wide(256, 1, 5, False)),
)


@lru_cache
def narrow(N: int, K: int, tokens: int, multiprocessors: int = 132) -> Narrow | None:
    """The cut that leaves the fewest multiprocessors and warps idle; None where K is no multiple of 256."""
    best: tuple[float, Narrow] | None = None
    for joined in (1, 2):
        for parts in range(1, WARPS + 1):
            stages = min(8, RING // (parts * 4 * tokens * 128))
            if K % (256 * parts) or stages < 2:
                continue
            for sets in range(1, WARPS // parts + 1):
                rows = sets * joined * 16
                waves = -(-(-(-N // rows)) // multiprocessors)
                # Bytes of the busiest multiprocessor; few warps do not draw all the bandwidth, a second wave starts anew.
                cost = waves * rows * max(1.0, BUSY / (sets * parts)) * (1 + 0.02 * (waves - 1) + 0.005 * (joined - 1))
                if best is None or cost < best[0]:
                    best = cost, Narrow(tokens, sets, parts, joined, stages)
    return None if best is None else best[1]


def cut(M: int, N: int, K: int, *, group: int, multiprocessors: int = 132) -> Narrow | Wide | None:
    """The cut for a weight in `triton_w4`; None where no kernel here takes it."""
    few = next((c for c in FEW if c >= M), None)
    if few is not None and group != 32:
        return narrow(N, K, few, multiprocessors)
    if N % ROWS or K % 128:
        return None
    return next(found for most, found in MANY if most >= M)
