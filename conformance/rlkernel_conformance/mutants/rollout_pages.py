"""Device sides of a rollout buffer with one method each that does something else.

The bugs that they plant are described in the table of `rollout_buffer`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rlkernel_core.spec.rollouts import Slots
from rlkernel_torch.rollout.pages import Pages


class PagesInAnotherOrder(Pages):
    def gather(self, slots: Any, cu_seqlens: Any, into: Any) -> None:
        super().gather(slots, cu_seqlens, into)
        for a, b in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
            if b - a > 4:  # more than one page
                for x in into.values():
                    x[a : a + 4] = x[a : a + 4].flip(0).clone()


class WrapsPlaces(Pages):
    def append(self, slots: Slots, *given: Any) -> None:
        super().append(Slots(slots.ids % len(self.stamp), slots.stamps), *given)


class ZeroDefaults(Pages):
    def __init__(self, fields: Any, *sizes: Any) -> None:
        super().__init__(fields, *sizes)
        self.fields = {n: replace(f, default=None if f.default is None else 0) for n, f in self.fields.items()}


class FirstNumbers(Pages):
    def gather(self, slots: Any, cu_seqlens: Any, into: Any) -> None:
        super().gather(slots, cu_seqlens, into)
        for x in into.values():
            x.copy_(x[:, :1].expand_as(x) if x.dim() > 1 else x)


class MovingStorage(Pages):
    def append(self, *args: Any) -> None:
        super().append(*args)
        self.tokens["token"] = self.tokens["token"].clone()


class KeepsGraphs(Pages):
    def append(self, *args: Any) -> None:
        with torch.enable_grad():
            super().append(*args)


class StoresTheDead(Pages):
    def append(self, slots: Slots, values: Any, cu_seqlens: Any, alive: Any) -> None:
        super().append(slots, values, cu_seqlens, None)


class CountsTheDead(Pages):
    def append(self, slots: Slots, values: Any, cu_seqlens: Any, alive: Any) -> None:
        super().append(slots, values, cu_seqlens, alive)
        if alive is not None:
            self.counts[:2] += (~alive).sum()


class WritesOverTheLast(Pages):
    def append(self, slots: Slots, values: Any, cu_seqlens: Any, alive: Any) -> None:
        if cu_seqlens is None and len(slots.ids) == 1:
            at = slots.ids.clamp(0, len(self.stamp) - 1)
            full = (self.stamp[at] == slots.stamps) & (self.length[at] == self.limit[at])
            self.length.index_add_(0, at, -full.long())
        super().append(slots, values, cu_seqlens, alive)


class IgnoresStamps(Pages):
    def append(self, slots: Slots, *rest: Any) -> None:
        now = self.stamp[slots.ids.clamp(0, len(self.stamp) - 1)]
        super().append(Slots(slots.ids, torch.where(now >= 0, now, slots.stamps)), *rest)
