"""What a policy loss fixes before it looks at the current policy: the loss mask, token weights and corrections.

All vectors are [B, T] or [N], in fp32 (float64 for float64).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from rlkernel_common.loss_ranks import Counts
from rlkernel_common.sequences import Sequences
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.policy_loss import LossConfig, PolicyLossCall

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Exponents of rollout weights stay within this: e^20 is far beyond any useful bound, and fp32 overflows at e^88.
EXPONENT_LIMIT: Final = 20.0


_PER_TOKEN = (
    "mask",
    "omega",
    "omega_entropy",
    "advantages",
    "old",
    "ref",
    "correction",
    "rollout_gap",
    "missing",
    "outside",
)


@dataclass(frozen=True)
class Batch:
    """What is constant in the current log-probabilities, per token; 0 where masked."""

    mask: Tensor  # bool: the token is in the loss
    omega: Tensor  # weight of the policy and KL terms
    omega_entropy: Tensor  # weight of the entropy bonus
    advantages: Tensor
    old: Tensor | None  # None: the current log-probability
    ref: Tensor | None
    correction: Tensor | None  # w
    kl_coef: float | Tensor
    entropy_coef: float | Tensor
    counts: Counts  # of the batch of all ranks
    group: ProcessGroup | None  # those ranks; None: this one
    # For statistics only.
    rollout_gap: Tensor | None  # delta
    missing: Tensor | None  # bool: rollout log-probability was NaN
    outside: Tensor | None  # bool: the correction was out of its bounds

    def at(self, tokens: Tensor | slice) -> Batch:
        """Some tokens of the batch, flat."""
        values = {n: value.reshape(-1)[tokens] for n in _PER_TOKEN if (value := getattr(self, n)) is not None}
        return replace(self, **values)


def token_weights(
    one: Tensor,  # in the loss: the number of ranks, else 0
    tokens: Tensor,  # [B], in the loss
    sequences: Sequences,
    counts: Counts,
    aggregate: str,
    denominator: float | Tensor | None,
    config: LossConfig,
) -> Tensor:
    """omega: the weight of each token that makes `aggregate` a plain sum, and that the mean over ranks."""
    if aggregate == "token_sum":
        return one
    if aggregate == "token_mean":
        return one / _count(denominator, counts.tokens, one.dtype)
    omega = one / _count(denominator, counts.sequences if config.count_empty else counts.filled, one.dtype)
    if aggregate == "seq_mean_token_mean":
        omega = omega / sequences.spread(tokens.clamp(min=1))
    elif aggregate == "seq_mean_token_sum_norm":
        omega = omega / float(one.shape[-1] if config.horizon is None else config.horizon)
    return torch.where(one > 0, omega, 0.0)


def _count(given: float | Tensor | None, counted: Tensor | int, dtype: torch.dtype) -> float | Tensor:
    """The denominator; one of 0 belongs to an empty sum and becomes 1."""
    count = counted if given is None else given
    if isinstance(count, Tensor):
        count = count.to(dtype)
        return torch.where(count > 0, count, 1.0)
    return count if given is not None else max(count, 1)


def prepare(
    call: PolicyLossCall | LinearPolicyLossCall,
    config: LossConfig,
    sequences: Sequences,
    *,
    mask: Tensor,
    before: Tensor | None,
    dtype: torch.dtype,
) -> Batch:
    """Masks, corrections and weights of a batch, with one collective where it is split over ranks.

    Args:
        call: checked.
        config: what it is configured as.
        sequences: its layout.
        mask: bool, as the tokens, in place of the call's: without tokens of no sequence.
        before: the log-probability that the rollout is compared with: the old one, or the current one.
        dtype: of the results.
    """
    rollout = call.rollout_logprob
    # Sums run in the order of memory: whatever the layout of the arguments, it is that of a contiguous batch.
    offered = mask = mask.contiguous()

    def clean(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(mask, x.to(dtype), 0.0).contiguous()

    gap = missing = weight = outside = None
    if rollout is not None and before is not None:
        missing = (torch.isnan(rollout) & mask).contiguous()
        gap = torch.where(mask & ~missing, before.to(dtype) - rollout.to(dtype), 0.0).contiguous()
        if config.rejection is not None:
            mask = mask & _kept(gap, mask, config, sequences)
        if config.correction is not None:
            weight, outside = _correction(torch.where(mask, gap, 0.0), mask, config, sequences)
    group = call.process_group
    one = mask.to(dtype)
    tokens = sequences.sum(one)
    counts = Counts(
        mask.sum(), (tokens > 0).sum(), sequences.count, offered.sum(), *_mean_weight(weight, one, config, sequences)
    ).whole(group)
    if weight is not None and counts.weight is not None and counts.share is not None:
        mean = counts.weight / counts.share.clamp(min=1e-8)
        weight = weight / torch.where(mean > 0, mean, 1.0)
    if group is not None:
        one = one * group.size()
    omega = token_weights(one, tokens, sequences, counts, config.aggregate, call.denominator, config)
    omega_entropy = omega
    if config.entropy_aggregate is not None:
        omega_entropy = token_weights(
            one, tokens, sequences, counts, config.entropy_aggregate, call.entropy_denominator, config
        )
    per_token = call.advantages.to(dtype)
    if per_token.shape != mask.shape:
        per_token = _spread_advantages(per_token, mask, sequences)
    return Batch(
        mask=mask,
        omega=omega,
        omega_entropy=omega_entropy,
        advantages=torch.where(mask, per_token, 0.0).contiguous(),
        old=clean(call.old_logprob),
        ref=clean(call.ref_logprob),
        correction=weight,
        kl_coef=call.kl_coef,
        entropy_coef=call.entropy_coef,
        counts=counts,
        group=group,
        rollout_gap=gap,
        missing=missing,
        outside=outside,
    )


def _spread_advantages(advantages: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    return sequences.spread(advantages.reshape(advantages.shape[0])).expand(mask.shape)


def sequence_mean(x: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    """Mean over each sequence's tokens in `mask`, at every token; x is 0 elsewhere."""
    return sequences.spread(sequences.sum(x) / sequences.sum(mask.to(x.dtype)).clamp(min=1))


