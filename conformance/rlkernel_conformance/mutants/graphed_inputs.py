"""Static inputs of plain torch's graphs, with one method each that does something else.

The bugs that they plant are described in the table of `capture`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_common.graphs.buffers import StaticInputs
from rlkernel_common.graphs.engine import Graphed

_HELD: Final[dict[int, Tensor]] = {}


class LeavesPadding(StaticInputs):
    def filling(self, reading: Any) -> Any:
        def fill(leaves: Any) -> None:
            for i, buffer in zip(self.copied, self.tensors, strict=True):
                self.cut_input(i, buffer, reading).copy_(leaves[i])

        return fill


class KeepsTheFirst(StaticInputs):
    """The buffers are filled once, when the graph is captured."""

    def fill(self, reading: Any) -> None:
        super().filling(reading)(reading.leaves)

    def filling(self, reading: Any) -> Any:
        return lambda leaves: None


class PaddedSizes(StaticInputs):
    """The function gets the padded size in place of the true one."""

    def filling(self, reading: Any) -> Any:
        true = super().filling(reading)
        padded = [size for bucket, (_, size) in zip(self._buckets, reading.sizes, strict=True) if bucket.valid]

        def fill(leaves: Any) -> None:
            true(leaves)
            for x, size in zip(self._valid, padded, strict=True):
                x.fill_(size)

        return fill


class NarrowSizes(StaticInputs):
    """The function gets the true size as int32."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._valid = [x.int() for x in self._valid]


class KeepsHistory(StaticInputs):
    """Inputs are copied with gradients on: the buffers keep the history of every call."""

    def filling(self, reading: Any) -> Any:
        true, into = super().filling(reading), self._parts(reading)

        def fill(leaves: Any) -> None:
            true(leaves)
            with torch.enable_grad():
                for i, x in into.items():
                    x.copy_(leaves[i])

        return fill if any(self.wants_grad) else true


class KnowsAddresses(StaticInputs):
    """A first tensor at the address of the call before is not copied."""

    last: Any = None

    def filling(self, reading: Any) -> Any:
        true = super().filling(reading)

        def fill(leaves: Any) -> None:
            x, kept = leaves[0], self.tensors[0].clone() if self.tensors else None
            at = (x.data_ptr(), x.shape, x.stride()) if isinstance(x, Tensor) else None
            true(leaves)
            if kept is not None and at is not None and at == self.last and x.data_ptr() in _HELD:
                self.tensors[0].copy_(kept)
            self.last = at

        return fill


class HoldsTheCallers(Graphed):
    def __call__(self, x: Any, *more: Any, **kwargs: Any) -> Any:
        _HELD[x.data_ptr()] = x  # it stays alive, so that an address that comes again is the same tensor
        return super().__call__(x, *more, **kwargs)
