"""The launches of the logits kernel, bound once a shape: Gluon's through a launcher, CUDA C++'s through the driver.

Legend: N rows · V vocabulary · D hidden · n rows and `width` ids of one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlkernel_cuda.common import driver
from rlkernel_cuda.common.tiles import Tile
from rlkernel_cuda.linear_logprob.logits_kernel import logits_kernel
from rlkernel_triton.launchers import Launcher

SOURCE: Final = Path(__file__).with_name("head.cu")
LOG2E: Final = 1.4426950408889634


class Kind(NamedTuple):
    """What the launches of a head are bound for, beside the layout of its operands."""

    N: int
    V: int
    D: int
    device: torch.device
    T: float | None  # None: one a row
    softcap: float | None
    logit_scale: float
    masked: bool  # rows that count come first, and their number lies on the device
    biased: bool


class Operands(NamedTuple):
    """Operands and rows of one call, in the order in which they are worked on: rows that count first."""

    x: Tensor  # [N, D] bf16, 16-byte rows
    w: Tensor  # [V, D] bf16, 16-byte rows
    bias: Tensor | None  # [V] fp32, no finite number below LEAST_BIAS of row_kernels
    given_bias: Tensor | None  # [V] fp32
    target: Tensor  # [N] int32; -1: none
    row_scale: Tensor  # [N] a logit times this is in base-2 units
    inverse: Tensor  # [N] logit_scale / T
    counted: Tensor | None  # [1] int32: how many rows count; None: all
    place: Tensor | None  # [N] which row of the caller each one is


class Form(NamedTuple):
    """One launch."""

    mode: int  # STATS, SAVE, GRAD of logits_kernel
    tile: Tile
    n: int
    width: int
    stride: int  # numbers from the maxima of a tile to those of the next, or of a row of coefficients


class Into(NamedTuple):
    """What a launch reads and writes beside operands; None where its mode does not need it."""

    tops: Tensor | None = None  # [tiles, stride]
    sums: Tensor | None = None  # [tiles, 2, n]
    chosen: Tensor | None = None  # [n]
    coef: Tensor | None = None  # [4, stride]
    out: Tensor | None = None  # [n, width] fp16 or bf16


LogitsLaunch = Callable[[Operands, slice, slice, Into], None]  # of some rows and some ids


def bind(launcher: Launcher, kind: Kind, form: Form) -> LogitsLaunch:
    """A launch for rows and ids of these sizes."""
    return _Single(launcher, kind, form) if form.tile.cluster == 1 else _Pair(kind, form)


class _Parts:
    """The operands of a launch, cut where it is not of all rows and ids."""

    def __init__(self, kind: Kind, form: Form) -> None:
        self.kind, self.form = kind, form
        self._all_rows, self._all_ids = form.n == kind.N, form.width == kind.V
        c = 1.0 if kind.softcap is None else float(kind.softcap)
        self.cap, self.cap_in = c, 2.0 * LOG2E * kind.logit_scale / c
        self.k_tiles = -(-kind.D // form.tile.depth)

    def of_rows(self, x: Tensor, rows: slice) -> Tensor:
        """Some rows."""
        return x if self._all_rows else x[rows]

    def of_ids(self, x: Tensor, ids: slice) -> Tensor:
        """Some ids."""
        return x if self._all_ids else x[ids]


class _Single(_Parts):
    """The kernel of logits_kernel.py."""

    def __init__(self, launcher: Launcher, kind: Kind, form: Form) -> None:
        super().__init__(kind, form)
        tile = form.tile
        self._grid = (multiprocessors(kind.device), 1, 1)
        self._x, self._w = Descriptor(tile.rows, tile.depth), Descriptor(tile.cols, tile.depth)
        self._out = Descriptor(tile.rows, tile.cols // 2)
        self._launch = launcher.bind(
            logits_kernel, num_warps=4, N=form.n, V=form.width, stride=form.stride, cap=self.cap, cap_in=self.cap_in,
            k_tiles=self.k_tiles, NC=tile.consumers, BM=tile.rows, BN=tile.cols, BK=tile.depth, STAGES=tile.stages,
            GROUP_M=tile.group, MODE=form.mode, BIAS=kind.biased, CAP=kind.softcap is not None, COUNTED=kind.masked,
        )  # fmt: skip

    def __call__(self, of: Operands, rows: slice, ids: slice, into: Into) -> None:
        x = self._x.of(self.of_rows(of.x, rows))
        scale = self.of_rows(of.row_scale, rows)  # also stands for what the mode does not read
        self._launch(
            self._grid, x, self._w.of(self.of_ids(of.w, ids)), x if into.out is None else self._out.of(into.out),
            self.of_rows(of.target, rows), scale if of.bias is None else self.of_ids(of.bias, ids), scale,
            *[scale if given is None else given for given in into[:4]],
            of.target if of.counted is None else of.counted, rows.start,
        )  # fmt: skip


class Descriptor:
    """What Triton needs to know of tensors that differ in their address alone, to fetch boxes of them by TMA."""

    def __init__(self, rows: int, cols: int) -> None:
        self._box = [rows, cols]
        self._same: dict[str, Any] | None = None  # all fields but the tensor

    def of(self, x: Tensor) -> TensorDescriptor:
        """The descriptor of x, whose shape and strides are those of the first one."""
        if self._same is None:
            made = TensorDescriptor.from_tensor(x, self._box, gl.NVMMASharedLayout(128, 16, 2))
            self._same = {name: value for name, value in vars(made).items() if name != "base"}
            return made
        found = TensorDescriptor.__new__(TensorDescriptor)
        vars(found).update(self._same, base=x)
        return found


class _Pair(_Parts):
    """The kernel of head.cu."""

    def __init__(self, kind: Kind, form: Form) -> None:
        super().__init__(kind, form)
        tile = form.tile
        rows = tile.consumers * tile.rows
        flags = {"MODE": form.mode, "BIAS": kind.biased, "CAP": kind.softcap is not None, "COUNTED": kind.masked}
        options = tuple(f"-D{n}={int(v)}" for n, v in {**flags, **driver.shape(tile)}.items())
        shared = tile.stages * (rows + tile.cols) * tile.depth * 2
        index = driver.index_of(kind.device)
        self._x, self._w = driver.Matrix(rows, tile.depth), driver.Matrix(tile.cols // 2, tile.depth)
        self._kernel = driver.function(SOURCE, options, "head", shared, index)
        self._blocks, self._shared, self._index = multiprocessors(kind.device) // 2 * 2, shared, index
        self._bound: dict[int, driver.Launch] = {}  # by the numbers from a row of the result to the next

    def __call__(self, of: Operands, rows: slice, ids: slice, into: Into) -> None:
        scale, out = self.of_rows(of.row_scale, rows), into.out
        target = self.of_rows(of.target, rows)
        pitch = 0 if out is None else out.stride(0)
        launch = self._bound.get(pitch)
        if launch is None:
            launch = self._bound[pitch] = self._of(pitch)
        bias = scale if of.bias is None else self.of_ids(of.bias, ids)
        given = (target if out is None else out, target, bias, scale, *[scale if x is None else x for x in into[:4]])
        launch(
            (self._x.of(self.of_rows(of.x, rows)), self._w.of(self.of_ids(of.w, ids))),
            (*[x.data_ptr() for x in given], (of.target if of.counted is None else of.counted).data_ptr(), rows.start),
        )

    def _of(self, pitch: int) -> driver.Launch:
        numbers: list[Any] = [c_int(x) for x in (self.form.n, self.form.width, self.form.stride, pitch)]
        numbers += [c_float(self.cap), c_float(self.cap_in), c_int(self.k_tiles)]
        return driver.Launch(self._kernel, driver.Blocks(self._blocks, 384, self._shared), self._index, numbers)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
