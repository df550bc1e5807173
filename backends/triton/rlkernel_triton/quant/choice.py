"""How a product is cut, by shape: data measured on GPUs, and a rule for shapes that nobody measured.

Tiles and parts of K decide the order of sums. They depend on the weight and on the class of M alone: rows of a batch
have the same bits in every batch of its class.

Legend: M tokens · N rows · K columns of the weight.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Cut(NamedTuple):
    """One way to cut a product."""

    BM: int  # tokens of a tile
    BN: int  # rows of a tile; of each half for a pair
    parts: int  # parts of K
    stages: int  # loads in flight
    warps: int
    fold: bool = False  # weights are scaled and rounded before the product
    step: int = 128  # columns a step, unless a group is smaller


# Largest M of a class. Above the last one the weight is dequantised and torch multiplies.
CLASSES: Final = (16, 32, 64, 128, 256)
MULTIPROCESSORS: Final = 132


def class_of(M: int) -> int | None:
    """The class of M, as its largest member; None above them all."""
    return next((c for c in CLASSES if c >= M), None)


def parts_of(tiles: int, steps: int, wanted: int = 4) -> int:
    """A power of two that divides the steps of K, for about `wanted` programs a multiprocessor, and 8 at most."""
    parts = 1
    while parts < 8 and tiles * parts * 2 <= wanted * MULTIPROCESSORS and steps % (parts * 2) == 0:
        parts *= 2
    return parts


def cut(M: int, N: int, K: int, step: int, *, pair: bool = False, rounded: bool = False) -> Cut | None:
    """The cut for a weight in `triton_w4`; None where it is better dequantised."""
    of = class_of(M)
    if of is None:
        return None
    rows = N // 2 if pair else N
    BN = 128 if of >= 128 and not pair and rows % 128 == 0 else 64
    BM = min(of, 128)
    tiles = rows // BN * -(-of // BM)
    parts = parts_of(tiles, K // step)
    return Cut(BM, BN, parts, 3 if of >= 64 else 4, 8 if BN == 128 else 4, fold=rounded)
