"""What a checkpoint takes in memory once it is loaded, from its header alone: nothing is loaded.

Imports torch to ask formats for the sizes of their parts.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

from rlkernel.checkpoints import files
from rlkernel.checkpoints.conversion import SKIPPED
from rlkernel.checkpoints.schemes import Item, items
from rlkernel_core.errors import MemoryBudgetError
from rlkernel_core.host.memory import Memory
from rlkernel_core.quant.spec import QuantSpec, spec_of

# What quantizing takes beside the weight: blocks of rows in fp32, whatever the weight's size (measured at 4096 x 2048:
# 7 MiB for int4_g128, 20 MiB for nf4).
WORKSPACE: Final = 24 << 20
_ADAM: Final = 3  # a gradient and two moments for each trained number


@dataclass
class Footprint:
    """Sizes in bytes, by what they are for."""

    parts: dict[str, int] = field(default_factory=dict)  # what -> bytes that stay
    passing: int = 0  # bytes on top while it is built: one layer

    def add(self, what: str, nbytes: int) -> None:
        """Count bytes that stay."""
        if nbytes:
            self.parts[what] = self.parts.get(what, 0) + nbytes

    @property
    def total(self) -> int:
        """What stays."""
        return sum(self.parts.values())

    @property
    def peak(self) -> int:
        """The most that is held at a time."""
        return self.total + self.passing

    def require(self, memory: Memory, what: str = "this plan") -> None:
        """Refuse what would swap, before any of it is taken.

        Raises:
            MemoryBudgetError: the peak is more than the budget; the largest part is named.
        """
        largest = max(self.parts.items(), key=lambda part: part[1], default=("nothing", 0))
        try:
            memory.require(self.peak, what)
        except MemoryBudgetError as error:
            remedy = f"The largest part is {largest[0]}: take a smaller format, model, batch or context."
            raise MemoryBudgetError(what, error.needed, error.budget, error.because, remedy) from None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"parts": dict(self.parts), "total": self.total, "passing": self.passing, "peak": self.peak}


def packed_bytes(spec: QuantSpec, shape: tuple[int, int]) -> int:
    """Bytes of a weight [Nout, K] in a format."""
    from rlkernel_core.quant.codec import codec_of

    return sum(prod(size) * kind.itemsize for size, kind in codec_of(spec).storage(spec, shape).values())


def footprint(
    path: Path | str,
    *,
    format: str | QuantSpec | None = None,  # noqa: A002  the field's noun
    skip: Sequence[str] = SKIPPED,
    lora_rank: int = 0,
    train: bool = False,
) -> Footprint:
    """Sizes of a checkpoint in memory, its weights loaded one at a time.

    Args:
        path: a safetensors or GGUF file, or the folder or the index of a sharded checkpoint.
        format: what weights [N, K] are quantized to as they are read; None leaves each as it is.
        skip: shell patterns of names that stay dense.
        lora_rank: of an adapter in 16 bits beside every quantized weight; 0 for none.
        train: count what an AdamW step holds for the adapter in fp32: gradients and two moments.

    Raises:
        ArgumentError: no such file, or a damaged one.
        UnknownNameError: no such format.
    """
    found, largest = Footprint(), 0
    with files.opened(Path(path)) as source:
        for item in items(source):
            held = sum(entry.nbytes for entry in item.entries.values())
            shape, dense = _shape(item), item.scheme == "dense"
            kept = any(fnmatch.fnmatch(item.name, pattern) for pattern in skip)
            packed = held
            if format is not None and dense and not kept and len(shape) == 2:
                packed = packed_bytes(spec_of(format), (shape[0], shape[1]))
                found.add(f"weights in {format}", packed)
            else:
                found.add("dense weights" if dense else f"weights as {item.scheme}", held)
            if lora_rank and packed != held:
                numbers = lora_rank * sum(shape)
                found.add(f"LoRA of rank {lora_rank}", 2 * numbers)
                found.add("its gradients and Adam moments", 4 * _ADAM * numbers if train else 0)
            largest = max(largest, held + packed)
    found.passing = largest + (WORKSPACE if format is not None else 0)
    return found


def _shape(item: Item) -> tuple[int, ...]:
    """Shape of a weight that is one tensor."""
    return next(iter(item.entries.values())).shape if len(item.entries) == 1 else ()
