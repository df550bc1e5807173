"""advantage@1 in plain torch: read the call, run its kind, whiten, weigh, and put the result in shape."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_common.moments import across_ranks, moments
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.advantage import AdvantageCall, AdvantageResult
from rlkernel_core.spec.advantage_kinds import KINDS
from rlkernel_torch.advantage.call import Estimate, Prepared
from rlkernel_torch.advantage.over_groups import over_groups
from rlkernel_torch.advantage.over_steps import over_steps
from rlkernel_torch.advantage.token_baseline import token_baseline


@torch.no_grad()
def advantage(call: AdvantageCall) -> AdvantageResult:
    """See `rlkernel_core.spec.advantage.AdvantageCall`."""
    ready = Prepared.of(call)
    if call.kind == "otb":
        estimate = token_baseline(ready)
    elif KINDS[call.kind].family == "group" or (call.kind == "remax" and not ready.extent.token_rewards):
        estimate = over_groups(ready)
    else:
        estimate = over_steps(ready)
    if call.singleton == "error":
        _refuse_singletons(ready, estimate)
    return _finished(ready, estimate)


def _refuse_singletons(call: Prepared, estimate: Estimate) -> None:
    """The one check that reads values: singleton="error" asks for it."""
    count = estimate.stats["group_count"]
    alone = (count < 2) if count.dim() == 1 else (count < 2).any(1)
    rows = (alone & call.chosen("in_loss") & ~estimate.invalid).nonzero().flatten().tolist()
    if rows:
        raise ArgumentError(
            "group",
            f"fewer than two valid members for sequences {rows[:8]}",
            "every group needs two with singleton='error'",
            "Drop those sequences, or pass singleton='zero'.",
        )


def _finished(call: Prepared, estimate: Estimate) -> AdvantageResult:
    """Whitening, weights, masks over sequences, and the shape of the result."""
    a, layout, invalid = estimate.advantages, call.layout, estimate.invalid
    in_loss = call.chosen("in_loss")
    by_token = a.dim() == 2
    stats: dict[str, Tensor] = {}
    if call["whiten"] != "none":
        member = in_loss & call.chosen("in_stats") & ~invalid
        counts = None if by_token or call["whiten_level"] == "sequence" else call.tokens_per_sequence()
        if by_token and layout is not None:
            member = layout.valid & layout.spread(member)
        whole = across_ranks(moments(a, member, counts), call["process_group"])
        var = whole.variance(call["whiten_ddof"])
        rstd = whole.rstd(call["whiten_ddof"], call["whiten_eps"], call["whiten_eps_mode"])
        stats = {"count": whole.n, "mean": whole.mean, "var": var, "rstd": rstd}
        if call["whiten"] == "global":
            a = whole.centered(a) * rstd
    if by_token and layout is not None:
        keep = layout.spread(in_loss & ~invalid)
        a = torch.where(keep if call["masked_out"] == "carry" else keep & layout.valid, a, 0.0)
    else:
        raw = 0.0 if estimate.raw is None else estimate.raw
        a = torch.where(in_loss, torch.where(invalid, raw, a), 0.0)
    if call["weights"] is not None:
        weight = call["weights"] if not by_token or layout is None else layout.spread(call["weights"])
        a = torch.where(weight == 0, 0.0, a * weight)
    if layout is not None and call.extent.token_output:
        a = layout.tokens(a if by_token else layout.select(layout.spread(a)))
    returns = estimate.returns if layout is None or estimate.returns is None else layout.tokens(estimate.returns)
    return AdvantageResult(a, returns, estimate.with_stats(stats))
