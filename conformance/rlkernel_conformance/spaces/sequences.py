"""Tokens of sequences, padded or packed, with all the ways to say which of them count.

Legend: B sequences · T padded length · N tokens in all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Generator, Tensor

PADDED: Final = ("full", "mask", "lengths", "nothing")
PACKED: Final = ("packed", "packed mask", "packed tail")
MASKED: Final = ("mask", "nothing", "packed mask")  # that pass a mask


@dataclass(frozen=True)
class Sequences:
    """Where the tokens of each sequence lie, and which of them count."""

    shape: tuple[int, ...]  # [B, T] or [N]
    rows: tuple[Any, ...]  # indices of a sequence's tokens among all, in order
    valid: Any  # [numel] the token counts and belongs to a sequence
    given: dict[str, Tensor] = field(default_factory=dict)  # mask, lengths or cu_seqlens

    @classmethod
    def draw(cls, B: int, T: int, how: str, generator: Generator) -> Sequences:
        """Sequences of up to T tokens, the second one empty where lengths are drawn; a mask has holes."""
        lengths = torch.randint(0, T + 1, (B,), generator=generator)
        lengths[1:2] = 0
        if how not in PACKED:
            rows = tuple(np.arange(i * T, (i + 1) * T) for i in range(B))
            if how == "lengths":
                counted = torch.arange(T) < lengths[:, None]
                return cls((B, T), rows, counted.reshape(-1).numpy(), {"lengths": lengths})
            if how == "full":
                return cls((B, T), rows, np.ones(B * T, bool))
            mask = torch.rand(B, T, generator=generator) < (0.7 if how == "mask" else 0.0)
            return cls((B, T), rows, mask.reshape(-1).numpy(), {"mask": mask})
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        total = int(bounds[-1]) + (3 if how == "packed tail" else 0)
        rows = tuple(np.arange(a, b) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
        valid = np.arange(total) < int(bounds[-1])
        given = {"cu_seqlens": bounds}
        if how == "packed mask":
            given["mask"] = torch.rand(total, generator=generator) < 0.7
            valid &= given["mask"].numpy()
        return cls((total,), rows, valid, given)

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return int(np.prod(self.shape, dtype=np.int64))
