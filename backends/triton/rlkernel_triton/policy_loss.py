"""policy_loss@1 in Triton: one launch over the batch and one over its partial sums; backward scales what was written.

A token costs 4 bytes of gradient and what it reads, each tensor once; a ratio per sequence reads its row again, which
by then lies in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rlkernel_core.reasons import Reason
from rlkernel_core.reference.known_gradient import attach
from rlkernel_core.spec import policy_loss as spec
from rlkernel_core.spec.policy_loss import LossResult, PolicyLossCall
from rlkernel_triton.launchers import Plan, launcher_for
from rlkernel_triton.loss_batch import LossBatch, scaled
from rlkernel_triton.suffix_scan import refused_float64


def policy_loss(call: PolicyLossCall) -> LossResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: PolicyLossCall) -> Callable[[PolicyLossCall], LossResult]:
    """What runs calls of this shape. See `rlkernel_core.spec.policy_loss.PolicyLossCall`."""
    config, shape, device = spec.configure(call), call.logprob.shape, call.logprob.device
    plan = Plan(launcher_for(device))
    by_plan = partial(scaled, plan=plan)
    room = torch.zeros if call.cu_seqlens is not None and config.level == "sequence" else torch.empty

    def run(call: PolicyLossCall) -> LossResult:
        logprob, entropy = call.logprob, call.entropy
        with torch.no_grad():
            batch = LossBatch.of(
                config, logprob, call.cu_seqlens, before=logprob, old=call.old_logprob, advantages=call.advantages,
                mask=call.mask, ref=call.ref_logprob, rollout=call.rollout_logprob, denominator=call.denominator,
                entropy_denominator=call.entropy_denominator, kl_coef=call.kl_coef, entropy_coef=call.entropy_coef,
                plan=plan,
            )  # fmt: skip
            partials = batch.partials(device)
            dlogprob = room(shape, dtype=torch.float32, device=device) if logprob.requires_grad else None
            dentropy = None
            if entropy is not None and entropy.requires_grad:
                dentropy = room(shape, dtype=torch.float32, device=device)
            current = None if entropy is None else entropy.detach().contiguous()
            batch.run(logprob.detach().contiguous(), current, dlogprob, dentropy, partials)
            value, stats = batch.summary(partials, entropy=entropy is not None)
        if dlogprob is None and dentropy is None:
            return LossResult(value, stats)
        return LossResult(attach(value, (dlogprob, logprob), (dentropy, entropy), by=by_plan), stats)

    return run


def fits(call: PolicyLossCall) -> Reason | None:
    """The state is fp32: a call with a float64 log-probability or entropy is for another implementation."""
    return refused_float64({"logprob": call.logprob, "entropy": call.entropy})
