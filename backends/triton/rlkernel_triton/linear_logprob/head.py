"""Launching the kernels of linear_logprob@1 over blocks of rows and columns.

A `Head` belongs to one shape: tiles are chosen and kernels bound once, and a call passes its tensors.

Legend: N rows · D hidden · V vocabulary · n rows of a block · P tiles of V.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_common.row_views import free_rows, take
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.listed_rows import Put
from rlkernel_triton.common.matmul_tiles import OPERAND_TYPES, Tile, options_of, tile_of
from rlkernel_triton.common.merge_softmax import WARPS, merge_tiles, rows_per_program
from rlkernel_triton.common.softmax import PLANES
from rlkernel_triton.common.softmax_rows import RowShape
from rlkernel_triton.launchers import Launch, Launcher
from rlkernel_triton.linear_logprob import kernels
from rlkernel_triton.linear_logprob.head_rows import HeadRows, head_like
from rlkernel_triton.linear_logprob.low_rank import LowRankBackward, LowRankGradients, strides
from rlkernel_triton.linear_logprob.operands import HeadStats, Operands, SavedRows
from rlkernel_triton.linear_logprob.workspace import Plan, decoded_rows


def _cdiv(a: int, b: int) -> int:
    """`triton.cdiv`, which unwraps its arguments: several us a call."""
    return -(-a // b)


def tiles_of(V: int, piece: int, BN: int) -> int:
    """Tiles of the pieces of V columns, the last of a piece cut off."""
    return V // piece * _cdiv(piece, BN) + _cdiv(V % piece, BN)


def panels_of(V: int, piece: int, most: int) -> list[tuple[int, int]]:
    """(first, width) of columns in groups of `most` at most, none of which is in two pieces."""
    pieces = ((first, min(first + piece, V)) for first in range(0, V, piece))
    return [(v, min(most, end - v)) for first, end in pieces for v in range(first, end, most)]


def stats_kind(softcap: float | None, support: bool) -> str:
    """Which tile the statistics of a call want."""
    return "stats" if softcap is None and not support else "stats+"


def head_tile(hidden: Tensor, weight: Tensor | QuantTensor, kind: str) -> Tile:
    """The tile of a kind of kernel that reads the head."""
    return tile_of(hidden, head_like(hidden, weight), kind if isinstance(weight, Tensor) else "decoded")


def saved_dtype(hidden: Tensor, weight: Tensor | QuantTensor) -> torch.dtype:
    """The dtype of saved logits."""
    weight = head_like(hidden, weight)
    if torch.float32 in (hidden.dtype, weight.dtype) or hidden.dtype != weight.dtype:
        return torch.float32
    # fp16: what is saved lies below 0 and mostly above -60, and 10 bits serve it better than a range
    return torch.float16


class Head:
    """Calls of one shape: how their blocks are worked on, each launch bound once.

    Args:
        launcher: what binds the kernels.
        hidden: [..., D]; of it and of the head, [V, D], no value is read, and neither is kept.
        head: the output head, stored or quantized.
        rows: what the call says of its rows; masked ones are worked on in an order.
        bias: there is one.
        lora: the low-rank addition, of which no value is read.
        scale: factor of the logits.
        moment: the entropy is wanted.
        plan: how the work is cut.
        pieces: how many pieces the vocabulary is cut into, and columns of one.
    """

    def __init__(
        self, launcher: Launcher, hidden: Tensor, head: Tensor | QuantTensor, rows: RowShape, *, bias: bool,
        lora: LoRA | None, scale: float, moment: bool, plan: Plan, pieces: tuple[int, int],
    ) -> None:  # fmt: skip
        self._launcher, self.plan, self.N, (self.V, self.D) = launcher, plan, rows.N, head.shape
        self.device, self._masked, support = hidden.device, rows.masked, rows.kept_row_bytes is not None
        weight, decoded = head_like(hidden, head), not isinstance(head, Tensor)
        self.tile = head_tile(hidden, head, stats_kind(rows.softcap, support))
        self._dlogits_tile = tile_of(hidden, weight, "saved") if plan.save else head_tile(hidden, head, "dlogits")
        self._product_tile = head_tile(hidden, head, "product")
        self._options = options_of(hidden)
        one = hidden.dtype if hidden.dtype == weight.dtype else torch.float32
        self.work = torch.float32 if one == torch.float32 else torch.bfloat16  # of gradients of logits: a wide range
        self._saved_dtype = saved_dtype(hidden, weight)
        # What operands become before a product. The interpreter's products of 16-bit operands are wrong.
        self._operand = OPERAND_TYPES[torch.float32 if INTERPRETED else one]
        self._back_operand = OPERAND_TYPES[torch.float32 if INTERPRETED else self.work]
        self.blocks = [(r, min(plan.block, rows.N - r)) for r in range(0, rows.N, plan.block)]
        self._alone = len(self.blocks) == 1
        self._columns = [(v, min(plan.columns, self.V - v)) for v in range(0, self.V, plan.columns)]
        # Columns whose rows of a quantized head are decoded at a time: whole tiles of one piece.
        most = decoded_rows(plan.columns, self.tile.BN)
        self.head_rows = HeadRows(launcher, head, most)
        self._panels = panels_of(self.V, pieces[1], most // self.tile.BN * self.tile.BN) if decoded else []
        # Where rows are read in the place where they lie: their stride. Else they are copied together.
        like = free_rows(torch.empty_strided(hidden.shape, hidden.stride(), device="meta"))
        self._in_place = not rows.masked and like.dim() == 2 and like.stride(1) == 1
        x_stride = like.stride(0) if self._in_place else self.D
        self._x_strides = {"b_stride": x_stride, "b_step": 1}
        self._weight_strides = {"b_stride": weight.stride(0), "b_step": weight.stride(1)}
        cut: dict[str, Any] = {"first": 0, "n": rows.N} if self._alone else {}  # passed where there are several blocks
        self._fixed = {
            **cut, **rows.fixed, "D": self.D, "V": self.V, "x_stride": x_stride, "head_stride": weight.stride(0),
            "head_step": weight.stride(1), "kept_stride": rows.kept_row_bytes or 0, "scale": scale,
            "softcap": rows.softcap or 0.0, "piece": pieces[1], "HAS_BIAS": bias, "HAS_INDEX": rows.masked,
            "HAS_CAP": rows.softcap is not None, "OPERAND": self._operand, "PART": decoded, **strides(lora),
        }  # fmt: skip
        whole: dict[str, Any] = {} if decoded else {"start": None, "width": None}
        self._partial = self._bind(
            kernels.head_partial_softmax, self.tile, **self._fixed, **whole, MOMENT=moment, SAVE=plan.save
        )
        self.pieces, piece = pieces
        per = _cdiv(piece, self.tile.BN)
        self._P, self.planes = tiles_of(self.V, piece, self.tile.BN), PLANES[support]
        width = triton.next_power_of_2(min(per, self._P))
        self._some = rows_per_program(width)
        self._merge = launcher.bind(
            merge_tiles, num_warps=WARPS, **cut, N=rows.N, P=self._P, per=per, pieces=self.pieces,
            HAS_INDEX=rows.masked, SUPPORT=support, MOMENT=moment, ROWS=self._some, WIDTH=width,
        )  # fmt: skip
        numbers = (self.planes * min(plan.block, rows.N) * self._P, self.planes * rows.N * self.pieces)
        self._room = [-(-n // 4) * 4 for n in numbers]  # each begins at a multiple of 16 bytes
        self._low_rank = None
        if lora is not None:
            self._low_rank = LowRankBackward(
                self._bind, hidden, lora, self._product_tile, self._back_operand, x_stride, masked=rows.masked
            )
        self._gradients: dict[tuple[tuple[bool, ...], int], Launch] = {}
        self._products: dict[tuple[object, ...], Launch] = {}

    def _bind(self, kernel: Any, tile: Tile, **fixed: Any) -> Launch:
        shape = {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "GROUP": tile.GROUP}
        arriving = ("g", "g_lse", "g_entropy", "g_mass")
        asked = tuple(n for n in arriving if fixed.get(n.upper()))  # gradients may lie anywhere
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

    def statistics(self, of: Operands, rest: int) -> HeadStats:
        """Every row's statistics; where the plan saves, its logits too. rest: numbers more."""
        parts, merged, spare = torch.empty(
            sum(self._room) + rest, dtype=torch.float32, device=self.device
        ).unsafe_split_with_sizes([*self._room, rest])  # fmt: skip
        saved = tile_max = None
        if self.plan.save:
            saved = torch.empty(self.N, self.V, dtype=self._saved_dtype, device=self.device)
            tile_max = torch.empty(self.N, self._P, dtype=torch.float32, device=self.device)
        ids, at = of.rows.ids, of.at()
        bias = ids if of.bias is None else of.bias
        room = self.head_rows.room(of.weight)
        for first, n in self.blocks:
            cut, x, blocks = () if self._alone else (first, n), self.rows(of, first, n), _cdiv(n, self.tile.BM)
            rest_of_it = (
                bias, *of.low_rank(first, n), ids, *at, *of.rows.temperatures, of.rows.bits_or_any, parts,
                parts if saved is None else saved[first:], parts if tile_max is None else tile_max[first:], *cut,
            )  # fmt: skip
            if isinstance(of.weight, Tensor):
                self._partial((blocks * self._P, 1, 1), x, of.weight, *rest_of_it)
            for start, width in self._panels:
                grid = (blocks * _cdiv(width, self.tile.BN), 1, 1)
                self._partial(grid, x, self.head_rows(of.weight, room, start, width), *rest_of_it, start, width)
            self._merge((_cdiv(n, self._some), self.pieces, 1), parts, *at, merged, *cut)
        return HeadStats(merged, saved, tile_max, spare)

    def gradients(
        self,
        of: Operands,
        saved: SavedRows,
        upstream: tuple[Tensor | None, ...],
        wanted: tuple[bool, ...],
        group: dist.ProcessGroup | None,
        put: Put | None = None,
        *,
        partial: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """dX [..., D], dW [V, D], dbias [V], dA [r, D], dB [V, r], each only where wanted.

        put: several ids a row; partial: dX is left as this rank's part.
        """
        # Every block writes its rows and columns, so that no gradient need begin as zeros.
        d_hidden, d_weight, d_bias = (
            torch.empty_like(x, memory_format=torch.contiguous_format) if want and isinstance(x, Tensor) else None
            for x, want in zip((of.hidden, of.weight, of.bias), wanted[:3], strict=True)
        )
        low = None if self._low_rank is None else self._low_rank.begin(of, wanted)
        dlogits = _Dlogits(self, of, saved, upstream, put)
        across = None if partial else group  # of dX
        of_low_rank: tuple[Tensor | None, ...] = (None, None)
        if self._alone:
            self._in_one_block(of, dlogits, d_hidden, d_weight, d_bias, low, across)
            return d_hidden, d_weight, d_bias, *(of_low_rank if low is None else low.finish(group))
        if d_hidden is not None or (low is not None and low.of_rows):
            for first, n in self.blocks:
                acc = None
                if d_hidden is not None:
                    acc = torch.zeros(n, self.D, dtype=torch.float32, device=self.device)
                x = self.rows(of, first, n)
                for start, width in self._columns:
                    rows = dlogits.rows(start, width)
                    dz, launch = dlogits(x, rows, first, n, start, width), self._product("rows", add=True)
                    if acc is not None:
                        launch(self._product_grid(n), dz, rows, of.at()[1], acc, first, n, width, width)
                    if low is not None:
                        low.take(dz, first, n, start, width)
                if low is not None:
                    low.finish_rows(x, first, n, acc)
                if d_hidden is not None and acc is not None:
                    self._put(of, acc, first, d_hidden, across)
        if d_weight is not None or d_bias is not None or (low is not None and low.of_columns):
            for start, width in self._columns:
                rows = dlogits.rows(start, width)
                each = ((first, n, self.rows(of, first, n)) for first, n in self.blocks)
                some = ((first, n, x, dlogits(x, rows, first, n, start, width)) for first, n, x in each)
                self._to_weight(of, some, start, width, d_weight, d_bias, low)
        return d_hidden, d_weight, d_bias, *(of_low_rank if low is None else low.finish(group))

    def _in_one_block(
        self, of: Operands, dlogits: _Dlogits, d_hidden: Tensor | None, d_weight: Tensor | None, d_bias: Tensor | None,
        low: LowRankGradients | None, group: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        """Write the gradients where all rows are in one block: each launch is passed pointers, and a first column."""
        (_, n), most, count = self.blocks[0], self.plan.columns, of.at()[1]
        x, dz, kind, device = self.rows(of, 0, n), dlogits.buffer, torch.float32, self.device
        # What belongs to a block of columns: split in one call, where a slice each would take a call each.
        acc, total, weights, d_weights, totals = None, None, (), (), ()
        if d_hidden is not None:
            acc = torch.zeros(n, self.D, dtype=kind, device=device)
            weights = of.weight.split(most) if isinstance(of.weight, Tensor) else ()
        if d_weight is not None:
            d_weights = d_weight.split(most)
        if d_bias is not None:
            total = torch.zeros(self.V, dtype=kind, device=device)
            totals = total.split(most)
        rows_grid, of_width, of_head = self._product_grid(n), 0, () if self._panels else dlogits.operands(None, 0, n)
        for i, (start, width) in enumerate(self._columns):
            if width != of_width:  # the first, and the last
                of_width, columns_grid = width, self._product_grid(width)
                write_dz, dz_grid = dlogits.of(n, width)
                to_hidden = self._product("rows", add=True, first=0, M=n, K=width, a_stride=width)
                to_weight = self._product("sum", add=False, first=0, M=width, K=n, a_step=width)
                rows_of_dz = dz[: n * width].view(n, width)
            if self._panels:
                rows = dlogits.rows(start, width)
                of_head = dlogits.operands(rows, 0, n)
            elif weights:
                rows = weights[i]
            write_dz(dz_grid, x, *of_head, *dlogits.given, start)
            if dlogits.put is not None:
                dlogits.put(dz, n, 0, start, width)
            if acc is not None:
                to_hidden(rows_grid, dz, rows, count, acc)
            if d_weight is not None:
                to_weight(columns_grid, dz, x, count, d_weights[i])
            if total is not None:
                totals[i].add_(rows_of_dz.sum(0, dtype=kind))
            if low is not None:
                low.take(dz, 0, n, start, width)
                if low.of_columns:
                    low.add_columns(of_B := low.columns(width), dz, 0, n, width)
                    low.put_columns(of_B, start)
        if low is not None:
            low.finish_rows(x, 0, n, acc)
        if acc is not None and d_hidden is not None:
            self._put(of, acc, 0, d_hidden, group)
        if total is not None and d_bias is not None:
            d_bias.copy_(total)

    def dlogits(self, arriving: tuple[bool, ...], width: int) -> Launch:
        """The launch that writes gradients of products, for the results that gradients arrive at."""
        found = self._gradients.get((arriving, width))
        if found is None:
            flags = dict(zip(("G", "G_LSE", "G_ENTROPY", "G_MASS"), arriving, strict=True))
            found = self._gradients[arriving, width] = self._bind(
                kernels.head_dlogits, self._dlogits_tile, **self._fixed, **flags, N=self.N, width=width,
                FROM_SAVED=self.plan.save, MAX_OF=self.tile.BN,
            )  # fmt: skip
        return found

    def dlogits_grid(self, n: int, width: int) -> tuple[int, int, int]:
        """Of that launch."""
        return _cdiv(n, self._dlogits_tile.BM) * _cdiv(width, self._dlogits_tile.BN), 1, 1

    def _to_weight(
        self,
        of: Operands,
        blocks: Iterable[tuple[int, int, Tensor, Tensor]],
        start: int,
        width: int,
        d_weight: Tensor | None,
        d_bias: Tensor | None,
        low: LowRankGradients | None,
    ) -> None:
        """Sum dz.T @ hidden, and dz over its rows, over several blocks of rows; round once."""
        d_rows = None if d_weight is None else d_weight[start : start + width]
        acc = None if d_rows is None else torch.zeros_like(d_rows, dtype=torch.float32)
        total = None if d_bias is None else torch.zeros(width, dtype=torch.float32, device=self.device)
        of_B = None if low is None or not low.of_columns else low.columns(width)
        for first, n, x, dz in blocks:
            if acc is not None:
                launch = self._product("sum", add=True)
                launch(self._product_grid(width), dz, x, of.at()[1], acc, first, width, n, width)
            if total is not None:
                total += dz[: n * width].view(n, width).sum(0, dtype=torch.float32)
            if low is not None and of_B is not None:
                low.add_columns(of_B, dz, first, n, width)
        if low is not None and of_B is not None:
            low.put_columns(of_B, start)
        if d_rows is not None and acc is not None:
            d_rows.copy_(acc)
        if d_bias is not None and total is not None:
            d_bias[start : start + width] = total

    def _product(self, limit: str, *, add: bool, **sizes: int) -> Launch:
        """The launch that multiplies dz with the head ("rows") or, transposed, with hidden states ("sum").

        Sizes that are not given are passed to it.
        """
        key = (limit, add, *sizes.values())
        found = self._products.get(key)
        if found is None:
            strides = {"a_step": 1, **self._weight_strides} if limit == "rows" else {"a_stride": 1, **self._x_strides}
            found = self._products[key] = self._bind(
                kernels.head_matmul, self._product_tile, **strides, **sizes, C=self.D,
                LIMIT=limit if self._masked else "none", ADD=add, OPERAND=self._back_operand,
            )  # fmt: skip
        return found

    def _product_grid(self, M: int) -> tuple[int, int, int]:
        t = self._product_tile
        return _cdiv(M, t.BM) * _cdiv(self.D, t.BN), 1, 1

    def _put(self, of: Operands, acc: Tensor, first: int, d_hidden: Tensor, group: dist.ProcessGroup | None) -> None:
        """Round a block of dX to its place."""
        if group is not None:
            dist.all_reduce(acc, group=group)
        grad = d_hidden.view(-1, self.D)
        if of.order is None:
            grad[first : first + acc.shape[0]] = acc
        else:
            grad.index_copy_(0, of.order.index[first : first + acc.shape[0]], acc.to(grad.dtype))


class _Dlogits:
    """The gradient of the products, block by block, in one buffer that the next block overwrites."""

    def __init__(
        self, head: Head, of: Operands, saved: SavedRows, upstream: tuple[Tensor | None, ...], put: Put | None
    ) -> None:  # fmt: skip
        self._head, self._of, self.put, self._room = head, of, put, head.head_rows.room(of.weight)
        self._arriving = tuple([g is not None for g in upstream])
        room = min(head.plan.block, head.N) * min(head.plan.columns, head.V)
        self.buffer = torch.empty(room, dtype=head.work, device=head.device)
        none, rows = of.rows.ids, of.rows
        self.given = (
            rows.ids, *of.at(), saved.invalid.view(torch.int8),
            *rows.temperatures, rows.bits_or_any, saved.stats,
            *[saved.stats if g is None else g.contiguous() for g in upstream],
            none if saved.logits is None else saved.logits, none if saved.tile_max is None else saved.tile_max,
            self.buffer,
        )  # fmt: skip

    def rows(self, start: int, width: int) -> Tensor:
        """Rows of the head from `start` on; decoded ones are overwritten by the next."""
        return self._head.head_rows(self._of.weight, self._room, start, width)

    def operands(self, rows: Tensor | None, first: int, n: int) -> tuple[Tensor | None, ...]:
        """The head, or the decoded rows of it, bias and the low-rank addition for a block of rows."""
        of = self._of
        weight = of.weight if isinstance(of.weight, Tensor) else rows
        return weight, of.rows.ids if of.bias is None else of.bias, *of.low_rank(first, n)

    def of(self, n: int, width: int) -> tuple[Launch, tuple[int, int, int]]:
        """The launch of so many rows and columns, and its grid: passed x, `operands`, `given`, a first column."""
        return self._head.dlogits(self._arriving, width), self._head.dlogits_grid(n, width)

    def __call__(self, x: Tensor, rows: Tensor, first: int, n: int, start: int, width: int) -> Tensor:
        """[n, width] of x [n, D], one of several blocks of rows, and of `rows`, at the beginning of the buffer."""
        launch, grid = self.of(n, width)
        launch(grid, x, *self.operands(rows, first, n), *self.given, first, n, start)
        if self.put is not None:
            self.put(self.buffer, n, first, start, width)
        return self.buffer