def over_level(x: Tensor, level: str, mask: Tensor, sequences: Sequences) -> Tensor:
    """One of: x per token, its sum per sequence, its mean per sequence."""
    if level == "geometric":
        return sequence_mean(x, mask, sequences)
    if level == "sequence":
        return sequences.spread(sequences.sum(x))
    return x


def _kept(gap: Tensor, mask: Tensor, config: LossConfig, sequences: Sequences) -> Tensor:
    """Tokens that the rejection leaves in."""
    rule = config.rejection
    if rule is None:
        return mask
    x = gap.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    if rule.statistic == "k2":
        x = 0.5 * x * x
    elif rule.statistic == "k3":
        x = torch.expm1(x) - x
    x = over_level(torch.where(mask, x, 0.0), rule.level, mask, sequences)
    if rule.statistic == "k1":
        x = x.exp()
    bad = torch.zeros_like(mask)
    if rule.low is not None:
        bad = bad | (x < rule.low)
    if rule.high is not None:
        bad = bad | (x > rule.high)
    if rule.level == "any":
        bad = sequences.spread(sequences.sum((bad & mask).to(x.dtype))) > 0
    return ~bad


def _correction(
    gap: Tensor, mask: Tensor, config: LossConfig, sequences: Sequences
) -> tuple[Tensor | None, Tensor | None]:
    """The weight w per token, before it is normalized, and where it was out of bounds."""
    rule = config.correction
    if rule is None:
        return None, None
    raw = over_level(gap, rule.level, mask, sequences).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    outside = torch.zeros_like(mask)
    if rule.low is not None:
        outside = outside | (raw < rule.low)
    if rule.high is not None:
        outside = outside | (raw > rule.high)
    weight = torch.where(outside, 0.0, raw) if rule.mode == "mask" else raw.clamp(rule.low, rule.high)
    return torch.where(mask, weight, 0.0), outside & mask


def _mean_weight(
    weight: Tensor | None, one: Tensor, config: LossConfig, sequences: Sequences
) -> tuple[Tensor | None, Tensor | None]:
    """The sum of weights by whose mean they are normalized, and of how many it is; None: they are not."""
    rule = config.correction
    if weight is None or rule is None or not rule.normalize:
        return None, None
    if rule.level == "token":
        return (weight * one).sum(), one.sum()
    share = torch.where(one > 0, one / sequences.spread(sequences.sum(one).clamp(min=1)), 0.0)  # a sequence counts once
    return (weight * share).sum(), share.sum()
