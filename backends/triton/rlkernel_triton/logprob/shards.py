"""Logits whose vocabulary is split over the ranks of a group: the statistics of all ranks.

A rank merges the parts of its rows into one part each, where there are several, and gathers one part of every rank, of
16 bytes a row (32 with a support). `merge_softmax` then merges them in rank order.

Legend: N rows · K listed ids of a row · P parts of a row of this rank · R ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_common import vocab_parallel
from rlkernel_core.spec.listed_ids import listed_shape
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.merge_softmax import WARPS, merge_tiles, rows_per_program
from rlkernel_triton.common.softmax import PLANES
from rlkernel_triton.common.softmax_rows import RowShape
from rlkernel_triton.launchers import Launcher


class Shards:
    """Calls of one shape.

    Args:
        launcher: what binds the kernel.
        call: of this rank, of which no value is read.
        rows: of the call.
        P: parts of a row of this rank.
        group: the ranks.
    """

    def __init__(self, launcher: Launcher, call: LogprobCall, rows: RowShape, P: int, group: dist.ProcessGroup) -> None:
        self.R, self._group, self._device = group.size(), group, call.logits.device
        self._K, support = (listed_shape(call.ids, call.logits) or (1, 1))[1], rows.kept_row_bytes is not None
        self._N, self._V, self._planes, self._merge = rows.N, rows.V, PLANES[support], None
        if P > 1 and rows.N:
            width = triton.next_power_of_2(P)
            block = rows_per_program(width)
            self._grid = (triton.cdiv(rows.N, block), 1, 1)
            self._merge = launcher.bind(
                merge_tiles, num_warps=WARPS, first=0, n=rows.N, N=rows.N, P=P, per=P, pieces=1, HAS_INDEX=False,
                SUPPORT=support, MOMENT=call.entropy, ROWS=block, WIDTH=width,
            )  # fmt: skip

    def locate(self) -> vocab_parallel.Shard:
        """Where this rank's ids stand, from three integers of every rank.

        Raises:
            ArgumentError: they have different numbers of rows or of listed ids; on a CPU alone.
        """
        return vocab_parallel.locate(self._group, self._V, self._N, self._K, self._device, "ids", "[N, K]")

    def add(self, y: Tensor) -> None:
        """Sum over the ranks, in place: logits of listed ids, each of which lies on one rank and is 0 on the others."""
        vocab_parallel.add(y, self._group)

    def gathered(self, parts: Tensor) -> Tensor:
        """[planes, N, R] statistics of all ranks from the [planes, N, P] of this one."""
        own = parts
        if self._merge is not None:
            own = torch.empty(self._planes * self._N, dtype=torch.float32, device=self._device)
            self._merge(self._grid, parts, parts, parts, own)
        every = vocab_parallel.gathered(own.view(self._planes, self._N), self._group)
        return every.permute(1, 2, 0).contiguous()
