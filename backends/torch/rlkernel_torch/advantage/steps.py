"""Kinds that are a recursion over time: GAE, discounted returns, V-trace, Retrace; and turns as time steps.

All tensors here are rows [R, T], finite at valid tokens and 0 at the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlkernel_torch.advantage.layout import Layout, exclusive, inclusive, next_valid

Factor = float | Tensor


@dataclass(frozen=True)
class Steps:
    """Rewards and what goes with them at the time steps of a batch."""

    layout: Layout
    rewards: Tensor
    gamma: float
    going_on: Tensor | None = None  # 1 where the episode goes on after the step, 0 where it ends
    bootstrap: Tensor | None = None  # [B]
    masked_time: str = "skip"

    def through(self, decay: Factor) -> Tensor:
        """`decay`, and 0 where the episode ends."""
        kept = torch.ones_like(self.rewards) if self.going_on is None else self.going_on
        return kept * decay

    def after(self, y: Tensor) -> Tensor:
        """`y`, and 0 where the episode ends."""
        return y if self.going_on is None else torch.where(self.going_on > 0, y, 0.0)

    def over_masked(self, decay: Factor) -> Factor:
        """What a masked token does to the value carried over it."""
        return {"skip": 1.0, "step": decay, "reset": 0.0}[self.masked_time]

    def ending(self) -> Tensor | None:  # [B]
        """The value after the last step, discounted."""
        return None if self.bootstrap is None else self.gamma * self.bootstrap


def discounted(steps: Steps) -> Tensor:
    """G_t = r_t + gamma G_{t+1}."""
    end = None if steps.bootstrap is None else steps.bootstrap
    fill = steps.over_masked(steps.gamma)
    return inclusive(steps.layout, steps.through(steps.gamma), steps.rewards, end, fill=fill)


def lambda_returns(steps: Steps, values: Tensor, lam: Factor) -> Tensor:
    """R_t of GAE and TD(lambda)."""
    # gamma * lam in float64 on the host where both are numbers: the fp32 rounding of 1 - lam is a visible bias.
    decay, blend = steps.gamma * lam, steps.gamma * (1.0 - lam)
    b = blend * values + decay * steps.rewards
    y = exclusive(steps.layout, steps.through(decay), b, steps.ending(), fill=steps.over_masked(decay))
    return steps.rewards + steps.after(y)


def retrace(steps: Steps, values: Tensor, q: Tensor, trace: Tensor) -> Tensor:
    """Targets of Q: R_t = r_t + gamma (v' + c' (R' - q'))."""
    b = steps.gamma * (values + trace * (steps.rewards - q))
    y = exclusive(steps.layout, steps.through(steps.gamma * trace), b, steps.ending())
    return steps.rewards + steps.after(y)


def vtrace(steps: Steps, values: Tensor, rho: Tensor, trace: Tensor) -> tuple[Tensor, Tensor]:
    """Targets vs of V, and the policy-gradient advantage."""
    following = steps.after(next_valid(steps.layout, values, steps.bootstrap))
    delta = rho * (steps.rewards + steps.gamma * following - values)
    excess = inclusive(steps.layout, steps.through(steps.gamma * trace), delta)
    excess_next = steps.after(next_valid(steps.layout, excess))
    targets = values + excess
    return targets, rho * (steps.rewards + steps.gamma * (following + excess_next) - values)


def clipped(ratio: Tensor, at: float | None) -> Tensor:
    """min(ratio, at)."""
    return ratio if at is None else ratio.clamp(max=at)


def as_turns(steps: Steps, turns: Tensor) -> tuple[Steps, Tensor]:
    """One step per turn, standing at its first token, and at every token the index of that first token."""
    layout, width = steps.layout, turns.shape[-1]
    at = torch.arange(width, device=turns.device).expand_as(turns)
    previous = torch.where(layout.valid, at, -1)
    previous = torch.cat([torch.full_like(previous[..., :1], -1), previous[..., :-1]], -1)
    previous = previous.cummax(-1).values if width else previous
    same = (previous >= 0) & (turns == turns.gather(-1, previous.clamp(min=0)))
    if layout.segment is not None:
        same &= (layout.segment == layout.segment[previous.clamp(min=0)[0]])[None]
    start = layout.valid & ~same
    whole = _turn_sums(layout, start, steps.rewards)
    going_on = steps.going_on
    if going_on is not None:
        going_on = (_turn_sums(layout, start, 1.0 - going_on) == 0).to(whole.dtype)
    heads = torch.where(start, at, 0)
    head = heads.cummax(-1).values if width else heads
    at_start = layout.only(start)
    return replace(steps, layout=at_start, rewards=at_start.select(whole), going_on=going_on), head


def _turn_sums(layout: Layout, start: Tensor, x: Tensor) -> Tensor:
    """Sum of x from each valid token to the end of its turn."""
    x = layout.select(x)
    rest = exclusive(layout, torch.where(start, 0.0, torch.ones_like(x)), torch.where(start, 0.0, x))
    return layout.select(x + rest)
