"""dequantize@1 in Triton: the reference's bits, at the speed of memory.

Legend: N rows · K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.quantize import DequantizeCall
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launcher, launcher_for, plain_launcher_for
from rlkernel_triton.quant import formats
from rlkernel_triton.quant.dequantize_kernels import (
    dequantize_blocks_kernel,
    dequantize_e2m1_tiles_kernel,
    dequantize_kernel,
)
from rlkernel_triton.quant.layouts import check_layout


def dequantize(call: DequantizeCall) -> Tensor:  # -> [N, K]
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: DequantizeCall) -> Callable[[DequantizeCall], Tensor]:
    """What runs calls of this shape. See `rlkernel_core.spec.quantize.DequantizeCall`."""
    check_layout("w", call.w)
    run = dequantizer(call.w, call.dtype or call.w.dtype)
    return lambda call: run(call.w)


def dequantized(
    w: QuantTensor, dtype: torch.dtype, rows: tuple[int, int] | None = None, out: Tensor | None = None
) -> Tensor:  # -> [rows, K]
    """The weight, or a range of its rows: from and to a multiple of 16 in a layout of tiles."""
    return dequantizer(w, dtype, rows, plain_launcher_for(w.device))(w, out)


def dequantizer(
    w: QuantTensor, dtype: torch.dtype, rows: tuple[int, int] | None = None, launcher: Launcher | None = None
) -> Callable[..., Tensor]:
    """What dequantizes weights like this one, or a range of their rows; bound once.

    It takes a weight, and a tensor for the result where there is one.

    Args:
        w: the weight; none of its values is read.
        dtype: of the result.
        rows: first row and one past the last, multiples of 16 in a layout of tiles; None for all.
        launcher: what binds the kernel; None for that of the weight's device.
    """
    launcher = launcher_for(w.device) if launcher is None else launcher
    bind = _bind_groups
    if formats.is_of_blocks(w.spec):
        bind = _bind_e2m1_tiles if w.layout == formats.E2M1 else _bind_blocks
    first, last = rows or (0, w.shape[0])
    shape, device = (last - first, w.shape[1]), w.device
    launch = bind(launcher, formats.as_nf4(w), first, last)

    def run(w: QuantTensor, out: Tensor | None = None) -> Tensor:
        result = torch.empty(shape, dtype=dtype, device=device) if out is None else out
        launch(w, result)
        return result

    return run


_Bound = Callable[[QuantTensor, Tensor], None]


def is_flat(w: QuantTensor) -> bool:
    """Blocks of the weight go on from row to row, so that rows begin anywhere in them."""
    return w.spec.element in {"nf4", "fp4"} and bool(w.shape[1] % w.spec.group)


def _bind_groups(launcher: Launcher, w: QuantTensor, first: int, last: int) -> _Bound:
    """Scales of groups, rows or all. Of a flat weight, whose blocks go on from row to row, some of its numbers."""
    flat, start, N, K = is_flat(w), None, last, w.shape[1]
    if flat:
        first, N, start, K = 0, 1, first * K, last * K
    R, C = (16, 256) if w.layout == formats.W4 else (1, 2048) if N == 1 else (8, 512)
    grid = (triton.cdiv(N - first, R) * triton.cdiv(K - (start or 0) // C * C, C), 1, 1)
    launch = launcher.bind(
        dequantize_kernel, options=formats.EXACT, first=first, row_bytes=(K + 1) // 2, **formats.scale_grid(w),
        N=N, K=K, start=start, FLAT=flat, R=R, C=C, TILED=w.layout == formats.W4,
        SYMMETRIC=w.spec.symmetric, NESTED=w.spec.double_quant, INTERPRETED=INTERPRETED,
        **formats.Element.of(w.spec).constants,
    )  # fmt: skip
    names = formats.part_names(w)[1:]
    contiguous = all(w.parts[n].is_contiguous() for n in names)

    def run(w: QuantTensor, out: Tensor) -> None:
        given = [w.parts[n] for n in names]
        if not contiguous:
            given = [part.contiguous() for part in given]
        launch(grid, formats.codes_of(w), *given, out)

    return run


def _bind_e2m1_tiles(launcher: Launcher, w: QuantTensor, first: int, last: int) -> _Bound:
    K = w.shape[1]
    C = next(size for size in (256, 128, 64) if K % size == 0)
    grid = (triton.cdiv(last - first, 16) * (K // C), 1, 1)
    launch = launcher.bind(
        dequantize_e2m1_tiles_kernel, options=formats.EXACT, first=first, N=last, K=K, C=C, INTERPRETED=INTERPRETED,
        FORMAT=formats.BLOCK_FORMATS[w.spec.format].value,
    )  # fmt: skip

    def run(w: QuantTensor, out: Tensor) -> None:
        scale = w.parts["scale"].contiguous().view(torch.int32)
        launch(grid, w.parts["codes"].contiguous(), scale, w.parts.get("global_scale", scale), out)

    return run


def _bind_blocks(launcher: Launcher, w: QuantTensor, first: int, last: int) -> _Bound:
    R, C, K = 8, 256, w.shape[1]
    grid = (triton.cdiv(last - first, R) * triton.cdiv(K, C), 1, 1)
    constants: dict[str, Any] = {**formats.block_constants(w.spec), "INTERPRETED": INTERPRETED}
    launch = launcher.bind(
        dequantize_blocks_kernel, options=formats.EXACT, first=first, N=last, K=K, R=R, C=C, **constants
    )
    return lambda w, out: launch(grid, *formats.block_parts(w), out)
