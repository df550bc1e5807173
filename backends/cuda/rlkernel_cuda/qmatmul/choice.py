"""How a product with a quantized weight is cut on Hopper.

A cut depends on the weight and on the class of M, so rows of a batch have the same bits in every batch of a class:
up to 8 tokens, up to 16, 33 to 64, 65 to 128; above, every 128 where blocks share the depth of a tile, and all where
they do not.

Legend: M tokens · N rows · K columns of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Final

from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_cuda.common import driver
from rlkernel_cuda.qmatmul import kernels
from rlkernel_cuda.qmatmul.kernels import W4SmallM, W4Wgmma, W8SmallM

FEW: Final = (8, 16)  # most tokens of the classes of the kernels for a small M
FROM: Final = 32  # tokens up to which the portable kernel is ahead of w4a16_wgmma
LARGE: Final = 45_000_000  # codes of a weight below which it is ahead up to 64 tokens too
WARPS: Final = {4: 28, 8: 16}  # most of a block there, by bits
BUSY: Final = {4: 20, 8: 12}  # that draw all of a multiprocessor's share of the memory
START: Final = 64 << 10  # bytes that could have been read until a block is under way
DECLARED: Final = 1 << 10  # bytes of barriers
RING: Final = driver.SHARED - DECLARED  # bytes of shared memory for what is on its way
LEAST_STAGES: Final = 2
MOST_STAGES: Final = 16
MOST_PARTS: Final = 8  # of a block: a stage holds x for all of them
TALL: Final = 100_000_000  # codes of a weight from which four warpgroups a block are ahead of two
SHARED: Final = 128  # tokens of a tile whose depth blocks share
WHOLE: Final = 256  # of one whose depth they do not share
# By tokens of a whole tile, the time of tiles whose depth blocks share over its own; and as many steps of 64 more.
SHARING: Final = {64: 1.08, SHARED: 1.08, WHOLE: 1.22}
SHARED_START: Final = 12
# Measured on an H200, where others than the rule's were ahead: benchmarks/notes/qmatmul.md.
MEASURED: Final = {  # (N, K, tokens) -> (sets, parts, joined, cluster, ahead)
    (4096, 4096, 8): (2, 8, 1, 1, 4),
    (4096, 4096, 16): (2, 8, 1, 1, 4),
    (6144, 4096, 8): (3, 4, 1, 1, 8),
    (6144, 4096, 16): (3, 4, 1, 1, 8),
    (8192, 8192, 8): (4, 4, 2, 2, 4),
    (8192, 8192, 16): (4, 4, 2, 2, 4),
    (10240, 8192, 8): (10, 2, 1, 2, 4),
    (10240, 8192, 16): (10, 2, 1, 2, 4),
    (5120, 17408, 8): (5, 2, 1, 2, 8),
    (5120, 17408, 16): (5, 2, 1, 2, 8),
    (24576, 4096, 16): (24, 1, 1, 2, 4),
    (34816, 5120, 8): (17, 1, 2, 2, 4),
    (34816, 5120, 16): (11, 1, 3, 2, 4),
}


def _shares(N: int, K: int, multiprocessors: int, bits: int) -> Iterator[tuple[float, int, int, int]]:
    """(cost, cluster, parts, sets): bytes of the busiest multiprocessor and a start a wave; more with few warps."""
    for cluster in (1, 2):
        for parts in range(1, MOST_PARTS + 1):
            if K % (256 * parts * cluster):
                continue
            for sets in range(1, WARPS[bits] // parts + 1):
                waves = ceil(ceil(N / (16 * sets)) / (multiprocessors // cluster))
                idle = max(1.0, BUSY[bits] / (sets * parts))
                yield waves * (sets * 2 * bits * K / cluster * idle + START), cluster, parts, sets


def _ring(one: W4SmallM, K: int) -> W4SmallM | None:
    """With as many stages as there is room for, and pieces; None where that is too few."""
    stage = one.parts * 4 * one.tokens * 128
    pieces = K // (256 * one.parts * one.cluster)
    stages = min(MOST_STAGES, (RING - kernels.shared(one._replace(stages=0))) // stage // 2 * 2, pieces + pieces % 2)
    return one._replace(stages=stages) if stages >= LEAST_STAGES else None


def few4(N: int, K: int, tokens: int, multiprocessors: int) -> W4SmallM | None:
    """The cut for few tokens and 4 bits; None where K is no multiple of 256."""
    if (N, K, tokens) in MEASURED:
        sets, parts, joined, cluster, ahead = MEASURED[N, K, tokens]
        return _ring(W4SmallM(tokens, sets, parts, joined, 0, cluster, ahead), K)
    for _, cluster, parts, sets in sorted(_shares(N, K, multiprocessors, 4)):
        ahead = 4 if sets * parts > 16 else 8
        found = _ring(W4SmallM(tokens, sets, parts, 1, 0, cluster, ahead), K)
        if found is not None:
            return found
    return None


def few8(N: int, K: int, tokens: int, multiprocessors: int) -> W8SmallM | None:
    """The cut for few tokens and 8 bits."""
    for _, cluster, parts, sets in sorted(_shares(N, K, multiprocessors, 8)):
        stages = min(8, RING // (parts * 4 * tokens * 128))
        if cluster == 1 and stages >= 3:
            return W8SmallM(tokens, sets, parts, stages)
    return None


def _whole(tokens: int, tiles: int, K: int, multiprocessors: int) -> bool:
    """Whole waves of whole tiles take no longer than equal shares of their depth."""
    steps = K / 64
    shared = SHARING[tokens] * tiles / multiprocessors * steps + SHARED_START
    return ceil(tiles / multiprocessors) * steps <= shared


def _wide(tokens: int, steps: int, warpgroups: int, spec: QuantSpec, *, split: bool) -> W4Wgmma:
    """With as many stages as there is room for, and no more than have something to do."""
    one = W4Wgmma(tokens, steps, 1, split, warpgroups)
    stage = kernels.shared(one) - kernels.staging(one) + kernels.scales(one, spec)
    return one._replace(stages=min(8, (driver.SHARED - DECLARED - kernels.staging(one)) // stage))


def many4(N: int, K: int, M: int, spec: QuantSpec, multiprocessors: int) -> W4Wgmma | None:
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


def cut(M: int, w: QuantTensor, multiprocessors: int = 132) -> W4SmallM | W8SmallM | W4Wgmma | None:
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
