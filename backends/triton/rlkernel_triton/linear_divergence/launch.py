"""linear_divergence@1 on Triton: a block of rows at a time, torch's products and the launches of divergence.

Legend: N rows · n rows of a block · D, E hidden sizes of student and teacher · V vocabulary · K listed ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.precision import full_precision
from rlkernel_common.row_views import free_rows, take
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.linear_divergence import LinearDivergenceCall
from rlkernel_triton.common.row_layout import RowLayout, per_row
from rlkernel_triton.divergence.kernels import SAVED
from rlkernel_triton.divergence.rows import CompareRows, List, Options, RowTensors
from rlkernel_triton.launchers import Plan, launcher_for

LOGITS: Final = 5 << 26  # of a block: 1.25 GiB in fp32
MOST_ROWS: Final = 4096  # of a block: products are no faster with more
MULTIPLE: Final = 1024  # of rows of a block: tiles of products fill the multiprocessors, slices of numbers are aligned
COLUMNS: Final = 8192  # of d_weight that are summed at a time where there are several blocks


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
    host = _Host(call)

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
        self._host, self._save = _Host(call), call.backward == "save"

    def forward(self, call: LinearDivergenceCall) -> tuple[Tensor, Saved]:
        """Two products and a launch for each block; with "save" a launch more."""
        values, saved = self._host.forward(call, save=self._save)
        return values, (call.hidden, call.weight, call.mask, saved) if self._save else (*_arguments(call), saved)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """A product for each operand that wants its gradient, and before it, unless saved, the forward pass again."""
        (*given, kept), (g,) = saved, grads
        if kept is None or g is None:
            raise RLKernelError("linear_divergence: its backward pass got less than its forward pass saved")
        back = self._host.backward_from_saved if self._save else self._host.backward
        return back(tuple(given), kept, g.contiguous().view(-1), self.wanted)

    @classmethod
    def saved_like(cls, call: LinearDivergenceCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Arguments and 6 N numbers, or those that are left to multiply with and the gradient of the logits."""
        del result, wanted
        hidden, N = call.hidden, call.hidden.shape[:-1].numel()
        if call.backward == "save":
            kept = hidden.new_empty((N, call.weight.shape[0]), dtype=_gradient_dtype(hidden))
            return hidden, call.weight, call.mask, kept
        return *_arguments(call), hidden.new_empty(SAVED * N, dtype=torch.float32)


def _arguments(call: LinearDivergenceCall) -> Saved:
    """The tensors of a call."""
    T, T_t = (x if isinstance(x, Tensor) else None for x in (call.temperature, call.teacher_temperature))
    return call.hidden, call.weight, call.teacher, call.teacher_weight, call.teacher_ids, call.mask, T, T_t


