"""logprob@1 in plain torch: rows are read in blocks, so the only [N, V] tensor made is the gradient.

Every row goes through `row_statistics` with tiles that depend on V alone; its bits depend on nothing but the row, and
with a group on how the vocabulary is split: a rank joins its own tiles, and then the ranks are joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel_common import listed_ids, vocab_parallel
from rlkernel_common.kept_ids import KeptIds
from rlkernel_common.row_selection import (
    Chosen,
    check_values,
    choose,
    results,
    selected,
)
from rlkernel_common.row_statistics import (
    SoftmaxStats,
    accumulator,
    below,
    cap,
    gradient,
    join,
    partial_softmax,
    softmax_stats,
    stacked,
    temperatures,
    tile_width,
    uncap,
)
from rlkernel_common.row_views import free_rows, places, shaped, take
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.spec.listed_ids import flat_ids, ids_per_row, listed_shape
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult, Support

# Logits of a block of rows: 16 MiB in fp32. Speed only; bits do not depend on it.
_BLOCK = 1 << 22


def logprob(call: LogprobCall) -> LogprobResult:
    """The operator's contract is `rlkernel_core.spec.logprob.LogprobCall`.

    Memory beyond results and gradient: some blocks of 16 MiB (of one row where a row is larger), a few numbers per
    row (with a group, per rank too) and per kept id.
    """
    return LogprobPair(call)(call) if gradient_wanted("logprob", call) else _forward(call)[0]


class LogprobPair(Pair[LogprobCall, LogprobResult]):
    """Log-probability, lse, entropy and kept mass of [..., V] logits, with their analytic gradient."""

    op = "logprob"

    def __init__(self, call: LogprobCall) -> None:
        """Keep the numbers of calls of this shape."""
        super().__init__(call)
        self._T = call.temperature if isinstance(call.temperature, float | int) else None
        self._softcap, self._rows = call.softcap, call.logits.shape[:-1]
        self._K = ids_per_row(call.ids, call.logits)

    def forward(self, call: LogprobCall) -> tuple[LogprobResult, Saved]:
        """The result, and the law of every row."""
        result, ids, first, row, listed = _forward(call)
        numbers = (row.logprob, row.top, row.log_total, row.mean, row.kept_top, row.kept_log_total)
        return result, (*_arguments(call), ids, first, *numbers, *listed)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """One read of the logits and one write."""
        logits, mask, each_T, kept_ids, offsets, ids, first, *numbers, many, many_row, many_y = saved
        value, top, log_total, mean, kept_top, kept_log_total = numbers
        if logits is None or ids is None or value is None or top is None or log_total is None:
            raise RLKernelError("logprob: its backward pass got less than its forward pass saved")
        row = SoftmaxStats(value, value, None, None, top, log_total, mean, kept_top, kept_log_total)  # lse is unread
        T = temperatures(each_T if self._T is None else self._T, self._rows, value.dtype, value.device)  # type: ignore[arg-type]
        offset, support = 0 if first is None else first, None
        if kept_ids is not None and offsets is not None:  # which of them lie outside was told in the forward pass
            support = KeptIds(Support(kept_ids, offsets), logits.shape[-1], offset=offset)
        counted = None if mask is None else mask.reshape(-1)
        flat = free_rows(logits)
        of_ids, *of_rows = [None if x is None else x.reshape(-1) for x in grads]
        listed = None
        if many is not None and many_row is not None and many_y is not None and of_ids is not None:
            each, total = listed_ids.upstream_of(many, many_row, of_ids, len(ids))
            found = listed_ids.gradient_at(many, many_row, many_y, ids, T, row, (each, total), *of_rows[:2])
            listed = listed_ids.ListedGradient(_local(many, offset), many_row, found, self._K)
            of_ids = total.to(T.dtype)
        g, local = selected((of_ids, *of_rows), ids, counted), ids - offset
        every = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grad = every.view(-1, flat.shape[-1])
        for rows in _blocks(*grad.shape):
            x = take(flat, rows).to(T.dtype)
            kept = None if support is None else support.block(rows.start, x.shape[0], 0, x.shape[1])
            dy = gradient(cap(x, self._softcap), local[rows], T[rows], row.of(rows), g.of(rows), kept)
            if listed is not None:
                dy = listed.put(dy, rows.start, 0)
            dx = uncap(dy, x, self._softcap)
            grad[rows] = dx if counted is None else torch.where(counted[rows, None], dx, 0.0)
        return (every,)

    @classmethod
    def saved_like(cls, call: LogprobCall, result: LogprobResult, wanted: tuple[bool, ...]) -> Saved:
        """Arguments, [N] ids and numbers for each field of the law that the gradient reads, and listed ids [M]."""
        del wanted
        N, ids = math.prod(call.logits.shape[:-1]), flat_ids(call.ids)

        def number(*more: int) -> Tensor:
            return result.logprob.new_empty((N, *more))

        mean = None if result.entropy is None else number()
        kept = (None, None) if call.support is None else (number(), number())
        chosen = ids.new_empty(N, dtype=torch.int64)
        first = None if call.group is None else chosen.new_empty(())
        listed: Saved = (None, None, None)
        if listed_shape(call.ids, call.logits) is not None:
            M = ids.numel()
            listed = chosen.new_empty(M), chosen.new_empty(M), result.logprob.new_empty(M)
        return *_arguments(call), chosen, first, number(), number(), number(), mean, *kept, *listed


def _arguments(call: LogprobCall) -> Saved:
    """The tensors of a call that its gradient reads again."""
    support, T = call.support, call.temperature
    kept = (None, None) if support is None else (support.ids, support.offsets)
    return call.logits, call.mask, T if isinstance(T, Tensor) else None, *kept


def _forward(call: LogprobCall) -> tuple[LogprobResult, Tensor, Tensor | None, SoftmaxStats, Saved]:
    """The result, and what the gradient reads.

    The ids that may be used ([N], -1: none), the first id of this rank where there is a group, the law of every row,
    and listed ids with their logits.
    """
    logits, mask, top_logprobs, support = call.logits, call.mask, call.top_logprobs, call.support
    ids, shape = flat_ids(call.ids), listed_shape(call.ids, logits)
    rows, N = logits.shape[:-1], logits.shape[:-1].numel()
    K = 1 if shape is None else shape[1]
    shard = vocab_parallel.locate(call.group, logits.shape[-1], N, K, logits.device, "ids", "[N, K]")
    if call.validate:
        check_values(call, int(shard.V))
    dtype = accumulator(logits)
    T = temperatures(call.temperature, rows, dtype, logits.device)
    kept = None if support is None else KeptIds(support, shard.V, offset=shard.offset)
    counted, flat, coded = None if mask is None else mask.reshape(-1), free_rows(logits.detach()), None
    if call.logits_scale is not None:
        scale = temperatures(call.logits_scale, rows, dtype, logits.device)  # NaN where it has no meaning
        flat, coded = flat.view(torch.uint8), _Coded(logits.dtype, scale)
    listed, y = None, None
    if shape is None:
        chosen = choose(ids.reshape(-1), counted, shard.V, kept)
    else:
        listed = listed_ids.list_ids(call.ids, N, counted, shard.V)
        y = cap(_at(flat, listed, shard, coded, dtype), call.softcap)
        chosen = Chosen(listed_ids.chosen_of(listed, y, N), counted, listed.invalid)
    row = _statistics(flat, coded, chosen.ids, T, kept, shard, call.softcap, moment=call.entropy)
    values, lse, H, mass = results(row, chosen.ids, chosen.counted)
    if listed is not None and y is not None:
        values = listed_ids.log_probabilities(listed, y, chosen.ids, T, row)
    top_ids, top = _best(flat, coded, chosen, T, call.softcap, top_logprobs)
    result = LogprobResult(
        logprob=shaped(values, ids.shape),
        lse=shaped(lse, rows),
        entropy=None if H is None else shaped(H, rows),
        top_ids=None if top_ids is None else top_ids.view(*rows, top_logprobs),
        top_logprobs=None if top is None else top.view(*rows, top_logprobs),
        log_kept_mass=None if mass is None else shaped(mass, rows),
        invalid=chosen.invalid.view(ids.shape),
    )
    first = shard.offset if isinstance(shard.offset, Tensor) else None
    return result, chosen.ids, first, row, (None, None, None) if listed is None else (listed.ids, listed.row, y)


class _Coded(NamedTuple):
    """What the bytes of 8-bit logits stand for. They are read as bytes: torch indexes no 8-bit floats."""

    kind: torch.dtype
    scale: Tensor  # [N]


def _wide(flat: Tensor, rows: slice, coded: _Coded | None, dtype: torch.dtype) -> Tensor:
    """[n, V] logits of some rows, those of 8 bits times their scale."""
    x = take(flat, rows)
    return x.to(dtype) if coded is None else x.view(coded.kind).to(dtype) * coded.scale[rows, None]


def _local(ids: Tensor, offset: Tensor | int) -> Tensor:
    """Listed ids counted from a rank's first, below 0 where there is none."""
    return torch.where(ids >= 0, ids - offset, -1)


