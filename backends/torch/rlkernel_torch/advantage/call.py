"""One call of advantage: its arguments detached and in the state's dtype, its sizes, its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlkernel_common.row_statistics import accumulator
from rlkernel_core.spec.advantage import AdvantageCall, AdvantageStats
from rlkernel_core.spec.advantage_checks import Extent, extent_of
from rlkernel_core.spec.advantage_kinds import KINDS
from rlkernel_torch.advantage.layout import Layout


@dataclass(frozen=True)
class Prepared:
    """What every kind reads."""

    args: Mapping[str, Any]
    extent: Extent
    layout: Layout | None  # None where no token-level tensor is given

    @classmethod
    def of(cls, call: AdvantageCall) -> Prepared:
        """The arguments of a call, prepared."""
        args, extent = call.as_dict(), extent_of(call)
        tensors = [x for x in args.values() if isinstance(x, Tensor)]
        state = accumulator(*tensors)
        kind = KINDS[args["kind"]]
        auto = {n: getattr(kind, n) for n in ("scale", "whiten") if args[n] == "auto"}
        ready = {n: _ready(n, x, state) for n, x in args.items()} | auto
        layout = None
        if extent.tokens is not None:
            layout = Layout.of(
                extent.tokens,
                extent.sequences,
                ready["rewards"].device,
                mask=ready["mask"],
                lengths=ready["lengths"],
                cu_seqlens=ready["cu_seqlens"],
            )
        return cls(ready, extent, layout)

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    @property
    def rewards(self) -> Tensor:
        """Rewards in the state's dtype."""
        x: Tensor = self.args["rewards"]
        return x

    def tokens_per_sequence(self) -> Tensor | None:  # [B] int64
        """Valid tokens of each sequence, where a layout says so."""
        described = any(self.args[n] is not None for n in ("mask", "lengths", "cu_seqlens"))
        if self.layout is not None:
            return self.layout.counts() if described or self.extent.token_rewards else None
        if self.args["lengths"] is not None:
            lengths: Tensor = self.args["lengths"]
            return lengths.to(torch.int64).clamp(min=0)
        if self.args["cu_seqlens"] is not None:
            bounds: Tensor = self.args["cu_seqlens"]
            return bounds.to(torch.int64).diff().clamp(min=0)
        return None

    def chosen(self, name: str) -> Tensor:  # [B] bool
        """A mask over sequences; all where it is not given."""
        x: Tensor | None = self.args[name]
        if x is not None:
            return x
        return torch.ones(self.extent.sequences, dtype=torch.bool, device=self.rewards.device)


@dataclass(frozen=True)
class Estimate:
    """What a kind makes of a batch, before whitening and weights."""

    advantages: Tensor  # [B] or rows [R, T]
    invalid: Tensor  # [B] bool
    returns: Tensor | None = None  # rows [R, T]
    raw: Tensor | None = None  # [B] what invalid sequences get; None: 0
    stats: Mapping[str, Tensor] = field(default_factory=dict)  # further fields of AdvantageStats

    def with_stats(self, more: Mapping[str, Tensor]) -> AdvantageStats:
        """The statistics that the caller gets."""
        return AdvantageStats(invalid=self.invalid, **self.stats, **more)


# Names, flags and sizes keep their dtype; everything else is arithmetic and gets the state's.
_NAMES = frozenset({"group", "mask", "lengths", "cu_seqlens", "dones", "turns", "in_stats", "in_loss", "anchor"})


def _ready(name: str, x: Any, state: torch.dtype) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach() if name in _NAMES else x.detach().to(state)
