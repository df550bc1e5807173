"""linear_logprob@1 in plain torch: tiles of logits are made, read and forgotten.

The backward pass makes each tile of logits again, or reads it where it was saved, twice: over the vocabulary
for each block of rows, which gives dX, then over the rows for each tile of the vocabulary, which gives dW and dbias. So
both accumulate in fp32 without a buffer that grows with N or V. It costs five matmuls with "recompute", three with
"save", fewer with frozen operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_common import listed_ids, vocab_parallel
from rlkernel_common.kept_ids import KeptIds, positions, readable
from rlkernel_common.row_selection import Chosen, choose, results, selected
from rlkernel_common.row_statistics import (
    Part,
    SoftmaxStats,
    Sums,
    Upstream,
    accumulator,
    below,
    cap,
    gradient,
    join,
    partial_softmax,
    side_by_side,
    softmax_stats,
    stacked,
    temperatures,
    tile_width,
    tree_sum,
    uncap,
)
from rlkernel_common.row_views import free_rows, shaped
from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.listed_ids import flat_ids, ids_per_row, listed_shape
from rlkernel_core.spec.logprob import LogprobResult, Support
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_torch.head import ROWS, Head, add_product, readable_head, stored
from rlkernel_torch.linear_logprob_workspace import mode


def linear_logprob(call: LinearLogprobCall) -> LogprobResult:
    """The operator's contract is `rlkernel_core.spec.linear_logprob.LinearLogprobCall`.

    `workspace` states the extra memory. Masked rows are skipped where the mask can be read without waiting for a
    device, that is on a CPU; elsewhere they are computed and left out.
    """
    if gradient_wanted("linear_logprob", call):
        return LinearLogprobPair(call)(call)
    mode(call)
    return _forward(call, save=False)[0]


class LinearLogprobPair(Pair[LinearLogprobCall, LogprobResult]):
    """Log-probability, lse, entropy and kept mass from the operands of the head, with their analytic gradients."""

    op = "linear_logprob"

    def __init__(self, call: LinearLogprobCall) -> None:
        """Keep the numbers of calls of this shape."""
        super().__init__(call)
        self._T = call.temperature if isinstance(call.temperature, float | int) else None
        self._softcap, self._scale, self._group = call.softcap, call.logit_scale, call.group
        self._partial = call.partial_grad
        self._quantized = None if isinstance(call.weight, Tensor) else call.weight.flatten()[1]
        self._lora_scale = 0.0 if call.lora is None else call.lora.scale
        self._rows, self._K = call.hidden.shape[:-1], ids_per_row(call.ids, call.hidden)
        self._save = mode(call) == "save"

    @classmethod
    def inputs(cls, call: LinearLogprobCall) -> Saved:
        """Hidden states, weight, bias, and A and B of LoRA."""
        return call.hidden, stored(call.weight), call.bias, *matrices(call)

    def forward(self, call: LinearLogprobCall) -> tuple[LogprobResult, Saved]:
        """The result, and the law of every row; with "save" its logits."""
        return _forward(call, save=self._save)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """One read of the logits for dX and dA, one for dW, dbias and dB."""
        hidden, weight, bias, A, B, mask, each_T, kept_ids, offsets, ids, first, logits, *numbers = saved
        value, top, log_total, mean, kept_top, kept_log_total, many, many_row, many_y, *parts = numbers
        head_weight: Tensor | QuantTensor | None = weight
        if self._quantized is not None:
            head_weight = readable_head(QuantTensor.unflatten(parts, self._quantized))  # type: ignore[arg-type]  # all are there
        if hidden is None or head_weight is None or ids is None or value is None or top is None or log_total is None:
            raise RLKernelError("linear_logprob: its backward pass got less than its forward pass saved")
        row = SoftmaxStats(value, value, None, None, top, log_total, mean, kept_top, kept_log_total)  # lse is unread
        T = temperatures(each_T if self._T is None else self._T, self._rows, value.dtype, value.device)  # type: ignore[arg-type]
        up = [None if g is None else g.reshape(-1) for g in grads]
        index, counted = _worked_on(None if mask is None else mask.reshape(-1))
        offset, listed = 0 if first is None else first, None
        if many is not None and many_row is not None and many_y is not None and up[0] is not None:
            each, total = listed_ids.upstream_of(many, many_row, up[0], len(ids))
            found = listed_ids.gradient_at(many, many_row, many_y, ids, T, row, (each, total), up[1], up[2])
            local, position = torch.where(many >= 0, many - offset, -1), positions(index, len(ids))
            listed, up[0] = listed_ids.ListedGradient(local, many_row, found, self._K, position), total.to(T.dtype)
        if index is not None:
            row, up = SoftmaxStats._make(_some(row, index)), _some(up, index)
            ids, T = ids[index], T[index]
        kept = None
        if kept_ids is not None and offsets is not None:  # which of them lie outside was told in the forward pass
            support, V = Support(kept_ids, offsets), head_weight.shape[0]
            kept = KeptIds(support, V, positions(index, self._rows.numel()), offset)
        upstream = selected(tuple(up), ids, counted)
        lora = None if A is None or B is None else LoRA(A, B, self._lora_scale)
        head = Head(free_rows(hidden), head_weight, bias, self._scale, index, counted, T.dtype, lora=lora)
        back = _Back(
            head=head,
            ids=ids - offset,
            T=T,
            kept=kept,
            softcap=self._softcap,
            saved=logits,
            row=row,
            upstream=upstream,
            listed=listed,
        )
        of_hidden, of_weight, of_bias, of_A, of_B = self.wanted
        d_hidden, d_A = back.hidden_and_factor(self._group, partial=self._partial, of_hidden=of_hidden, of_factor=of_A)
        d_weight, d_bias, d_B = back.rows_of_head(of_weight=of_weight, of_bias=of_bias, of_lora=of_B)
        return None if d_hidden is None else d_hidden.view(hidden.shape), d_weight, d_bias, d_A, d_B

    @classmethod
    def saved_like(cls, call: LinearLogprobCall, result: LogprobResult, wanted: tuple[bool, ...]) -> Saved:
        """Operands; [N] ids and numbers for each field of the law that the gradient reads; logits; [M] ids."""
        del wanted
        N, like, given = math.prod(call.hidden.shape[:-1]), result.logprob, flat_ids(call.ids)
        ids = given.new_empty(N, dtype=torch.int64)
        first = None if call.group is None else given.new_empty((), dtype=torch.int64)
        logits = like.new_empty(N, call.weight.shape[0]) if mode(call) == "save" else None
        there = (True, True, True, call.entropy, *[call.support is not None] * 2)
        listed: Saved = (None, None, None)
        if listed_shape(call.ids, call.hidden) is not None:
            M = given.numel()
            listed = ids.new_empty(M), ids.new_empty(M), like.new_empty(M)
        row = [like.new_empty(N) if x else None for x in there]
        return *_arguments(call), ids, first, logits, *row, *listed, *_parts(call.weight)


def _arguments(call: LinearLogprobCall) -> Saved:
    """The tensors of a call that its gradient reads again."""
    support, T = call.support, call.temperature
    kept = (None, None) if support is None else (support.ids, support.offsets)
    given = call.hidden, stored(call.weight), call.bias, *matrices(call)
    return *given, call.mask, T if isinstance(T, Tensor) else None, *kept


def _parts(weight: Tensor | QuantTensor) -> list[Tensor]:
    return [] if isinstance(weight, Tensor) else weight.flatten()[0]


def matrices(call: LinearLogprobCall | LinearPolicyLossCall) -> tuple[Tensor | None, Tensor | None]:
    """A and B of LoRA."""
    return (None, None) if call.lora is None else (call.lora.A, call.lora.B)


def _worked_on(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """[n] rows that are worked on, None for all; and [N], which of all count, None for all that are worked on."""
    if mask is not None and readable(mask):
        return mask.nonzero()[:, 0], None
    return None, mask


def _some(every: Iterable[Tensor | None], index: Tensor) -> list[Tensor | None]:
    return [None if x is None else x[index] for x in every]


def _everywhere(some: Iterable[Tensor | None], index: Tensor | None, N: int) -> list[Tensor | None]:
    """Numbers of all N rows from those that are worked on, 0 elsewhere."""
    if index is None:
        return list(some)
    return [None if x is None else x.new_zeros(N, *x.shape[1:]).index_copy_(0, index, x) for x in some]


@torch.no_grad()
def _forward(call: LinearLogprobCall, *, save: bool) -> tuple[LogprobResult, Saved]:
    """The result, and what the gradient reads."""
    rows, (V, D), given = call.hidden.shape[:-1], call.weight.shape, flat_ids(call.ids)
    N = rows.numel()
    dtype = accumulator(call.hidden, stored(call.weight), call.bias)
    shard = vocab_parallel.locate(call.group, V, N, D, call.hidden.device)
    mask = None if call.mask is None else call.mask.reshape(-1)
    index, counted = _worked_on(mask)
    count, piece = vocab_parallel.pieces(V, 1 if call.group is None else call.group.size())
    x, weight = free_rows(call.hidden), readable_head(call.weight)
    head = Head(x, weight, call.bias, call.logit_scale, index, counted, dtype, piece, call.lora)
    listed, y = None, None
    if listed_shape(call.ids, call.hidden) is None:
        every_kept = None if call.support is None else KeptIds(call.support, shard.V)
        chosen = choose(given.reshape(-1), mask, shard.V, every_kept)
    else:
        listed = listed_ids.list_ids(call.ids, N, mask, shard.V)
        y = cap(_at(head, listed, shard), call.softcap)
        chosen = Chosen(listed_ids.chosen_of(listed, y, N), mask, listed.invalid)
    every_T = temperatures(call.temperature, rows, dtype, call.hidden.device)
    T, ids, kept = every_T, chosen.ids, None
    if index is not None:  # from here on only the rows that count
        ids, T = ids[index], T[index]
    if call.support is not None:
        kept = KeptIds(call.support, shard.V, positions(index, N), shard.offset)
    saved = T.new_empty(N, V) if save else None
    row = _statistics(head, ids, T, kept, shard, call.softcap, saved, count, moment=call.entropy)
    values, lse, H, mass = _everywhere(results(row, ids, counted), index, N)
    law_rows = (row.logprob, row.top, row.log_total, row.mean, row.kept_top, row.kept_log_total)
    of_rows = _everywhere(law_rows, index, N)
    if listed is not None and y is not None:
        value, top, log_total, *_ = of_rows
        every = SoftmaxStats(value, value, None, None, top, log_total, None, None, None)  # type: ignore[arg-type]
        values = listed_ids.log_probabilities(listed, y, chosen.ids, every_T, every)
    result = LogprobResult(
        logprob=shaped(values, given.shape),  # type: ignore[arg-type]  # these two are always there
        lse=shaped(lse, rows),  # type: ignore[arg-type]
        entropy=None if H is None else shaped(H, rows),
        log_kept_mass=None if mass is None else shaped(mass, rows),
        invalid=chosen.invalid.view(given.shape),
    )
    first = shard.offset if isinstance(shard.offset, Tensor) else None
    of_lists = (None, None, None) if listed is None else (listed.ids, listed.row, y)
    return result, (*_arguments(call), chosen.ids, first, saved, *of_rows, *of_lists, *_parts(call.weight))


def _at(head: Head, listed: listed_ids.ListedIds, shard: vocab_parallel.Shard) -> Tensor:
    """[M] logits at listed ids, before the cap; 0 where there is none."""
    local = listed.ids - shard.offset
    here = (listed.ids >= 0) & (local >= 0) & (local < head.weight.shape[0])
    M = here.shape[0] if head.hidden.shape[:-1].numel() else 0
    y = torch.zeros(here.shape, dtype=head.dtype, device=here.device)
    for some in (slice(e, min(e + ROWS, M)) for e in range(0, M, ROWS)):
        x, at = head.at(listed.row[some])[: some.stop - some.start], torch.where(here[some], local[some], 0)
        one = tree_sum(x * head.tile(at))
        if head.bias is not None:
            one += head.bias[at]
        y[some] = torch.where(here[some], one * head.scale, 0.0)
    if shard.group is not None:
        vocab_parallel.add(y, shard.group)  # each id lies on one rank
    return y


def _statistics(
    head: Head,
    ids: Tensor,
    T: Tensor,
    kept: KeptIds | None,
    shard: vocab_parallel.Shard,
    softcap: float | None,
    saved: Tensor | None,
    pieces: int,
    *,
    moment: bool,
) -> SoftmaxStats:
    """SoftmaxStats of every row, from tiles, pieces of the vocabulary, blocks of rows and ranks."""
    local = ids - shard.offset
    width = tile_width(head.weight.shape[0])
    blocks = []
    for rows in head.rows():
        x, n = head.block(rows), rows.stop - rows.start
        parts: list[list[Part]] = [[] for _ in range(pieces)]
        for tile in head.tiles():
            logits = head.logits(x, tile)[:n]
            if saved is not None:
                saved[head.place(rows), tile] = logits
            among = None if kept is None else kept.block(rows.start, n, tile.start, logits.shape[1])
            y = cap(logits, softcap)
            found = partial_softmax(y, local[rows] - tile.start, T[rows], width, among, moment=moment)
            parts[tile.start // head.piece].append(found)
        none = _nothing(T[rows], kept, moment=moment)
        each = (join(side_by_side(of_piece), T[rows]) if of_piece else none for of_piece in parts)
        blocks.append(stacked(list(each)))
    part = below(blocks) if blocks else stacked([_nothing(T, kept, moment=moment)] * pieces)
    if shard.group is not None:
        part = vocab_parallel.gather(part, shard.group)
    return softmax_stats(join(part, T), T)


def _nothing(T: Tensor, kept: KeptIds | None, *, moment: bool) -> Part:
    """Statistics of no ids, [n]."""
    top, zero = torch.full_like(T, -torch.inf), torch.zeros_like(T)
    sums = Sums(top, zero, zero if moment else None)
    return Part(top, sums, None if kept is None else sums)


class _Back(NamedTuple):
    """The way back from row gradients to the operands."""

    head: Head
    ids: Tensor  # [n] counted from the first column of this shard
    T: Tensor  # [n]
    kept: KeptIds | None
    softcap: float | None
    saved: Tensor | None  # [N, V]
    row: SoftmaxStats  # [n]
    upstream: Upstream  # [n]
    listed: listed_ids.ListedGradient | None  # at ids counted as above

    def hidden_and_factor(
        self, group: dist.ProcessGroup | None, *, partial: bool, of_hidden: bool, of_factor: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """[..., D], zeros in the rows that were left out, and [r, D] of A; each only where wanted.

        Both are sums over the ranks, but [..., D] where it is to be this rank's part.
        """
        head, lora = self.head, self.head.lora
        every = torch.zeros_like(head.hidden, memory_format=torch.contiguous_format) if of_hidden else None
        total = None if lora is None or not of_factor else self.T.new_zeros(lora.A.shape)
        for rows in head.rows() if of_hidden or of_factor else ():
            x = head.block(rows)
            dx = torch.zeros_like(x)
            for tile in head.tiles():
                add_product(dx, self._logits(x, rows, tile), head.tile(tile))
            if group is not None and not partial:
                vocab_parallel.add(dx, group)
            if every is not None:
                grad, done = every.view(-1, head.D), head.to_hidden(dx)[: rows.stop - rows.start].to(every.dtype)
                if head.active is None:
                    grad[rows] = done
                else:
                    grad.index_copy_(0, head.active[rows], done)
            if total is not None:
                head.add_to_factor(total, dx, x)
        if total is not None and group is not None and partial:
            vocab_parallel.add(total, group)
        return every, None if total is None or lora is None else total.to(lora.A.dtype)

    def rows_of_head(
        self, *, of_weight: bool, of_bias: bool, of_lora: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """[V, D], [V] and [V, r], each only where wanted."""
        head, D = self.head, self.head.D
        wanted = (
            (stored(head.weight), of_weight),
            (head.bias, of_bias),
            (None if head.lora is None else head.lora.B, of_lora),
        )
        d_weight, d_bias, d_lora = [
            torch.empty_like(x, memory_format=torch.contiguous_format) if wants and x is not None else None
            for x, wants in wanted
        ]
        columns = slice(0 if of_weight else D, head.width if of_lora else D)
        for tile in head.tiles() if of_weight or of_bias or of_lora else ():
            dw = self.T.new_zeros(tile.stop - tile.start, columns.stop - columns.start)
            db = self.T.new_zeros(tile.stop - tile.start)
            for rows in head.rows():
                x = head.block(rows)
                dz = self._logits(x, rows, tile)
                if of_weight or of_lora:
                    dw.addmm_(dz.T, x[:, columns])
                db += dz.sum(0)
            if d_weight is not None:
                d_weight[tile] = dw[:, :D]
            if d_bias is not None:
                d_bias[tile] = db
            if d_lora is not None:
                d_lora[tile] = dw[:, D - columns.start :]
        return d_weight, d_bias, d_lora

    def _logits(self, x: Tensor, rows: slice, tile: slice) -> Tensor:
        """[R, w] gradient with respect to hidden @ weight.T, zeros below the last row."""
        n = rows.stop - rows.start
        logits = self.head.logits(x, tile)[:n] if self.saved is None else self.saved[self.head.place(rows), tile]
        among = None if self.kept is None else self.kept.block(rows.start, n, tile.start, logits.shape[1])
        row, upstream = self.row.of(rows), self.upstream.of(rows)
        dy = gradient(cap(logits, self.softcap), self.ids[rows] - tile.start, self.T[rows], row, upstream, among)
        if self.listed is not None:
            dy = self.listed.put(dy, rows.start, tile.start)
        dz = uncap(dy, logits, self.softcap) * self.head.scale
        if self.head.counted is not None:
            dz = torch.where(self.head.counted[rows, None], dz, 0.0)
        return torch.nn.functional.pad(dz, (0, 0, 0, ROWS - n))
