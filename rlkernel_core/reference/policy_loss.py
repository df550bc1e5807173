"""policy_loss@1 in plain torch: the coefficient function, attached to the autograd graph.

The gradient is made with the value, analytically; backward only scales it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_core.reference.known_gradient import attach
from rlkernel_core.reference.loss_batch import prepare
from rlkernel_core.reference.loss_coefficients import coefficients, summary
from rlkernel_core.reference.sequences import Packed, Sequences, layout
from rlkernel_core.spec import policy_loss as spec
from rlkernel_core.spec.policy_loss import Correction, GammaGate, LossResult, Rejection


def full_mask(mask: Tensor | None, shape: tuple[int, ...], sequences: Sequences, device: torch.device) -> Tensor:
    """The mask with its default filled in, False at tokens of no sequence."""
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=device)
    return mask & sequences.inside if isinstance(sequences, Packed) else mask


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
    shape = tuple(logprob.shape)
    sequences = layout(shape, cu_seqlens)
    with torch.no_grad():
        batch = prepare(
            old_logprob,
            advantages,
            config,
            sequences,
            mask=full_mask(mask, shape, sequences, logprob.device),
            ref=ref_logprob,
            rollout=rollout_logprob,
            before=logprob if old_logprob is None else old_logprob,
            denominator=denominator,
            entropy_denominator=entropy_denominator,
            kl_coef=kl_coef,
            entropy_coef=entropy_coef,
            dtype=torch.float64 if logprob.dtype == torch.float64 else torch.float32,
        )
        at = coefficients(logprob, entropy, batch, config, sequences)
        value, stats = summary(at, entropy, batch, config, sequences)
    loss = attach(value, (at.dlogprob, logprob), (at.dentropy, entropy))
    return LossResult(loss, stats)
