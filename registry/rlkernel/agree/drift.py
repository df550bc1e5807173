"""How far apart two sets of log-probabilities of the same tokens are.

With x = log p trainer - log p rollout, over tokens that the rollout drew:

    kl     mean of e^x - 1 - x, which estimates KL(rollout || trainer) in nats per token and is never negative
    clip   share of tokens whose ratio e^x is outside [1 - 0.2, 1 + 0.2] before any update: they start clipped
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

CLIP: Final = 0.2  # the bound of PPO and GRPO


@dataclass(frozen=True)
class Drift:
    """One comparison of log-probabilities; x = log p trainer - log p rollout, in nats."""

    tokens: int  # compared
    max: float  # largest |x|
    mean: float  # of |x|
    p99: float  # 99th percentile of |x|
    kl: float  # mean of e^x - 1 - x: KL(rollout || trainer), nats per token
    clip: float  # share of tokens whose ratio e^x starts outside [1 - CLIP, 1 + CLIP]
    equal: float  # share of tokens with the same bits

    @classmethod
    def between(cls, trainer: Tensor, rollout: Tensor) -> Drift:
        """Of log-probabilities [...] by `trainer` and by `rollout`; in float64, so that measuring adds nothing."""
        same = (trainer == rollout).double().mean()
        x = trainer.detach().double().flatten() - rollout.detach().double().flatten()
        ratio = x.exp()
        numbers = (
            x.abs().max(),
            x.abs().mean(),
            torch.quantile(x.abs(), 0.99),
            (ratio - 1 - x).mean().clamp(min=0.0),
            ((ratio < 1 - CLIP) | (ratio > 1 + CLIP)).double().mean(),
            same,
        )
        return cls(x.numel(), *(float(n) for n in numbers))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)
