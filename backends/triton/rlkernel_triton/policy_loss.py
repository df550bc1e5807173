"""policy_loss@1 in Triton: one launch over the batch and one over its partial sums; backward scales what was written.

A token costs 4 bytes of gradient and what it reads, each tensor once; a ratio per sequence reads its row again, which
by then lies in a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_core.reasons import Reason
from rlkernel_core.reference.known_gradient import attach
from rlkernel_core.spec import policy_loss as spec
from rlkernel_core.spec.policy_loss import Correction, GammaGate, LossResult, Rejection
from rlkernel_triton.loss_batch import LossBatch, scaled
from rlkernel_triton.suffix_scan import refused_float64


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor | None,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kind: str = "grpo",
    level: str | None = None,
    clip: tuple[float, float] | None = None,
    dual_clip: float | None = None,
    log_ratio_limit: float | None = None,
    tau: tuple[float, float] | None = None,
    gamma: GammaGate | None = None,
    ratio_cap: float | None = None,
    dro_beta: float | None = None,
    aggregate: str | None = None,
    denominator: float | Tensor | None = None,
    horizon: float | None = None,
    count_empty: bool = False,
    ref_logprob: Tensor | None = None,
    kl: str | None = None,
    kl_coef: float | Tensor = 0.0,
    kl_clamp: tuple[float, float] | None = None,
    kl_importance: bool = False,
    entropy: Tensor | None = None,
    entropy_coef: float | Tensor = 0.0,
    entropy_aggregate: str | None = None,
    entropy_denominator: float | Tensor | None = None,
    rollout_logprob: Tensor | None = None,
    correction: Correction | None = None,
    rejection: Rejection | None = None,
) -> LossResult:
    """See rlkernel_core.spec.policy_loss.policy_loss."""
    config = spec.check(
        logprob,
        old_logprob,
        advantages,
        mask=mask,
        cu_seqlens=cu_seqlens,
        kind=kind,
        level=level,
        clip=clip,
        dual_clip=dual_clip,
        log_ratio_limit=log_ratio_limit,
        tau=tau,
        gamma=gamma,
        ratio_cap=ratio_cap,
        dro_beta=dro_beta,
        aggregate=aggregate,
        denominator=denominator,
        horizon=horizon,
        count_empty=count_empty,
        ref_logprob=ref_logprob,
        kl=kl,
        kl_coef=kl_coef,
        kl_clamp=kl_clamp,
        kl_importance=kl_importance,
        entropy=entropy,
        entropy_coef=entropy_coef,
        entropy_aggregate=entropy_aggregate,
        entropy_denominator=entropy_denominator,
        rollout_logprob=rollout_logprob,
        correction=correction,
        rejection=rejection,
    )
    with torch.no_grad():
        batch = LossBatch.of(
            config, logprob, cu_seqlens, before=logprob, old=old_logprob, advantages=advantages, mask=mask,
            ref=ref_logprob, rollout=rollout_logprob, denominator=denominator,
            entropy_denominator=entropy_denominator, kl_coef=kl_coef, entropy_coef=entropy_coef,
        )  # fmt: skip
        partial = batch.partials(logprob.device)
        room = torch.zeros if cu_seqlens is not None and config.level == "sequence" else torch.empty
        dlogprob = room(logprob.shape, dtype=torch.float32, device=logprob.device) if logprob.requires_grad else None
        dentropy = None
        if entropy is not None and entropy.requires_grad:
            dentropy = room(logprob.shape, dtype=torch.float32, device=logprob.device)
        current = None if entropy is None else entropy.detach().contiguous()
        batch.run(logprob.detach().contiguous(), current, dlogprob, dentropy, partial)
        value, stats = batch.summary(partial, entropy=entropy is not None)
    return LossResult(attach(value, (dlogprob, logprob), (dentropy, entropy), by=scaled), stats)


def fits(
    logprob: Tensor,
    old_logprob: Tensor | None,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kind: str = "grpo",
    level: str | None = None,
    clip: tuple[float, float] | None = None,
    dual_clip: float | None = None,
    log_ratio_limit: float | None = None,
    tau: tuple[float, float] | None = None,
    gamma: GammaGate | None = None,
    ratio_cap: float | None = None,
    dro_beta: float | None = None,
    aggregate: str | None = None,
    denominator: float | Tensor | None = None,
    horizon: float | None = None,
    count_empty: bool = False,
    ref_logprob: Tensor | None = None,
    kl: str | None = None,
    kl_coef: float | Tensor = 0.0,
    kl_clamp: tuple[float, float] | None = None,
    kl_importance: bool = False,
    entropy: Tensor | None = None,
    entropy_coef: float | Tensor = 0.0,
    entropy_aggregate: str | None = None,
    entropy_denominator: float | Tensor | None = None,
    rollout_logprob: Tensor | None = None,
    correction: Correction | None = None,
    rejection: Rejection | None = None,
) -> Reason | None:
    """The state is fp32: a call with a float64 log-probability or entropy is for another implementation."""
    return refused_float64({"logprob": logprob, "entropy": entropy})
