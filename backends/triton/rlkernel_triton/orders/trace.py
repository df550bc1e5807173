"""One call of an operator with a launcher that derives orders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from rlkernel_triton.launchers import Scope
from rlkernel_triton.orders.expressions import Array, leaf
from rlkernel_triton.orders.memory import GlobalMemory
from rlkernel_triton.prepared import prepared


class Derives(Protocol):
    """A launcher that derives orders."""

    memory: GlobalMemory
    fusable: dict[str, int]  # kernel -> additions that a later compiler may fuse with a product


class Trace:
    """One call of an operator, whose floats have hashes.

    Args:
        launcher: what derives.
        op: a key of `rlkernel_triton.claims.CLAIMS`.
    """

    def __init__(self, launcher: Any, op: str) -> None:
        self._launcher: Derives = launcher
        self._prepare = prepared(op, Scope(launcher, launcher.target))

    def name(self, x: torch.Tensor, hashes: Array) -> None:
        """Give the elements of a tensor hashes, [..., pieces] (`expressions.leaf`)."""
        self._launcher.memory.name(x, hashes)

    def leaf(self, name: str, index: Array, pieces: int) -> Array:
        """Hashes of elements of an argument at some places, [..., pieces]."""
        return leaf(name, index, pieces)

    def run(self, call: Any) -> Any:
        """The operator's result.

        Raises:
            NoCertificateError: the order cannot be derived.
        """
        return self._prepare(call)(call)

    def hashes(self, x: torch.Tensor) -> Array:
        """Hashes of a tensor's elements, [..., pieces]; 0 where bits are known."""
        return self._launcher.memory.hashes(x)

    @property
    def fusable(self) -> Mapping[str, int]:
        """Of each kernel that ran: additions without a rounding of their own, which ptxas may fuse with a product."""
        return dict(self._launcher.fusable)
