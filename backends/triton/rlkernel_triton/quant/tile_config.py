"""How a product is tiled, by shape and GPU: tables measured on one GPU, and the rule that splits K.

Tiles and parts of K decide the order of sums. They depend on the weight and on the class of M alone: rows of a batch
have the same bits in every batch of its class.

Legend: M tokens · N rows · K columns of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.launchers import planned_target


class Machine(NamedTuple):
    """What decides how a product is tiled and decoded."""

    kind: str  # of `W4_TILES`
    multiprocessors: int
    ptx: bool  # inline PTX is understood
    sync: bool  # weights are the operand of `mma.sync`

    @property
    def tables(self) -> bool:
        """Bytes of a table in registers can be picked."""
        return self.ptx or INTERPRETED

    @property
    def casts(self) -> bool:
        """There are instructions for e4m3fn."""
        return self.kind == "sm90" and not INTERPRETED


_KINDS: Final = {"sm90": "sm90", "sm87": "jetson", "sm110": "jetson", "sm101": "jetson"}


def machine(device: torch.device) -> Machine:
    """The machine behind a device, or that which is planned for; the interpreter stands for a large GPU."""
    target = planned_target()
    if target is None:
        return _machine_of(device)
    kind = _KINDS.get(f"sm{target.arch}", "other") if target.nvidia else "other"
    return Machine(kind, target.planned, ptx=target.nvidia, sync=target.nvidia and kind != "sm90")


@lru_cache
def _machine_of(device: torch.device) -> Machine:
    if INTERPRETED:
        return Machine("sm90", 132, ptx=False, sync=False)
    found = torch.cuda.get_device_properties(device)
    nvidia = torch.version.hip is None
    kind = _KINDS.get(f"sm{found.major}{found.minor}", "other") if nvidia else "other"
    return Machine(kind, found.multi_processor_count, ptx=nvidia, sync=nvidia and kind != "sm90")


class W4Config(NamedTuple):
    """One way to tile a product of a weight in `triton_w4`."""

    BM: int  # tokens of a tile
    BN: int  # rows of a tile; of each half for a pair
    parts: int  # parts of K; 0: as many as fill the GPU
    stages: int  # loads in flight
    warps: int
    fold: bool = False  # weights are scaled and rounded before the product
    step: int = 128  # columns a step, unless a group is smaller


class Row(NamedTuple):
    """Configurations for a class of M."""

    wide: W4Config  # where 128 rows a tile make a tile for every multiprocessor
    narrow: W4Config


class Tiles(NamedTuple):
    """What is known of a kind of GPU."""

    table: dict[int, Row]  # largest M of a class -> its rows; above them a weight is dequantized and torch multiplies
    unrounded: W4Config  # large M where no weight may be rounded, and pairs


# sm90: measured on an H200 (benchmarks/notes/qmatmul.md). Orin and Thor: two programs a multiprocessor or more by
# registers and shared memory, none spilled (benchmarks/notes/jetson.md). Others: chosen to fit 64 KiB of shared memory.
# Neither was measured.
_SMALL: Final = {16: W4Config(16, 64, 0, 3, 4), 32: W4Config(32, 64, 0, 3, 8), 64: W4Config(64, 64, 0, 2, 8)}
_JETSON: Final = {16: W4Config(16, 64, 0, 3, 4), 32: W4Config(32, 64, 0, 3, 4), 64: W4Config(64, 64, 0, 2, 4)}
W4_TILES: Final[dict[str, Tiles]] = {
    "sm90": Tiles(
        {
            16: Row(W4Config(16, 128, 0, 4, 4), W4Config(16, 128, 0, 3, 4)),
            32: Row(W4Config(32, 128, 1, 3, 4), W4Config(32, 64, 0, 3, 4)),
            64: Row(W4Config(64, 128, 1, 3, 4), W4Config(64, 64, 0, 3, 4)),
            128: Row(W4Config(128, 128, 1, 5, 8, True, 64), W4Config(128, 64, 2, 3, 4)),
            256: Row(W4Config(256, 128, 1, 4, 8, True, 64), W4Config(128, 64, 2, 4, 4, True, 64)),
            512: Row(W4Config(128, 128, 1, 4, 8, True, 64), W4Config(256, 128, 1, 4, 8, True, 64)),
            1024: Row(W4Config(256, 128, 1, 3, 8, True, 64), W4Config(128, 128, 1, 4, 8, True, 64)),
        },
        W4Config(64, 64, 0, 3, 4),
    ),
    "jetson": Tiles({M: Row(found, found) for M, found in _JETSON.items()}, W4Config(16, 64, 0, 2, 8)),
    "other": Tiles({M: Row(found, found) for M, found in _SMALL.items()}, W4Config(16, 64, 0, 2, 8)),
}
PROGRAMS: Final = 3  # a multiprocessor, at most, where K is split


def class_of(M: int, kind: str) -> int | None:
    """The class of M, as its largest member; None above them all."""
    return next((c for c in W4_TILES[kind].table if c >= M), None)


def splitk_parts(tiles: int, steps: int, multiprocessors: int, programs: int = PROGRAMS) -> int:
    """A power of two that divides the steps of K, for so many programs a multiprocessor, and 8 at most."""
    parts = 1
    while parts < 8 and tiles * parts * 2 <= programs * multiprocessors and steps % (parts * 2) == 0:
        parts *= 2
    return parts


def w4_config(
    M: int, N: int, K: int, *, group: int, pair: bool, rounding: str, kind: str = "sm90", multiprocessors: int = 132
) -> W4Config | None:
    """The configuration for a weight in `triton_w4`; None where it is better dequantized, which rounds it."""
    of = class_of(M, kind)
    if of is None and rounding != "none":
        return None
    tiles = W4_TILES[kind]
    rows = N // 2 if pair else N
    row = None if of is None else tiles.table[of]
    found = tiles.unrounded if row is None else row.wide if rows // 128 >= multiprocessors else row.narrow
    if pair or (found.fold and rounding == "none"):
        found = tiles.unrounded._replace(BM=min(tiles.unrounded.BM, found.BM))
    if rows % found.BN:
        found = found._replace(BN=64 if rows % 64 == 0 else 32, warps=4)
    if rounding == "dtype":  # 4 warps on 128 rows: a known race
        found = found._replace(fold=True, warps=max(found.warps, 8 if found.BN == 128 else 4))
    steps = K // min(group or found.step, found.step)
    given = found.parts if found.parts and steps % found.parts == 0 else 0
    return found._replace(parts=given or splitk_parts(rows // found.BN, steps, multiprocessors))


class TileConfig(NamedTuple):
    """One way to tile a product that folds scales: mxfp4 and nvfp4 in tiles, and experts."""

    BM: int
    BN: int
    stages: int
    warps: int


# Rows of x up to a class -> configuration, as measured on an H200 (benchmarks/notes/quant-formats.md): of an expert, on
# average; of a weight alone, which is dequantized above, where 128 rows a tile make a tile for every multiprocessor
# (WIDE), and where not. 128 rows of folded weights want 8 warps, as in `w4_config`.
OF_EXPERTS: Final = {
    4: TileConfig(16, 64, 4, 4), 16: TileConfig(32, 128, 4, 8), 64: TileConfig(64, 64, 3, 4),
    128: TileConfig(128, 128, 3, 8),
}  # fmt: skip
_FEW: Final = {16: TileConfig(16, 64, 4, 4), 32: TileConfig(32, 128, 4, 8)}
WIDE: Final = {**_FEW, 64: TileConfig(64, 128, 3, 8), 256: TileConfig(128, 128, 3, 8)}
NARROW: Final = {**_FEW, 64: TileConfig(64, 64, 3, 4), 256: TileConfig(128, 64, 3, 4)}
MOST_ROWS: Final = max(WIDE)  # of x, above which a weight alone is dequantized
FEW_ROWS_PROGRAMS: Final = 7  # as `PROGRAMS`, on sm90 for 16 tokens a tile, which take few registers and little memory
LARGE: Final = 1 << 14  # elements of a tile from which a step is short


def tile_config(rows: int, width: int, machine: Machine, *, experts: bool, pair: bool) -> TileConfig:
    """The configuration for so many rows of x (of an expert, on average) and columns of the result.

    GPUs others than that which was measured have less memory.
    """
    wide = WIDE if width // 128 >= machine.multiprocessors else NARROW
    table: Mapping[int, TileConfig] = OF_EXPERTS if experts else wide
    found = next((c for limit, c in table.items() if rows <= limit), table[max(table)])
    if machine.kind != "sm90":
        found = found._replace(stages=2)
    if pair and found.BM * found.BN >= LARGE:  # two sums
        found = found._replace(BN=64, warps=4)
    if width % found.BN:
        found = found._replace(BN=64 if width % 64 == 0 else 32, warps=4)
    return found
