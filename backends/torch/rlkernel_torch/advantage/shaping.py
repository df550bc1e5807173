"""shape_rewards@1 in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_common.moments import Moments, across_ranks, merged, moments, reciprocal
from rlkernel_common.row_statistics import accumulator
from rlkernel_core.spec.shape_rewards import RunningMoments, ShapedRewards, ShapeRewardsCall, sizes
from rlkernel_torch.advantage.layout import Layout


@torch.no_grad()
def shape_rewards(call: ShapeRewardsCall) -> ShapedRewards:
    """See `rlkernel_core.spec.shape_rewards.ShapeRewardsCall`."""
    rewards, logprob, ref_logprob = call.rewards, call.logprob, call.ref_logprob
    sequences, tokens = sizes(call)
    given = [x for x in (rewards, logprob, ref_logprob) if x is not None]
    state = accumulator(*given)
    x = rewards.detach().to(state, copy=True)  # the result is the caller's own
    layout = None
    if tokens is not None:
        layout = Layout.of(
            tokens, sequences, x.device, mask=call.mask, lengths=call.lengths, cu_seqlens=call.cu_seqlens
        )
    by_token = tokens is not None and tuple(x.shape) == tokens and rewards.shape != (sequences,)
    kept: RunningMoments | None = None
    penalty = None
    if not by_token:
        x = x if call.clip is None else torch.where(x.isfinite(), x.clamp(*call.clip), x)
        if call.normalize != "none":
            whole = across_ranks(moments(x, x.isfinite()), call.process_group)
            if call.normalize == "running":
                if call.running is not None:
                    whole = merged(_moments(call.running, state), whole)
                kept = RunningMoments(whole.n, whole.mean, whole.m2)
            x = (whole.centered(x) if call.center else x) * reciprocal(whole.variance(call.ddof), call.eps, "std_add")
        if call.max_length is not None and call.overlong_buffer is not None:
            length = _lengths(layout, call.lengths, call.cu_seqlens, call.mask)
            penalty = _overlong(length.to(state), call.max_length, call.overlong_buffer, call.overlong_factor)
            penalty = penalty.clamp(min=-call.overlong_factor) if call.overlong_cap else penalty
            x = x + penalty
    if layout is None or not (by_token or call.kl != "none" or call.output == "token"):
        return ShapedRewards(x, penalty=penalty, running=kept)
    r = layout.rows(x) if by_token else torch.where(layout.last()[0], layout.spread(x), 0.0)
    total = None
    if logprob is not None and ref_logprob is not None:
        d = layout.rows(logprob.detach().to(state)) - layout.rows(ref_logprob.detach().to(state))
        estimate = layout.select(_kl(layout.select(d), call.kl, call.kl_input_clamp, call.kl_clamp))
        r, total = r - call.kl_coef * estimate, layout.totals(estimate)
    return ShapedRewards(layout.tokens(layout.select(r)), total, penalty, kept)


def _moments(running: RunningMoments, state: torch.dtype) -> Moments:
    n, mean, m2 = (x.to(state) for x in (running.count, running.mean, running.m2))
    return Moments(n, mean, torch.zeros_like(mean), m2)


def _kl(d: Tensor, kind: str, input_clamp: float | None, clamp: float | None) -> Tensor:
    """Estimate of KL per token from d = log p - log p_ref."""
    d = d if input_clamp is None else d.clamp(-input_clamp, input_clamp)
    if kind == "k1":
        estimate = d
    elif kind == "abs":
        estimate = d.abs()
    elif kind == "k2":
        estimate = 0.5 * d.square()
    else:
        estimate = torch.expm1(-d) + d
    return estimate if clamp is None else estimate.clamp(-clamp, clamp)


def _overlong(length: Tensor, limit: int, buffer: int, factor: float) -> Tensor:
    """0 up to limit - buffer, then linear, -factor at the limit."""
    return ((limit - buffer - length) / buffer * factor).clamp(max=0.0)


def _lengths(layout: Layout | None, lengths: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None) -> Tensor:
    if lengths is not None:
        return lengths.long()
    if layout is not None and mask is not None:
        return layout.counts()
    if cu_seqlens is None:
        raise RuntimeError("an overlong penalty was let through without lengths")
    return cu_seqlens.diff()
