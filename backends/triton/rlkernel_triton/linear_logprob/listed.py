"""Several ids of each row: the launch that multiplies hidden states with the listed rows of the head.

Legend: N rows · D hidden · V vocabulary, or this rank's shard · K listed ids of a row · M those of all rows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel_core.spec.linear_logprob import LinearLogprobCall, stored_head
from rlkernel_core.spec.listed_ids import is_ragged, listed_shape
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.listed_rows import ListedRows, Lists, local_ids
from rlkernel_triton.common.row_layout import layout_of
from rlkernel_triton.common.softmax_rows import RowShape
from rlkernel_triton.launchers import Launcher
from rlkernel_triton.linear_logprob import kernels
from rlkernel_triton.linear_logprob.low_rank import strides

BLOCK: Final = 16  # listed ids of a program
BK: Final = 128  # numbers of hidden that it takes at a time
WARPS: Final = 4


class Several(NamedTuple):
    """What the gradient needs of rows that list several ids."""

    lists: Lists  # as given, or counted from this shard's first; NO_ID where there is none
    chosen: Tensor  # [N] int64, counted alike
    invalid: Tensor  # N bool: rows without a chosen id
    y: Tensor  # [M] fp32 logits under the cap


class SeveralIds:
    """Calls of one shape: the logits of listed ids, and the launches for logits of any origin."""

    def __init__(self, launcher: Launcher, call: LinearLogprobCall, rows: RowShape, whole: int) -> None:
        (V, D), self._group, scale = call.weight.shape, call.group, float(call.logit_scale)
        sizes, ragged = listed_shape(call.ids, call.hidden) or (0, 0), is_ragged(call.ids)
        self.rows = ListedRows(
            launcher,
            rows,
            sizes,
            whole,
            ragged=ragged,
            sharded=call.group is not None,
            ordered=rows.masked,
            scale=scale,
        )
        layout, self._copied = layout_of(call.hidden)
        K = 0 if ragged else sizes[1]
        self._grid = (rows.N, max(1, triton.cdiv(K, BLOCK)), 1)  # a program takes a list of unknown length alone
        self._launch = launcher.bind(
            kernels.head_listed_logits, num_warps=WARPS, **layout._asdict(), K=K, D=D, V=V, scale=scale,
            head_stride=stored_head(call).stride(0), head_step=stored_head(call).stride(1), softcap=rows.softcap or 0.0,
            **strides(call.lora), HAS_BIAS=call.bias is not None, HAS_MASK=rows.masked,
            HAS_CAP=rows.softcap is not None, RAGGED=ragged, BLOCK=BLOCK, BK=BK,
        )  # fmt: skip

    def local(self, lists: Lists, offset: Tensor | int | None) -> Lists:
        """Ids counted from this shard's first."""
        return lists if offset is None else lists._replace(ids=local_ids(lists.ids, offset))

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, low_rank: tuple[Tensor | None, Tensor | None],
        lists: Lists, mask: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """[M] fp32 logits under the cap, of which those of masked rows are not written.

        Args:
            hidden: [..., D].
            weight: [V, D].
            bias: [V] contiguous.
            low_rank: the inner product of LoRA, [N, r] fp32 in the order of hidden, and B.
            lists: the ids, as `local` has them.
            mask: [N].
        """
        y = torch.empty(self.rows.M, dtype=torch.float32, device=hidden.device)
        if self._grid[0]:
            x = hidden.clone(memory_format=torch.contiguous_format) if self._copied else hidden
            none = lists.ids
            self._launch(
                self._grid, x, weight, none if bias is None else bias, *low_rank, *lists.pointers,
                none if mask is None else mask, y,
            )  # fmt: skip
        if self._group is not None:
            dist.all_reduce(y, group=self._group)  # each id lies on one rank, and is 0 on the others
        return y
