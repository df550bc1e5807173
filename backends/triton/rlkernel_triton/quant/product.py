"""qmatmul@1 in Triton.

A weight in `triton_w4` is decoded in registers and multiplied, up to the largest class of M; above it, the weight is
dequantised in pieces that stay in the cache and torch multiplies them. Canonical weights of any shape take a kernel
that reads bytes. Inputs that a format quantises are coded first, and products of 8-bit floats are taken of their exact
16-bit values, since the 8-bit instructions of some GPUs keep fewer bits of a sum than the contract allows.

Legend: M tokens · K inputs · N outputs · R = N, or N / 2 for a pair · r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_core.spec.qmatmul import PAIRS, LoRA
from rlkernel_triton.common.host import INTERPRETED, blank
from rlkernel_triton.common.language import triton
from rlkernel_triton.launchers import (
    Grid,
    Launch,
    Launcher,
    Plan,
    piece_of,
    plain_launcher_for,
    planned,
    planned_target,
)
from rlkernel_triton.quant import choice, product_kernels, storage, word_kernels
from rlkernel_triton.quant.activations import quantize_activation
from rlkernel_triton.quant.choice import Cut
from rlkernel_triton.quant.splitk_counters import scratch
from rlkernel_triton.quant.storage import W4, Element

MOST_RANK: Final = 64  # of a LoRA that the kernels add themselves
MOST_OF_TABLE: Final = 64  # tokens of a product with a weight of a table that is not dequantised first


@dataclass(frozen=True)
class After:
    """What follows the product."""

    bias: Tensor | None = None  # [N]
    lora: LoRA | None = None
    activation: str | None = None
    residual: Tensor | None = None  # [M, R]

    @property
    def pair(self) -> bool:
        """The rows of the weight are a gate's and a value's."""
        return self.activation in PAIRS

    @property
    def nothing(self) -> bool:
        """The result is the product."""
        return self.bias is None and self.lora is None and self.activation is None and self.residual is None

    def arguments(self, x: Tensor) -> dict[str, Any]:
        """Keyword arguments of the kernels; `x` stands for what is not there."""
        given: dict[str, Any] = {
            "bias": x if self.bias is None else self.bias.contiguous(),
            "BIAS": self.bias is not None,
            "residual": x if self.residual is None else self.residual,
            "residual_row": 0,
            "RESIDUAL": self.residual is not None,
            "PAIR": self.pair,
            "ACTIVATION": self.activation or "none",
            "INTERPRETED": INTERPRETED,
            "xa": x,
            "lora_b": x,
            "lora_row": 0,
            "lora_rank": 0,
            "lora_scale": 0.0,
            "RANK": 0,
            "WIDE_LORA": False,
        }
        if self.residual is not None:
            residual = self.residual if self.residual.stride(1) == 1 else self.residual.contiguous()
            given |= {"residual": residual, "residual_row": residual.stride(0)}
        if self.lora is not None and self.lora.A.shape[0]:
            B = self.lora.B.contiguous()
            xa = inner(x, self.lora.A)
            given |= {"xa": xa, "lora_b": B, "lora_row": B.stride(0), "lora_rank": B.shape[1]}
            given |= {"lora_scale": float(self.lora.scale), "RANK": triton.cdiv(B.shape[1], 16) * 16}
            given |= {"WIDE_LORA": INTERPRETED or B.dtype != xa.dtype or B.dtype == torch.float32}
        return given

    def tensors(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors among `arguments`: bias, xa, lora_b, residual."""
        bias = x if self.bias is None else self.bias.contiguous()
        residual = x if self.residual is None else self.residual
        if residual.stride(-1) != 1:
            residual = residual.contiguous()
        if self.lora is None or not self.lora.A.shape[0]:
            return bias, x, x, residual
        return bias, inner(x, self.lora.A), self.lora.B.contiguous(), residual


NOTHING: Final = After()


