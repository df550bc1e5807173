"""Examples at other sizes: the first example's rows repeated to fill each bucket, for warming up ahead of use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rlkernel_common.graphs.key import Reading, StaticKey, TensorKey
from rlkernel_core.spec.graphed import Bucket

Call = tuple[tuple[Any, ...], dict[str, Any]]


def as_call(example: Any) -> Call:
    """Positional and keyword arguments of an example as users write it."""
    if isinstance(example, dict):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple) else (example,)), {}


def without_static(reading: Reading) -> Reading:
    """The same call, keeping no static tensor alive: `at_every_size` puts those in that are static by then."""
    pairs = zip(reading.key[1], reading.leaves, strict=True)
    return replace(reading, leaves=[None if isinstance(key, StaticKey) else leaf for key, leaf in pairs])


def at_every_size(reading: Reading, buckets: Sequence[Bucket], static: Mapping[str, Tensor]) -> list[Call]:
    """Calls like this one at every combination of bucket sizes."""
    calls: list[Call] = []
    pairs = list(zip(reading.key[1], reading.leaves, strict=True))
    for sizes in product(*(bucket.sizes for bucket in buckets)):
        leaves = [static[key.name] if isinstance(key, StaticKey) else leaf for key, leaf in pairs]
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
