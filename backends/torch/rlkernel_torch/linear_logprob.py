"""linear_logprob@1 in plain torch: tiles of logits are made, swept and forgotten.

The backward pass makes each tile of logits again, or reads it where it was saved, and sweeps twice: over the vocabulary
for each block of rows, which gives dX, then over the rows for each tile of the vocabulary, which gives dW and dbias. So
both accumulate in fp32 without a buffer that grows with N or V. It costs five matmuls with "recompute", three with
"save", fewer with frozen operands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_common import vocab_parallel
from rlkernel_common.kept_ids import KeptIds, positions, readable
from rlkernel_common.row_selection import choose, results, selected
from rlkernel_common.row_statistics import (
    Law,
    Part,
    Sums,
    Upstream,
    accumulator,
    cap,
    gradient,
    join,
    law,
    side_by_side,
    sweep,
    temperatures,
    tile_width,
    uncap,
)
from rlkernel_common.row_views import free_rows
from rlkernel_core.errors import ArgumentError
from rlkernel_core.gradients import refuse_second_derivative
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_torch.head import ROWS, Head, add_product


def linear_logprob(call: LinearLogprobCall) -> LogprobResult:
    """The operator's contract is `rlkernel_core.spec.linear_logprob.LinearLogprobCall`.

    `workspace` states the extra memory. Masked rows are skipped where the mask can be read without waiting for a
    device, that is on a CPU; elsewhere they are computed and left out.
    """
    hidden, weight, ids, mask, support, group = call.hidden, call.weight, call.ids, call.mask, call.support, call.group
    rows, N, (V, D) = ids.shape, ids.numel(), weight.shape
    dtype = accumulator(hidden, weight, call.bias)
    mask = None if mask is None else mask.reshape(-1)
    nnz = 0 if support is None else support.ids.shape[0]
    ranks = 1 if group is None else group.size()
    mode = _mode(call.backward, call.max_workspace_bytes, (N, D, V, dtype.itemsize, nnz, ranks))
    shard = vocab_parallel.locate(group, V, N, D, hidden.device)
    kept = None if support is None else KeptIds(support, shard.V)
    chosen = choose(ids.reshape(-1), mask, shard.V, kept)

    index = mask.nonzero()[:, 0] if mask is not None and readable(mask) else None
    T = temperatures(call.temperature, rows, dtype, hidden.device)
    used, counted = chosen.ids, chosen.counted
    if index is not None:  # from here on only the rows that count
        used, counted, T = used[index], None, T[index]
    if support is not None:
        kept = KeptIds(support, shard.V, positions(index, N), shard.offset)
    operands = (free_rows(hidden), weight, call.bias)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    out = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        *operands,
        used,
        T,
        counted,
        index,
        kept,
        shard,
        call.softcap,
        call.logit_scale,
        call.entropy,
        wanted and mode == "save",
    )
    values, lse, H, mass = out
    return LogprobResult(
        logprob=values.view(rows),
        lse=lse.view(rows),
        entropy=None if H is None else H.view(rows),
        log_kept_mass=None if mass is None else mass.view(rows),
        invalid=chosen.invalid.view(rows),
    )


def workspace(backward: str, N: int, D: int, V: int, itemsize: int = 4, nnz: int = 0, ranks: int = 1) -> int:
    """Most extra bytes of a call, beyond its results and gradients.

    A block of rows, a tile of the weight and its gradient, some temporaries of a tile of logits, a few numbers per row
    and rank, six per kept id; and, for "save", the logits of all rows.

    Args:
        backward: "recompute" or "save".
        N: rows.
        D: hidden size.
        V: size of the vocabulary, or of this rank's shard.
        itemsize: of the accumulator: 4, or 8 for float64.
        nnz: kept ids of the support.
        ranks: of the group.
    """
    w = tile_width(V)
    operands = 3 * (ROWS + w) * D
    logits = ROWS * (16 * w + 16 * -(-V // w))
    saved = N * V if backward == "save" else 0
    return itemsize * (operands + logits + saved) + 8 * (16 + 8 * ranks) * (N + ROWS) + 6 * 8 * nnz


def _mode(backward: str, limit: int | None, size: tuple[int, int, int, int, int, int]) -> str:
    """The mode that runs, within the limit."""
    if limit is None:
        return "recompute" if backward == "auto" else backward
    for mode in ("save", "recompute") if backward == "auto" else (backward,):
        least = workspace(mode, *size)
        if least <= limit:
            return mode
    remedy = f"Pass at least {least}" + (", or backward='recompute'." if backward == "save" else ", or None.")
    raise ArgumentError("max_workspace_bytes", limit, f"is below what backward={mode!r} needs here, {least}", remedy)


class _LinearLogprob(torch.autograd.Function):
    """Log-probability, lse, entropy and kept mass from the operands of the head, with their analytic gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, D], or [..., D] of any layout
        weight: Tensor,  # [V, D]
        bias: Tensor | None,  # [V]
        ids: Tensor,  # [n] in the whole vocabulary; -1: no gradient through the chosen id
        T: Tensor,  # [n]
        counted: Tensor | None,  # [n]
        index: Tensor | None,  # [n] rows that are worked on
        kept: KeptIds | None,
        shard: vocab_parallel.Shard,
        softcap: float | None,
        scale: float,
        entropy: bool,
        save: bool,
    ) -> tuple[Tensor | None, ...]:
        head = Head(hidden, weight, bias, scale, index, counted, T.dtype)
        saved = T.new_empty(head.n, weight.shape[0]) if save else None
        row = _statistics(head, ids, T, kept, shard, softcap, saved, moment=entropy)
        ctx.save_for_backward(hidden, weight, bias, ids, T, counted, index, saved, *row)
        ctx.kept, ctx.shard, ctx.softcap, ctx.scale = kept, shard, softcap, scale
        ctx.set_materialize_grads(False)
        out = results(row, ids, counted)
        if index is None:
            return out
        every = (None if x is None else x.new_zeros(hidden.shape[:-1].numel()).index_copy_(0, index, x) for x in out)
        return tuple(every)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_logprob")
        hidden, weight, bias, ids, T, counted, index, saved, *row = ctx.saved_tensors
        if index is not None:
            upstream = tuple(None if g is None else g[index] for g in upstream)
        back = _Back(
            head=Head(hidden, weight, bias, ctx.scale, index, counted, T.dtype),
            ids=ids - ctx.shard.offset,
            T=T,
            kept=ctx.kept,
            softcap=ctx.softcap,
            saved=saved,
            row=Law(*row),
            upstream=selected(upstream, ids, counted),
        )
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        d_hidden = back.hidden(ctx.shard.group) if of_hidden else None
        d_weight, d_bias = back.weight_and_bias(of_weight=of_weight, of_bias=of_bias)
        return d_hidden, d_weight, d_bias, *(None,) * 10


