"""RL batches for your own tests: ragged, masked, packed, with the extremes that training meets; drawn, no data needed.

    from rlkernel_conformance.batches import rl_batch

    batch = rl_batch(seed=0)
    loss = my_loss(batch.logprob, batch.old_logprob, batch.advantages, mask=batch.mask)

The same seed and sizes give the same numbers on every machine. What an extreme looks like is in EXTREMES; `rl_batch`
puts all of them into one batch unless told which.

Legend: B sequences · T padded length · N packed tokens · G sequences of a group · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

import torch
from torch import Generator, Tensor

from rlkernel_core.errors import ArgumentError, UnknownNameError

__all__ = ["EXTREMES", "PackedBatch", "RLBatch", "rl_batch"]

EXTREMES: Final[Mapping[str, str]] = {
    "long": "one sequence has all T tokens, the others a third of them at most",
    "empty": "one sequence has no token",
    "hole": "tokens inside a sequence are masked, as tool output is",
    "equal group": "all rewards of a group are the same number, which has no short binary fraction",
    "minus infinity": "the policy gives an old token no mass: its logprob is -inf, and 15 % of the logits are -inf",
    "huge ratio": "log-ratios of +-60: e^60 overflows nothing in fp32, and its square does",
    "poison": "NaN, infinities and ids out of range wherever the mask is False",
}


@dataclass(frozen=True)
class RLBatch:
    """A padded batch; tensors on one device, floats in fp32."""

    ids: Tensor  # [B, T] int64, tokens of the responses
    mask: Tensor  # [B, T] bool, True where a token counts
    lengths: Tensor  # [B] int64, tokens of each sequence, masked ones inside included
    logprob: Tensor  # [B, T] of the current policy, nats
    old_logprob: Tensor  # [B, T] of the policy that the ratio is taken against
    ref_logprob: Tensor  # [B, T] of the reference policy
    rollout_logprob: Tensor  # [B, T] of the engine that sampled
    rewards: Tensor  # [B] one per sequence
    group: Tensor  # [B] int64, which prompt a sequence answers: G neighbors each
    advantages: Tensor  # [B] rewards less their group's mean, over its std; 0 in a constant group
    logits: Tensor  # [B, T, V]

    def packed(self) -> PackedBatch:
        """The tokens of all sequences end to end, without padding; masked ones inside a sequence stay."""
        there = torch.arange(self.mask.shape[1], device=self.mask.device) < self.lengths[:, None]
        starts = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)
        by_token = {f.name: getattr(self, f.name)[there] for f in fields(PackedBatch) if f.name in _BY_TOKEN}
        return PackedBatch(cu_seqlens=starts, rewards=self.rewards, group=self.group,
                           advantages=self.advantages[:, None], **by_token)  # fmt: skip

    def to(self, device: str) -> RLBatch:
        """The same batch on a device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True)
class PackedBatch:
    """The same batch, packed; fields without a comment are as in `RLBatch`, [N] in place of [B, T]."""

    ids: Tensor
    mask: Tensor
    logprob: Tensor
    old_logprob: Tensor
    ref_logprob: Tensor
    rollout_logprob: Tensor
    logits: Tensor  # [N, V]
    cu_seqlens: Tensor  # [B + 1] int32, where each sequence starts
    rewards: Tensor  # [B]
    group: Tensor  # [B]
    advantages: Tensor  # [B, 1]


_BY_TOKEN: Final = ("ids", "mask", "logprob", "old_logprob", "ref_logprob", "rollout_logprob", "logits")


