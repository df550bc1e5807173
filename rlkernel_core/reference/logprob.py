"""logprob@1 in plain torch: rows are swept in blocks, so the only [N, V] tensor made is the gradient.

Every row goes through `row_statistics` with tiles that depend on V alone; its bits depend on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlkernel_core.reference.kept_ids import KeptIds
from rlkernel_core.reference.row_selection import (
    Chosen,
    check_values,
    choose,
    refuse_second_derivative,
    results,
    selected,
)
from rlkernel_core.reference.row_statistics import (
    Law,
    accumulator,
    cap,
    gradient,
    join,
    law,
    sweep,
    temperatures,
    tile_width,
    uncap,
)
from rlkernel_core.reference.row_views import free_rows, take
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult

# Logits of a block of rows: 16 MiB in fp32. Speed only; bits do not depend on it.
_BLOCK = 1 << 22


def logprob(call: LogprobCall) -> LogprobResult:
    """The operator's contract is `rlkernel_core.spec.logprob.logprob`.

    Memory beyond results and gradient: some blocks of 16 MiB (of one row where a row is larger), a few numbers per
    row and per kept id.
    """
    logits, ids, mask, top_logprobs, support = call.logits, call.ids, call.mask, call.top_logprobs, call.support
    rows, V = ids.shape, logits.shape[-1]
    if call.validate:
        check_values(ids, mask, V, call.temperature, support)
    dtype = accumulator(logits)
    T = temperatures(call.temperature, rows, dtype, logits.device)
    kept = None if support is None else KeptIds(support, V)
    chosen = choose(ids.reshape(-1), None if mask is None else mask.reshape(-1), V, kept)
    flat = free_rows(logits)
    out = _Logprob.apply(flat, chosen.ids, T, chosen.counted, kept, call.softcap, call.entropy)  # type: ignore[no-untyped-call]
    values, lse, H, mass = out
    top_ids, top = _best(flat.detach(), chosen, T, call.softcap, top_logprobs)
    return LogprobResult(
        logprob=values.view(rows),
        lse=lse.view(rows),
        entropy=None if H is None else H.view(rows),
        top_ids=None if top_ids is None else top_ids.view(*rows, top_logprobs),
        top_logprobs=None if top is None else top.view(*rows, top_logprobs),
        log_kept_mass=None if mass is None else mass.view(rows),
        invalid=chosen.invalid.view(rows),
    )


def _blocks(N: int, V: int) -> Iterator[slice]:
    step = max(1, _BLOCK // V)
    return (slice(r, min(r + step, N)) for r in range(0, N, step))


def _statistics(
    flat: Tensor, ids: Tensor, T: Tensor, kept: KeptIds | None, softcap: float | None, *, moment: bool
) -> Law:
    """Law of every row, block by block."""
    N, V = ids.shape[0], flat.shape[-1]
    laws = []
    for rows in _blocks(N, V) if N else (slice(0, 0),):
        y = cap(take(flat, rows).to(T.dtype), softcap)
        among = None if kept is None else kept.block(rows.start, y.shape[0], 0, V)
        part = sweep(y, ids[rows], T[rows], tile_width(V), among, moment=moment)
        laws.append(law(join(part, T[rows]), T[rows]))
    return Law._make(None if column[0] is None else torch.cat(column) for column in zip(*laws, strict=True))


class _Logprob(torch.autograd.Function):
    """Log-probability, lse, entropy and kept mass of [N, V] logits, with their analytic gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,  # [N, V], or [..., V] of any layout
        ids: Tensor,  # [N]; -1: no gradient through the chosen id
        T: Tensor,  # [N]
        counted: Tensor | None,  # [N]
        kept: KeptIds | None,
        softcap: float | None,
        entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        row = _statistics(flat, ids, T, kept, softcap, moment=entropy)
        ctx.save_for_backward(flat, ids, T, counted, *row)
        ctx.kept, ctx.softcap = kept, softcap
        ctx.set_materialize_grads(False)
        return results(row, ids, counted)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("logprob")
        flat, ids, T, counted, *saved = ctx.saved_tensors
        row, g = Law(*saved), selected(upstream, ids, counted)
        every = torch.empty_like(flat, memory_format=torch.contiguous_format)
        grad = every.view(-1, flat.shape[-1])
        for rows in _blocks(*grad.shape):
            x = take(flat, rows).to(T.dtype)
            kept = None if ctx.kept is None else ctx.kept.block(rows.start, x.shape[0], 0, x.shape[1])
            dy = gradient(cap(x, ctx.softcap), ids[rows], T[rows], row.of(rows), g.of(rows), kept)
            dx = uncap(dy, x, ctx.softcap)
            grad[rows] = dx if counted is None else torch.where(counted[rows, None], dx, 0.0)
        return every, None, None, None, None, None, None


def _best(
    flat: Tensor, chosen: Chosen, T: Tensor, softcap: float | None, n: int
) -> tuple[Tensor | None, Tensor | None]:
    """The n best ids of each row by (logit descending, id ascending) and their log-probabilities."""
    if not n:
        return None, None
    every_id = torch.full((T.shape[0], n), -1, dtype=torch.int64, device=flat.device)
    every_value = T.new_zeros(every_id.shape)
    for rows in _blocks(T.shape[0], flat.shape[-1]):
        x, t = take(flat, rows).to(T.dtype), T[rows]
        best = torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :n]
        y = cap(x, softcap)
        # With the best id as the chosen one, its own log-probability keeps its precision; the others have p <= 1/2.
        row = law(join(sweep(y, best[:, 0], t, tile_width(x.shape[1]), None, moment=False), t), t)
        value = (y.gather(1, best) - row.top[:, None]) / t[:, None] - row.log_total[:, None]
        value[:, 0] = row.logprob
        counted = None if chosen.counted is None else chosen.counted[rows, None]
        every_id[rows] = best if counted is None else torch.where(counted, best, -1)
        every_value[rows] = value if counted is None else torch.where(counted, value, 0.0)
    return every_id, every_value
