"""divergence@1 in plain torch: rows are read in blocks, so the only [N, V] tensor made is the gradient.

The backward pass makes the distributions again. Rows are filled up to a power of two or a multiple of 1024, and summed
in an order that depends on that width alone: a row's bits depend on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_common.divergences import Listed, beta_of, listed, terms
from rlkernel_common.row_statistics import accumulator, temperatures, tile_width, tree_sum
from rlkernel_common.row_views import free_rows, shaped, take
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.divergence import DivergenceCall

# Logits of a block of rows: 4 MiB in fp32, of which a dozen temporaries are made. Speed only; bits do not depend on it.
_BLOCK = 1 << 20


def divergence(call: DivergenceCall) -> Tensor:
    """The operator's contract is `rlkernel_core.spec.divergence.DivergenceCall`.

    Memory beyond results and gradient: some blocks of 4 MiB (of one row where a row is larger).
    """
    if gradient_wanted("divergence", call):
        return DivergencePair(call)(call)
    with torch.no_grad():
        return _forward(call)


class DivergencePair(Pair[DivergenceCall, Tensor]):
    """Divergences, and the gradient of the student's logits."""

    op = "divergence"

    def __init__(self, call: DivergenceCall) -> None:
        """Keep the numbers of calls of this shape."""
        super().__init__(call)
        self._kind, self._beta = call.kind, call.beta
        self._T, self._T_t = (_number(x) for x in (call.temperature, call.teacher_temperature))

    def forward(self, call: DivergenceCall) -> tuple[Tensor, Saved]:
        """Divergences; the arguments are saved."""
        return _forward(call), _arguments(call)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """One read of both sides and one write."""
        (logits, teacher, ids, mask, T, T_t), (g,) = saved, grads
        if logits is None or teacher is None or g is None:
            raise RLKernelError("divergence: its backward pass got less than its forward pass saved")
        call = DivergenceCall(
            logits,
            teacher,
            kind=self._kind,
            beta=self._beta,
            temperature=self._T if T is None else T,  # type: ignore[arg-type]  # one of them is there
            teacher_temperature=self._T_t if T_t is None else T_t,
            teacher_ids=ids,
            mask=mask,
        )
        every = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grad, up = every.view(-1, logits.shape[-1]), g.reshape(-1)
        for rows, sides in _blocks(call):
            dz = sides.gradient(self._kind, beta_of(self._beta), up[rows])
            grad[rows] = dz if mask is None else torch.where(mask.reshape(-1)[rows, None], dz, 0.0)
        return (every,)

    @classmethod
    def saved_like(cls, call: DivergenceCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Arguments."""
        del result, wanted
        return _arguments(call)


def _number(x: float | Tensor | None) -> float | None:
    return None if isinstance(x, Tensor) else x


def _arguments(call: DivergenceCall) -> Saved:
    """The tensors of a call."""
    T, T_t = (x if isinstance(x, Tensor) else None for x in (call.temperature, call.teacher_temperature))
    return call.logits, call.teacher, call.teacher_ids, call.mask, T, T_t


def _forward(call: DivergenceCall) -> Tensor:
    rows, dtype = call.logits.shape[:-1], accumulator(call.logits)
    values = torch.zeros(rows.numel(), dtype=dtype, device=call.logits.device)
    for block, sides in _blocks(call):
        values[block] = sides.values(call.kind, beta_of(call.beta))[0]
    if call.mask is not None:
        values = torch.where(call.mask.reshape(-1), values, 0.0)
    return shaped(values, rows)


def _blocks(call: DivergenceCall) -> Iterator[tuple[slice, Sides]]:
    """Both sides, block by block of rows."""
    logits, rows, V = call.logits, call.logits.shape[:-1], call.logits.shape[-1]
    N, dtype, device = rows.numel(), accumulator(logits), logits.device
    T = temperatures(call.temperature, rows, dtype, device)
    T_t = T if call.teacher_temperature is None else temperatures(call.teacher_temperature, rows, dtype, device)
    student, teacher = free_rows(logits.detach()), free_rows(call.teacher.detach())
    ids = None if call.teacher_ids is None else free_rows(call.teacher_ids)
    step = max(1, _BLOCK // V)
    for first in range(0, N, step):
        block = slice(first, min(first + step, N))
        x, t = take(student, block).to(dtype), take(teacher, block)
        if ids is None:
            yield block, Sides.of(x, T[block], t.to(dtype), T_t[block])
        else:
            yield block, Sides.of_list(x, T[block], listed(take(ids, block), t, V, dtype))


class Sides(NamedTuple):
    """Log masses of student and teacher over the vocabulary, or over a list and a tail."""

    V: int
    T: Tensor  # [n] of the student
    log_s: Tensor  # [n, W] filled up with -inf; with a list [n, K + 1], filled up too
    log_t: Tensor  # the same
    among_tail: Tensor | None  # [n, V] log of the student's probabilities within the tail; None without a list
    list: Listed | None

    @classmethod
    def of(cls, x: Tensor, T: Tensor, teacher: Tensor, T_t: Tensor) -> Sides:
        """Of logits [n, V] of both; temperatures [n]."""
        log_s, log_t = (_Softmax.of(a, b).logs() for a, b in ((x, T), (teacher, T_t)))
        return cls(x.shape[1], T, log_s, log_t, None, None)

    @classmethod
    def of_list(cls, x: Tensor, T: Tensor, teacher: Listed) -> Sides:
        """Of the student's logits [n, V] and a teacher's list."""
        V, n = x.shape[1], x.shape[0]
        # Entries that do not count are marked in a column of their own.
        out = torch.zeros(n, V + 1, dtype=torch.bool, device=x.device)
        out.scatter_(1, torch.where(teacher.there, teacher.ids, V), True)
        every, rest = _Softmax.of(x, T), _Softmax.of(x.masked_fill(out[:, :V], -torch.inf), T)
        tail = (rest.top - every.top) / T + rest.log_total - every.log_total
        tail = torch.where((rest.top == -torch.inf) & every.log_total.isfinite(), -torch.inf, tail)
        log_s = every.logs()
        of_list = torch.where(teacher.there | log_s[:, :1].isnan(), log_s.gather(1, teacher.ids), -torch.inf)
        both = [torch.cat((a, b[:, None]), 1) for a, b in ((of_list, tail), (teacher.log_t, teacher.log_tail))]
        return cls(V, T, _filled(both[0]), _filled(both[1]), rest.logs()[:, :V], teacher)

    def values(self, kind: str, beta: float) -> tuple[Tensor, Tensor]:
        """[n] divergences, and [n, W] the derivatives with respect to log masses of the student."""
        term, u = terms(kind, beta, self.log_s, self.log_t)
        return tree_sum(term), u

    def gradient(self, kind: str, beta: float, g: Tensor) -> Tensor:
        """[n, V] gradient of the student's logits for upstream gradients g [n]; NaN where there is no divergence."""
        value, u = self.values(kind, beta)
        each = u - self.log_s.exp() * tree_sum(u)[:, None]
        scale = torch.where(value.isfinite(), g / self.T, torch.nan)[:, None]
        if self.list is None or self.among_tail is None:
            return each[:, : self.V] * scale
        K = self.list.ids.shape[1]
        out = torch.zeros(len(g), self.V + 1, dtype=each.dtype, device=each.device)
        out[:, : self.V] = self.among_tail.exp().nan_to_num() * each[:, K : K + 1]
        out.scatter_(1, torch.where(self.list.there, self.list.ids, self.V), each[:, :K])
        return out[:, : self.V] * scale


def _filled(x: Tensor) -> Tensor:
    """[n, W] of [n, V], with -inf up to a multiple of the tile's width."""
    n, V = x.shape
    width = tile_width(V)
    filled = x.new_full((n, -(-V // width) * width), -torch.inf)
    filled[:, :V] = x
    return filled


class _Softmax(NamedTuple):
    """A softmax."""

    x: Tensor  # [n, W] logits
    T: Tensor  # [n]
    top: Tensor  # [n] the largest logit
    log_total: Tensor  # [n] log of the sum of exp((x - top) / T); NaN where the top is not finite

    @classmethod
    def of(cls, x: Tensor, T: Tensor) -> _Softmax:
        """Of logits [n, V]."""
        x = _filled(x)
        top = x.amax(1)
        return cls(x, T, top, tree_sum((x - top[:, None]).div_(T[:, None]).exp_()).log())

    def logs(self) -> Tensor:
        """[n, W] logarithms of the probabilities."""
        return (self.x - self.top[:, None]).div_(self.T[:, None]).sub_(self.log_total[:, None])
