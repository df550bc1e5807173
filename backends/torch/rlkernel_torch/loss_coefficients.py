"""One coefficient function for every policy loss: value, exact derivatives and statistics from per-token vectors.

    prepare(...)       loss_batch.py: what is fixed before the current policy is looked at
    coefficients(...)  per-token loss, d loss / d logprob, d loss / d entropy
    summary(...)       the scalar loss and LossStats

policy_loss runs it on log-probabilities, linear_policy_loss on those it makes chunk by chunk; there is no second copy
of the formulas. All vectors are [B, T] or [N], in fp32 (float64 for float64).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel_common.loss_batch import EXPONENT_LIMIT, Batch, over_level, sequence_mean
from rlkernel_common.loss_ranks import ROWS, joined, of_all_ranks
from rlkernel_common.sequences import Bag, Sequences
from rlkernel_core.spec.policy_loss import LossConfig, LossStats
from rlkernel_torch.loss_surrogates import (
    SURROGATES,
    Point,
    Term,
    gmpo_clip,
    kl_estimate,
    log_correction,
    vespo_weight,
)


@dataclass(frozen=True)
class Coefficients:
    """The loss at one point."""

    policy: Tensor  # l per token, correction included, before omega
    kl: Tensor | None  # KL estimate per token, before kl_importance
    loss: Tensor  # omega (w l + kl_coef kl) - entropy_coef omega' H, per token: sums to the loss
    dlogprob: Tensor  # d loss / d logprob
    dentropy: Tensor | None
    term: Term
    ratio: Tensor
    log_ratio: Tensor  # d before any limit


@dataclass(frozen=True)
class _Ratio:
    """A ratio at every token and the way its gradient goes."""

    value: Tensor
    moves: Tensor  # bool: the token's log-probability moves it
    shared: bool  # it belongs to the whole sequence


def _ratio(d: Tensor, batch: Batch, config: LossConfig, sequences: Sequences, *, token: bool) -> _Ratio:
    limit, mask = config.log_ratio_limit, batch.mask
    if token or config.level == "token":
        return _Ratio(d.clamp(-limit, limit).exp(), (d.abs() <= limit) & mask, shared=False)
    if config.surrogate == "vespo":
        log_v = torch.where(mask, d.clamp(-limit, limit), 0.0)
        if batch.correction is not None:
            log_v = log_v + torch.where(mask, log_correction(batch.correction), 0.0)
        return _Ratio(vespo_weight(over_level(log_v, "sequence", mask, sequences)), torch.zeros_like(mask), shared=True)
    if config.surrogate == "gmpo":
        clipped, free = gmpo_clip(d.clamp(-limit, limit), batch.advantages, config.clip)
        log_r = sequence_mean(torch.where(mask, clipped, 0.0), mask, sequences)
        return _Ratio(log_r.exp(), free & (d.abs() <= limit) & mask, shared=True)
    log_s = sequence_mean(d, mask, sequences)
    inside = (log_s.abs() <= limit) & mask
    return _Ratio(log_s.clamp(-limit, limit).exp(), inside, shared=not config.own_gradient)


def _along(ratio: _Ratio, upstream: Tensor, mask: Tensor, sequences: Sequences) -> Tensor:
    """From d loss / d ratio (omega included) to d loss / d logprob. A zero stays zero at an infinite ratio."""
    flow = torch.where(upstream != 0, upstream * ratio.value, 0.0)
    if ratio.shared:
        # The sum over a sequence, times 1 / |y|, is the mean over it: every token of it moves the ratio by that.
        flow = sequence_mean(torch.where(mask, flow, 0.0), mask, sequences)
    return torch.where(ratio.moves, flow, 0.0)


def coefficients(
    logprob: Tensor, entropy: Tensor | None, batch: Batch, config: LossConfig, sequences: Sequences
) -> Coefficients:
    """Per-token loss and its exact derivatives, at detached log-probabilities and entropies."""
    mask, omega = batch.mask, batch.omega
    logprob = torch.where(mask, logprob.to(omega.dtype), 0.0).contiguous()
    old = logprob if batch.old is None else batch.old
    d = torch.where(mask, logprob - old, 0.0)
    ratio = _ratio(d, batch, config, sequences, token=False)
    limit = config.log_ratio_limit
    at = Point(logprob, old, d.clamp(-limit, limit), ratio.value, batch.advantages)
    term = SURROGATES[config.surrogate](at, config)

    weight = None if config.surrogate == "vespo" else batch.correction
    policy = term.value if weight is None else weight * term.value
    scale = omega if weight is None else omega * weight
    loss = omega * policy
    dlogprob = torch.zeros_like(omega)
    if term.through is not None:
        dlogprob = dlogprob + _along(ratio, scale * term.through, mask, sequences)
    if term.direct is not None:
        dlogprob = dlogprob + scale * term.direct

    kl = None
    if batch.ref is not None and config.kl is not None:
        kl, derivative = kl_estimate(torch.where(mask, logprob - batch.ref, 0.0), config.kl, config.kl_clamp)
        step = omega * batch.kl_coef
        if config.kl_importance:
            own = config.surrogate not in {"clip", "cispo", "sapo"}
            by = _ratio(d, batch, config, sequences, token=True) if own else ratio
            loss = loss + step * by.value * kl
            dlogprob = dlogprob + step * by.value * derivative + _along(by, step * kl, mask, sequences)
        else:
            loss, dlogprob = loss + step * kl, dlogprob + step * derivative

    dentropy = None
    if entropy is not None:
        dentropy = -batch.entropy_coef * batch.omega_entropy
        loss = loss + dentropy * torch.where(mask, entropy.to(omega.dtype), 0.0).contiguous()
    return Coefficients(
        policy=policy,
        kl=kl,
        loss=torch.where(mask, loss, 0.0),
        dlogprob=torch.where(mask, dlogprob, 0.0),
        dentropy=dentropy,
        term=term,
        ratio=ratio.value,
        log_ratio=d,
    )


def summary(
    at: Coefficients, entropy: Tensor | None, batch: Batch, config: LossConfig, sequences: Sequences
) -> tuple[Tensor, LossStats]:
    """The scalar loss and its statistics, all on the device; one collective where the batch is split over ranks."""
    of, counts = _sums(at, entropy, batch, config), batch.counts
    if batch.group is not None:
        of = dict(zip(ROWS, joined(of_all_ranks(torch.stack(list(of.values()))[:, None], batch.group)), strict=True))
    dtype = batch.omega.dtype
    n = counts.tokens.to(dtype).clamp(min=1)
    share, squares, some = of["share"], of["squares"], counts.tokens > 0
    stats = LossStats(
        tokens=counts.tokens,
        sequences=None if isinstance(sequences, Bag) else counts.filled,
        policy_loss=of["policy"],
        ratio_mean=of["ratio"] / n,
        ratio_min=torch.where(some, of["least"], 0.0),
        ratio_max=torch.where(some, of["most"], 0.0),
        clip_low=of["low"] / n,
        clip_high=of["high"] / n,
        clip_dual=of["dual"] / n,
        approx_kl_k1=of["k1"] / n,
        approx_kl_k3=of["k3"] / n,
        effective_sample_size=torch.where(
            squares > 0, share.square() / (n * torch.where(squares > 0, squares, 1.0)), 0.0
        ),
        entropy=None if entropy is None else of["entropy"] / n,
        kl_ref=None if at.kl is None else of["kl"] / n,
        rollout_kl=None if batch.rollout_gap is None else of["gap"] / n,
        rollout_missing=None if batch.missing is None else of["missing"] / n,
        correction_mean=None if batch.correction is None else of["weight"] / n,
        correction_clipped=None if batch.outside is None else of["outside"] / n,
        rejected=None
        if config.rejection is None
        else (counts.offered - counts.tokens).to(dtype) / counts.offered.to(dtype).clamp(min=1),
    )
    return of["loss"], stats


def _sums(at: Coefficients, entropy: Tensor | None, batch: Batch, config: LossConfig) -> dict[str, Tensor]:
    """What this rank adds to every row of `ROWS`; 0 where the call has no such number."""
    mask, dtype = batch.mask, batch.omega.dtype
    zero = batch.omega.new_zeros(())

    def total(x: Tensor | None) -> Tensor:
        return zero if x is None else torch.where(mask, x.to(dtype), 0.0).contiguous().sum()

    def padded(x: Tensor, fill: float) -> Tensor:
        return torch.cat([torch.where(mask, x, fill).flatten(), x.new_full((1,), fill)])

    d = at.log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    weight = at.ratio if batch.correction is None or config.surrogate == "vespo" else at.ratio * batch.correction
    v = torch.where(mask, weight, 0.0)
    top = padded(v, 0.0).amax()
    u = v / torch.where(top > 0, top, 1.0)  # so that no square overflows
    gap = None if batch.rollout_gap is None else batch.rollout_gap.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    found = {
        "loss": at.loss.sum(),
        "policy": (batch.omega * at.policy).sum(),
        "tokens": mask.to(dtype).sum(),
        "ratio": total(at.ratio),
        "least": padded(at.ratio, torch.inf).amin(),
        "most": padded(at.ratio, -torch.inf).amax(),
        "low": total(at.term.low),
        "high": total(at.term.high),
        "dual": total(at.term.dual),
        "k1": total(-at.log_ratio),
        "k3": total(torch.expm1(d) - d),
        "top": top,
        "share": u.sum(),
        "squares": u.square().sum(),
        "entropy": total(entropy),
        "kl": total(at.kl),
        "gap": total(None if gap is None else torch.expm1(gap) - gap),
        "missing": total(batch.missing),
        "weight": total(batch.correction),
        "outside": total(batch.outside),
    }
    return {name: found[name] for name in ROWS}
