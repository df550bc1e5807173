"""From the gradient of the logits to dX, dW and dbias, which accumulate in fp32 and are rounded once.

Legend: N rows · D hidden · V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_cuda.head import Head, made_again, scatter_rows
from rlkernel_cuda.plan import round_up
from rlkernel_cuda.products import product


class Back:
    """The way back from dz to the operands; an operand that wants nothing costs nothing."""

    hidden: Tensor | None  # [N, D] in the caller's order; fp32 where other ranks add to it
    weight: Tensor | None  # [V, D]
    bias: Tensor | None  # [V] fp32

    def __init__(
        self, head: Head, coef: Tensor, of_hidden: bool, of_weight: bool, of_bias: bool, *, partial: bool = False
    ) -> None:
        self._head, self._coef = head, coef
        self._x, self._w = head.x[:, : head.D], head.w[:, : head.D]
        dtype = torch.float32 if partial else self._x.dtype
        self.hidden = self._x.new_empty(self._x.shape, dtype=dtype) if of_hidden else None
        self.weight = self._w.new_empty(self._w.shape) if of_weight else None
        self.bias = head.row_scale.new_zeros(self._w.shape[0]) if of_bias else None

    def at_once(self, dz: Tensor) -> None:
        """From the gradient of all logits, [N, V]."""
        everything = slice(0, self._x.shape[0])
        if self.hidden is not None:
            dx = self.hidden if self._head.place is None else torch.empty_like(self.hidden)
            self._add_hidden(dz, everything, slice(0, self._w.shape[0]), dx, None)
            if dx is not self.hidden:
                scatter_rows(dx, self._head, 0, self.hidden)
        if self.weight is not None:
            self._add_weight(dz, everything, self.weight, None)
        if self.bias is not None:
            torch.sum(dz, 0, dtype=torch.float32, out=self.bias)

    def by_slices(self, block: int, width: int, numbers: int, *, apart: bool) -> None:
        """Make the logits again, `block` rows by `width` ids at a time.

        Args:
            block: rows.
            width: ids, a multiple of 256.
            numbers: least size of the buffer of dz.
            apart: dX and dW in passes of their own, so that neither accumulates over the other's loop.
        """
        N, V = self._x.shape[0], self._w.shape[0]
        buffer = self._x.new_empty(max(numbers, min(block, N) * round_up(min(width, V), 8)))
        rows, ids = _cut(N, block), _cut(V, width)
        if not apart:
            self._slice_by_slice(buffer, rows, ids, of_hidden=True)
            return
        for r in rows if self.hidden is not None else ():
            self._block_of_hidden(buffer, r, ids)
        if self.weight is not None or self.bias is not None:
            self._slice_by_slice(buffer, rows, ids, of_hidden=False)

    def _block_of_hidden(self, buffer: Tensor, rows: slice, ids: list[slice]) -> None:
        if self.hidden is None:
            return
        dx = self.hidden.new_empty(rows.stop - rows.start, self._head.D, dtype=torch.float32)
        for c in ids:
            self._add_hidden(self._dz(buffer, rows, c), rows, c, dx, None if c.start == 0 else dx)
        scatter_rows(dx, self._head, rows.start, self.hidden)

    def _slice_by_slice(self, buffer: Tensor, rows: list[slice], ids: list[slice], *, of_hidden: bool) -> None:
        d_hidden = self.hidden if of_hidden else None
        gathered = self._head.place is not None
        dx = None
        if d_hidden is not None and (len(ids) > 1 or gathered):
            dx = d_hidden.new_empty(d_hidden.shape, dtype=torch.float32)
        dw = None
        if self.weight is not None and len(rows) > 1:
            dw = self.weight.new_empty(ids[0].stop, self._head.D, dtype=torch.float32)
        for c in ids:
            for r in rows:
                dz = self._dz(buffer, r, c)
                if d_hidden is not None:
                    since = None if c.start == 0 or dx is None else dx[r]
                    rounds = dx is None or (c is ids[-1] and not gathered)
                    self._add_hidden(dz, r, c, d_hidden[r] if rounds or dx is None else dx[r], since)
                if self.weight is not None:
                    part = None if dw is None else dw[: dz.shape[1]]
                    rounds = r is rows[-1] or part is None
                    self._add_weight(
                        dz, r, self.weight[c] if rounds or part is None else part, None if r.start == 0 else part
                    )
                if self.bias is not None:
                    self.bias[c] += torch.sum(dz, 0, dtype=torch.float32)
        if d_hidden is not None and dx is not None and gathered:
            scatter_rows(dx, self._head, 0, d_hidden)

    def _add_hidden(self, dz: Tensor, rows: slice, ids: slice, out: Tensor, since: Tensor | None) -> None:
        product(dz, self._w[ids], out, since=since, count=self._head.count, first=rows.start)

    def _add_weight(self, dz: Tensor, rows: slice, out: Tensor, since: Tensor | None) -> None:
        product(dz, self._x[rows], out, since=since, transposed=True, count=self._head.count, first=rows.start)

    def _dz(self, buffer: Tensor, rows: slice, ids: slice) -> Tensor:
        n, width = rows.stop - rows.start, ids.stop - ids.start
        pitch = round_up(width, 8)  # rows that TMA can write
        dz = buffer[: n * pitch].view(n, pitch)[:, :width]
        made_again(self._head, self._coef, rows, ids, dz)
        return dz


def _cut(size: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]