class _Host:
    """What the host does for calls of one shape."""

    def __init__(self, call: LinearDivergenceCall) -> None:
        self._shape, self._V = call.hidden.shape[:-1], call.weight.shape[0]
        self._N, self._device = self._shape.numel(), call.hidden.device
        T = call.temperature
        T_t = T if call.teacher_temperature is None else call.teacher_temperature
        options = Options(call.kind, call.beta, _number(T), _number(T_t), call.mask is not None)
        block = min(MOST_ROWS, max(MULTIPLE, LOGITS // self._V // MULTIPLE * MULTIPLE))
        firsts = range(0, self._N, block)
        self._blocks = [slice(first, min(first + block, self._N)) for first in firsts]
        self._largest = min(block, self._N)
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
        dz = torch.empty((self._N, self._V), dtype=_gradient_dtype(call.hidden), device=self._device) if save else None
        ones = torch.ones(self._largest if save else 0, dtype=torch.float32, device=self._device)
        for rows, _, logits, teacher, of in self._sides(_arguments(call)):
            compare, numbers = self._compare[len(logits)], _of_rows(saved, rows)
            compare.values(logits, teacher, of, values[rows], numbers)
            if dz is not None:
                compare.gradient(logits, teacher, of, numbers, ones[: len(logits)], dz[rows])
        result: Tensor = torch.ops.aten._unsafe_view(values, self._shape)  # noqa: SLF001  # no view: it may be changed
        return result, saved if dz is None else dz

    def backward_from_saved(self, given: Saved, dz: Tensor, g: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """The gradients that are wanted, from that of the logits where upstream is 1.

        A row's upstream gradient multiplies the row of d_hidden, and the hidden states that d_weight is made of.
        """
        (hidden, weight, mask), (of_hidden, of_weight) = given, wanted
        if hidden is None or weight is None:
            raise RLKernelError("linear_divergence: its backward pass got less than its forward pass saved")
        d_hidden, d_weight, counted = None, None, None if mask is None else mask.contiguous().view(-1, 1)
        up = g[:, None] if counted is None else torch.where(counted, g[:, None], 0.0)
        if of_hidden:
            d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            torch.mul(_product(dz, weight), up, out=d_hidden.view(-1, d_hidden.shape[-1]))
        if of_weight:
            x = hidden.detach().reshape(-1, hidden.shape[-1]).to(torch.float32) * up
            x = (x if counted is None else torch.where(counted, x, 0.0)).to(dz.dtype)
            d_weight = torch.empty(weight.shape, dtype=weight.dtype, device=self._device)
            _write_product(d_weight, dz.T, x)
        return d_hidden, d_weight

    def backward(self, given: Saved, saved: Tensor, g: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """The gradients of hidden and weight that are wanted."""
        hidden, weight, of_hidden, of_weight = given[0], given[1], *wanted
        if hidden is None or weight is None:
            raise RLKernelError("linear_divergence: its backward pass got less than its forward pass saved")
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if of_hidden else None
        d_weight: Tensor | None = None
        several = len(self._blocks) != 1
        if of_weight:
            made = torch.zeros if several else torch.empty
            d_weight = made(weight.shape, dtype=torch.float32 if several else weight.dtype, device=self._device)
        kind = _gradient_dtype(hidden)
        for rows, x, logits, teacher, of in self._sides(given):
            dz = torch.empty(logits.shape, dtype=kind, device=self._device)
            self._compare[len(dz)].gradient(logits, teacher, of, _of_rows(saved, rows), g[rows], dz)
            if d_hidden is not None:
                _write_product(d_hidden.view(-1, d_hidden.shape[-1])[rows], dz, weight)
            if d_weight is not None and not several:
                _write_product(d_weight, dz.T, x)
            elif d_weight is not None:
                for first in range(0, self._V, COLUMNS):
                    part = slice(first, first + COLUMNS)
                    d_weight[part] += _product(dz[:, part].T, x)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype)

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
            logits = _product(x, weight.T)
            if listed_ids is not None:
                yield rows, x, logits, List.of(listed_ids, t, self._V), of
            elif of_teacher is not None:
                yield rows, x, logits, _product(t, of_teacher.T), of
            else:
                yield rows, x, logits, t.contiguous(), of


def _of_rows(saved: Tensor, rows: slice) -> Tensor:
    """The numbers of a block."""
    return saved[SAVED * rows.start : SAVED * rows.stop]


def _gradient_dtype(hidden: Tensor) -> torch.dtype:
    """Of gradients of logits: fp16 has too small a range for them."""
    return torch.bfloat16 if hidden.dtype == torch.bfloat16 else torch.float32


def _number(T: float | Tensor) -> float | None:
    return None if isinstance(T, Tensor) else float(T)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[n, k] @ [k, m] in fp32: 16-bit operands are multiplied as they are where the device sums them in fp32."""
    with full_precision(a):
        if a.is_cuda and a.dtype == b.dtype and a.itemsize == 2:
            return torch.mm(a, b, out_dtype=torch.float32)
        return a.float() @ b.float()


def _write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """[n, k] @ [k, m], rounded once to the dtype of `out`."""
    if a.dtype == b.dtype == out.dtype:
        with full_precision(a):
            torch.mm(a, b, out=out)
    else:
        out.copy_(_product(a, b))
