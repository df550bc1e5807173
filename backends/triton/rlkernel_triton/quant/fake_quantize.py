"""fake_quantize@1 in Triton: one launch there and back, one for a clipped gradient; none for a straight-through one.

One scale in all takes a launch for the maximum before. Double-quantized scales depend on the mean of all, so there
`quantize` and `dequantize` run one after the other.

Legend: N rows · K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.ends import ends
from rlkernel_core.quant.float8 import FLOAT8
from rlkernel_core.quant.kquants import SUB
from rlkernel_core.quant.mx import form_of
from rlkernel_core.quant.spec import QuantSpec, spec_of
from rlkernel_core.spec.fake_quantize import FakeQuantizeCall
from rlkernel_core.spec.quantize import QuantizeCall
from rlkernel_triton.common.host import INTERPRETED, lasting
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import Launch, Launcher, Plan, launcher_for
from rlkernel_triton.launchers.specialization import aligned
from rlkernel_triton.quant import fake_quantize_kernels as kernels
from rlkernel_triton.quant import fake_rows_kernels as rows_kernels
from rlkernel_triton.quant import formats
from rlkernel_triton.quant.block_quantize_kernels import absmax_finite_kernel
from rlkernel_triton.quant.dequantize import dequantized
from rlkernel_triton.quant.quantize import (
    _LARGEST,
    _MX_RULES,
    _ROUNDINGS,
    ROW_TILE,
    SUPER_BLOCK,
    _integers,
    _tile_arguments,
    _tile_of,
    _within_31_bits,
    quantize,
)
from rlkernel_triton.quant.quantize_kernels import absmax_kernel
from rlkernel_triton.quant.tile_config import machine

BLOCK: Final = 128  # rows and columns that share a scale in the formats of blocks
BLOCK_ROWS: Final = 64  # of a block that a program reads at once, where it reads blocks twice
BLOCK_WARPS: Final = 16  # of such a program; half of them where it keeps a block in registers
SMALL_GROUP: Final = 32  # columns: groups so small are fastest with 16 elements a thread
_CELLS: Final[dict[tuple[QuantSpec, torch.device], Tensor]] = {}


def fake_quantize(call: FakeQuantizeCall) -> Tensor:  # -> [N, K]
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: FakeQuantizeCall) -> Callable[[FakeQuantizeCall], Tensor]:
    """What runs calls of this shape. See `rlkernel_core.spec.fake_quantize.FakeQuantizeCall`."""
    if gradient_wanted("fake_quantize", call):
        return FakeQuantizePair(call)
    return _Host(call).forward


class FakeQuantizePair(Pair[FakeQuantizeCall, Tensor]):
    """The weight there and back, and its gradient; scales are found again for clipped ones."""

    op = "fake_quantize"

    def __init__(self, call: FakeQuantizeCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host, self._clipped, self._dtype = _Host(call), call.clipped, call.weight.dtype

    def forward(self, call: FakeQuantizeCall) -> tuple[Tensor, Saved]:
        """The result; the weight where gradients are clipped."""
        return self._host.forward(call), (call.weight if call.clipped else None,)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """A copy of the upstream gradient, or one launch."""
        (weight,), (g,) = saved, grads
        if g is None or (weight is None and self._clipped):
            raise RLKernelError("fake_quantize: its backward pass got less than its forward pass saved")
        if weight is None:
            return (g.to(self._dtype, copy=True, memory_format=torch.contiguous_format),)
        return (self._host.backward(weight, g.contiguous()),)

    @classmethod
    def saved_like(cls, call: FakeQuantizeCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """The weight where gradients are clipped."""
        del result, wanted
        return (call.weight if call.clipped else None,)


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: FakeQuantizeCall) -> None:
        weight = call.weight
        self._spec = spec_of(call.format)
        own = torch.float32 if weight.dtype == torch.float64 else weight.dtype
        self._dtype = call.dtype or own
        self._plan = Plan(launcher_for(weight.device))

    def forward(self, call: FakeQuantizeCall) -> Tensor:
        """The result."""
        weight = call.weight.detach()
        if self._spec.double_quant:
            return dequantized(self._quantized(weight), self._dtype)
        out = torch.empty(weight.shape, dtype=self._dtype, device=weight.device)
        self._run(weight, out, None)
        return out

    def backward(self, weight: Tensor, g: Tensor) -> Tensor:
        """A clipped gradient of the weight."""
        weight = weight.detach()
        if self._spec.double_quant:
            one, other = (dequantized(w, torch.float32) for w in ends(self._quantized(weight)))
            x = weight.float()
            beyond = (x < torch.minimum(one, other)) | (x > torch.maximum(one, other))
            return torch.where(beyond, 0, g.to(weight.dtype))
        out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        self._run(weight, out, g)
        return out

    def _quantized(self, weight: Tensor) -> Any:
        return quantize(QuantizeCall(weight, self._spec))

    def _run(self, weight: Tensor, out: Tensor, up: Tensor | None) -> None:
        if formats.is_of_blocks(self._spec):
            self._blocks(weight, out, up)
        elif self._spec.group > 0 and self._spec.rows == 1:
            self._groups(weight, out, up)
        else:
            self._rows(weight, out, up)

    def _groups(self, weight: Tensor, out: Tensor, up: Tensor | None) -> None:
        """A scale for each group of columns of a row: integers, nf4, fp4."""
        spec, (N, K) = self._spec, weight.shape
        table = spec.element in {"nf4", "fp4"}
        if table and K % spec.group:  # blocks go on from row to row
            weight, N, K = weight.reshape(1, N * K), 1, N * K
        size, warps = (2048, 2) if table else (4096, 4) if spec.group <= SMALL_GROUP else (8192, 4)
        R, C = (1, 2048) if N == 1 else _tile_of(N, K, spec.group, size)
        weight = _within_31_bits(weight, R, C)

        def bound(launcher: Launcher) -> Launch:
            return launcher.bind(
                kernels.fake_groups_kernel, num_warps=warps, any_alignment=_ARRIVING,
                **_tile_arguments(weight, N, K, R, C), largest=_LARGEST[spec.scale_rule],
                GROUP=spec.group, ELEMENT=formats.Element.of(spec).ELEMENT, SCALE_TYPE=_SCALE_TYPES[spec.scale_dtype],
                SYMMETRIC=spec.symmetric, FLOAT_ZERO=spec.float_zero,
                ROUNDING=_ROUNDINGS[spec.rounding].value, BACKWARD=up is not None, **_numbers(spec),
            )  # fmt: skip

        launch = self._plan.get(_place(up), bound)
        cells = _cells_of(spec, weight.device) if table else out
        grid = (triton.cdiv(N, R) * triton.cdiv(K, C), 1, 1)
        launch(grid, weight, out if up is None else up, out, cells)

    def _rows(self, weight: Tensor, out: Tensor, up: Tensor | None) -> None:
        """A scale for each row, for each block of 128 x 128, or for the whole weight."""
        spec, (N, K) = self._spec, weight.shape
        if up is None and _in_words(spec, weight):
            self._words(weight, out)
            return
        (R, C), warps = ((BLOCK_ROWS, BLOCK), BLOCK_WARPS) if spec.rows == BLOCK else (ROW_TILE, 4)
        if spec.rows == 1:  # long tiles that need no masks; not for one scale in all, which reads a number a tile
            size, warps = (4096, 4) if spec.element in FLOAT8 else (4096, 8) if spec.symmetric else (2048, 4)
            widths = [c for c in (4096, 2048, 1024) if c <= size and K % c == 0 and N % (size // c) == 0]
            R, C = (size // widths[0], widths[0]) if widths else ROW_TILE
        side = BLOCK if spec.rows == BLOCK else R
        tiles, weight = triton.cdiv(N, side), _within_31_bits(weight, side, K)

        def bound(launcher: Launcher) -> tuple[Launch | None, Launch]:
            form = FLOAT8.get(spec.element)
            given = _tile_arguments(weight, N, K, R, C)
            rows = launcher.bind(
                rows_kernels.fake_rows_kernel, num_warps=warps, any_alignment=_ARRIVING, **given,
                largest=_LARGEST.get(spec.scale_rule) or (form.max if form else 1.0), parts=tiles,
                ROWS={0: 0, 1: 1, BLOCK: 2}[spec.rows], SIDE=side, **formats.Element.of(spec).constants,
                SCALE_TYPE=_SCALE_TYPES[spec.scale_dtype], SYMMETRIC=spec.symmetric,
                POWER=spec.scale_rule == "absmax/max_pow2", **_numbers(spec), LARGEST=form.max if form else 0.0,
                PARTS=triton.next_power_of_2(tiles) if spec.rows == 0 else 1,
                CAST=_cast(spec, weight.device), BACKWARD=up is not None,
            )  # fmt: skip
            return launcher.bind(absmax_kernel, num_warps=4, **given) if spec.rows == 0 else None, rows

        first, rows = self._plan.get(_place(up), bound)
        partial = out
        if first is not None:
            partial = torch.empty(tiles, dtype=torch.int32, device=weight.device)
            first((tiles, 1, 1), weight, partial)
        grid = (tiles, triton.cdiv(K, C) if spec.rows == BLOCK else 1, 1)
        rows(grid, weight, out if up is None else up, out, partial)

    def _words(self, weight: Tensor, out: Tensor) -> None:
        """Whole blocks of 128 x 128, read once."""
        spec, (N, K) = self._spec, weight.shape

        def bound(launcher: Launcher) -> Launch:
            form, constants = FLOAT8[spec.element], formats.Element.of(spec).constants
            return launcher.bind(
                rows_kernels.fake_words_kernel, num_warps=BLOCK_WARPS // 2, options=formats.EXACT,
                row_stride=weight.stride(0), K=K, C=BLOCK, parts=BLOCK // rows_kernels.PART.value, largest=form.max,
                POWER=spec.scale_rule == "absmax/max_pow2", **{n: constants[n] for n in ("MANTISSA", "BIAS", "FNUZ")},
                LARGEST=form.max, CAST=_cast(spec, weight.device), INTERPRETED=INTERPRETED,
            )  # fmt: skip

        self._plan.get("words", bound)((N // BLOCK, K // BLOCK, 1), weight, out)

    def _blocks(self, weight: Tensor, out: Tensor, up: Tensor | None) -> None:
        """MX, NVFP4 and the k-quants."""
        spec, (N, K) = self._spec, weight.shape
        size, warps = 4096, 4
        if spec.group <= SMALL_GROUP:
            size, warps = (2048, 4) if spec.format == "nvfp4" else (4096, 8)
        R, C = _tile_of(N, K, spec.group, size)
        weight = _within_31_bits(weight, R, C)

        def bound(launcher: Launcher) -> tuple[Launch | None, Launch]:
            given = _tile_arguments(weight, N, K, R, C)
            more: dict[str, Any] = {"any_alignment": _ARRIVING, "BACKWARD": up is not None, "num_warps": warps, **given}
            away = spec.rounding == "away"
            if spec.group == SUPER_BLOCK:
                bits = {"int4": 4, "int5": 5, "int6": 6}[spec.element]
                kind: dict[str, Any] = {"GROUP": SUB[spec.element], "BITS": bits, "SIGNED": spec.symmetric}
                return None, launcher.bind(kernels.fake_kquants_kernel, **more, **kind)
            if spec.format == "nvfp4":
                first = launcher.bind(absmax_finite_kernel, **given, GROUP=spec.group, TOKENS=False)
                return first, launcher.bind(kernels.fake_nvfp4_kernel, **more, GROUP=spec.group, AWAY=away)
            element, four = form_of(spec.element), spec.element == "e2m1"
            return None, launcher.bind(
                kernels.fake_mx_kernel, **more, GROUP=spec.group, AWAY=away, FOUR=four,
                RULE=_MX_RULES[spec.scale_rule], MANTISSA=element.mantissa,
                BIAS=1 if four else formats.block_constants(spec)["BIAS"], TOP=element.largest_exponent,
                FRACTION=int((element.largest_fraction - 1) * (1 << 23)), LARGEST=element.max,
            )  # fmt: skip

        first, last = self._plan.get(_place(up), bound)
        grid, tensors = (triton.cdiv(N, R) * triton.cdiv(K, C), 1, 1), [weight, out if up is None else up, out]
        if first is not None:
            most = torch.zeros(1, dtype=torch.int32, device=weight.device)
            first((triton.cdiv(N, R), 1, 1), weight, most)
            tensors.append(most)
        last(grid, *tensors)


_ARRIVING: Final = ("up",)
_SCALE_TYPES: Final = {"float32": 0, "bfloat16": 1, "float16": 2}


def _place(up: Tensor | None) -> str:
    return "forward" if up is None else "backward"


def _cast(spec: QuantSpec, device: torch.device) -> bool:
    return spec.element == "e4m3fn" and machine(device).casts


def _in_words(spec: QuantSpec, weight: Tensor) -> bool:
    """Whether `fake_words_kernel` reads the weight: whole blocks of bf16, two numbers in each aligned word."""
    if spec.rows != BLOCK or weight.dtype != torch.bfloat16:
        return False
    (N, K), (row, column) = weight.shape, weight.stride()
    whole = N % BLOCK == 0 and K % BLOCK == 0 and column == 1 and row % 2 == 0
    return whole and K <= row < 2**31 // BLOCK and aligned(weight)


def _numbers(spec: QuantSpec) -> dict[str, Any]:
    """Least and largest code less the zero-point of symmetric integers, or entry of a table."""
    if spec.element in {"nf4", "fp4"}:
        return {"LEAST": -1, "MOST": 1}
    found = _integers(spec)
    if spec.element == "int4" and spec.symmetric:
        return {name: code - 8 for name, code in found.items()}
    return found


def _cells_of(spec: QuantSpec, device: torch.device) -> Tensor:  # -> [192] fp32
    """The table of `kernels.nearest_value`; moved to a device once, since a copy from the host is a synchronization."""
    key = (spec, device)
    if key not in _CELLS:
        table = codec_of(spec).constants(spec)["table"]
        values = (table[:8] if spec.element == "fp4" else table).sort().values
        middles = (values[:-1] + values[1:]) / 2
        numbers = (middles * 16).round() + 16  # of the cells that hold them, all different
        cells = torch.arange(128, device=values.device).unsqueeze(1)
        own = torch.where(numbers == cells, middles, torch.inf).amin(1)
        found = torch.cat([own[:64], values[(numbers < cells).sum(1)]])
        _CELLS[key] = lasting(lambda: {"cells": found.to(device)}, device)["cells"]
    return _CELLS[key]
