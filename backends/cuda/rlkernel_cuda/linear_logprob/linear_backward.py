"""From the gradient of the logits to dX, dW and dbias, which accumulate in fp32 and are rounded once.

Legend: N rows · D hidden · V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_cuda.linear_logprob.head import ForwardState, Head
from rlkernel_cuda.linear_logprob.plan import Plan, round_up
from rlkernel_cuda.linear_logprob.products import Products


class Wanted(NamedTuple):
    """Operands that gradients are wanted of; one that wants nothing costs nothing."""

    hidden: bool
    weight: bool
    bias: bool


class HeadGradients(NamedTuple):
    """Gradients of the operands; None where none is wanted."""

    hidden: Tensor | None  # [N, D] in the caller's order; fp32 where other ranks add to it
    weight: Tensor | None  # [V, D]
    bias: Tensor | None  # [V] fp32


class Backward:
    """The backward pass of calls of one shape.

    Args:
        head: the launches.
        wanted: operands that gradients are wanted of.
        partial: whether other ranks add to dX.
    """

    def __init__(self, head: Head, wanted: Wanted, *, partial: bool) -> None:
        self.head, self._wanted, self._partial = head, wanted, partial
        self.product = Products()

    def from_dlogits(self, state: ForwardState, dz: Tensor) -> HeadGradients:
        """From the gradient of all logits, [N, V]."""
        kind, of = self.head.kind, state.of
        found = self._empty(state)
        if found.hidden is not None:
            dx = found.hidden if of.place is None else torch.empty_like(found.hidden)
            self.product(dz, _of_width(of.w, kind.D), dx, count=of.counted)
            if of.place is not None:
                self.head.scatter(dx, of, 0, found.hidden)
        if found.weight is not None:
            self.product(dz, _of_width(of.x, kind.D), found.weight, transposed=True, count=of.counted)
        if found.bias is not None:
            torch.sum(dz, 0, dtype=torch.float32, out=found.bias)
        return found

    def recompute_by_slices(self, state: ForwardState, coef: Tensor, cut: Plan) -> HeadGradients:
        """Make the logits again, `cut.block` rows by `cut.width` ids at a time; if `cut.apart`, for dX and dW apart."""
        N, V = self.head.kind.N, self.head.kind.V
        rows, ids = _cut(N, cut.block), _cut(V, cut.width)
        numbers = max(cut.buffer, min(cut.block, N) * round_up(min(cut.width, V), 8))
        run = _Run(self, state, coef, self._empty(state), state.of.x.new_empty(numbers))
        if not cut.apart:
            run.slice_by_slice(rows, ids, of_hidden=True)
            return run.found
        for r in rows if run.found.hidden is not None else ():
            run.block_of_hidden(r, ids)
        if run.found.weight is not None or run.found.bias is not None:
            run.slice_by_slice(rows, ids, of_hidden=False)
        return run.found

    def _empty(self, state: ForwardState) -> HeadGradients:
        kind, wanted = self.head.kind, self._wanted
        dtype = torch.float32 if self._partial else torch.bfloat16
        like = state.of.x
        return HeadGradients(
            like.new_empty(kind.N, kind.D, dtype=dtype) if wanted.hidden else None,
            like.new_empty(kind.V, kind.D) if wanted.weight else None,
            like.new_zeros(kind.V, dtype=torch.float32) if wanted.bias else None,
        )


class _Run(NamedTuple):
    """One call, slice by slice."""

    backward: Backward
    state: ForwardState
    coef: Tensor
    found: HeadGradients
    buffer: Tensor

    def block_of_hidden(self, rows: slice, ids: list[slice]) -> None:
        """DX of a block of rows, over all ids."""
        head, of, out = self.backward.head, self.state.of, self.found.hidden
        if out is None:
            return
        dx = out.new_empty(rows.stop - rows.start, head.kind.D, dtype=torch.float32)
        for c in ids:
            self._add_hidden(self._dz(rows, c), rows, c, dx, None if c.start == 0 else dx)
        head.scatter(dx, of, rows.start, out)

    def slice_by_slice(self, rows: list[slice], ids: list[slice], *, of_hidden: bool) -> None:
        """DW and dbias of a slice of ids over all rows, and dX where it is wanted with them."""
        head, of, D = self.backward.head, self.state.of, self.backward.head.kind.D
        weight, bias = self.found.weight, self.found.bias
        d_hidden = self.found.hidden if of_hidden else None
        gathered = of.place is not None
        dx = None
        if d_hidden is not None and (len(ids) > 1 or gathered):
            dx = d_hidden.new_empty(d_hidden.shape, dtype=torch.float32)
        dw = None
        if weight is not None and len(rows) > 1:
            dw = weight.new_empty(ids[0].stop, D, dtype=torch.float32)
        for c in ids:
            for r in rows:
                dz = self._dz(r, c)
                if d_hidden is not None:
                    earlier = None if c.start == 0 or dx is None else _part(dx, r)
                    rounds = dx is None or (c is ids[-1] and not gathered)
                    self._add_hidden(dz, r, c, _part(d_hidden if rounds or dx is None else dx, r), earlier)
                if weight is not None:
                    part = None if dw is None else dw[: dz.shape[1]]
                    rounds = r is rows[-1] or part is None
                    self._add_weight(
                        dz, r, _part(weight, c) if rounds or part is None else part, None if r.start == 0 else part
                    )
                if bias is not None:
                    bias[c] += torch.sum(dz, 0, dtype=torch.float32)
        if d_hidden is not None and dx is not None and gathered:
            head.scatter(dx, of, 0, d_hidden)

    def _add_hidden(self, dz: Tensor, rows: slice, ids: slice, out: Tensor, earlier: Tensor | None) -> None:
        of, kind = self.state.of, self.backward.head.kind
        w = _part(_of_width(of.w, kind.D), ids)
        self.backward.product(dz, w, out, earlier=earlier, count=of.counted, first=rows.start)

    def _add_weight(self, dz: Tensor, rows: slice, out: Tensor, earlier: Tensor | None) -> None:
        of, kind = self.state.of, self.backward.head.kind
        x = _part(_of_width(of.x, kind.D), rows)
        self.backward.product(dz, x, out, earlier=earlier, transposed=True, count=of.counted, first=rows.start)

    def _dz(self, rows: slice, ids: slice) -> Tensor:
        n, width = rows.stop - rows.start, ids.stop - ids.start
        pitch = round_up(width, 8)  # rows that TMA can write
        dz = self.buffer.as_strided((n, width), (pitch, 1))
        self.backward.head.recompute_dlogits(self.state.of, self.coef, rows, ids, dz)
        return dz


def _part(x: Tensor, some: slice) -> Tensor:
    """Some rows of x, or ids of a bias."""
    return x if some.start == 0 and some.stop == x.shape[0] else x[some]


def _of_width(x: Tensor, D: int) -> Tensor:
    """Without the columns that fill up its rows."""
    return x if x.shape[1] == D else x[:, :D]


def _cut(size: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]
