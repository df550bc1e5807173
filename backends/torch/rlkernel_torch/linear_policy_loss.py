"""linear_policy_loss@1 in plain torch: one pass over the head where that is legal, else the two operators in a row.

One pass (fused_loss.py) makes the gradient with the loss: three matmuls, an fp32 gradient of the weight and the logits
of a block of rows, constant in N. The way through linear_logprob costs five matmuls, or three where it may keep the
logits (max_workspace_bytes). It is taken for sequence-level ratios, for a support, where a rollout is compared with
the current policy itself, and where the workspace is too small for one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_common import vocab_parallel
from rlkernel_common.kept_ids import readable
from rlkernel_common.known_gradient import attach
from rlkernel_common.loss_batch import prepare
from rlkernel_common.row_selection import choose
from rlkernel_common.row_statistics import accumulator, temperatures
from rlkernel_common.sequences import Packed, layout
from rlkernel_core.spec import linear_policy_loss as spec
from rlkernel_core.spec.linear_logprob import LinearLogprobCall
from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.policy_loss import LossConfig, LossResult, PolicyLossCall
from rlkernel_torch.fused_loss import FusedLoss, Gradients, workspace
from rlkernel_torch.head import Head
from rlkernel_torch.linear_logprob import linear_logprob
from rlkernel_torch.loss_coefficients import coefficients, summary
from rlkernel_torch.policy_loss import full_mask, policy_loss


def linear_policy_loss(call: LinearPolicyLossCall) -> LossResult:
    """The operator's contract is `rlkernel_core.spec.linear_policy_loss.LinearPolicyLossCall`.

    `fused_loss.workspace` and `linear_logprob.workspace` state the extra memory. dW is rounded once; dX once when it
    is made and once more where an upstream gradient that is no power of two scales it.
    """
    hidden, weight, ids, bias, mask, entropy = call.hidden, call.weight, call.ids, call.bias, call.mask, call.entropy
    limit = call.max_workspace_bytes
    config = spec.configure(call)
    shape, (V, D) = tuple(ids.shape), weight.shape
    sequences = layout(shape, call.cu_seqlens)
    if mask is not None or isinstance(sequences, Packed):
        mask = full_mask(mask, shape, sequences, ids.device)
    dtype = accumulator(hidden, weight, bias)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    fits = limit is None or workspace(ids.numel(), D, V, dtype.itemsize) <= limit
    if not (wanted and fits and _per_token(config, call.support, call.old_logprob, call.rollout_logprob)):
        law = linear_logprob(LinearLogprobCall.of(call, mask=mask))
        result = policy_loss(PolicyLossCall.of(call, logprob=law.logprob, entropy=law.entropy, mask=mask))
        return LossResult(
            result.loss, result.stats, law.logprob.detach(), None if law.entropy is None else law.entropy.detach()
        )

    with torch.no_grad():
        batch = prepare(
            call.old_logprob,
            call.advantages,
            config,
            sequences,
            mask=full_mask(mask, shape, sequences, ids.device),
            ref=call.ref_logprob,
            rollout=call.rollout_logprob,
            before=call.old_logprob,
            denominator=call.denominator,
            entropy_denominator=call.entropy_denominator,
            kl_coef=call.kl_coef,
            entropy_coef=call.entropy_coef,
            dtype=dtype,
        )
        shard = vocab_parallel.locate(call.group, V, ids.numel(), D, hidden.device)
        flat_mask = None if mask is None else mask.reshape(-1)
        chosen = choose(ids.reshape(-1), flat_mask, shard.V, None)
        T = temperatures(call.temperature, ids.shape, dtype, hidden.device)
        active = flat_mask.nonzero()[:, 0] if flat_mask is not None and readable(flat_mask) else None
        some = slice(None) if active is None else active  # rows that are worked on
        flat = hidden.detach().reshape(-1, D)
        one_pass = FusedLoss(
            head=Head(flat, weight, bias, call.logit_scale, active, chosen.counted if active is None else None, dtype),
            ids=chosen.ids[some],
            T=T[some],
            shard=shard,
            softcap=call.softcap,
            entropy=entropy,
            batch=batch.at(some),
            config=config,
        )
        into = Gradients(
            hidden=torch.zeros_like(flat, memory_format=torch.contiguous_format) if hidden.requires_grad else None,
            weight=T.new_zeros(weight.shape) if weight.requires_grad else None,
            bias=T.new_zeros(V) if bias is not None and bias.requires_grad else None,
        )
        values, H = one_pass.run(into)
        values, H = values.view(shape), None if H is None else H.view(shape)
        at = coefficients(values, H, batch, config, sequences)
        value, stats = summary(at, H, batch, config, sequences)
    d_hidden = None if into.hidden is None else into.hidden.view(hidden.shape)
    loss = attach(value, (d_hidden, hidden), (into.weight, weight), (into.bias, bias))
    return LossResult(loss, stats, values, H)


def _per_token(config: LossConfig, support: Support | None, old: Tensor | None, rollout: Tensor | None) -> bool:
    """Whether a token's gradient depends on that token's log-probability alone."""
    return config.level == "token" and support is None and (old is not None or rollout is None)
