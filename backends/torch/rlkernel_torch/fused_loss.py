"""The loss and its gradients out of the head in one pass: a block of rows at a time, from logits to dX and dW.

Each block's logits are made once, read for its log-probabilities, put through the coefficient function and turned
into their own gradient: three matmuls in all, against five where logits are made again. It is legal where the
gradient of a token depends on nothing but that token, once the mask and the token weights are known.

Legend: N rows · D hidden · V vocabulary · R rows of a block · r rank of the low-rank addition, or 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel_common import vocab_parallel
from rlkernel_common.loss_batch import Batch
from rlkernel_common.row_selection import results, selected
from rlkernel_common.row_statistics import (
    SoftmaxStats,
    Upstream,
    cap,
    gradient,
    join,
    partial_softmax,
    side_by_side,
    softmax_stats,
    stacked,
    tile_width,
    uncap,
)
from rlkernel_common.sequences import Bag
from rlkernel_common.vocab_parallel import Shard
from rlkernel_core.spec.policy_loss import LossConfig
from rlkernel_torch.head import ROWS, Head, add_product
from rlkernel_torch.loss_coefficients import coefficients


@dataclass
class Gradients:
    """What the pass accumulates; None where an operand is frozen."""

    hidden: Tensor | None  # [N, D] in the dtype of hidden: each row is complete when it is written
    weight: Tensor | None  # [V, D] in the accumulator's dtype: every block adds to it
    bias: Tensor | None  # [V] likewise
    A: Tensor | None  # [r, D] likewise
    B: Tensor | None  # [V, r] likewise


@dataclass(frozen=True)
class FusedLoss:
    """One pass over the rows of a head."""

    head: Head
    ids: Tensor  # [n] in the whole vocabulary; -1: no gradient through the chosen id
    T: Tensor  # [n]
    shard: Shard
    softcap: float | None
    entropy: bool
    batch: Batch  # of the rows that are worked on, flat
    config: LossConfig
    partial: bool  # the gradient of hidden is left as this rank's part

    def run(self, into: Gradients) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies, [N], of every row; gradients are added to `into`."""
        head = self.head
        logprob = self.T.new_zeros(head.hidden.shape[0])
        entropy = torch.zeros_like(logprob) if self.entropy else None
        for rows in head.rows():
            x, logits = head.block(rows), self.T.new_empty(rows.stop - rows.start, head.weight.shape[0])
            row = self._stats(x, logits, rows)
            counted = None if head.counted is None else head.counted[rows]
            values, _, H, _ = results(row, self.ids[rows], counted)
            place = head.place(rows)
            logprob[place] = values
            if entropy is not None and H is not None:
                entropy[place] = H
            at = coefficients(values, H, self.batch.at(rows), self.config, Bag(values.shape[0]))
            g = selected((at.dlogprob, None, at.dentropy, None), self.ids[rows], counted)
            self._add(into, rows, x, logits, row, g)
        if into.A is not None and self.shard.group is not None and self.partial:
            vocab_parallel.add(into.A, self.shard.group)
        return logprob, entropy

    def _add(self, into: Gradients, rows: slice, x: Tensor, logits: Tensor, row: SoftmaxStats, g: Upstream) -> None:
        """Add the gradients that a block's rows make, from its logits and the gradients of its statistics."""
        head, n = self.head, logits.shape[0]
        counted = None if head.counted is None else head.counted[rows, None]
        dx, to_x = torch.zeros_like(x), into.hidden is not None or into.A is not None
        for tile in head.tiles():
            local = self.ids[rows] - self.shard.offset - tile.start
            dy = gradient(cap(logits[:, tile], self.softcap), local, self.T[rows], row, g, None)
            dz = uncap(dy, logits[:, tile], self.softcap) * head.scale
            if counted is not None:
                dz = torch.where(counted, dz, 0.0)
            dz = torch.nn.functional.pad(dz, (0, 0, 0, ROWS - n))
            if to_x:
                add_product(dx, dz, head.tile(tile))
            for total, some in ((into.weight, x[:, : head.D]), (into.B, x[:, head.D :])):
                if total is not None:
                    total[tile].addmm_(dz.T, some)
            if into.bias is not None:
                into.bias[tile] += dz.sum(0)
        if to_x and self.shard.group is not None and not self.partial:
            vocab_parallel.add(dx, self.shard.group)
        if into.hidden is not None:
            into.hidden[head.place(rows)] = head.to_hidden(dx)[:n].to(into.hidden.dtype)
        if into.A is not None:
            head.add_to_factor(into.A, dx, x)

    def _stats(self, x: Tensor, logits: Tensor, rows: slice) -> SoftmaxStats:
        """SoftmaxStats of a block; its logits are written to `logits`."""
        head, parts = self.head, []
        width = tile_width(head.weight.shape[0])
        for tile in head.tiles():
            logits[:, tile] = head.logits(x, tile)[: logits.shape[0]]
            local = self.ids[rows] - self.shard.offset - tile.start
            y = cap(logits[:, tile], self.softcap)
            parts.append(partial_softmax(y, local, self.T[rows], width, None, moment=self.entropy))
        part = join(side_by_side(parts), self.T[rows])
        if self.shard.group is not None:
            part = join(vocab_parallel.gather(stacked([part]), self.shard.group), self.T[rows])
        return softmax_stats(part, self.T[rows])


def workspace(N: int, D: int, V: int, itemsize: int = 4, r: int = 0) -> int:
    """Most extra bytes of one pass, beyond its results and gradients; itemsize is that of the accumulator.

    The weight's gradient in the accumulator's dtype until backward scales it, the logits of a block of rows, a block
    of rows, a tile of the weight and its gradient, two dozen temporaries of a tile of logits, four dozen numbers a row.
    """
    w = tile_width(V)
    tiles = -(-V // w)
    numbers = V * (D + r + 1) + ROWS * V + 3 * (ROWS + w) * (D + r) + ROWS * (24 * w + 16 * tiles)
    if r:  # A twice and its gradient twice; operands before they are joined
        numbers += 4 * r * D + 2 * (ROWS + w) * (D + r)
    return itemsize * numbers + 48 * 8 * (N + ROWS)
