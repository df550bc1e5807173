"""How a product with a quantised weight is cut on Hopper.

A cut depends on the weight and on the class of M, so rows of a batch have the same bits in every batch of a class:
up to 8 tokens, up to 16, 33 to 64, 65 to 128; above, every 128 where blocks share the depth of a tile, and all where
they do not.

Legend: M tokens · N rows · K columns of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import Final

from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_cuda import driver
from rlkernel_cuda.quant import launch
from rlkernel_cuda.quant.launch import Narrow, Narrow8, Wide

FEW: Final = (8, 16)  # most tokens of the classes of `narrow` and `narrow8`
FROM: Final = 32  # tokens up to which the portable kernel is ahead of `wide`
LARGE: Final = 45_000_000  # codes of a weight below which it is ahead up to 64 tokens too
WARPS: Final = 16  # of a block there
BUSY: Final = 12  # warps that draw all of a multiprocessor's share of the memory
START: Final = 64 << 10  # bytes that could have been read until a block is under way
RING: Final = 200 << 10  # bytes of shared memory for what is on its way
LEAST_STAGES: Final = 3
TALL: Final = 100_000_000  # codes of a weight from which four warpgroups a block are ahead of two
SHARED: Final = 128  # tokens of a tile whose depth blocks share
WHOLE: Final = 256  # of one whose depth they do not share
# By tokens of a whole tile, the time of tiles whose depth blocks share over its own; and as many steps of 64 more.
SHARING: Final = {64: 1.08, SHARED: 1.08, WHOLE: 1.22}
SHARED_START: Final = 12
DECLARED: Final = 1 << 10  # bytes of barriers
# Measured on an H200, where others than the rule's were ahead: benchmarks/notes/qmatmul.md.
MEASURED: Final = {
    (28672, 4096, 8): Narrow(8, 7, 2, 2, 8),
    (24576, 4096, 8): Narrow(8, 6, 2, 2, 8),
    (34816, 5120, 8): Narrow(8, 17, 1, 1, 8),
    (34816, 5120, 16): Narrow(16, 17, 1, 1, 8),
    (19456, 2560, 16): Narrow(16, 5, 2, 2, 8),
    (4096, 4096, 8): Narrow(8, 2, 4, 1, 8),
    (4096, 4096, 16): Narrow(16, 2, 4, 1, 6),
}


def _shares(N: int, K: int, multiprocessors: int) -> Iterator[tuple[float, int, int, int]]:
    """(cost, sets, parts, joined): bytes of the busiest multiprocessor and a start a wave; more with few warps."""
    for joined in (1, 2):
        for parts in range(1, WARPS + 1):
            if K % (256 * parts):
                continue
            for sets in range(1, WARPS // parts + 1):
                rows = sets * joined * 16
                waves = ceil(ceil(N / rows) / multiprocessors)
                idle = max(1.0, BUSY / (sets * parts))
                yield waves * (rows * K / 2 * idle + START * (1 + 0.1 * joined)), sets, parts, joined


@lru_cache
def few4(N: int, K: int, tokens: int, multiprocessors: int) -> Narrow | None:
    """The cut for few tokens and 4 bits; None where K is no multiple of 256."""
    if (N, K, tokens) in MEASURED:
        return MEASURED[N, K, tokens]
    for _, sets, parts, joined in sorted(_shares(N, K, multiprocessors)):
        stages = min(8, RING // (parts * 4 * tokens * 128))
        if stages >= LEAST_STAGES:
            return Narrow(tokens, sets, parts, joined, stages)
    return None


@lru_cache
def few8(N: int, K: int, tokens: int, multiprocessors: int) -> Narrow8 | None:
    """The cut for few tokens and 8 bits."""
    for _, sets, parts, joined in sorted(_shares(N, K, multiprocessors)):
        stages = min(8, RING // (parts * 4 * tokens * 128))
        if joined == 1 and stages >= LEAST_STAGES:
            return Narrow8(tokens, sets, parts, stages)
    return None


def _whole(tokens: int, tiles: int, K: int, multiprocessors: int) -> bool:
    """Whole waves of whole tiles take no longer than equal shares of their depth."""
    steps = K / 64
    shared = SHARING[tokens] * tiles / multiprocessors * steps + SHARED_START
    return ceil(tiles / multiprocessors) * steps <= shared


def _wide(tokens: int, steps: int, teams: int, spec: QuantSpec, *, split: bool) -> Wide:
    """With as many stages as there is room for, and no more than have something to do."""
    one = Wide(tokens, steps, 1, split, teams)
    stage = launch.shared(one) - launch.staging(one) + launch.scales(one, spec)
    return one._replace(stages=min(8, (driver.SHARED - DECLARED - launch.staging(one)) // stage))


@lru_cache
def many4(N: int, K: int, M: int, spec: QuantSpec, multiprocessors: int) -> Wide | None:
    """The cut for more than FEW tokens and 4 bits; None where no tile divides it, or another kernel is ahead."""
    if (FROM if N * K >= LARGE else 64) >= M or N % 128 or K % 128:
        return None
    if M <= 64:
        if N % 256 == 0 and _whole(64, N // 256, K, multiprocessors):
            return _wide(64, 2, 4, spec, split=False)
        return _wide(64, 2, 4 if N % 256 == 0 and N * K >= TALL else 2, spec, split=True)
    if M <= SHARED:
        return _wide(SHARED, 2, 2, spec, split=not _whole(SHARED, N // 128, K, multiprocessors))
    if _whole(WHOLE, N // 128 * ceil(M / WHOLE), K, multiprocessors):
        return _wide(WHOLE, 1, 2, spec, split=False)
    return _wide(SHARED, 2, 2, spec, split=True)


def cut(M: int, w: QuantTensor, multiprocessors: int = 132) -> Narrow | Narrow8 | Wide | None:
    """The cut for a weight in `triton_w4`, or a canonical one of 8 bits; None where no kernel here takes it."""
    (N, K), spec = w.shape, w.spec
    tokens = next((c for c in FEW if c >= M), None)
    if spec.element != "int4":
        return None if tokens is None or N % 16 else few8(N, K, tokens, multiprocessors)
    if tokens is not None and spec.group != 32:
        found = few4(N, K, tokens, multiprocessors)
        if found is not None:
            return found
    return many4(N, K, M, spec, multiprocessors)
