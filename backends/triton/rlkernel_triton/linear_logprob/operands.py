"""The tensors of a call of linear_logprob@1 as its launches take them, and what they leave for the gradient.

Legend: N rows · D hidden · V vocabulary · n rows of a block · r rank of a low-rank addition · P tiles of V.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_triton.common.softmax_rows import RowTensors


class RowOrder(NamedTuple):
    """The rows that count first; the device alone knows how many they are."""

    index: Tensor  # type: ignore[assignment]  # [N] int64, a permutation; in place of the method of tuples
    count: Tensor  # type: ignore[assignment]  # [1] int64; the same

    @classmethod
    def of(cls, mask: Tensor) -> Self:
        """The order of a mask, [N] bool, without host synchronization."""
        index = torch.sort(mask.view(torch.uint8), descending=True, stable=True).indices
        return cls(index, mask.sum(0, keepdim=True, dtype=torch.int64))


class Operands(NamedTuple):
    """The tensors of a call."""

    hidden: Tensor  # [..., D]
    weight: Tensor | QuantTensor  # [V, D]
    bias: Tensor | None  # [V] contiguous
    rows: RowTensors  # ids are counted from the first column of the head
    order: RowOrder | None
    lora: LoRA | None
    inner: Tensor | None  # [N, r] fp32 scale times hidden @ A.T, in the order of `order`

    def at(self) -> tuple[Tensor, Tensor]:
        """Index and count, or pointers that no kernel follows."""
        return (self.rows.ids, self.rows.ids) if self.order is None else self.order

    def low_rank(self, first: int, n: int) -> tuple[Tensor | None, Tensor | None]:
        """The inner product of a block of rows, [n, r], and B; None where there is no LoRA."""
        if self.inner is None or self.lora is None:
            return None, None
        return self.inner[first : first + n], self.lora.B


class HeadStats(NamedTuple):
    """What the statistics of all rows are, and what a plan that saves keeps."""

    merged: Tensor  # planes * N * pieces numbers, in the order [planes, N, pieces], and some more
    logits: Tensor | None  # [N, V] saved, less the largest of their tile
    tile_max: Tensor | None  # [N, P]
    spare: Tensor  # the room that was asked for


class SavedRows(NamedTuple):
    """What the gradient needs of the forward pass."""

    invalid: Tensor  # N bool
    stats: Tensor  # 6 N numbers, as `merge_softmax` wrote them
    logits: Tensor | None  # of `HeadStats`
    tile_max: Tensor | None
