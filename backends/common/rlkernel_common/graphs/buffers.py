"""Static input buffers of one graph: filled before every replay, padded, and the outputs cut back.

Buffers are made outside inference mode, so that they can be filled in any mode.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from rlkernel_common.graphs.key import Reading, TensorKey
from rlkernel_core.errors import CaptureError
from rlkernel_core.spec.graphed import Bucket
from rlkernel_core.tree import flatten


class StaticInputs:
    """The arguments that a recording reads: buffers for copied tensors, everything else as it was passed."""

    def __init__(self, reading: Reading, buckets: Sequence[Bucket], device: torch.device) -> None:
        self._layout, self._structure, self._buckets = reading.layout, reading.key[0], tuple(buckets)
        self._leaves = list(reading.leaves)
        self.copied = tuple(i for i, k in enumerate(reading.key[1]) if isinstance(k, TensorKey))
        with torch.inference_mode(mode=False):
            self.tensors = [_allocate(reading.key[1][i], device) for i in self.copied]
            self._valid = [torch.zeros((), dtype=torch.int64, device=device) for b in buckets if b.valid]
        for i, buffer in zip(self.copied, self.tensors, strict=True):
            self._leaves[i] = buffer
        self.wants_grad = tuple(
            k.requires_grad for k in (reading.key[1][i] for i in self.copied) if isinstance(k, TensorKey)
        )

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(x.nbytes for x in (*self.tensors, *self._valid))

    def fill(self, reading: Reading) -> None:
        """Copy a call's tensors in and pad the rest."""
        self.filling(reading)(reading.leaves)

    def filling(self, reading: Reading) -> Callable[[Sequence[Any]], object]:
        """What fills the buffers with the leaves of a call like this one: copies them in and pads the rest."""
        into = self._parts(reading)
        # One launch copies all tensors of a dtype, but only within one device.
        alike: dict[Hashable, list[int]] = {}
        for i, x in into.items():
            alike.setdefault(i if i in reading.strangers else x.dtype, []).append(i)
        copies = [_copy([into[i] for i in at], at, len(reading.key[1])) for at in alike.values()]
        padded = [
            (buffer.narrow(dim, true, size - true), self._layout.pad[i])
            for i, buffer in zip(self.copied, self.tensors, strict=True)
            for true, size, dim in ((*reading.sizes[bucket], dim) for bucket, dim in self._layout.bucketed[i])
            if size > true
        ]
        given = [size[0] for size, bucket in zip(reading.sizes, self._buckets, strict=True) if bucket.valid]
        constants = [*padded, *zip(self._valid, given, strict=True)]  # fn may have written there
        shield = any(self.wants_grad)  # the buffers would keep the history of their copies
        if len(copies) == 1 and not constants and not shield:
            return copies[0]

        def fill(leaves: Sequence[Any]) -> None:
            for x, value in constants:
                x.fill_(value)
            for copy in copies:
                copy(leaves)

        def shielded(leaves: Sequence[Any]) -> None:
            with torch.inference_mode(mode=False), torch.no_grad():  # in this order: the former turns gradients on
                fill(leaves)

        return shielded if shield else fill

    def filled_bytes(self, reading: Reading) -> int:
        """Bytes that one call like this one copies."""
        return sum(x.nbytes for x in self._parts(reading).values())

    def _parts(self, reading: Reading) -> dict[int, Tensor]:
        """For each copied leaf the part of its buffer that it goes to."""
        return {i: self.cut_input(i, x, reading) for i, x in zip(self.copied, self.tensors, strict=True)}

    def cut_input(self, i: int, x: Tensor, reading: Reading) -> Tensor:
        """The rows of a padded input that hold the call's values."""
        for bucket, dim in self._layout.bucketed[i]:
            x = x.narrow(dim, 0, reading.sizes[bucket][0])
        return x

    def call(self, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Run fn on these tensors in place of the copied inputs."""
        leaves = list(self._leaves)
        for i, x in zip(self.copied, tensors, strict=True):
            leaves[i] = x
        args, kwargs = self._structure.build(leaves)
        names = [bucket.valid for bucket in self._buckets if bucket.valid]
        return fn(*args, **kwargs, **dict(zip(names, self._valid, strict=True)))


def _copy(into: list[Tensor], at: list[int], leaves: int) -> Callable[[Sequence[Any]], object]:
    """What copies the leaves at these places, of so many, into these tensors."""
    if len(into) == 1:
        copy, i = into[0].copy_, at[0]
        return lambda given: copy(given[i])
    copy_all = partial(torch._foreach_copy_, into)
    if len(into) == leaves:
        return copy_all
    pick = itemgetter(*at)
    return lambda given: copy_all(pick(given))


def _allocate(key: Any, device: torch.device) -> Tensor:
    order = key.order or tuple(range(len(key.shape)))
    x = torch.empty([key.shape[d] for d in order], dtype=key.dtype, device=device)
    return x.permute([order.index(d) for d in range(len(order))]) if order else x


def cut_outputs(outputs: Any, reading: Reading, buckets: Sequence[Bucket]) -> Any:
    """Outputs without the rows that buckets added."""
    leaves, structure = flatten(outputs)
    names = structure.names()
    for bucket, (true, padded) in zip(buckets, reading.sizes, strict=True):
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            dim = bucket.out.get(name) if isinstance(bucket.out, Mapping) else bucket.out
            if dim is not None and isinstance(leaf, Tensor):
                leaves[i] = _cut(name or "the output", leaf, dim, true, padded)
        if isinstance(bucket.out, Mapping):
            unknown = sorted(set(bucket.out) - set(names))
            if unknown:
                raise CaptureError(f"Bucket.out names {unknown}, but fn returns {list(names)}.")
    return structure.build(leaves)


def _cut(name: str, x: Tensor, dim: int, true: int, padded: int) -> Tensor:
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != padded:
        raise CaptureError(
            f"{name} has shape {list(x.shape)}, but dimension {dim} of every output should have the bucketed size "
            f"{padded}: what is not cut may hold padding. Name the outputs to cut, Bucket(out={{name: dim}}), and let "
            "fn mask the others with Bucket(valid=...)."
        )
    return x.narrow(dim, 0, true)


def run_plain(fn: Callable[..., Any], reading: Reading, buckets: Sequence[Bucket], device: torch.device) -> Any:
    """Run fn itself on the caller's tensors, with everything a replay would have given it."""
    leaves = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in reading.leaves]
    args, kwargs = reading.key[0].build(leaves)
    sizes = {
        bucket.valid: torch.tensor(true, dtype=torch.int64, device=device)
        for bucket, (true, _) in zip(buckets, reading.sizes, strict=True)
        if bucket.valid
    }
    return fn(*args, **kwargs, **sizes)
