"""Tiles of attention@1: how many rows and keys a program takes at a time, its warps, and its loads in flight.

A shape for each kind of device, type and width of a head, never searched for at run time: it decides bits. Where a
query's sums may be compared, all paths take one tile.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final, NamedTuple

CHUNK: Final = 1024  # keys whose sums are merged with those of the next
NARROWEST: Final = 16  # columns that a matrix instruction takes at least
WIDEST: Final = 256  # columns of a head that are claimed


class Tile(NamedTuple):
    """Rows of queries and keys of a tile, and how a program is compiled."""

    ROWS: int
    KEYS: int
    num_warps: int
    num_stages: int
    SLICE: int = 0  # columns of a head that are multiplied at a time; 0: all


# Those of sm90 and two bytes were chosen by time on an H200, all others by what comes out of the compiler: what fits
# shared memory, and spills least. Forward has 64 rows where a matrix unit multiplies 64 at a time (Hopper), and 64 keys
# wherever one multiplies: that is the order of sums. fp32 operands have none, and 16 keys. RDNA's instructions hold
# operands twice: heads are cut there.
# (kernel, architecture, bytes of an operand, widest head) -> tile; the first that matches.
TILES: Final[tuple[tuple[str, str, int, int, Tile], ...]] = (
    ("forward", "gfx1*", 2, 128, Tile(32, 64, 8, 1, 32)),
    ("forward", "gfx1*", 2, 256, Tile(16, 64, 8, 1, 32)),
    ("forward", "gfx9*", 2, 256, Tile(64, 64, 4, 1)),
    ("forward", "sm8*", 2, 128, Tile(64, 64, 8, 2)),
    ("forward", "sm12*", 2, 128, Tile(64, 64, 8, 2)),
    ("forward", "sm86", 2, 256, Tile(64, 64, 8, 1)),
    ("forward", "sm89", 2, 256, Tile(64, 64, 8, 1)),
    ("forward", "sm12*", 2, 256, Tile(64, 64, 8, 1)),
    ("forward", "sm90", 2, 128, Tile(64, 64, 4, 3)),
    ("forward", "*", 2, 128, Tile(64, 64, 4, 2)),
    ("forward", "*", 2, 256, Tile(64, 64, 8, 2)),
    ("forward", "*", 4, 128, Tile(32, 16, 4, 1, 16)),
    ("forward", "*", 4, 256, Tile(32, 16, 8, 1, 16)),
    ("queries", "gfx1*", 2, 256, Tile(32, 32, 8, 1, 32)),
    ("queries", "gfx9*", 2, 128, Tile(64, 64, 4, 1)),
    ("queries", "gfx9*", 2, 256, Tile(64, 32, 4, 1)),
    ("queries", "sm90", 2, 128, Tile(64, 64, 4, 2)),
    ("queries", "*", 2, 128, Tile(64, 64, 8, 2)),
    ("queries", "sm8*", 2, 256, Tile(32, 32, 4, 2)),
    ("queries", "sm12*", 2, 256, Tile(32, 32, 4, 2)),
    ("queries", "*", 2, 256, Tile(64, 32, 8, 2)),
    ("queries", "*", 4, 128, Tile(32, 16, 4, 1, 16)),
    ("queries", "*", 4, 256, Tile(32, 16, 8, 1, 16)),
    ("keys", "gfx1*", 2, 256, Tile(32, 32, 8, 1, 32)),
    ("keys", "gfx9*", 2, 128, Tile(32, 64, 4, 1)),
    ("keys", "gfx9*", 2, 256, Tile(32, 32, 4, 1)),
    ("keys", "sm90", 2, 128, Tile(32, 64, 4, 2)),
    ("keys", "*", 2, 128, Tile(64, 64, 8, 2)),
    ("keys", "*", 2, 256, Tile(32, 32, 8, 2)),
    ("keys", "*", 4, 128, Tile(16, 32, 4, 1, 16)),
    ("keys", "*", 4, 256, Tile(16, 32, 8, 1, 16)),
)


def tile_for(kernel: str, arch: str, size: int, width: int) -> Tile:
    """The tile of a kernel on an architecture, for operands of `size` bytes and heads of a width."""
    return next(
        tile for name, on, of, most, tile in TILES
        if name == kernel and fnmatchcase(arch, on) and of == size and width <= most
    )  # fmt: skip
