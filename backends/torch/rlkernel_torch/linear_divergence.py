"""linear_divergence@1 in plain torch: logits of a block of rows at a time, both ways.

The backward pass makes a block's logits again, on both sides, or reads their gradient where it was saved. Every product
has one shape (`rlkernel_torch.head`), and rows are compared as `rlkernel_torch.divergence` does: a row's bits depend on
nothing but the row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkernel_common.divergences import beta_of, listed
from rlkernel_common.kept_ids import readable
from rlkernel_common.row_statistics import accumulator, temperatures
from rlkernel_common.row_views import free_rows, shaped, take
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.linear_divergence import LinearDivergenceCall
from rlkernel_torch.divergence import Sides
from rlkernel_torch.head import ROWS, Head, add_product

_BLOCK = 1 << 20  # logits of the rows that are compared at a time, as in divergence


def linear_divergence(call: LinearDivergenceCall) -> Tensor:
    """The operator's contract is `rlkernel_core.spec.linear_divergence.LinearDivergenceCall`.

    Memory beyond results and gradients: logits of 64 rows on both sides and their gradient, some blocks of 4 MiB, tiles
    of the heads in the accumulator's type, and d_weight in it where weight has 16 bits; with "save" the gradient of
    all logits in it. Masked rows are skipped where the mask can be read without waiting for a device.
    """
    if gradient_wanted("linear_divergence", call):
        return LinearDivergencePair(call)(call)
    with torch.no_grad():
        return _forward(call)[0]


class LinearDivergencePair(Pair[LinearDivergenceCall, Tensor]):
    """Divergences, and the gradients of the student's operands."""

    op = "linear_divergence"

    def __init__(self, call: LinearDivergenceCall) -> None:
        """Keep the numbers of calls of this shape."""
        super().__init__(call)
        self._kind, self._beta, self._save = call.kind, call.beta, call.backward == "save"
        self._T, self._T_t = (
            None if isinstance(x, Tensor) else x for x in (call.temperature, call.teacher_temperature)
        )

    def forward(self, call: LinearDivergenceCall) -> tuple[Tensor, Saved]:
        """Divergences; the arguments are saved, and with "save" the gradient of the logits where upstream is 1."""
        values, kept = _forward(call, save=self._save)
        return values, (*_arguments(call), kept)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """Block by block of rows: the gradient of the logits, and from it what is wanted."""
        (hidden, weight, teacher, of_teacher, ids, mask, T, T_t, kept), (g,) = saved, grads
        if hidden is None or weight is None or teacher is None or g is None:
            raise RLKernelError("linear_divergence: its backward pass got less than its forward pass saved")
        call = LinearDivergenceCall(
            hidden,
            weight,
            teacher,
            teacher_weight=of_teacher,
            kind=self._kind,
            beta=self._beta,
            temperature=self._T if T is None else T,  # type: ignore[arg-type]  # one of them is there
            teacher_temperature=self._T_t if T_t is None else T_t,
            teacher_ids=ids,
            mask=mask,
        )
        blocks, up = _Blocks(call), g.reshape(-1)
        of_hidden, of_weight = self.wanted
        every = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if of_hidden else None
        total = torch.zeros(weight.shape, dtype=blocks.dtype, device=weight.device) if of_weight else None
        head = blocks.student
        for rows in head.rows():
            x, g = head.block(rows), up[head.place(rows)]
            dz = blocks.gradient(rows, x, g) if kept is None else blocks.scaled(rows, kept[head.place(rows)], g)
            dz = pad(dz, (0, 0, 0, ROWS - rows.stop + rows.start))
            dx = torch.zeros_like(x)
            for tile in head.tiles():
                part = dz[:, tile].contiguous()
                if every is not None:
                    add_product(dx, part, head.tile(tile))
                if total is not None:
                    total[tile].addmm_(part.T, x)
            if every is not None:
                every.view(-1, every.shape[-1])[head.place(rows)] = dx[: rows.stop - rows.start].to(every.dtype)
        return every, None if total is None else total.to(weight.dtype)

    @classmethod
    def saved_like(cls, call: LinearDivergenceCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Arguments, and with "save" N x V numbers."""
        del wanted
        N, V = result.numel(), call.weight.shape[0]
        return *_arguments(call), result.new_empty((N, V)) if call.backward == "save" else None


def _arguments(call: LinearDivergenceCall) -> Saved:
    """The tensors of a call."""
    T, T_t = (x if isinstance(x, Tensor) else None for x in (call.temperature, call.teacher_temperature))
    return call.hidden, call.weight, call.teacher, call.teacher_weight, call.teacher_ids, call.mask, T, T_t


def _forward(call: LinearDivergenceCall, *, save: bool = False) -> tuple[Tensor, Tensor | None]:
    blocks, shape, V = _Blocks(call), call.hidden.shape[:-1], call.weight.shape[0]
    values = torch.zeros(shape.numel(), dtype=blocks.dtype, device=call.hidden.device)
    kept = values.new_zeros(shape.numel(), V) if save else None
    for rows in blocks.student.rows():
        place = blocks.student.place(rows)
        values[place] = blocks.values(rows)
        if kept is not None:
            g = values.new_ones(rows.stop - rows.start)
            kept[place] = blocks.gradient(rows, blocks.student.block(rows), g)
    return shaped(values, shape), kept


class _Blocks:
    """The rows of a call that are worked on, by blocks of `ROWS`."""

    def __init__(self, call: LinearDivergenceCall) -> None:
        shape, mask = call.hidden.shape[:-1], None if call.mask is None else call.mask.reshape(-1)
        self._call, self.dtype = call, accumulator(call.hidden)
        index, self._counted = None, mask
        if mask is not None and readable(mask):
            index, self._counted = mask.nonzero()[:, 0], None
        more = {"scale": 1.0, "active": index, "counted": self._counted, "dtype": self.dtype, "bias": None}
        self.student = Head(free_rows(call.hidden.detach()), call.weight.detach(), **more)  # type: ignore[arg-type]
        self._teacher = free_rows(call.teacher.detach())
        self._head = None
        if call.teacher_weight is not None:
            self._head = Head(self._teacher, call.teacher_weight, **more)  # type: ignore[arg-type]
        self._ids = None if call.teacher_ids is None else free_rows(call.teacher_ids)
        T_t = call.temperature if call.teacher_temperature is None else call.teacher_temperature
        each = (temperatures(x, shape, self.dtype, call.hidden.device) for x in (call.temperature, T_t))
        self._T, self._T_t = (x if index is None else x[index] for x in each)

    def values(self, rows: slice) -> Tensor:
        """[n] divergences of a block, 0 where rows do not count."""
        kind, beta = self._call.kind, beta_of(self._call.beta)
        found = torch.cat([sides.values(kind, beta)[0] for _, sides in self._sides(rows, self.student.block(rows))])
        return found if self._counted is None else torch.where(self._counted[rows], found, 0.0)

    def gradient(self, rows: slice, x: Tensor, g: Tensor) -> Tensor:
        """[n, V] gradient of the logits of a block for upstream gradients g [n], from its hidden states."""
        kind, beta = self._call.kind, beta_of(self._call.beta)
        found = torch.cat([sides.gradient(kind, beta, g[part]) for part, sides in self._sides(rows, x)])
        return self._where_counted(rows, found)

    def scaled(self, rows: slice, kept: Tensor, g: Tensor) -> Tensor:
        """The same from the gradient for upstream gradients of 1."""
        return self._where_counted(rows, kept * g.to(kept.dtype)[:, None])

    def _where_counted(self, rows: slice, dz: Tensor) -> Tensor:
        return dz if self._counted is None else torch.where(self._counted[rows, None], dz, 0.0)

    def _sides(self, rows: slice, x: Tensor) -> Iterator[tuple[slice, Sides]]:
        """Both sides of a block, a few rows at a time, counted from the block's first."""
        V, n = self.student.weight.shape[0], rows.stop - rows.start
        logits, place = _logits(self.student, x)[:n], self.student.place(rows)
        if self._head is not None:
            teacher = _logits(self._head, self._head.block(rows))[:n]
        else:
            teacher = take(self._teacher, place)
        ids = None if self._ids is None else take(self._ids, place)
        step = max(1, _BLOCK // V)
        for first in range(0, n, step):
            part = slice(first, min(first + step, n))
            T, T_t = (each[rows][part] for each in (self._T, self._T_t))
            if ids is None:
                yield part, Sides.of(logits[part], T, teacher[part].to(self.dtype), T_t)
            else:
                yield part, Sides.of_list(logits[part], T, listed(ids[part], teacher[part], V, self.dtype))


def _logits(head: Head, x: Tensor) -> Tensor:
    """[R, V] of a block of hidden states."""
    return torch.cat([head.logits(x, tile) for tile in head.tiles()], 1)