def rl_batch(
    seed: int = 0,
    *,
    groups: int = 4,
    group_size: int = 4,
    length: int = 32,
    vocab: int = 64,
    extremes: Collection[str] = tuple(EXTREMES),
    device: str = "cpu",
) -> RLBatch:
    """A batch of groups * group_size sequences of up to `length` tokens, from a seed.

    Args:
        seed: any integer of 63 bits.
        groups: prompts, at least 2; B = groups * group_size.
        group_size: G, responses to a prompt, at least 2.
        length: T, at least 6.
        vocab: V, at least 4.
        extremes: names of EXTREMES; () for a batch without any, where sequences still differ in length.
        device: torch device of every tensor; numbers are drawn on the CPU.

    Raises:
        ArgumentError: a size below the least.
        UnknownNameError: an extreme that is none.
    """
    least = {"groups": (groups, 2), "group_size": (group_size, 2), "length": (length, 6), "vocab": (vocab, 4)}
    for name, (value, at_least) in least.items():
        if value < at_least:
            raise ArgumentError(name, value, f"must be >= {at_least}", f"Pass at least {at_least}.")
    for name in extremes:
        if name not in EXTREMES:
            raise UnknownNameError("extreme", name, EXTREMES)
    g = Generator().manual_seed(seed)
    B, T, V = groups * group_size, length, vocab
    mask, lengths = _lengths(B, T, extremes, g)
    logits = 3 * torch.randn(B, T, V, generator=g)
    ids = torch.randint(V, (B, T), generator=g)
    if "minus infinity" in extremes:
        impossible = torch.rand(B, T, V, generator=g) < 0.15
        logits = logits.masked_fill(impossible.scatter(2, ids[..., None], False), -math.inf)
        logits[1, 0, ids[1, 0]] = -math.inf
        logits[1, 0, (ids[1, 0] + 1) % V] = 0.0  # another token is possible there
    logprob = logits.log_softmax(-1).gather(2, ids[..., None])[..., 0]
    finite = logprob.nan_to_num(neginf=-30.0)
    old, ref, rollout = ((finite + s * torch.randn(B, T, generator=g)).clamp(max=0) for s in (0.1, 0.3, 0.02))
    rollout = (old + (rollout - finite)).clamp(max=0)
    if "huge ratio" in extremes:
        old[2, 0] = finite[2, 0] - 60
        logprob[3, 0], old[3, 0] = finite[3, 0] - 60, finite[3, 0]
    group = torch.arange(groups).repeat_interleave(group_size)
    rewards = torch.randint(5, (B,), generator=g) / 4
    if "equal group" in extremes:
        rewards[group == groups - 1] = 12.3
    batch = RLBatch(
        ids, mask, lengths, logprob, old, ref, rollout, rewards, group, _advantages(rewards, groups), logits
    )
    return (_poisoned(batch) if "poison" in extremes else batch).to(device)


def _lengths(B: int, T: int, extremes: Collection[str], g: Generator) -> tuple[Tensor, Tensor]:
    """Which tokens count [B, T], and how many tokens a sequence has [B]."""
    most = max(4, T // 3) if "long" in extremes else T
    lengths = torch.randint(3, most + 1, (B,), generator=g)
    if "long" in extremes:
        lengths[0] = T
    if "empty" in extremes:
        lengths[-1] = 0
    mask = torch.arange(T) < lengths[:, None]
    if "hole" in extremes:
        mask[0, 1:3] = False
    return mask, lengths


def _advantages(rewards: Tensor, groups: int) -> Tensor:
    """[B]; the first of each group is subtracted before anything is summed: a constant group gives exactly 0."""
    x = (rewards.view(groups, -1) - rewards.view(groups, -1)[:, :1]).double()
    away, std = x - x.mean(1, keepdim=True), x.std(1, keepdim=True)
    return torch.where(std > 0, away / (std + 1e-6), 0.0).float().reshape(-1)


def _poisoned(batch: RLBatch) -> RLBatch:
    """The same where the mask is True; elsewhere what fresh or stale memory may hold."""
    B, T = batch.mask.shape
    poison = torch.tensor([math.nan, math.inf, -math.inf, 1e30])[torch.arange(B * T).view(B, T) % 4]
    kept = batch.mask
    by_token = ("logprob", "old_logprob", "ref_logprob", "rollout_logprob")
    found = {name: torch.where(kept, getattr(batch, name), poison) for name in by_token}
    ids = torch.where(kept, batch.ids, torch.tensor([-100, 2**40])[torch.arange(B * T).view(B, T) % 2])
    return replace(batch, **found, ids=ids, logits=torch.where(kept[..., None], batch.logits, poison[..., None]))
