"""Where the sequences of a batch are: padded rows [B, T] by mask or lengths, or packed tokens [N] by cu_seqlens.

Inside, tokens are always rows [R, T]: R = B padded, R = 1 packed with a segment id per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from rlkernel_torch.advantage.suffix import suffix_scan


@dataclass(frozen=True)
class Layout:
    """The valid tokens of B sequences."""

    valid: Tensor  # [R, T] bool
    sequences: int  # B
    shape: tuple[int, ...]  # of token-level tensors outside: (B, T) or (N,)
    segment: Tensor | None = None  # [T] int64 sequence of a packed token, B outside all sequences
    starts: Tensor | None = None  # [B] int64 first token of a packed sequence
    ends: Tensor | None = None  # [B] int64 one past its last token

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        sequences: int,
        device: torch.device,
        *,
        mask: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Self:
        """The layout that the arguments of a call describe."""
        at = torch.arange(shape[-1], device=device)
        if cu_seqlens is None:
            valid = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
            return cls(valid if lengths is None else at < lengths.long()[:, None], sequences, tuple(shape))
        bounds = cu_seqlens.to(torch.int64).clamp(0, shape[0])
        starts, ends = bounds[:-1], bounds[1:]
        # Tokens before the first sequence belong to no sequence, as those after the last one.
        segment = torch.searchsorted(ends.contiguous(), at, right=True)
        inside = (segment < sequences) & (at >= bounds[0])
        segment = torch.where(inside, segment, sequences)
        valid = inside if mask is None else inside & mask
        return cls(valid[None], sequences, tuple(shape), segment, starts, ends)

    def rows(self, x: Tensor) -> Tensor:  # token-level -> [R, T]
        """A token-level tensor as rows."""
        return x if self.segment is None else x[None]

    def tokens(self, x: Tensor) -> Tensor:  # [R, T] -> token-level
        """Rows as a token-level tensor."""
        return x if self.segment is None else x[0]

    def spread(self, x: Tensor) -> Tensor:  # [B] -> [R, T]
        """The entry of its sequence at every token; anything outside all sequences."""
        if self.segment is None:
            return x[:, None].expand(self.shape)
        padded = torch.cat([x, x.new_zeros(1)])
        return padded[self.segment][None]

    def select(self, x: Tensor, other: Tensor | float = 0.0) -> Tensor:  # [R, T]
        """`x` where valid, else `other`."""
        return torch.where(self.valid, x, other)

    def only(self, valid: Tensor) -> Self:  # [R, T]
        """The same sequences with other valid tokens."""
        return replace(self, valid=valid)

    def counts(self) -> Tensor:  # [B] int64
        """Valid tokens of each sequence."""
        upto, before = self._counted()
        return upto - before

    def last(self) -> tuple[Tensor, Tensor]:  # [R, T], [R, T] bool
        """Last valid token of each sequence, and the tokens behind it (all tokens of a fully masked sequence)."""
        running = self.valid.to(torch.int64).cumsum(-1)
        final = self.spread(self._counted()[0])
        return self.valid & (running == final), ~self.valid & (running == final)

    def totals(self, x: Tensor) -> Tensor:  # [R, T] -> [B]
        """Sum of `x` over the valid tokens of each sequence, in one order for all layouts."""
        sums = suffix_scan(torch.ones_like(x), self.select(x), self.segment)
        if self.starts is None or self.ends is None:
            return sums[:, 0] if self.shape[-1] else x.new_zeros(self.sequences)
        empty = self.starts >= self.ends
        return torch.where(empty, 0.0, torch.cat([sums[0], sums.new_zeros(1)])[self.starts])

    def before(self, x: Tensor, beyond: float) -> Tensor:  # [R, T]
        """x_{t+1} at t, and `beyond` at the end of each sequence's storage."""
        moved = torch.cat([x[..., 1:], torch.full_like(x[..., :1], beyond)], -1)
        if self.segment is None:
            return moved
        joined = torch.cat([self.segment[1:] == self.segment[:-1], torch.zeros_like(self.segment[:1]).bool()])
        return torch.where(joined, moved, beyond)

    def _counted(self) -> tuple[Tensor, Tensor]:  # [B], [B] int64
        """How many valid tokens of the row stand up to the end of each sequence, and before its start."""
        if self.starts is None or self.ends is None:
            return self.valid.sum(-1), torch.zeros(self.sequences, dtype=torch.int64, device=self.valid.device)
        running = torch.cat([self.starts.new_zeros(1), self.valid[0].to(torch.int64).cumsum(0)])
        return running[self.ends], running[self.starts]


def inclusive(layout: Layout, a: Tensor, b: Tensor, end: Tensor | None = None, *, fill: float | Tensor = 1.0) -> Tensor:
    """y_t = a_t y_{t+1} + b_t over the valid tokens; y after the last one is `end` [B] (0 where not given).

    A masked position is y -> fill * y and holds the y carried through it.
    """
    last, behind = layout.last()
    a, b = layout.select(a, fill), layout.select(b)
    if end is None:
        return suffix_scan(a, b, layout.segment)
    beyond = layout.spread(end)
    shifted = torch.where(last, b + torch.where(last, a, 0.0) * beyond, b)
    y = suffix_scan(torch.where(last, 0.0, a), shifted, layout.segment)
    return torch.where(behind, beyond, y)


def exclusive(layout: Layout, a: Tensor, b: Tensor, end: Tensor | None = None, *, fill: float | Tensor = 1.0) -> Tensor:
    """Value at the next position: the same scan on the maps of t + 1, so that nothing is divided by a."""
    last, behind = layout.last()
    a, b = layout.before(layout.select(a, fill), 1.0), layout.before(layout.select(b), 0.0)
    beyond = torch.zeros_like(b) if end is None else layout.spread(end)
    y = suffix_scan(torch.where(last, 0.0, a), torch.where(last, beyond, b), layout.segment)
    return torch.where(behind, beyond, y)


def next_valid(layout: Layout, x: Tensor, end: Tensor | None = None) -> Tensor:  # [R, T], [B]
    """Value at the next valid token; `end` (0 where not given) after the last one."""
    return exclusive(layout, torch.zeros_like(x), x, end)
