"""Tiles of hidden @ weight.T: their shapes by architecture and operand type.

A shape per kind of device, never searched for at run time: that would break graphs, and bits with them. The table holds
what fits registers and shared memory everywhere.

Legend: D hidden · BM, BN, BK rows, columns and steps of D of a tile.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_triton.common.device import arch_of
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import tl

OPERAND_TYPES: Final = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Tile(NamedTuple):
    """One program's block of rows BM, of columns BN, steps of BK, and how it is compiled."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int
    GROUP: int = 8


# What a kernel holds beside its accumulators decides how large they may be:
#   "stats"     softmax statistics            "stats+"   statistics under a cap or a support
#   "dlogits"   the gradient of logits        "saved"    the same of kept logits, without a product
#   "product"   nothing                       "small_m"  the same for few rows, which wait for the head alone
#   "decoded"   nothing but rows of a quantized head in fp32, beside operands of 16 bits
#   "fp32"      fp32 operands, which no matrix unit takes unrounded
#   "tma product", "tma small_m"  operands that Hopper's copy engine brings
#   "chunks"    sums of finished chunks          "chunks small_m"   the same for few rows, or few tiles
#   "tma chunks", "tma chunks small_m"   the same of operands that Hopper's copy engine brings
# Where the tile of "small_m" is another one than that of "product", both were seen to give a row the same bits. Those
# of "chunks" and "chunks small_m" use one matrix instruction: the certificates of linear show one order of sums.
# (architecture, kernels) -> tile; the first that matches.
TILES: Final[tuple[tuple[str, tuple[str, ...], Tile], ...]] = (
    ("interpreter", ("*",), Tile(64, 1024, 64, 4, 1)),
    ("*", ("saved",), Tile(8, 256, 16, 4, 1)),
    ("*", ("fp32",), Tile(64, 64, 16, 4, 2)),
    ("sm90", ("stats", "dlogits", "product"), Tile(128, 256, 64, 8, 3)),
    ("sm100", ("stats", "dlogits", "product", "small_m"), Tile(128, 256, 64, 8, 3)),
    ("sm90", ("tma chunks",), Tile(128, 128, 64, 4, 3)),
    ("sm90", ("chunks", "tma chunks small_m"), Tile(128, 128, 64, 8, 4)),
    ("sm90", ("chunks small_m",), Tile(64, 128, 64, 4, 3)),
    ("sm80", ("chunks small_m",), Tile(32, 128, 64, 4, 3)),
    ("sm87", ("chunks small_m",), Tile(32, 128, 64, 4, 3)),
    ("sm8*", ("chunks small_m",), Tile(32, 128, 32, 4, 3)),
    ("gfx950", ("chunks small_m",), Tile(32, 128, 64, 4, 2)),
    ("gfx9*", ("chunks small_m",), Tile(16, 128, 64, 4, 2)),
    ("gfx1*", ("chunks small_m",), Tile(16, 128, 32, 4, 2)),
    ("sm90", ("tma product",), Tile(128, 256, 64, 8, 4)),
    ("sm90", ("small_m", "tma small_m"), Tile(64, 128, 64, 4, 4)),
    ("sm90", ("*",), Tile(128, 128, 64, 8, 3)),
    ("sm100", ("*",), Tile(128, 128, 64, 8, 3)),
    ("sm80", ("*",), Tile(128, 128, 64, 8, 3)),
    ("sm87", ("*",), Tile(128, 128, 64, 8, 3)),
    ("sm*", ("*",), Tile(128, 128, 32, 8, 3)),
    ("gfx9*", ("*",), Tile(128, 128, 64, 8, 2)),
    ("gfx*", ("*",), Tile(64, 128, 32, 8, 2)),
)


# Options of Triton's AMD compiler beside the tile: the size of a matrix instruction, how many of a lane's reads of LDS
# are packed into one (gfx950 has wide ones of its own), and waves that registers are held down for (0: none). Chosen by
# what comes out of the compiler, without scratch: on gfx90a and gfx942 the small instruction takes as many registers as
# the large one and fewer reads of LDS; on gfx950 the large one leaves room for five waves, the small one for four. Not
# one was measured: nothing here has run on an AMD GPU.
AMD: Final[tuple[tuple[str, dict[str, int]], ...]] = (
    ("gfx942", {"matrix_instr_nonkdim": 16, "kpack": 2, "waves_per_eu": 0}),
    ("gfx950", {"matrix_instr_nonkdim": 32, "kpack": 1, "waves_per_eu": 0}),
    ("gfx90a", {"matrix_instr_nonkdim": 16, "kpack": 2, "waves_per_eu": 0}),
    ("gfx*", {"waves_per_eu": 0}),
)


def compiler_options(arch: str) -> dict[str, int]:
    """Options of the compiler for an architecture; none but on AMD GPUs, whose compiler alone knows them."""
    return next((dict(options) for name, options in AMD if fnmatchcase(arch, name)), {})


def tile_for(arch: str, kind: str) -> Tile:
    """The tile of a kind of kernel on an architecture."""
    return next(
        tile for name, kinds, tile in TILES if fnmatchcase(arch, name) and any(fnmatchcase(kind, k) for k in kinds)
    )


def tile_of(hidden: Tensor, weight: Tensor, kind: str) -> Tile:
    """The tile of a kind of kernel for these operands on their device."""
    fp32 = kind != "saved" and (hidden.dtype == torch.float32 or weight.dtype != hidden.dtype)
    return tile_for(arch_of(hidden), "fp32" if fp32 else kind)


def options_of(x: Tensor) -> dict[str, int]:
    """Options of the compiler for the device of x."""
    return {} if INTERPRETED else compiler_options(arch_of(x))
