"""Launching the kernels of linear_logprob@1 over blocks of rows and columns.

Legend: N rows · D hidden · V vocabulary · n rows of a block · P tiles of V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from rlkernel_core.reference.row_views import free_rows, take
from rlkernel_triton import head_kernels, law_kernel
from rlkernel_triton.head_tiles import Tile, compiler_options, tile_for
from rlkernel_triton.head_workspace import Plan
from rlkernel_triton.kept_bits import Kept
from rlkernel_triton.launch import FUSED, INTERPRETED, on_device_of
from rlkernel_triton.logprob_kernels import PLANES

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Order(NamedTuple):
    """The rows that count first; the device alone knows how many they are."""

    index: Tensor  # [N] int64, a permutation
    count: Tensor  # [1] int64

    @classmethod
    def of(cls, mask: Tensor) -> Self:
        """The order of a mask, [N] bool, without host synchronisation."""
        index = torch.sort(mask.to(torch.uint8), descending=True, stable=True).indices
        return cls(index, mask.sum(dtype=torch.int64)[None])


@cache
def _arch(device: int) -> str:
    target = triton.runtime.driver.active.get_current_target()
    return f"sm{target.arch}" if target.backend == "cuda" else str(target.arch).partition(":")[0]


def tile_of(hidden: Tensor, weight: Tensor, kind: str) -> Tile:
    """The tile of a kind of kernel for these operands on their device."""
    wide = kind != "saved" and (hidden.dtype == torch.float32 or weight.dtype != hidden.dtype)
    with on_device_of(hidden):
        return tile_for("interpreter" if INTERPRETED else _arch(hidden.get_device()), "wide" if wide else kind)


def sweep_kind(softcap: float | None, support: bool) -> str:
    """Which kind of sweep a call wants."""
    return "sweep" if softcap is None and not support else "rich"


Slope = Callable[[Tensor, int, int, int], Tensor]  # (x [n, D], first row, first column, columns) -> [n, columns]


class Head:
    """The operands of a call and how its blocks are worked on."""

    def __init__(
        self,
        hidden: Tensor,  # [..., D]
        weight: Tensor,  # [V, D]
        bias: Tensor | None,  # [V]
        ids: Tensor,  # [N] counted from the first column of the head
        T: float | Tensor,
        order: Order | None,
        kept: Kept | None,
        softcap: float | None,
        scale: float,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, None if bias is None else bias.contiguous()
        self.ids, self.T, self.order, self.kept = ids, T, order, kept
        self.softcap, self.scale = softcap, scale
        self.N, (self.V, self.D) = ids.shape[0], weight.shape
        self.tile = tile_of(hidden, weight, sweep_kind(softcap, kept is not None))
        one = hidden.dtype if hidden.dtype == weight.dtype else torch.float32
        self.work = torch.float32 if one == torch.float32 else torch.bfloat16  # of gradients of logits: a wide range
        # What operands become before a product. The interpreter's products of 16-bit operands are wrong.
        self.operand = TYPES[torch.float32 if INTERPRETED else one]
        self.back_operand = TYPES[torch.float32 if INTERPRETED else self.work]

    def blocks(self, plan: Plan) -> Iterator[tuple[int, int]]:
        """(first, n) of every block of rows."""
        return ((r, min(plan.block, self.N - r)) for r in range(0, self.N, plan.block))

    def some(self, first: int, n: int) -> Tensor:
        """[n, D] hidden states of a block: where they lie if that is possible, else copied together."""
        rows, which = free_rows(self.hidden), slice(first, first + n)
        if self.order is None and rows.dim() == 2 and rows.stride(1) == 1:
            return rows[which]
        return take(rows, which if self.order is None else self.order.index[which]).contiguous()

    def statistics(self, plan: Plan, *, moment: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Every row's statistics, [planes, N]; where the plan saves, the logits [N, V] and the peaks of their tiles."""
        P, device = triton.cdiv(self.V, self.tile.BN), self.ids.device
        planes = PLANES[self.kept is not None]
        joined = torch.empty(planes, self.N, dtype=torch.float32, device=device)
        saved = peaks = None
        if plan.save:
            # fp16: what is saved lies below 0 and mostly above -60, and 10 bits serve it better than a range
            kept_as = torch.float32 if self.work == torch.float32 else torch.float16
            saved = torch.empty(self.N, self.V, dtype=kept_as, device=device)
            peaks = torch.empty(self.N, P, dtype=torch.float32, device=device)
        width = triton.next_power_of_2(P)
        some = law_kernel.rows_of_a_program(width)
        for first, n in self.blocks(plan):
            parts = torch.empty(planes, n, P, dtype=torch.float32, device=device)
            x = self.some(first, n)
            with on_device_of(self.ids):
                head_kernels.head_sweep[(triton.cdiv(n, self.tile.BM) * P,)](
                    x, self.weight, self._or(self.bias), self.ids, *self._order(), self.T, *self._kept(),
                    parts, parts if saved is None else saved[first:], parts if peaks is None else peaks[first:],
                    first, n, self.D, self.V, x.stride(0), *self.weight.stride(), self._kept_stride(),
                    self.scale, self.softcap or 0.0, **self._flags(), MOMENT=moment, SAVE=saved is not None,
                    OPERAND=self.operand, **_options(self.tile, self.hidden),
                )  # fmt: skip
                law_kernel.join[(triton.cdiv(n, some),)](
                    parts, *self._order(), joined, first, n, self.N, P, HAS_INDEX=self.order is not None,
                    SUPPORT=self.kept is not None, MOMENT=moment, ROWS=some, WIDTH=width,
                    LOG=width.bit_length() - 1, num_warps=law_kernel.WARPS, **FUSED,
                )  # fmt: skip
        return joined, saved, peaks

    def slope(
        self,
        invalid: Tensor,
        law_rows: Tensor,  # [6, N]
        upstream: tuple[Tensor | None, ...],
        saved: Tensor | None,
        peaks: Tensor | None,
        plan: Plan,
    ) -> Slope:
        """The gradient of the products, block by block, in one buffer that the next block overwrites."""
        g = [None if x is None else x.reshape(-1).contiguous() for x in upstream]
        tile = tile_of(self.hidden, self.weight, "slope" if saved is None else "saved")
        room = min(plan.block, self.N) * min(plan.columns, self.V)
        buffer = torch.empty(room, dtype=self.work, device=self.ids.device)

        def block(x: Tensor, first: int, start: int, width: int) -> Tensor:
            n = x.shape[0]
            out = buffer[: n * width].view(n, width)
            grid = triton.cdiv(n, tile.BM) * triton.cdiv(width, tile.BN)
            with on_device_of(self.ids):
                head_kernels.head_gradient[(grid,)](
                    x, self.weight, self._or(self.bias), self.ids, *self._order(), invalid.view(torch.int8),
                    self.T, *self._kept(), law_rows, *(self._or(u, law_rows) for u in g),
                    self._or(saved), self._or(peaks), out, first, n, self.N, start, width, self.D, self.V,
                    x.stride(0), *self.weight.stride(), self._kept_stride(), self.scale, self.softcap or 0.0,
                    **self._flags(), G=g[0] is not None, G_LSE=g[1] is not None, G_ENTROPY=g[2] is not None,
                    G_MASS=g[3] is not None, SAVED=saved is not None, PEAK=self.tile.BN, OPERAND=self.operand,
                    **_options(tile, self.hidden),
                )  # fmt: skip
            return out

        return block

    def gradients(
        self, slope: Slope, plan: Plan, wanted: tuple[bool, ...], group: dist.ProcessGroup | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dX [..., D], dW [V, D] and dbias [V], each only where wanted."""
        of_hidden, of_weight, of_bias = wanted
        d_hidden = torch.zeros_like(self.hidden, memory_format=torch.contiguous_format) if of_hidden else None
        d_weight = torch.zeros_like(self.weight, memory_format=torch.contiguous_format) if of_weight else None
        d_bias = torch.zeros_like(self.bias) if of_bias and self.bias is not None else None
        columns = [(v, min(plan.columns, self.V - v)) for v in range(0, self.V, plan.columns)]
        blocks = list(self.blocks(plan))
        alone = len(blocks) == 1  # then both products take a block while it is there
        for first, n in blocks if d_hidden is not None or alone else ():
            acc = None if d_hidden is None else torch.zeros(n, self.D, dtype=torch.float32, device=self.ids.device)
            x = self.some(first, n)
            for start, width in columns:
                dz = slope(x, first, start, width)
                if acc is not None:
                    self._product(dz, self.weight[start:], first, acc, add=True, limit="rows")
                if alone:
                    self._to_weight([(first, x, dz)], start, width, d_weight, d_bias, alone=True)
            if acc is not None and d_hidden is not None:
                self._put(acc, first, d_hidden, group)
        if not alone and (d_weight is not None or d_bias is not None):
            for start, width in columns:
                each = ((first, self.some(first, n)) for first, n in blocks)
                some = ((first, x, slope(x, first, start, width)) for first, x in each)
                self._to_weight(some, start, width, d_weight, d_bias, alone=False)
        return d_hidden, d_weight, d_bias

    def _to_weight(
        self,
        blocks: Iterable[tuple[int, Tensor, Tensor]],
        start: int,
        width: int,
        d_weight: Tensor | None,
        d_bias: Tensor | None,
        *,
        alone: bool,
    ) -> None:
        """Sum dz.T @ hidden, and dz over its rows, over all blocks of rows; round once."""
        d_rows = None if d_weight is None else d_weight[start : start + width]
        acc = d_rows if alone or d_rows is None else torch.zeros_like(d_rows, dtype=torch.float32)
        total = None if d_bias is None else torch.zeros(width, dtype=torch.float32, device=self.ids.device)
        for first, x, dz in blocks:
            if acc is not None:
                self._product(dz.t(), x, first, acc, add=not alone, limit="sum")
            if total is not None:
                total += dz.sum(0, dtype=torch.float32)
        if d_rows is not None and acc is not None and not alone:
            d_rows.copy_(acc)
        if d_bias is not None and total is not None:
            d_bias[start : start + width] = total

    def _product(self, a: Tensor, b: Tensor, first: int, out: Tensor, *, add: bool, limit: str) -> None:
        (M, K), C, t = a.shape, out.shape[1], tile_of(self.hidden, self.weight, "product")
        with on_device_of(self.ids):
            head_kernels.product[(triton.cdiv(M, t.BM) * triton.cdiv(C, t.BN),)](
                a, b, self._order()[1], out, first, M, C, K, *a.stride(), *b.stride(),
                LIMIT="none" if self.order is None else limit, ADD=add, OPERAND=self.back_operand,
                **_options(t, self.hidden),
            )  # fmt: skip

    def _put(self, acc: Tensor, first: int, d_hidden: Tensor, group: dist.ProcessGroup | None) -> None:
        """Round a block of dX to its place."""
        if group is not None:
            dist.all_reduce(acc, group=group)
        grad = d_hidden.view(-1, self.D)
        if self.order is None:
            grad[first : first + acc.shape[0]] = acc
        else:
            grad.index_copy_(0, self.order.index[first : first + acc.shape[0]], acc.to(grad.dtype))

    def _or(self, x: Tensor | None, instead: Tensor | None = None) -> Tensor:
        """A tensor where a kernel wants a pointer that it will not follow."""
        return x if x is not None else self.ids if instead is None else instead

    def _order(self) -> tuple[Tensor, Tensor]:
        return (self.ids, self.ids) if self.order is None else self.order

    def _kept(self) -> tuple[Tensor]:
        return (self.ids if self.kept is None else self.kept.bytes,)

    def _kept_stride(self) -> int:
        return 0 if self.kept is None else self.kept.row_bytes

    def _flags(self) -> dict[str, bool]:
        return {
            "HAS_BIAS": self.bias is not None,
            "HAS_INDEX": self.order is not None,
            "HAS_T": isinstance(self.T, Tensor),
            "HAS_CAP": self.softcap is not None,
            "SUPPORT": self.kept is not None,
        }


def _options(tile: Tile, x: Tensor) -> dict[str, int | bool]:
    """Constants of a tile, and options of the compiler for the device of x."""
    own = {} if INTERPRETED else compiler_options(_arch(x.get_device()))
    return {**tile._asdict(), "INTERPRETED": INTERPRETED, **own, **FUSED}
