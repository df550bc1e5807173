"""The device's side of a rollout buffer: token pages, the page table, cursors, and counters that need no host.

A token goes to page table[slot, position // P], row position % P. What must not be stored goes to one spare row behind
the last page, so that no shape depends on values. `append` reads nothing on the host.

Legend: B slots in a call · T tokens in a call · S all slots · P tokens in a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.rollouts import Field, Slots

CLOSED = -1  # stamp of a slot that nobody writes
COUNTERS = ("appended", "stale", "over the limit")


class Pages:
    """Storage of tokens."""

    def __init__(
        self, fields: Mapping[str, Field], pages: int, page_tokens: int, slots: int, width: int, device: torch.device
    ) -> None:
        self.fields, self.page_tokens = dict(fields), page_tokens
        self.spare = pages * page_tokens
        self.tokens = {
            name: torch.zeros((self.spare + 1, *f.shape), dtype=dtype_of(f), device=device)
            for name, f in self.fields.items()
        }
        self.table = torch.zeros((slots, width), dtype=torch.int32, device=device)  # [S, W]
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)  # [S]
        self.limit = torch.zeros(slots, dtype=torch.int64, device=device)  # [S]
        self.stamp = torch.full((slots,), CLOSED, dtype=torch.int64, device=device)  # [S]
        self.counts = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """All storage, by name."""
        named = {"table": self.table, "length": self.length, "limit": self.limit, "stamp": self.stamp}
        return {**named, "counts": self.counts, **{f"field.{n}": x for n, x in self.tokens.items()}}

    def open(
        self, slots: Sequence[int], stamps: Sequence[int], limits: Sequence[int], pages: Sequence[list[int]]
    ) -> Slots:
        """Make slots writable."""
        device = self.table.device
        ids, marks = torch.tensor(slots, device=device), torch.tensor(stamps, device=device)
        width = max(map(len, pages), default=0)
        rows = torch.tensor([[*p, *[0] * (width - len(p))] for p in pages], dtype=torch.int32, device=device)
        self.table[ids, :width] = rows.view(len(slots), width)
        self.length[ids] = 0
        self.limit[ids] = torch.tensor(limits, device=device)
        self.stamp[ids] = marks
        return Slots(ids, marks)

    def close(self, slots: Sequence[int]) -> None:
        """Make slots refuse tokens; what they hold stays."""
        self.stamp[torch.tensor(slots, dtype=torch.int64, device=self.stamp.device)] = CLOSED

    def clear(self, slots: Sequence[int]) -> None:
        """Make slots refuse tokens, and forget what they hold."""
        ids = torch.tensor(slots, dtype=torch.int64, device=self.stamp.device)
        self.stamp[ids] = CLOSED
        self.length[ids] = 0

    def lengths(self, slots: Sequence[int]) -> list[int]:
        """Tokens that slots hold; synchronizes."""
        ids = torch.tensor(slots, dtype=torch.int64, device=self.length.device)
        found: list[int] = self.length[ids].tolist()
        return found

    def append(
        self, slots: Slots, values: Mapping[str, Tensor], cu_seqlens: Tensor | None, alive: Tensor | None
    ) -> None:
        """One token for each slot, or packed ones."""
        count = len(self.stamp)
        known = (slots.ids >= 0) & (slots.ids < count)  # [B]
        ids = torch.where(known, slots.ids, 0)
        current = known & (self.stamp[ids] == slots.stamps)
        given = torch.ones_like(known) if alive is None else alive
        if cu_seqlens is None:
            at, offset = ids, torch.zeros_like(ids)
        else:
            cu_seqlens = cu_seqlens.long()
            token = torch.arange(next(iter(values.values())).shape[0], device=ids.device)  # [T]
            row = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
            inside = row < len(ids)
            row = torch.where(inside, row, 0)
            at, offset = ids[row], token - cu_seqlens[row]
            given, current = inside & given[row], current[row]
        position = self.length[at] + offset
        fits = position < self.limit[at]
        stored = given & current & fits
        page = torch.where(stored, torch.div(position, self.page_tokens, rounding_mode="floor"), 0)
        target = self.table[at, page] * self.page_tokens + position % self.page_tokens
        target = torch.where(stored, target, self.spare)
        for name, f in self.fields.items():
            self._store(name, f, values.get(name), target)
        self.length.index_add_(0, at, stored.to(self.length.dtype))
        self.counts += torch.stack([given.sum(), (given & ~current).sum(), (given & current & ~fits).sum()])

    def _store(self, name: str, f: Field, value: Tensor | None, target: Tensor) -> None:
        storage = self.tokens[name]
        if value is None:
            value = storage.new_full((), f.default or 0).expand(len(target), *f.shape)
        storage.index_copy_(0, target, value.to(storage.dtype))

    def gather(self, slots: Tensor, cu_seqlens: Tensor, into: Mapping[str, Tensor]) -> None:
        """Pack the tokens of slots [R] into tensors [T, ...]."""
        total = next(iter(into.values())).shape[0] if into else 0
        token = torch.arange(total, device=slots.device)
        row = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
        position = token - cu_seqlens[row]
        page = torch.div(position, self.page_tokens, rounding_mode="floor")
        source = self.table[slots[row], page].long() * self.page_tokens + position % self.page_tokens
        for name, out in into.items():
            torch.index_select(self.tokens[name], 0, source, out=out)


def dtype_of(f: Field) -> torch.dtype:
    """The torch dtype of a field."""
    found = getattr(torch, f.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError("fields", repr(f.dtype), "is no torch dtype", "Pass its name, such as 'float32'.")
    return found