def inner(x: Tensor, A: Tensor) -> Tensor:  # [M, K], [r, K] -> [M, r]
    """x A^T, accumulated in fp32; rounded to the dtype of x where both have it."""
    half = x.dtype == A.dtype and not INTERPRETED
    x, A = (_settled(t if half else t.float()) for t in (x, A))
    return torch.nn.functional.linear(x, A)


def _settled(x: Tensor) -> Tensor:
    """Contiguous and aligned: a BLAS adds up in another order where strides or alignment are others."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def product(
    x: Tensor, w: QuantTensor, after: After, rounding: str, dtype: torch.dtype | None = None, plan: Plan | None = None
) -> Tensor:
    """act(x w'^T + lora + bias) + residual for contiguous x [M, K], as [M, R] of a dtype, that of x unless said.

    With a plan all of its calls have one shape, format and layout.
    """

    def bound(launcher: Launcher) -> tuple[Callable[[Tensor, QuantTensor, After, torch.dtype], Tensor] | None]:
        return (bound_words(launcher, x, w, after, rounding),)

    (words,) = planned(plan, "words", x.device, bound)
    if words is not None:
        return words(x, w, after, dtype or x.dtype)
    M, (N, _) = x.shape[0], w.shape
    width = N // 2 if after.pair else N
    y = torch.empty(M, width, dtype=dtype or x.dtype, device=x.device)
    if M == 0:
        return y
    if after.lora is not None and after.lora.A.shape[0] > MOST_RANK:
        h = product(x, w, After(), rounding, torch.float32)
        h.addmm_(inner(x, after.lora.A).float(), after.lora.B.float().t(), alpha=after.lora.scale)
        finish(x, h, replace(after, lora=None), y)
        return y
    w = storage.table_of_nf4(w)
    half, table = x.dtype != torch.float32 and w.spec.act == "none", w.spec.element == "nf4"
    if half and rounding != "none" and (table or choice.class_of(M, machine(x.device).kind) is None):
        by_pieces(x, w, after, y)
    elif w.layout == CANONICAL:
        by_bytes(x, w, after, rounding, y, plan)
    else:
        by_bytes(x, storage.packed(w, CANONICAL), after, rounding, y, plan)
    return y


def _cut(x: Tensor, w: QuantTensor, after: After, rounding: str) -> Cut | None:
    """How a product of words is cut; None where the weight is no words, or too many tokens for that."""
    half, on = x.dtype != torch.float32 and w.spec.act == "none", machine(x.device)
    # Values of a table are looked up in registers, which takes PTX, and are rounded before their scales.
    table = storage.table_of_nf4(w).spec.element == "nf4"
    by_table = rounding == "any" and x.shape[0] <= MOST_OF_TABLE and on.tables
    if not half or w.layout != W4 or (table and not by_table):
        return None
    return choice.cut(
        x.shape[0],
        *w.shape,
        group=w.spec.group,
        pair=after.pair,
        rounding=rounding,
        kind=on.kind,
        multiprocessors=on.multiprocessors,
    )


class Machine(NamedTuple):
    """What decides how a product is cut and decoded."""

    kind: str  # of `choice.DEVICES`
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


def machine(device: torch.device) -> Machine:
    """The machine behind a device, or that which is planned for; the interpreter stands for a large GPU."""
    target = planned_target()
    if target is None:
        return _machine_of(device)
    kind = choice.kind_of(f"sm{target.arch}") if target.nvidia else "other"
    return Machine(kind, target.planned, ptx=target.nvidia, sync=target.nvidia and kind != "sm90")


@lru_cache
def _machine_of(device: torch.device) -> Machine:
    if INTERPRETED:
        return Machine("sm90", 132, ptx=False, sync=False)
    found = torch.cuda.get_device_properties(device)
    nvidia = torch.version.hip is None
    kind = choice.kind_of(f"sm{found.major}{found.minor}") if nvidia else "other"
    return Machine(kind, found.multi_processor_count, ptx=nvidia, sync=nvidia and kind != "sm90")


# What word_product is passed at run time, in its order.
_OF_WORDS: Final = (
    "x", "codes", "scale", "zero", "table", "nested_table", "nested_absmax", "nested_offset", "y", "partial",
    "tickets", "bias", "xa", "lora_b", "residual",
)  # fmt: skip


class WordProduct:
    """The product of a weight in `triton_w4`, bound for a shape."""

    def __init__(
        self, launcher: Launcher, x: Tensor, w: QuantTensor, after: After, cut: Cut, *, permuted: bool | None = None
    ) -> None:
        w = storage.table_of_nf4(w)
        spec, M, (N, K), on = w.spec, x.shape[0], w.shape, machine(x.device)
        self._width = N // 2 if after.pair else N
        self._M, self._device = M, x.device
        self._tiles = triton.cdiv(M, cut.BM) * (self._width // cut.BN)
        self._numbers = cut.parts * self._tiles * (2 if after.pair else 1) * cut.BM * cut.BN if cut.parts > 1 else 0
        self._grid = (self._tiles * cut.parts, 1, 1)
        self._plain = all(part is None for part in (after.bias, after.lora, after.residual))
        self._follow = (blank(x.dtype, x.device),) * 4  # bias, xa, lora_b, residual
        self._parts = storage.part_names(w)
        self._as_they_are = all(w.parts[n].is_contiguous() for n in self._parts)
        fixed = {n: value for n, value in after.arguments(x).items() if n not in _OF_WORDS}
        self._launch = launcher.bind(
            word_kernels.word_product, num_warps=cut.warps, num_stages=cut.stages, **fixed, x_row=K, M=M,
            N=N, K=K, BM=cut.BM, BN=cut.BN, BK=min(spec.group or cut.step, cut.step), PARTS=cut.parts,
            STAGES=cut.stages, GROUP=spec.group, SYMMETRIC=spec.symmetric, FOLD=cut.fold,
            PERMUTED=on.sync if permuted is None else permuted, ASM=on.ptx, TABLE=spec.element == "nf4",
            NESTED=spec.double_quant,
        )  # fmt: skip

    def __call__(self, x: Tensor, w: QuantTensor, after: After, dtype: torch.dtype) -> Tensor:
        """The product of contiguous x."""
        y = torch.empty((self._M, self._width), dtype=dtype, device=self._device)
        partial = counters = x
        if self._numbers:
            counters, partial = scratch(self._tiles, self._numbers, self._device)
        parts = w.parts
        given = [parts[n] for n in self._parts]
        if not self._as_they_are:
            given = [part.contiguous() for part in given]
        follow = self._follow if self._plain else after.tensors(x)
        self._launch(self._grid, x, *given, y, partial, counters, *follow)
        return y


def bound_words(
    launcher: Launcher, x: Tensor, w: QuantTensor, after: After, rounding: str
) -> Callable[[Tensor, QuantTensor, After, torch.dtype], Tensor] | None:
    """What multiplies contiguous x by weights like this one in one launch; None where that takes more."""
    if not x.shape[0] or (after.lora is not None and after.lora.A.shape[0] > MOST_RANK):
        return None
    cut = _cut(x, w, after, rounding)
    return None if cut is None else WordProduct(launcher, x, w, after, cut)


PIECE: Final = 128 << 20  # bytes of a dequantised piece: large enough for a product to fill a GPU


def by_pieces(x: Tensor, w: QuantTensor, after: After, y: Tensor) -> None:
    """Pieces of the dequantised weight, multiplied by torch; sums are kept in fp32 where something follows."""
    N, K = w.shape
    rows = max(64, piece_of(PIECE, 2) // (K * x.element_size()) // 64 * 64)
    buffer = torch.empty(min(rows, N), K, dtype=x.dtype, device=x.device)
    plain = after.nothing and y.dtype == x.dtype
    h = y if plain else torch.empty(x.shape[0], N, dtype=torch.float32, device=x.device)
    for first in range(0, N, rows):
        last = min(first + rows, N)
        piece = storage.dequantised(w, x.dtype, (first, last), buffer[: last - first])
        if plain:
            torch.mm(x, piece.t(), out=h[:, first:last])
        else:
            h[:, first:last] = wide_product(x, piece)
    if plain:
        return
    if after.nothing:
        y.copy_(h)
    else:
        finish(x, h, after, y)


def wide_product(x: Tensor, piece: Tensor) -> Tensor:
    """x piece^T in fp32, not rounded to the dtype of x."""
    if x.is_cuda:
        return torch.mm(x, piece.t(), out_dtype=torch.float32)
    return x.float() @ piece.float().t()


def finish(x: Tensor, h: Tensor, after: After, y: Tensor) -> None:
    """What follows a product that lies in memory."""
    M, N = h.shape
    launch = plain_launcher_for(x.device).bind(product_kernels.follow, **after.arguments(x), M=M, N=N, BM=32, BN=64)
    launch((triton.cdiv(M, 32) * triton.cdiv(y.shape[1], 64), 1, 1), h, y)


# What byte_product is passed at run time, in its order.
_OF_BYTES: Final = (
    "x", "x_scale", "codes", "scale", "zero", "table", "nested_table", "nested_absmax", "nested_offset", "y", "bias",
    "xa", "lora_b", "residual",
)  # fmt: skip


def by_bytes(x: Tensor, w: QuantTensor, after: After, rounding: str, y: Tensor, plan: Plan | None = None) -> None:
    """The product of a canonical weight."""
    spec, M, (N, K) = w.spec, x.shape[0], w.shape
    scale, coded, form = x, x, 0
    if spec.act != "none":
        q = quantize_activation(x, spec)
        integers = spec.act == "token_int8"
        scale, form = q.scale.contiguous(), 2 if spec.act == "block128_fp8" else 1
        # Every code is exact in 16 bits; a rounded weight wants the type that it is rounded to.
        exact = torch.bfloat16 if x.dtype == torch.float32 and rounding != "dtype" else x.dtype
        coded = q.codes if integers else q.codes.float().to(exact)

    def bound(launcher: Launcher) -> tuple[Launch, Grid, tuple[str, ...], bool]:
        element = Element.of(spec)
        wide = coded.dtype == torch.float32 or (rounding == "none" and (spec.element == "nf4" or spec.float_zero))
        ragged = spec.element == "nf4" and K % spec.group != 0
        step = 32 if wide else 64 if spec.group else 128
        if spec.group and not ragged:
            step = min(step, spec.group) if form != 2 else 128
        BM = next((b for b in (16, 32, 64) if b >= M), 128 if not wide else 64)
        on = machine(x.device)
        stages = 3 if step == 128 and on.kind == "sm90" else 2
        fixed = {n: value for n, value in after.arguments(x).items() if n not in _OF_BYTES}
        launch = launcher.bind(
            product_kernels.byte_product, num_warps=4, num_stages=stages, **fixed, **storage.scale_grid(w),
            x_row=coded.stride(0), x_scale_row=scale.stride(0), row_bytes=(K + 1) // 2, M=M, N=N, K=K, BM=BM, BN=64,
            BK=step, STAGES=stages, ELEMENT=element.ELEMENT, SYMMETRIC=spec.symmetric, NESTED=spec.double_quant,
            MANTISSA=element.MANTISSA, FLOAT_BIAS=element.BIAS, FNUZ=element.FNUZ, RAGGED=ragged,
            FOLD=spec.element == "nf4" or (rounding == "dtype" and spec.act != "token_int8"), WIDE=wide, X_SCALE=form,
            CAST=spec.element == "e4m3fn" and on.casts,
        )  # fmt: skip
        names = storage.part_names(w)
        grid = (triton.cdiv(M, BM) * triton.cdiv(y.shape[1], 64), 1, 1)
        return launch, grid, names[1:], all(w.parts[n].is_contiguous() for n in names[1:])

    launch, grid, names, as_they_are = planned(plan, "bytes", x.device, bound)
    parts = [w.parts[n] for n in names]
    if not as_they_are:
        parts = [part.contiguous() for part in parts]
    launch(grid, coded, scale, storage.codes(w), *parts, y, *after.tensors(x))
