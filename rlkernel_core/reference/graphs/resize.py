"""Examples at other sizes: the first example's rows repeated to fill each bucket, for warming up ahead of use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rlkernel_core.reference.graphs.key import Reading, TensorKey
from rlkernel_core.spec.graphed import Bucket

Call = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(example: Any) -> Call:
    """Positional and keyword arguments of an example as users write it."""
    if isinstance(example, dict):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple) else (example,)), {}


def at_every_size(reading: Reading, buckets: Sequence[Bucket]) -> list[Call]:
    """Calls like this one at every combination of bucket sizes."""
    calls: list[Call] = []
    for sizes in product(*(bucket.sizes for bucket in buckets)):
        leaves = list(reading.leaves)
        for i, dims in enumerate(reading.layout.bucketed):
            for bucket, dim in dims:
                leaves[i] = _resize(leaves[i], dim, sizes[bucket], reading.layout.pad[i])
        calls.append(reading.key[0].build(leaves))
    return calls


def volume(reading: Reading) -> int:
    """Elements in the copied inputs: the largest graph is captured first, so that smaller ones reuse its memory."""
    shapes = (key.shape for key in reading.key[1] if isinstance(key, TensorKey))
    return sum(torch.Size(shape).numel() for shape in shapes)


def _resize(x: Tensor, dim: int, size: int, pad: float) -> Tensor:
    if x.shape[dim] == 0:
        shape = list(x.shape)
        shape[dim] = size
        return x.new_full(shape, pad)
    return x.index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])
