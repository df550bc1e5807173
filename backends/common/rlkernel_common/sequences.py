"""Where sequences begin and end: sums per sequence and back, for padded and packed batches alike.

Values are per token ([B, T] or [N]) or per sequence ([B]). Each layout has `count`, the number of sequences, `sum`, a
sum of per-token values over each sequence (the caller has put 0 where a token does not count), and `spread`, a
per-sequence value at each of its tokens.

Legend: B sequences · T padded length · N packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Padded:
    """Sequences are the rows of [B, T]."""

    count: int
    length: int

    def sum(self, x: Tensor) -> Tensor:
        """[B, T] -> [B]."""
        return x.sum(-1)

    def spread(self, y: Tensor) -> Tensor:
        """[B] -> [B, T]."""
        return y.unsqueeze(-1).expand(self.count, self.length)


@dataclass(frozen=True)
class Packed:
    """Sequences stand end to end in [N]; offsets[i] is where sequence i begins."""

    offsets: Tensor  # [B + 1] int64 within [0, N]
    index: Tensor  # [N] int64: the sequence of a token (any, where inside is False)
    inside: Tensor  # [N] bool: the token belongs to a sequence
    count: int

    @classmethod
    def of(cls, cu_seqlens: Tensor, tokens: int) -> Packed:
        """From sequence starts; clamped and sorted, so that no value of cu_seqlens can reach outside the tokens."""
        count = cu_seqlens.shape[0] - 1
        offsets = cu_seqlens.long().clamp(0, tokens).cummax(0).values
        place = torch.arange(tokens, device=cu_seqlens.device)
        index = torch.searchsorted(offsets, place, right=True) - 1
        inside = (index >= 0) & (index < count)
        return cls(offsets, index.clamp(0, max(count - 1, 0)), inside, count)

    def sum(self, x: Tensor) -> Tensor:
        """[N] -> [B], each sequence on its own and in order: no atomics, and no sequence disturbs another.

        In float64: one after the other in fp32, ten thousand tokens lose 5e-5 of their sum.
        """
        if self.count == 0:
            return x.new_zeros(0)
        total = torch.segment_reduce(x.double(), "sum", offsets=self.offsets, axis=0, initial=0, unsafe=True)
        return total.to(x.dtype)

    def spread(self, y: Tensor) -> Tensor:
        """[B] -> [N]."""
        if self.count == 0:
            return y.new_zeros(self.index.shape)
        return torch.where(self.inside, y[self.index], torch.zeros_like(y[:1]))


@dataclass(frozen=True)
class Bag:
    """[N] tokens whose sequences nobody told: one sequence, which no contract lets a caller ask about."""

    tokens: int
    count: int = 1

    def sum(self, x: Tensor) -> Tensor:
        """[N] -> [1]."""
        return x.sum().reshape(1)

    def spread(self, y: Tensor) -> Tensor:
        """[1] -> [N]."""
        return y.expand(self.tokens)


Sequences = Padded | Packed | Bag


def layout(shape: tuple[int, ...], cu_seqlens: Tensor | None) -> Sequences:
    """The sequences of a batch of that shape."""
    if len(shape) == 2:
        return Padded(shape[0], shape[1])
    return Bag(shape[0]) if cu_seqlens is None else Packed.of(cu_seqlens, shape[0])
