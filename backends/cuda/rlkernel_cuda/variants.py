"""Shapes of the logits kernel, as data. Measured figures stand in benchmarks/notes/linear_logprob.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Tile:
    """One shape of the logits kernel."""

    consumers: int = 2  # warpgroups that compute, each its own rows
    rows: int = 64  # of a consumer
    cols: int = 256
    depth: int = 64  # of the hidden size, per step
    stages: int = 4  # of the ring
    group: int = 16  # row tiles that walk the vocabulary together


LOGITS: Final = Tile()
