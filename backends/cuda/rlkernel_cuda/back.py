"""From the gradient of the logits to dX, dW and dbias: cuBLAS matmuls that accumulate in fp32 and round once.

Legend: N rows · D hidden · V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_cuda.head import Head, made_again, scatter_rows
from rlkernel_cuda.plan import SPLIT_BELOW, round_up


class Back:
    """The way back from dz to the operands; an operand that wants nothing costs nothing."""

    hidden: Tensor | None  # [N, D] in the caller's order
    weight: Tensor | None  # [V, D]
    bias: Tensor | None  # [V] fp32

    def __init__(self, head: Head, coef: Tensor, of_hidden: bool, of_weight: bool, of_bias: bool) -> None:
        self._head, self._coef = head, coef
        self._x, self._w = head.x[:, : head.D], head.w[:, : head.D]
        self.hidden = self._x.new_empty(self._x.shape) if of_hidden else None
        self.weight = self._w.new_empty(self._w.shape) if of_weight else None
        self.bias = head.row_scale.new_zeros(self._w.shape[0]) if of_bias else None

    def at_once(self, dz: Tensor) -> None:
        """From the gradient of all logits, [N, V]."""
        if self.hidden is not None:
            if self._head.place is None:
                _product(dz, self._w, self.hidden)
            else:
                dx = torch.empty_like(self.hidden)
                _product(dz, self._w, dx)
                scatter_rows(dx, self._head, 0, self.hidden)
        if self.weight is not None:
            _product(dz.t(), self._x, self.weight)
        if self.bias is not None:
            torch.sum(dz, 0, dtype=torch.float32, out=self.bias)

    def by_slices(self, block: int, width: int, *, apart: bool) -> None:
        """Make the logits again, `block` rows by `width` ids at a time.

        Args:
            block: rows.
            width: ids, a multiple of 256.
            apart: dX and dW in passes of their own, so that neither accumulates over the other's loop.
        """
        N, V = self._x.shape[0], self._w.shape[0]
        buffer = self._x.new_empty(min(block, N) * round_up(min(width, V), 8))
        rows, ids = _cut(N, block), _cut(V, width)
        if not apart:
            self._slice_by_slice(buffer, rows, ids, of_hidden=True)
            return
        for r in rows if self.hidden is not None else ():
            dx = None
            for c in ids:
                dx = _added(dx, self._dz(buffer, r, c), self._w[c])
            if self.hidden is not None and dx is not None:
                scatter_rows(dx, self._head, r.start, self.hidden)
        if self.weight is not None or self.bias is not None:
            self._slice_by_slice(buffer, rows, ids, of_hidden=False)

    def _slice_by_slice(self, buffer: Tensor, rows: list[slice], ids: list[slice], *, of_hidden: bool) -> None:
        d_hidden = self.hidden if of_hidden else None
        dx = None
        if d_hidden is not None and (len(ids) > 1 or self._head.place is not None):
            dx = d_hidden.new_empty(d_hidden.shape, dtype=torch.float32)
        for c in ids:
            dw = None
            for r in rows:
                dz = self._dz(buffer, r, c)
                if dx is not None:
                    _added(None if c.start == 0 else dx[r], dz, self._w[c], out=dx[r])
                elif d_hidden is not None:
                    _product(dz, self._w, d_hidden[r])
                if self.weight is not None and len(rows) == 1:
                    _product(dz.t(), self._x, self.weight[c])
                elif self.weight is not None:
                    dw = _added(dw, dz.t(), self._x[r])
                if self.bias is not None:
                    self.bias[c] += torch.sum(dz, 0, dtype=torch.float32)
            if self.weight is not None and dw is not None:
                self.weight[c] = dw
        if d_hidden is not None and dx is not None:
            scatter_rows(dx, self._head, 0, d_hidden)

    def _dz(self, buffer: Tensor, rows: slice, ids: slice) -> Tensor:
        n, width = rows.stop - rows.start, ids.stop - ids.start
        pitch = round_up(width, 8)  # rows that TMA can write
        dz = buffer[: n * pitch].view(n, pitch)[:, :width]
        made_again(self._head, self._coef, rows, ids, dz)
        return dz


def _cut(size: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """A @ b, rounded once; a small product is made in fp32, because parts of a split sum would be rounded each."""
    if out.numel() < SPLIT_BELOW:
        out.copy_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        torch.mm(a, b, out=out)


def _added(sum_: Tensor | None, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """sum_ + a @ b in fp32, in place."""
    if sum_ is not None:
        return torch.addmm(sum_, a, b, out_dtype=torch.float32, out=sum_)
    if out is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)
