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
    """Cuts for a class of M."""

    wide: Cut  # where 128 rows a tile make a tile for every multiprocessor
    narrow: Cut


class Device(NamedTuple):
    """What is known of a kind of GPU."""

    table: dict[int, Row]  # largest M of a class -> its cuts; above them a weight is dequantised and torch multiplies
    unrounded: Cut  # large M where no weight may be rounded, and pairs


# sm90: measured on an H200 (benchmarks/notes/qmatmul.md). Orin and Thor: two programs a multiprocessor or more by
# registers and shared memory, none spilled (benchmarks/notes/jetson.md). Others: chosen to fit 64 KiB of shared memory.
# Neither was measured.
_SMALL: Final = {16: Cut(16, 64, 0, 3, 4), 32: Cut(32, 64, 0, 3, 8), 64: Cut(64, 64, 0, 2, 8)}
_JETSON: Final = {16: Cut(16, 64, 0, 3, 4), 32: Cut(32, 64, 0, 3, 4), 64: Cut(64, 64, 0, 2, 4)}
DEVICES: Final[dict[str, Device]] = {
    "sm90": Device(
        {
            16: Row(Cut(16, 128, 0, 4, 4), Cut(16, 128, 0, 3, 4)),
            32: Row(Cut(32, 128, 1, 3, 4), Cut(32, 64, 0, 3, 4)),
            64: Row(Cut(64, 128, 1, 3, 4), Cut(64, 64, 0, 3, 4)),
            128: Row(Cut(128, 128, 1, 5, 8, True, 64), Cut(128, 64, 2, 3, 4)),
            256: Row(Cut(256, 128, 1, 4, 8, True, 64), Cut(128, 64, 2, 4, 4, True, 64)),
            512: Row(Cut(128, 128, 1, 4, 8, True, 64), Cut(256, 128, 1, 4, 8, True, 64)),
            1024: Row(Cut(256, 128, 1, 3, 8, True, 64), Cut(128, 128, 1, 4, 8, True, 64)),
        },
        Cut(64, 64, 0, 3, 4),
    ),
    "jetson": Device({M: Row(found, found) for M, found in _JETSON.items()}, Cut(16, 64, 0, 2, 8)),
    "other": Device({M: Row(found, found) for M, found in _SMALL.items()}, Cut(16, 64, 0, 2, 8)),
}
_KINDS: Final = {"sm90": "sm90", "sm87": "jetson", "sm110": "jetson", "sm101": "jetson"}
PROGRAMS: Final = 3  # a multiprocessor, at most, where K is split


def kind_of(arch: str) -> str:
    """The kind of GPU, a key of `DEVICES`, that an architecture is: "sm87", "gfx942"."""
    return _KINDS.get(arch, "other")


def class_of(M: int, kind: str) -> int | None:
    """The class of M, as its largest member; None above them all."""
    return next((c for c in DEVICES[kind].table if c >= M), None)


def parts_of(tiles: int, steps: int, multiprocessors: int, programs: int = PROGRAMS) -> int:
    """A power of two that divides the steps of K, for so many programs a multiprocessor, and 8 at most."""
    parts = 1
    while parts < 8 and tiles * parts * 2 <= programs * multiprocessors and steps % (parts * 2) == 0:
        parts *= 2
    return parts


def cut(
    M: int, N: int, K: int, *, group: int, pair: bool, rounding: str, kind: str = "sm90", multiprocessors: int = 132
) -> Cut | None:
    """The cut for a weight in `triton_w4`; None where it is better dequantised, which rounds it."""
    of = class_of(M, kind)
    if of is None and rounding != "none":
        return None
    device = DEVICES[kind]
    rows = N // 2 if pair else N
    row = None if of is None else device.table[of]
    found = device.unrounded if row is None else row.wide if rows // 128 >= multiprocessors else row.narrow
    if pair or (found.fold and rounding == "none"):
        found = device.unrounded._replace(BM=min(device.unrounded.BM, found.BM))
    if rows % found.BN:
        found = found._replace(BN=64 if rows % 64 == 0 else 32, warps=4)
    if rounding == "dtype":
        found = found._replace(
            fold=True, warps=max(found.warps, 8 if found.BN == 128 else 4)
        )  # 4 warps on 128 rows: a known race
    steps = K // min(group or found.step, found.step)
    given = found.parts if found.parts and steps % found.parts == 0 else 0
    return found._replace(parts=given or parts_of(rows // found.BN, steps, multiprocessors))
