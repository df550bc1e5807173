"""How a product is cut, by shape: a table measured on one GPU, and the rule that splits K.

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
    parts: int  # parts of K; 0: as many as fill the GPU
    stages: int  # loads in flight
    warps: int
    fold: bool = False  # weights are scaled and rounded before the product
    step: int = 128  # columns a step, unless a group is smaller


class Row(NamedTuple):
    """Cuts for a class of M, measured on an H200 (benchmarks/notes/qmatmul.md)."""

    wide: Cut  # where 128 rows a tile make a tile for every multiprocessor
    narrow: Cut


# Largest M of a class -> its cuts. Above the last class a weight is dequantised and torch multiplies.
TABLE: Final[dict[int, Row]] = {
    16: Row(Cut(16, 128, 0, 4, 4), Cut(16, 128, 0, 4, 4)),
    32: Row(Cut(32, 128, 1, 3, 8), Cut(32, 64, 0, 3, 4)),
    64: Row(Cut(64, 128, 1, 3, 8), Cut(64, 64, 0, 3, 4)),
    128: Row(Cut(128, 128, 1, 4, 8, True, 64), Cut(128, 64, 2, 3, 4)),
    256: Row(Cut(256, 128, 1, 4, 8, True, 64), Cut(128, 128, 1, 3, 8)),
}
UNROUNDED: Final = Cut(64, 64, 0, 3, 4)  # large M where no weight may be rounded, and pairs
MULTIPROCESSORS: Final = 132
PROGRAMS: Final = 3  # a multiprocessor, at most, where K is split


def class_of(M: int) -> int | None:
    """The class of M, as its largest member; None above them all."""
    return next((c for c in TABLE if c >= M), None)


def parts_of(tiles: int, steps: int) -> int:
    """A power of two that divides the steps of K, for `PROGRAMS` programs a multiprocessor, and 8 at most."""
    parts = 1
    while parts < 8 and tiles * parts * 2 <= PROGRAMS * MULTIPROCESSORS and steps % (parts * 2) == 0:
        parts *= 2
    return parts


def cut(M: int, N: int, K: int, *, group: int, pair: bool, rounding: str) -> Cut | None:
    """The cut for a weight in `triton_w4`; None where it is better dequantised, which rounds it."""
    of = class_of(M)
    if of is None and rounding != "none":
        return None
    rows = N // 2 if pair else N
    row = None if of is None else TABLE[of]
    found = UNROUNDED if row is None else row.wide if rows // 128 >= MULTIPROCESSORS else row.narrow
    if pair or (found.fold and rounding == "none"):
        found = UNROUNDED._replace(BM=min(UNROUNDED.BM, found.BM))
    elif rows % found.BN:
        found = found._replace(BN=64, warps=4)
    if rounding == "dtype":
        found = found._replace(fold=True, warps=8 if found.BN == 128 else 4)  # 4 warps on 128 rows: a known race
    steps = K // min(group or found.step, found.step)
    parts = found.parts if found.parts and steps % found.parts == 0 else parts_of(rows // found.BN, steps)
    return found._replace(parts=parts)
