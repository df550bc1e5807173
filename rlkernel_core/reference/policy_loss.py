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
from rlkernel_core.spec.policy_loss import LossResult, PolicyLossCall


def full_mask(mask: Tensor | None, shape: tuple[int, ...], sequences: Sequences, device: torch.device) -> Tensor:
    """The mask with its default filled in, False at tokens of no sequence."""
    if mask is None:
        mask = torch.ones(shape, dtype=torch.bool, device=device)
    return mask & sequences.inside if isinstance(sequences, Packed) else mask


def policy_loss(call: PolicyLossCall) -> LossResult:
    """See rlkernel_core.spec.policy_loss.policy_loss."""
    logprob, old_logprob, entropy = call.logprob, call.old_logprob, call.entropy
    config = spec.configure(call)
    shape = tuple(logprob.shape)
    sequences = layout(shape, call.cu_seqlens)
    with torch.no_grad():
        batch = prepare(
            old_logprob,
            call.advantages,
            config,
            sequences,
            mask=full_mask(call.mask, shape, sequences, logprob.device),
            ref=call.ref_logprob,
            rollout=call.rollout_logprob,
            before=logprob if old_logprob is None else old_logprob,
            denominator=call.denominator,
            entropy_denominator=call.entropy_denominator,
            kl_coef=call.kl_coef,
            entropy_coef=call.entropy_coef,
            dtype=torch.float64 if logprob.dtype == torch.float64 else torch.float32,
        )
        at = coefficients(logprob, entropy, batch, config, sequences)
        value, stats = summary(at, entropy, batch, config, sequences)
    loss = attach(value, (at.dlogprob, logprob), (at.dentropy, entropy))
    return LossResult(loss, stats)
