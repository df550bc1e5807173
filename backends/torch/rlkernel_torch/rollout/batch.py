"""A popped batch: views of staging storage that the buffer made once, guarded by a generation stamp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from rlkernel_core.errors import StaleBatchError, UnknownNameError
from rlkernel_core.spec.rollouts import Field
from rlkernel_torch.rollout.pages import Pages, dtype_of

PER_ROW = {
    "group": torch.int64,
    "group_ids": torch.int64,
    "reward": torch.float32,
    "valid": torch.bool,
    "weight": torch.float32,
    "status": torch.uint8,
    "version": torch.int64,
}


@dataclass
class Row:
    """One row of a batch, on the host."""

    slot: int
    length: int
    values: Mapping[str, float | tuple[float, ...]]  # one for each of PER_ROW


class Batch:
    """See `rlkernel_core.spec.rollouts.RolloutBatch`."""

    def __init__(self, staging: Staging, fields: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
        self._staging, self._generation = staging, staging.generation
        self._fields, self._rows = fields, rows

    def __getitem__(self, name: str) -> Tensor:
        """A field, packed."""
        self._staging.check(self._generation)
        if not isinstance(name, str) or name not in self._fields:
            raise UnknownNameError("field", name, self._fields)
        return self._fields[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the storage back."""
        self._staging.release(self._generation)

    def _row(self, name: str) -> Tensor:
        self._staging.check(self._generation)
        return self._rows[name]

    @property
    def cu_seqlens(self) -> Tensor:
        """[R + 1] int64."""
        return self._row("cu_seqlens")

    @property
    def group(self) -> Tensor:
        """[R] int64, dense; fillers -1."""
        return self._row("group")

    @property
    def group_ids(self) -> Tensor:
        """[R] int64, as reserved; fillers -1."""
        return self._row("group_ids")

    @property
    def reward(self) -> Tensor:
        """[R] or [R, K] float32."""
        return self._row("reward")

    @property
    def valid(self) -> Tensor:
        """[R] bool."""
        return self._row("valid")

    @property
    def weight(self) -> Tensor:
        """[R] float32."""
        return self._row("weight")

    @property
    def status(self) -> Tensor:
        """[R] uint8."""
        return self._row("status")

    @property
    def version(self) -> Tensor:
        """[R] int64; fillers -1."""
        return self._row("version")


class Staging:
    """Storage of the one batch that may be out at a time. Subclasses may name another kind of batch."""

    batch: ClassVar[type[Batch]] = Batch

    def __init__(self, fields: Mapping[str, Field], tokens: int, rows: int, rewards: int, device: torch.device) -> None:
        self.capacity, self.rows, self._device = tokens, rows, device
        self.fields = {n: torch.zeros((tokens, *f.shape), dtype=dtype_of(f), device=device) for n, f in fields.items()}
        self.cu_seqlens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.per_row = {
            name: torch.zeros((rows, rewards) if name == "reward" and rewards > 1 else rows, dtype=dtype, device=device)
            for name, dtype in PER_ROW.items()
        }
        self.generation, self.out = 0, False

    def tensors(self) -> dict[str, Tensor]:
        """All storage, by name."""
        return {"cu_seqlens": self.cu_seqlens, **self.per_row, **{f"field.{n}": x for n, x in self.fields.items()}}

    def fill(self, pages: Pages, rows: Sequence[Row]) -> Batch:
        """Gather rows into the storage; fillers have length 0."""
        ends = torch.tensor([0, *(r.length for r in rows)], device="cpu").cumsum(0)
        count, total = len(rows), int(ends[-1])
        cu_seqlens = self.cu_seqlens[: count + 1]
        cu_seqlens.copy_(ends)
        slots = torch.tensor([r.slot for r in rows], device=self._device)
        fields = {name: x[:total] for name, x in self.fields.items()}
        pages.gather(slots, cu_seqlens, fields)
        per_row = {name: x[:count] for name, x in self.per_row.items()}
        for name, x in per_row.items():
            x.copy_(torch.tensor([r.values[name] for r in rows], dtype=x.dtype, device="cpu").view(x.shape))
        self.generation += 1
        self.out = True
        return self.batch(self, fields, {"cu_seqlens": cu_seqlens, **per_row})

    def release(self, generation: int) -> None:
        """Take the storage back."""
        self.check(generation)
        self.out = False

    def check(self, generation: int) -> None:
        """The batch of this generation is still out."""
        if not self.out or generation != self.generation:
            raise StaleBatchError(
                "This batch was released; its storage belongs to newer rollouts. Clone what must outlive release()."
            )
