"""advantage@1 in plain torch: read the call, run its kind, whiten, weigh, and put the result in shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.reference.advantage.call import Call, Estimate
from rlkernel_core.reference.advantage.moments import across_ranks, moments
from rlkernel_core.reference.advantage.over_groups import over_groups
from rlkernel_core.reference.advantage.over_steps import over_steps
from rlkernel_core.reference.advantage.token_baseline import token_baseline
from rlkernel_core.spec.advantage import AdvantageResult
from rlkernel_core.spec.advantage_kinds import KINDS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def advantage(
    rewards: Tensor,
    *,
    kind: str,
    group: int | Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    lam_value: float | Tensor | None = None,
    length_adaptive: float | None = None,
    bootstrap: Tensor | None = None,
    dones: Tensor | None = None,
    done_index: str = "after",
    turns: Tensor | None = None,
    ratio: Tensor | None = None,
    ratio_clip: float | None = 1.0,
    trace_clip: float | None = 1.0,
    q_values: Tensor | None = None,
    baseline: Tensor | None = None,
    in_stats: Tensor | None = None,
    in_loss: Tensor | None = None,
    valid_range: tuple[float, float] | None = None,
    weights: Tensor | None = None,
    reward_weights: Tensor | None = None,
    step_rewards: Tensor | None = None,
    anchor: Tensor | None = None,
    step_weight: float = 1.0,
    logprob: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    leave_one_out: bool = False,
    scale: str = "auto",
    ddof: int = 1,
    eps: float = 1e-6,
    eps_mode: str = "std_add",
    min_std: float = 0.0,
    low_std: str = "zero",
    singleton: str = "zero",
    constant: str = "zero",
    invalid: str = "zero",
    masked_time: str = "skip",
    masked_out: str = "zero",
    whiten: str = "auto",
    whiten_level: str = "auto",
    whiten_ddof: int = 1,
    whiten_eps: float = 1e-8,
    whiten_eps_mode: str = "var_add",
    process_group: ProcessGroup | None = None,
    reward_level: str = "auto",
    output: str = "auto",
) -> AdvantageResult:
    """See `rlkernel_core.spec.advantage.advantage`."""
    call = Call.of(locals())
    if kind == "otb":
        estimate = token_baseline(call)
    elif KINDS[kind].family == "group" or (kind == "remax" and not call.extent.token_rewards):
        estimate = over_groups(call)
    else:
        estimate = over_steps(call)
    if singleton == "error":
        _refuse_singletons(call, estimate)
    return _finished(call, estimate)


def _refuse_singletons(call: Call, estimate: Estimate) -> None:
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


def _finished(call: Call, estimate: Estimate) -> AdvantageResult:
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
            a = whole.centred(a) * rstd
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
