"""Shapes of the matmul kernels, as data. Measured figures stand in benchmarks/notes/linear_logprob.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Tile:
    """One shape of a matmul kernel."""

    cluster: int = 1  # blocks that share a tile of the second operand: 1 is Gluon's kernel, 2 those in CUDA C++
    consumers: int = 2  # warpgroups of a block that compute, each its own rows
    rows: int = 64  # of a consumer
    cols: int = 256
    depth: int = 64  # per step
    stages: int = 4  # of the ring
    group: int = 8  # row tiles of a block that share each column tile while it is in L2
    lag: bool = True  # whether a step's tiles are freed when the next step is under way, or before it starts


SINGLE: Final = Tile()
PAIR: Final = Tile(cluster=2)
FORWARD: Tile = (
    SINGLE  # logits that end in softmax statistics: one kernel for every N, with gradients or without, so equal bits
)
GRADIENT: Tile = PAIR  # logits that are recomputed and end in their gradient
PRODUCT: Tile | None = PAIR  # dX and dW that need no earlier sum, or have rows to skip; None: cuBLAS