def _statistics(
    head: Head,
    ids: Tensor,
    T: Tensor,
    kept: KeptIds | None,
    shard: vocab_parallel.Shard,
    softcap: float | None,
    saved: Tensor | None,
    *,
    moment: bool,
) -> Law:
    """Law of every row, from tiles, blocks of rows and ranks."""
    local = ids - shard.offset
    width = tile_width(head.weight.shape[0])
    blocks = []
    for rows in head.rows():
        x, n, parts = head.block(rows), rows.stop - rows.start, []
        for tile in head.tiles():
            logits = head.logits(x, tile)[:n]
            if saved is not None:
                saved[rows, tile] = logits
            among = None if kept is None else kept.block(rows.start, n, tile.start, logits.shape[1])
            y = cap(logits, softcap)
            parts.append(sweep(y, local[rows] - tile.start, T[rows], width, among, moment=moment))
        blocks.append(join(side_by_side(parts), T[rows]))
    part = side_by_side(blocks) if blocks else _no_rows(T, kept, moment=moment)
    if shard.group is not None:
        part = join(vocab_parallel.gather(part, shard.group), T)
    return law(part, T)


def _no_rows(T: Tensor, kept: KeptIds | None, *, moment: bool) -> Part:
    sums = Sums(T, T, T if moment else None)
    return Part(T, sums, None if kept is None else sums)


class _Back(NamedTuple):
    """The way back from row gradients to the operands."""

    head: Head
    ids: Tensor  # [n] counted from the first column of this shard
    T: Tensor  # [n]
    kept: KeptIds | None
    softcap: float | None
    saved: Tensor | None  # [n, V]
    row: Law  # [n]
    upstream: Upstream  # [n]

    def hidden(self, group: dist.ProcessGroup | None) -> Tensor:
        """[..., D], zeros in the rows that were left out."""
        head = self.head
        every = torch.zeros_like(head.hidden, memory_format=torch.contiguous_format)
        grad = every.view(-1, every.shape[-1])
        for rows in head.rows():
            x = head.block(rows)
            dx = torch.zeros_like(x)
            for tile in head.tiles():
                add_product(dx, self._logits(x, rows, tile), head.tile(tile))
            if group is not None:
                vocab_parallel.add(dx, group)
            done = dx[: rows.stop - rows.start].to(grad.dtype)
            if head.active is None:
                grad[rows] = done
            else:
                grad.index_copy_(0, head.active[rows], done)
        return every

    def weight_and_bias(self, *, of_weight: bool, of_bias: bool) -> tuple[Tensor | None, Tensor | None]:
        """[V, D] and [V], each only where wanted."""
        head = self.head
        d_weight = torch.empty_like(head.weight, memory_format=torch.contiguous_format) if of_weight else None
        d_bias = torch.empty_like(head.bias) if of_bias and head.bias is not None else None
        for tile in head.tiles() if of_weight or of_bias else ():
            dw = self.T.new_zeros(tile.stop - tile.start, head.hidden.shape[-1])
            db = self.T.new_zeros(tile.stop - tile.start)
            for rows in head.rows():
                x = head.block(rows)
                dz = self._logits(x, rows, tile)
                if of_weight:
                    dw.addmm_(dz.T, x)
                db += dz.sum(0)
            if d_weight is not None:
                d_weight[tile] = dw
            if d_bias is not None:
                d_bias[tile] = db
        return d_weight, d_bias

    def _logits(self, x: Tensor, rows: slice, tile: slice) -> Tensor:
        """[R, w] gradient with respect to hidden @ weight.T, zeros below the last row."""
        n = rows.stop - rows.start
        logits = self.head.logits(x, tile)[:n] if self.saved is None else self.saved[rows, tile]
        among = None if self.kept is None else self.kept.block(rows.start, n, tile.start, logits.shape[1])
        row, upstream = self.row.of(rows), self.upstream.of(rows)
        dy = gradient(cap(logits, self.softcap), self.ids[rows] - tile.start, self.T[rows], row, upstream, among)
        dz = uncap(dy, logits, self.softcap) * self.head.scale
        if self.head.counted is not None:
            dz = torch.where(self.head.counted[rows, None], dz, 0.0)
        return torch.nn.functional.pad(dz, (0, 0, 0, ROWS - n))
