"""linear_divergence@1 on Triton: a block of rows at a time, torch's products and the launches of divergence.

Legend: N rows · n rows of a block · D, E hidden sizes of student and teacher · V vocabulary · K listed ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.row_views import free_rows, take
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.linear_divergence import LinearDivergenceCall
from rlkernel_triton.common.row_layout import RowLayout, per_row
from rlkernel_triton.divergence.kernels import SAVED
from rlkernel_triton.divergence.rows import CompareRows, List, Options, RowTensors
from rlkernel_triton.launchers import Plan, launcher_for
from rlkernel_triton.linear_divergence.gradients import Block, from_all_rows, from_blocks, gradient_dtype, product

LOGITS: Final = 5 << 26  # of a block: 1.25 GiB in fp32
MOST_ROWS: Final = 4096  # of a block: products are no faster with more
MULTIPLE: Final = 1024  # of rows of a block: tiles of products fill the multiprocessors, slices of numbers are aligned


def linear_divergence(call: LinearDivergenceCall) -> Tensor:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: LinearDivergenceCall) -> Callable[[LinearDivergenceCall], Tensor]:
    """What runs calls of this shape; see `rlkernel_core.spec.linear_divergence.LinearDivergenceCall`.

    Memory beyond results and gradients: fp32 logits of a block on both sides, 24 bytes a row; backward the gradient of
    a block's logits, and with several blocks d_weight in fp32. With "save" the gradient of all rows' logits, and
    backward a copy of hidden or d_hidden in fp32.
    """
    if gradient_wanted("linear_divergence", call):
        return LinearDivergencePair(call)
    host = TritonHost(call)

    def run(call: LinearDivergenceCall) -> Tensor:
        with torch.no_grad():
            return host.forward(call)[0]

    return run


class LinearDivergencePair(Pair[LinearDivergenceCall, Tensor]):
    """Divergences, and the gradients of the student's operands."""

    op = "linear_divergence"

    def __init__(self, call: LinearDivergenceCall) -> None:
        """Bind the launches of calls of this shape."""
        super().__init__(call)
        self._host, self._save = self.host(call), call.backward == "save"

    def forward(self, call: LinearDivergenceCall) -> tuple[Tensor, Saved]:
        """Two products and a launch for each block; with "save" a launch more."""
        values, saved = self._host.forward(call, save=self._save)
        return values, (call.hidden, call.weight, call.mask, saved) if self._save else (*arguments(call), saved)

    @classmethod
    def host(cls, call: LinearDivergenceCall) -> Host:
        """What runs calls of this shape."""
        return TritonHost(call)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """A product for each operand that wants its gradient, and before it, unless saved, the forward pass again."""
        (hidden, weight, *others, kept), (g,) = saved, grads
        if hidden is None or weight is None or kept is None or g is None:
            raise RLKernelError("linear_divergence: its backward pass got less than its forward pass saved")
        up = g.contiguous().view(-1)
        if self._save:
            return from_all_rows(hidden, weight, others[0], kept[:, : len(weight)], up, self.wanted)
        blocks = self._host.gradients((hidden, weight, *others), kept, up)
        return from_blocks(hidden, weight, blocks, self._host.several, self.wanted)

    @classmethod
    def saved_like(cls, call: LinearDivergenceCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Arguments and 6 N numbers, or those that are left to multiply with and the gradient of the logits."""
        del result, wanted
        hidden, N = call.hidden, call.hidden.shape[:-1].numel()
        if call.backward == "save":
            kept = hidden.new_empty((N, call.weight.shape[0]), dtype=gradient_dtype(hidden))
            return hidden, call.weight, call.mask, kept
        return *arguments(call), hidden.new_empty(SAVED * N, dtype=torch.float32)


def arguments(call: LinearDivergenceCall) -> Saved:
    """The tensors of a call."""
    T, T_t = (x if isinstance(x, Tensor) else None for x in (call.temperature, call.teacher_temperature))
    return call.hidden, call.weight, call.teacher, call.teacher_weight, call.teacher_ids, call.mask, T, T_t


class Host(ABC):
    """What the host does for calls of one shape."""

    several: bool  # blocks of rows: d_weight is a sum. True also where there is none, and d_weight is 0

    @abstractmethod
    def forward(self, call: LinearDivergenceCall, *, save: bool = False) -> tuple[Tensor, Tensor]:
        """The result, and what the gradient needs: with `save` the gradient of the logits, where upstream is 1."""

    @abstractmethod
    def gradients(self, given: Saved, saved: Tensor, g: Tensor) -> Iterator[Block]:
        """The gradients of the logits of each block, from `arguments`, what forward saved, and upstream's [N]."""


class TritonHost(Host):
    """Logits by torch, a block of rows at a time, and the launches of divergence on them."""

    def __init__(self, call: LinearDivergenceCall) -> None:
        self._shape, self._V = call.hidden.shape[:-1], call.weight.shape[0]
        self._N, self._device = self._shape.numel(), call.hidden.device
        T = call.temperature
        T_t = T if call.teacher_temperature is None else call.teacher_temperature
        options = Options(call.kind, call.beta, _number(T), _number(T_t), call.mask is not None)
        block = min(MOST_ROWS, max(MULTIPLE, LOGITS // self._V // MULTIPLE * MULTIPLE))
        firsts = range(0, self._N, block)
        self._blocks = [slice(first, min(first + block, self._N)) for first in firsts]
        self._largest, self.several = min(block, self._N), len(self._blocks) != 1
        self._dtype = gradient_dtype(call.hidden)
        rows = RowLayout(1, self._V, 0, 1)  # of logits that are made for a block
        launcher, K = launcher_for(self._device), 0 if call.teacher_ids is None else call.teacher_ids.shape[-1]
        self._compare = {
            n: CompareRows(Plan(launcher), n, self._V, options, rows, None if K else rows, K)
            for n in {b.stop - b.start for b in self._blocks}
        }

    def forward(self, call: LinearDivergenceCall, *, save: bool = False) -> tuple[Tensor, Tensor]:
        """The result, and what the gradient needs: with `save` the gradient of the logits, where upstream is 1."""
        values = torch.empty(self._N, dtype=torch.float32, device=self._device)
        saved = torch.empty(SAVED * self._N, dtype=torch.float32, device=self._device)
        dz = torch.empty((self._N, self._V), dtype=self._dtype, device=self._device) if save else None
        ones = torch.ones(self._largest if save else 0, dtype=torch.float32, device=self._device)
        for rows, _, logits, teacher, of in self._sides(arguments(call)):
            compare, numbers = self._compare[len(logits)], _of_rows(saved, rows)
            compare.values(logits, teacher, of, values[rows], numbers)
            if dz is not None:
                compare.gradient(logits, teacher, of, numbers, ones[: len(logits)], dz[rows])
        result: Tensor = torch.ops.aten._unsafe_view(values, self._shape)  # noqa: SLF001  # no view: it may be changed
        return result, saved if dz is None else dz

    def gradients(self, given: Saved, saved: Tensor, g: Tensor) -> Iterator[Block]:
        """The gradients of the logits of each block: the forward pass again, but for its sums."""
        for rows, x, logits, teacher, of in self._sides(given):
            dz = torch.empty(logits.shape, dtype=self._dtype, device=self._device)
            self._compare[len(dz)].gradient(logits, teacher, of, _of_rows(saved, rows), g[rows], dz)
            yield Block(rows, x, dz)

    def _sides(self, given: Saved) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | List, RowTensors]]:
        """Block by block: its rows, hidden states, logits, teacher, and what else belongs to its rows."""
        tensors: list[Any] = [None if x is None else x.detach() for x in given]
        hidden, weight, teacher, of_teacher, ids, mask, T, T_t = tensors
        counted = None if mask is None else mask.contiguous().view(-1)
        each: list[Any] = [None if x is None else per_row(x, self._shape) for x in (T, T if T_t is None else T_t)]
        flat: list[Any] = [None if x is None else free_rows(x) for x in (hidden, teacher, ids)]
        for rows in self._blocks:
            of = RowTensors(*(None if x is None else x[rows] for x in (counted, *each)))
            some: list[Any] = [None if x is None else take(x, rows) for x in flat]
            x, t, listed_ids = some
            if of.mask is not None:  # products must not meet what rows hold that do not count
                x = torch.where(of.mask[:, None], x, 0.0)
            logits = product(x, weight.T)
            if listed_ids is not None:
                yield rows, x, logits, List.of(listed_ids, t, self._V), of
            elif of_teacher is not None:
                yield rows, x, logits, product(t, of_teacher.T), of
            else:
                yield rows, x, logits, t.contiguous(), of


def _of_rows(saved: Tensor, rows: slice) -> Tensor:
    """The numbers of a block."""
    return saved[SAVED * rows.start : SAVED * rows.stop]


def _number(T: float | Tensor) -> float | None:
    return None if isinstance(T, Tensor) else float(T)