def _at(
    flat: Tensor, listed: listed_ids.ListedIds, shard: vocab_parallel.Shard, coded: _Coded | None, dtype: torch.dtype
) -> Tensor:
    """[M] logits at listed ids, before the cap, any number where there is none; no row is copied."""
    local = _local(listed.ids, shard.offset)
    at = local.clamp(0, flat.shape[-1] - 1)
    if not flat.shape[:-1].numel():
        y = at.new_zeros(at.shape, dtype=dtype)
    else:
        found = flat[(*places(flat, listed.row), at)]
        y = found.to(dtype) if coded is None else found.view(coded.kind).to(dtype) * coded.scale[listed.row]
    if shard.group is not None:
        y = torch.where(at == local, y, 0.0)
        vocab_parallel.add(y, shard.group)  # each id lies on one rank
    return y


def _blocks(N: int, V: int) -> Iterator[slice]:
    step = max(1, _BLOCK // V)
    return (slice(r, min(r + step, N)) for r in range(0, N, step))


def _statistics(
    flat: Tensor, coded: _Coded | None, ids: Tensor, T: Tensor, kept: KeptIds | None, shard: vocab_parallel.Shard,
    softcap: float | None, *, moment: bool,
) -> SoftmaxStats:  # fmt: skip
    """SoftmaxStats of every row, block by block, and of all ranks."""
    (N,), V, local = ids.shape, flat.shape[-1], ids - shard.offset
    parts = []
    for rows in _blocks(N, V) if N else (slice(0, 0),):
        y = cap(_wide(flat, rows, coded, T.dtype), softcap)
        among = None if kept is None else kept.block(rows.start, y.shape[0], 0, V)
        part = partial_softmax(y, local[rows], T[rows], tile_width(V), among, moment=moment)
        parts.append(join(part, T[rows]))
    part = below(parts)
    if shard.group is not None:
        part = join(vocab_parallel.gather(stacked([part]), shard.group), T)
    return softmax_stats(part, T)


def _best(
    flat: Tensor, coded: _Coded | None, chosen: Chosen, T: Tensor, softcap: float | None, n: int
) -> tuple[Tensor | None, Tensor | None]:
    """The n best ids of each row by (logit descending, id ascending) and their log-probabilities."""
    if not n:
        return None, None
    every_id = torch.full((T.shape[0], n), -1, dtype=torch.int64, device=flat.device)
    every_value = T.new_zeros(every_id.shape)
    for rows in _blocks(T.shape[0], flat.shape[-1]):
        x, t = _wide(flat, rows, coded, T.dtype), T[rows]
        best = torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :n]
        y = cap(x, softcap)
        # With the best id as the chosen one, its own log-probability keeps its precision; the others have p <= 1/2.
        row = softmax_stats(join(partial_softmax(y, best[:, 0], t, tile_width(x.shape[1]), None, moment=False), t), t)
        value = (y.gather(1, best) - row.top[:, None]) / t[:, None] - row.log_total[:, None]
        value[:, 0] = row.logprob
        counted = None if chosen.counted is None else chosen.counted[rows, None]
        every_id[rows] = best if counted is None else torch.where(counted, best, -1)
        every_value[rows] = value if counted is None else torch.where(counted, value, 0.0)
    return every_id, every_value
