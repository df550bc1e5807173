"""The launches for a block of rows, bound once per shape: compare.cu, `merge_tiles_kernel` and `gradient_kernel`.

Legend: n rows of the block · D, E hidden sizes of student and teacher · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_cuda.common import driver
from rlkernel_cuda.common.tiles import PAIR
from rlkernel_cuda.linear_divergence.row_kernels import SUMS, gradient_kernel, merge_tiles_kernel
from rlkernel_cuda.linear_logprob.logits import multiprocessors
from rlkernel_cuda.linear_logprob.plan import COLS, count_of, round_up
from rlkernel_triton.launchers import Launcher

SOURCE: Final = Path(__file__).with_name("compare.cu")
TILE: Final = replace(PAIR, group=16)
BACK: Final = 2  # numbers of a row that the gradient reads
SCRATCH: Final = 128 * COLS  # fp32 numbers of a block of compare.cu: its tile of the teacher's logits
MERGED: Final = (16, 32)  # rows, and tiles at a time, of a program that merges tiles
GRADIENT: Final = (4, 16)  # tiles that a program of the gradient takes at a time, and how many times


class Form(NamedTuple):
    """The numbers that launches are bound for."""

    kind: str  # "forward_kl" or "reverse_kl"
    n: int
    V: int
    D: int
    E: int
    masked: bool
    save: bool = False  # the gradient will be asked for

    @property
    def pitch(self) -> int:
        """Columns of a row of the gradient: a multiple of 16 bytes."""
        return round_up(self.V, 8)

    @property
    def kept_pitch(self) -> int:
        """Columns of a row of what is kept: whole tiles."""
        return round_up(self.V, COLS)


class Side(NamedTuple):
    """Student or teacher, of the rows of a block."""

    hidden: Tensor  # [n, D] bf16, rows that TMA can read
    weight: Tensor  # [V, D]
    scale: Tensor  # [n] fp32 log2(e) / T


class Kept(NamedTuple):
    """What is kept of a block for its gradient."""

    logits: Tensor  # [2, at least n, kept_pitch] fp16; no numbers where no gradient is asked for
    sums: Tensor  # [tiles, SUMS, n] fp32
    rows: Tensor  # [BACK, n] fp32


TilesLaunch = Callable[[Side, Side, Tensor, Kept], None]  # student, teacher, room for teacher's logits, results


def bind_tiles(form: Form, device: torch.device) -> TilesLaunch:
    """The launch of compare.cu."""
    rows = TILE.consumers * TILE.rows
    shared, index = TILE.stages * (rows + TILE.cols) * TILE.depth * 2, driver.index_of(device)
    flags = {"REVERSE": form.kind == "reverse_kl", "SAVE": form.save, **driver.shape(TILE)}
    kernel = driver.function(SOURCE, tuple(f"-D{name}={int(x)}" for name, x in flags.items()), "compare", shared, index)
    numbers = (form.n, form.V, *(count_of(depth, TILE.depth) for depth in (form.D, form.E)))
    grid = driver.Blocks(multiprocessors(device) // 2 * 2, 384, shared)
    launch = driver.Launch(kernel, grid, index, [c_int(x) for x in numbers])
    known = [driver.Matrix(box, TILE.depth) for box in (rows, TILE.cols // 2) * 2]

    def run(student: Side, teacher: Side, scratch: Tensor, into: Kept) -> None:
        given = (student.hidden, student.weight, teacher.hidden, teacher.weight)
        words = (scratch, student.scale, teacher.scale, into.sums, *into.logits)
        launch([of.of(x) for of, x in zip(known, given, strict=True)], [x.data_ptr() for x in words])

    return run


class Compare:
    """The launches for blocks of one form.

    Args:
        launcher: of the Triton kernels.
        form: what they are bound for.
        device: a Hopper GPU.
    """

    def __init__(self, launcher: Launcher, form: Form, device: torch.device) -> None:
        self.form, self._device, self._tiles = form, device, count_of(form.V, COLS)
        self._compare = bind_tiles(form, device)
        self._merge = launcher.bind(
            merge_tiles_kernel, N=form.n, tiles=self._tiles, HAS_MASK=form.masked, KIND=form.kind, SAVE=form.save,
            ROWS=MERGED[0], TILES=MERGED[1],
        )  # fmt: skip
        tiles, loop = GRADIENT
        self._gradient_grid = (form.n, count_of(form.V, COLS * tiles * loop), 1)
        self._gradient = launcher.bind(
            gradient_kernel, any_alignment=("g",), N=form.n, V=form.V, pitch=form.pitch, kept_pitch=form.kept_pitch,
            HAS_MASK=form.masked, KIND=form.kind, BN=COLS, TILES=tiles, LOOP=loop,
        )  # fmt: skip

    def room(self, logits: Tensor) -> Kept:
        """Room for a block, given that for its logits."""
        sums = torch.empty((self._tiles, SUMS.value, self.form.n), dtype=torch.float32, device=self._device)
        return Kept(logits, sums, torch.empty((BACK, self.form.n), dtype=torch.float32, device=self._device))

    def values(
        self, student: Side, teacher: Side, mask: Tensor | None, scratch: Tensor, values: Tensor, kept: Kept
    ) -> None:
        """Write n divergences, and what the gradient needs.

        Args:
            student: its rows.
            teacher: the same rows.
            mask: [n] rows that count; None: all.
            scratch: room for the teacher's logits, SCRATCH numbers of fp32 for each multiprocessor.
            values: [n] fp32.
            kept: from `room`.
        """
        self._compare(student, teacher, scratch, kept)
        self._merge(
            (count_of(self.form.n, MERGED[0]), 1, 1), kept.sums, student.scale, teacher.scale,
            values if mask is None else mask, values, kept.rows,
        )  # fmt: skip

    def gradient(self, mask: Tensor | None, g: Tensor, kept: Kept, dz: Tensor) -> None:
        """Write the gradient of the logits, [n, pitch], for upstream gradients g: n contiguous numbers of fp32."""
        self._gradient(self._gradient_grid, *kept.logits, kept.sums, kept.rows, g if mask is None else mask, g, dz)
