"""Launching the kernels of linear_logprob@1 over blocks of rows and columns.

A `Head` belongs to one shape: tiles are chosen and kernels bound once, and a call passes its tensors.

Legend: N rows · D hidden · V vocabulary · n rows of a block · P tiles of V.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from rlkernel_common.row_views import free_rows, take
from rlkernel_triton import head_kernels, law_kernel
from rlkernel_triton.head_tiles import Tile, compiler_options, tile_for
from rlkernel_triton.head_workspace import Plan
from rlkernel_triton.kept_bits import Kept
from rlkernel_triton.launch import INTERPRETED, on_device_of
from rlkernel_triton.launchers import Launch, Launcher
from rlkernel_triton.launchers.planning import planned_target
from rlkernel_triton.logprob_kernels import PLANES

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Order(NamedTuple):
    """The rows that count first; the device alone knows how many they are."""

    index: Tensor  # [N] int64, a permutation
    count: Tensor  # [1] int64

    @classmethod
    def of(cls, mask: Tensor) -> Self:
        """The order of a mask, [N] bool, without host synchronisation."""
        index = torch.sort(mask.view(torch.uint8), descending=True, stable=True).indices
        return cls(index, mask.sum(0, keepdim=True, dtype=torch.int64))


def arch_of(x: Tensor) -> str:
    """The architecture that kernels on x are compiled for, or planned for: "sm90", "gfx942"; "interpreter"."""
    if (planned := planned_target()) is not None:
        return f"sm{planned.arch}" if planned.kind == "cuda" else str(planned.arch)
    if INTERPRETED:
        return "interpreter"
    with on_device_of(x):
        return _arch(x.get_device())


@cache
def _arch(device: int) -> str:
    target = triton.runtime.driver.active.get_current_target()
    return f"sm{target.arch}" if target.backend == "cuda" else str(target.arch).partition(":")[0]


def tile_of(hidden: Tensor, weight: Tensor, kind: str) -> Tile:
    """The tile of a kind of kernel for these operands on their device."""
    wide = kind != "saved" and (hidden.dtype == torch.float32 or weight.dtype != hidden.dtype)
    return tile_for(arch_of(hidden), "wide" if wide else kind)


def options_of(x: Tensor) -> dict[str, int]:
    """Options of the compiler for the device of x."""
    return {} if INTERPRETED else compiler_options(arch_of(x))


def sweep_kind(softcap: float | None, support: bool) -> str:
    """Which kind of sweep a call wants."""
    return "sweep" if softcap is None and not support else "rich"


class Operands(NamedTuple):
    """The tensors of a call."""

    hidden: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V] contiguous
    ids: Tensor  # N, contiguous, counted from the first column of the head
    T: Tensor | None  # N, contiguous fp32; None: the head's number
    order: Order | None
    kept: Kept | None

    def at(self) -> tuple[Tensor, Tensor]:
        """Index and count, or pointers that no kernel follows."""
        return (self.ids, self.ids) if self.order is None else self.order

    def temperatures(self) -> tuple[Tensor, ...]:
        """What a kernel is passed."""
        return () if self.T is None else (self.T,)

    def bits(self) -> Tensor:
        """Of the kept ids, or a pointer that no kernel follows."""
        return self.ids if self.kept is None else self.kept.bytes


class Swept(NamedTuple):
    """What the statistics of all rows are, and what a plan that saves keeps."""

    joined: Tensor  # planes * N numbers, in the order [planes, N], and some more
    saved: Tensor | None  # [N, V]
    peaks: Tensor | None  # [N, P]
    rest: Tensor  # the room that was asked for


class Head:
    """Calls of one shape: how their blocks are worked on, each launch bound once.

    Args:
        launcher: what binds the kernels.
        hidden: [..., D]; of it and of the weight, [V, D], no value is read, and neither is kept.
        weight: the output head.
        N: rows.
        bias: there is one.
        T: the temperature, None where it is a tensor.
        masked: rows are worked on in an order.
        kept_row_bytes: bytes of a row of kept ids; None without a support.
        softcap: c of c * tanh(x / c).
        scale: factor of the logits.
        moment: the entropy is wanted.
        plan: how the work is cut.
    """

    def __init__(
        self, launcher: Launcher, hidden: Tensor, weight: Tensor, *, N: int, bias: bool, T: float | None, masked: bool,
        kept_row_bytes: int | None, softcap: float | None, scale: float, moment: bool, plan: Plan,
    ) -> None:  # fmt: skip
        self._launcher, self.plan, self.N, (self.V, self.D) = launcher, plan, N, weight.shape
        self.device, self._masked, support = hidden.device, masked, kept_row_bytes is not None
        self.tile = tile_of(hidden, weight, sweep_kind(softcap, support))
        self._slope_tile = tile_of(hidden, weight, "saved" if plan.save else "slope")
        self._product_tile = tile_of(hidden, weight, "product")
        self._options = options_of(hidden)
        one = hidden.dtype if hidden.dtype == weight.dtype else torch.float32
        self.work = torch.float32 if one == torch.float32 else torch.bfloat16  # of gradients of logits: a wide range
        # What operands become before a product. The interpreter's products of 16-bit operands are wrong.
        self._operand = TYPES[torch.float32 if INTERPRETED else one]
        self._back_operand = TYPES[torch.float32 if INTERPRETED else self.work]
        self.blocks = [(r, min(plan.block, N - r)) for r in range(0, N, plan.block)]
        self._alone = len(self.blocks) == 1
        self._columns = [(v, min(plan.columns, self.V - v)) for v in range(0, self.V, plan.columns)]
        # Where rows are read in the place where they lie: their stride. Else they are copied together.
        rows = free_rows(torch.empty_strided(hidden.shape, hidden.stride(), device="meta"))
        self._in_place = not masked and rows.dim() == 2 and rows.stride(1) == 1
        x_stride = rows.stride(0) if self._in_place else self.D
        self._x_strides = {"b_stride": x_stride, "b_step": 1}
        self._weight_strides = {"b_stride": weight.stride(0), "b_step": weight.stride(1)}
        cut = {"first": 0, "n": N} if self._alone else {}  # passed where there are several blocks
        self._fixed = {
            **cut, **({} if T is None else {"T": T}), "D": self.D, "V": self.V, "x_stride": x_stride,
            "head_stride": weight.stride(0), "head_step": weight.stride(1), "kept_stride": kept_row_bytes or 0,
            "scale": scale, "softcap": softcap or 0.0, "HAS_BIAS": bias, "HAS_INDEX": masked, "HAS_T": T is None,
            "HAS_CAP": softcap is not None, "SUPPORT": support, "OPERAND": self._operand,
        }  # fmt: skip
        self._sweep = self._bind(head_kernels.head_sweep, self.tile, **self._fixed, MOMENT=moment, SAVE=plan.save)
        self._P, self.planes = triton.cdiv(self.V, self.tile.BN), PLANES[support]
        width = triton.next_power_of_2(self._P)
        self._some = law_kernel.rows_of_a_program(width)
        self._join = launcher.bind(
            law_kernel.join, num_warps=law_kernel.WARPS, **cut, N=N, P=self._P, HAS_INDEX=masked, SUPPORT=support,
            MOMENT=moment, ROWS=self._some, WIDTH=width, LOG=width.bit_length() - 1,
        )  # fmt: skip
        numbers = (self.planes * min(plan.block, N) * self._P, self.planes * N)
        self._room = [-(-n // 4) * 4 for n in numbers]  # each begins at a multiple of 16 bytes
        self._gradients: dict[tuple[bool, ...], Launch] = {}
        self._products: dict[tuple[str, bool], Launch] = {}

    def _bind(self, kernel: Any, tile: Tile, **fixed: Any) -> Launch:
        shape = {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP": tile.GROUP, "INTERPRETED": INTERPRETED}
        asked = tuple(n for n in ("g", "g_lse", "g_entropy", "g_mass") if "G" in fixed)
        return self._launcher.bind(
            kernel, num_warps=tile.num_warps, num_stages=tile.num_stages, options=self._options, any_alignment=asked,
            **shape, **fixed,
        )  # fmt: skip

    def rows(self, of: Operands, first: int, n: int) -> Tensor:
        """Hidden states of a block, [n, D]: where they lie if that is possible, else copied together."""
        if self._in_place and self._alone:
            return of.hidden
        rows, which = free_rows(of.hidden), slice(first, first + n)
        if self._in_place:
            return rows[which]
        return take(rows, which if of.order is None else of.order.index[which]).contiguous()

    def statistics(self, of: Operands, rest: int) -> Swept:
        """Every row's statistics; where the plan saves, the logits and the peaks of their tiles. rest: numbers more."""
        parts, joined, spare = torch.empty(
            sum(self._room) + rest, dtype=torch.float32, device=self.device
        ).unsafe_split_with_sizes([*self._room, rest])  # fmt: skip
        saved = peaks = None
        if self.plan.save:
            # fp16: what is saved lies below 0 and mostly above -60, and 10 bits serve it better than a range
            kept_as = torch.float32 if self.work == torch.float32 else torch.float16
            saved = torch.empty(self.N, self.V, dtype=kept_as, device=self.device)
            peaks = torch.empty(self.N, self._P, dtype=torch.float32, device=self.device)
        bias, at = of.ids if of.bias is None else of.bias, of.at()
        for first, n in self.blocks:
            cut = () if self._alone else (first, n)
            self._sweep(
                (triton.cdiv(n, self.tile.BM) * self._P, 1, 1), self.rows(of, first, n), of.weight, bias, of.ids, *at,
                *of.temperatures(), of.bits(), parts, parts if saved is None else saved[first:],
                parts if peaks is None else peaks[first:], *cut,
            )  # fmt: skip
            self._join((triton.cdiv(n, self._some), 1, 1), parts, *at, joined, *cut)
        return Swept(joined, saved, peaks, spare)

    def gradients(
        self,
        of: Operands,
        invalid: Tensor,
        law_rows: Tensor,  # [6, N]
        upstream: tuple[Tensor | None, ...],
        saved: Tensor | None,
        peaks: Tensor | None,
        wanted: tuple[bool, ...],
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dX [..., D], dW [V, D] and dbias [V], each only where wanted."""
        # Every block writes its rows and columns, so that no gradient need begin as zeros.
        d_hidden, d_weight, d_bias = (
            torch.empty_like(x, memory_format=torch.contiguous_format) if want and x is not None else None
            for x, want in zip((of.hidden, of.weight, of.bias), wanted, strict=True)
        )
        slope = _Slope(self, of, invalid, law_rows, upstream, saved, peaks)
        if d_hidden is not None or self._alone:
            for first, n in self.blocks:
                acc = None if d_hidden is None else torch.zeros(n, self.D, dtype=torch.float32, device=self.device)
                x = self.rows(of, first, n)
                for start, width in self._columns:
                    dz = slope(x, first, n, start, width)
                    if acc is not None:
                        self._to_hidden(of, dz, first, n, start, width, acc)
                    if self._alone:
                        self._to_weight(of, [(first, n, x, dz)], start, width, d_weight, d_bias)
                if acc is not None and d_hidden is not None:
                    self._put(of, acc, first, d_hidden, group)
        if not self._alone and (d_weight is not None or d_bias is not None):
            for start, width in self._columns:
                each = ((first, n, self.rows(of, first, n)) for first, n in self.blocks)
                some = ((first, n, x, slope(x, first, n, start, width)) for first, n, x in each)
                self._to_weight(of, some, start, width, d_weight, d_bias)
        return d_hidden, d_weight, d_bias

    def slope(self, arriving: tuple[bool, ...]) -> Launch:
        """The launch that writes gradients of products, for the results that gradients arrive at."""
        found = self._gradients.get(arriving)
        if found is None:
            flags = dict(zip(("G", "G_LSE", "G_ENTROPY", "G_MASS"), arriving, strict=True))
            found = self._gradients[arriving] = self._bind(
                head_kernels.head_gradient, self._slope_tile, **self._fixed, **flags, N=self.N, SAVED=self.plan.save,
                PEAK=self.tile.BN,
            )  # fmt: skip
        return found

    def slope_grid(self, n: int, width: int) -> tuple[int, int, int]:
        """Of that launch."""
        return triton.cdiv(n, self._slope_tile.BM) * triton.cdiv(width, self._slope_tile.BN), 1, 1

    def _to_hidden(self, of: Operands, dz: Tensor, first: int, n: int, start: int, width: int, acc: Tensor) -> None:
        """Add dz @ weight[start : start + width]."""
        launch = self._product("rows", add=True)
        weight = of.weight[start:] if start else of.weight
        launch(self._product_grid(n), dz, weight, of.at()[1], acc, first, n, width, width)

    def _to_weight(
        self,
        of: Operands,
        blocks: Iterable[tuple[int, int, Tensor, Tensor]],
        start: int,
        width: int,
        d_weight: Tensor | None,
        d_bias: Tensor | None,
    ) -> None:
        """Sum dz.T @ hidden, and dz over its rows, over all blocks of rows; round once."""
        d_rows = None if d_weight is None else d_weight[start : start + width]
        acc = d_rows if self._alone or d_rows is None else torch.zeros_like(d_rows, dtype=torch.float32)
        total = None if d_bias is None else torch.zeros(width, dtype=torch.float32, device=self.device)
        for first, n, x, dz in blocks:
            if acc is not None:
                launch = self._product("sum", add=not self._alone)
                launch(self._product_grid(width), dz, x, of.at()[1], acc, first, width, n, width)
            if total is not None:
                total += dz[: n * width].view(n, width).sum(0, dtype=torch.float32)
        if d_rows is not None and acc is not None and not self._alone:
            d_rows.copy_(acc)
        if d_bias is not None and total is not None:
            d_bias[start : start + width] = total

    def _product(self, limit: str, *, add: bool) -> Launch:
        """The launch that multiplies dz with the head ("rows") or, transposed, with hidden states ("sum")."""
        found = self._products.get((limit, add))
        if found is None:
            strides = {"a_step": 1, **self._weight_strides} if limit == "rows" else {"a_stride": 1, **self._x_strides}
            found = self._products[limit, add] = self._bind(
                head_kernels.product, self._product_tile, **strides, C=self.D, LIMIT=limit if self._masked else "none",
                ADD=add, OPERAND=self._back_operand,
            )  # fmt: skip
        return found

    def _product_grid(self, M: int) -> tuple[int, int, int]:
        t = self._product_tile
        return triton.cdiv(M, t.BM) * triton.cdiv(self.D, t.BN), 1, 1

    def _put(self, of: Operands, acc: Tensor, first: int, d_hidden: Tensor, group: dist.ProcessGroup | None) -> None:
        """Round a block of dX to its place."""
        if group is not None:
            dist.all_reduce(acc, group=group)
        grad = d_hidden.view(-1, self.D)
        if of.order is None:
            grad[first : first + acc.shape[0]] = acc
        else:
            grad.index_copy_(0, of.order.index[first : first + acc.shape[0]], acc.to(grad.dtype))


class _Slope:
    """The gradient of the products, block by block, in one buffer that the next block overwrites."""

    def __init__(
        self, head: Head, of: Operands, invalid: Tensor, law_rows: Tensor, upstream: tuple[Tensor | None, ...],
        saved: Tensor | None, peaks: Tensor | None,
    ) -> None:  # fmt: skip
        self._head, self._several = head, len(head.blocks) > 1
        self._launch = head.slope(tuple([g is not None for g in upstream]))
        room = min(head.plan.block, head.N) * min(head.plan.columns, head.V)
        self._buffer = torch.empty(room, dtype=head.work, device=head.device)
        none = of.ids
        self._given = (
            of.weight, none if of.bias is None else of.bias, of.ids, *of.at(), invalid.view(torch.int8),
            *of.temperatures(), of.bits(), law_rows, *[law_rows if g is None else g.contiguous() for g in upstream],
            none if saved is None else saved, none if peaks is None else peaks, self._buffer,
        )  # fmt: skip

    def __call__(self, x: Tensor, first: int, n: int, start: int, width: int) -> Tensor:
        """[n, width] of x [n, D], at the beginning of the buffer."""
        cut = (first, n) if self._several else ()
        self._launch(self._head.slope_grid(n, width), x, *self._given, *cut, start, width)
        return self._buffer
