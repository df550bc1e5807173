"""advantage@1 on the device: kinds over tokens are one launch of the suffix scan, whitening two more.

Kinds over groups are one launch where groups have a size (group_advantage/). Turns and the token baseline are the
definition's own torch operations, scans in log2 T passes. Nothing synchronises or depends on data for a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rlkernel_common.moments import across_ranks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.advantage import AdvantageCall, AdvantageResult, AdvantageStats
from rlkernel_core.spec.advantage_checks import Extent, extent_of
from rlkernel_core.spec.advantage_kinds import KINDS
from rlkernel_torch.advantage.estimate import advantage as in_torch
from rlkernel_triton.group_advantage.launch import MADE, by_group
from rlkernel_triton.launchers import Plan, launcher_for
from rlkernel_triton.recursion import Rows, Scanned, run
from rlkernel_triton.suffix_scan import refused_float64
from rlkernel_triton.whitening import moments, whitened

# Kind -> the rule of the scan that it is.
_RULES = {
    "gae": "gae",
    "returns": "returns",
    "reinforce_pp": "returns",
    "remax": "returns",
    "vtrace": "vtrace",
    "retrace": "retrace",
}


def advantage(call: AdvantageCall) -> AdvantageResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: AdvantageCall) -> Callable[[AdvantageCall], AdvantageResult]:
    """What runs calls of this shape. See `rlkernel_core.spec.advantage.AdvantageCall`."""
    extent = extent_of(call)
    if call.kind in MADE:
        return partial(_by_group, extent, Plan(launcher_for(call.rewards.device)))
    tokens, rule = extent.tokens, _RULES.get(call.kind)
    if rule is None or call.turns is not None:
        return in_torch
    if tokens is None or (call.kind == "remax" and not extent.token_rewards):
        return in_torch
    plan = Plan(launcher_for(call.rewards.device))

    @torch.no_grad()
    def run(call: AdvantageCall) -> AdvantageResult:
        rows = Rows.of(tokens, extent.sequences, call.mask, call.lengths, call.cu_seqlens)
        return _finished(call, rows, _scanned(rule, call, extent, rows, plan), plan)

    return run


@torch.no_grad()
def _by_group(extent: Extent, plan: Plan, call: AdvantageCall) -> AdvantageResult:
    """A kind over groups."""
    result = by_group(call, extent, plan)
    if call.singleton == "error":
        _refuse_singletons(call, result.stats)
    return result


def _refuse_singletons(call: AdvantageCall, stats: AdvantageStats) -> None:
    """The one check that reads values: singleton="error" asks for it."""
    if stats.group_count is None:
        return
    alone = stats.group_count < 2
    alone = (alone if alone.dim() == 1 else alone.any(1)) & ~stats.invalid
    chosen = alone if call.in_loss is None else alone & call.in_loss
    found = chosen.nonzero().flatten().tolist()
    if found:
        raise ArgumentError(
            "group",
            f"fewer than two valid members for sequences {found[:8]}",
            "every group needs two with singleton='error'",
            "Drop those sequences, or pass singleton='zero'.",
        )


def _scanned(rule: str, call: AdvantageCall, extent: Extent, rows: Rows, plan: Plan) -> Scanned:
    """Advantages and targets as the scan gives them, 0 where masked, and which sequences are not finite."""
    tokens = {n: _maybe(getattr(call, n)) for n in ("values", "q_values", "ratio")}
    rewards = _real(call.rewards)
    if not extent.token_rewards or call.masked_time != "skip":
        rows = rows.located(plan)
    stop = call.dones
    if stop is not None:
        stop = stop.contiguous().view(torch.uint8)
        if call.done_index == "before":
            stop = run("scan", rows, b=stop, a=0.0, exclusive=True, plan=plan, place="stop").out
    lam: float | Tensor = call.lam
    if call.length_adaptive is not None:
        lam = _adapted(call.length_adaptive, rows)
    made = run(
        rule,
        rows,
        b=rewards if extent.token_rewards else None,
        outcome=None if extent.token_rewards else rewards,
        **tokens,
        ratio_clip=call.ratio_clip,
        trace_clip=call.trace_clip,
        gamma=call.gamma,
        lam=_real(lam) if isinstance(lam, Tensor) else lam,
        lam_value=_real(call.lam_value) if isinstance(call.lam_value, Tensor) else call.lam_value,
        stop=stop,
        init=None if call.bootstrap is None else _real(call.bootstrap),
        baseline=None if call.baseline is None else _real(call.baseline),
        masked=call.masked_time,
        plan=plan,
        place="main",
    )
    return _carried(made, rows, tokens["values"], plan) if call.masked_out == "carry" else made


def _carried(made: Scanned, rows: Rows, values: Tensor | None, plan: Plan) -> Scanned:
    """The same, a masked token holding what the next valid one does."""
    out = run("scan", rows, b=made.out, a=0.0, carry=True, plan=plan, place="carried").out
    if made.targets is None:
        raise RuntimeError("a recursion without targets")
    if values is None:
        targets = run("scan", rows, b=made.targets, a=0.0, carry=True, plan=plan, place="targets").out
        return Scanned(out, targets, invalid=made.invalid)
    counted = run("scan", rows, b=torch.ones_like(out), a=0.0, plan=plan, place="counted").out > 0
    return Scanned(out, torch.where(counted, made.targets, out + values.float()), invalid=made.invalid)


def _finished(call: AdvantageCall, rows: Rows, made: Scanned, plan: Plan) -> AdvantageResult:
    """Whitening, weights and masks over sequences."""
    out, invalid = made.out, made.invalid
    if invalid is None:
        raise RuntimeError("a recursion without flags")
    kind = KINDS[call.kind]
    whiten = kind.whiten if call.whiten == "auto" else call.whiten
    in_loss, in_stats, weights = call.in_loss, call.in_stats, call.weights
    stats: dict[str, Tensor] = {}
    whole = rstd = None
    if whiten != "none":
        member = ~invalid
        for chosen in (in_loss, in_stats):
            member = member if chosen is None else member & chosen
        total = across_ranks(moments(out, rows, member, plan=plan), call.process_group)
        factor = total.rstd(call.whiten_ddof, call.whiten_eps, call.whiten_eps_mode)
        stats = {"count": total.n, "mean": total.mean, "var": total.variance(call.whiten_ddof), "rstd": factor}
        if whiten == "global":
            whole, rstd = total, factor
    if whole is not None or in_loss is not None or weights is not None:
        chosen = ~invalid if in_loss is None else in_loss & ~invalid
        weight = None if weights is None else _real(weights)
        carry = call.masked_out == "carry"
        out = whitened(out, out, rows, whole, rstd, chosen=chosen, weights=weight, carry=carry, plan=plan)
    return AdvantageResult(out, made.targets, AdvantageStats(invalid=invalid, **stats))


def _adapted(alpha: float, rows: Rows) -> float | Tensor:
    """1 - 1 / max(alpha L, 1) for the L valid tokens of each sequence."""
    if rows.bounds is None and rows.mask is None and rows.ends is None:
        return 1.0 - 1.0 / max(alpha * rows.width, 1.0)
    return 1.0 - 1.0 / (alpha * _counts(rows).float()).clamp(min=1.0)


def _counts(rows: Rows) -> Tensor:  # [B] int64
    """Valid tokens of each sequence."""
    if rows.bounds is not None:
        bounds = rows.bounds.long().clamp(0, rows.width)
        if rows.mask is None:
            return bounds.diff().clamp(min=0)
        running = torch.cat([bounds.new_zeros(1), rows.mask.long().cumsum(0)])
        return running[bounds[1:]] - running[bounds[:-1]]
    if rows.mask is not None:
        return rows.mask.sum(-1, dtype=torch.int64)
    if rows.ends is not None:
        return rows.ends.long().clamp(0, rows.width)
    raise RuntimeError("the lengths of unmasked rows are no tensor")


def _maybe(x: Tensor | None) -> Tensor | None:
    return None if x is None else _real(x)


def _real(x: Tensor) -> Tensor:
    """Without gradient, and of a dtype that a kernel can read."""
    x = x.detach()
    return x.float() if x.dtype == torch.bool else x


def fits(call: AdvantageCall) -> Reason | None:
    """The state is fp32: a call with a float64 tensor, or with 2^31 tokens in a sequence, is for another."""
    return refused_float64({k: v for k, v in call.as_dict().items() if isinstance(v, Tensor)})
