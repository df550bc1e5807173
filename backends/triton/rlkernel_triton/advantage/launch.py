"""advantage@1 on the device: kinds over tokens are one launch of the suffix scan, whitening three more.

Kinds over groups are one launch where groups have a size, the token baseline two (group_launch.py). Turns, and token
baselines of large batches by ids, are the definition's own torch operations, scans in log2 T passes. Nothing
synchronizes or depends on data for a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.advantage import AdvantageCall, AdvantageResult, AdvantageStats
from rlkernel_core.spec.advantage_checks import Extent, extent_of
from rlkernel_core.spec.advantage_kinds import KINDS
from rlkernel_core.spec.form import filled
from rlkernel_torch.advantage.estimate import advantage as in_torch
from rlkernel_triton.advantage.group_launch import GROUP_KINDS, Groups
from rlkernel_triton.advantage.token_baseline import TokenBaseline, serves
from rlkernel_triton.affine_suffix_scan.launch import refused_float64
from rlkernel_triton.affine_suffix_scan.recursion import BoundRecursion, Recursion, ScanOutput, SequenceLayout, run
from rlkernel_triton.common.host import untracked
from rlkernel_triton.launchers import Plan, launcher_for
from rlkernel_triton.whiten.launch import Whitening

# Kind -> the rule of the scan that it is.
_RULES = {
    "gae": "gae",
    "returns": "returns",
    "reinforce_pp": "returns",
    "remax": "returns",
    "vtrace": "vtrace",
    "retrace": "retrace",
}
# Argument -> its place among `Recursion.tensors`; rewards have one that depends on their shape.
_PLACES: Final = {"values": 2, "q_values": 3, "ratio": 4, "lam": 5, "lam_value": 6, "bootstrap": 9, "baseline": 11}


def advantage(call: AdvantageCall) -> AdvantageResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: AdvantageCall) -> Callable[[AdvantageCall], AdvantageResult]:
    """What runs calls of this shape. See `rlkernel_core.spec.advantage.AdvantageCall`."""
    extent = extent_of(call)
    if call.kind in GROUP_KINDS:
        groups = Groups(call, extent, Plan(launcher_for(call.rewards.device)))
        return untracked(partial(_refusing, groups) if call.singleton == "error" else groups.run, call)
    tokens, rule = extent.tokens, "otb" if serves(call, extent) else _RULES.get(call.kind)
    if rule is None or call.turns is not None:
        return in_torch
    if tokens is None or (call.kind == "remax" and not extent.token_rewards):
        return in_torch
    return untracked(_Steps(rule, call, extent).run, call)


def _refusing(groups: Groups, call: AdvantageCall) -> AdvantageResult:
    """A kind over groups, each of which must have two members."""
    result = groups.run(call)
    _refuse_singletons(call, result.stats)
    return result


def _refuse_singletons(call: AdvantageCall, stats: AdvantageStats | None) -> None:
    """The one check that reads values: singleton="error" asks for it."""
    if stats is None or stats.group_count is None:
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


class _Steps:
    """A kind over tokens, prepared: what a call of its shape asks for, and the launches."""

    def __init__(self, rule: str, call: AdvantageCall, extent: Extent) -> None:
        self._rule, self._extent = rule, extent
        tokens = extent.tokens
        if tokens is None:
            raise RuntimeError("a kind over tokens without tokens")
        self._tokens: tuple[int, ...] = tokens
        self._plan = Plan(launcher_for(call.rewards.device))
        self._locates = not extent.token_rewards or call.masked_time != "skip"
        # A layout that nothing but a shape describes is the same in every call.
        bare = call.mask is call.lengths is call.cu_seqlens is None
        self._bare = SequenceLayout(self._tokens, extent.sequences) if bare else None
        self._recursion: BoundRecursion | None = None
        # Arguments that are tensors, and where the scan takes them: all that it needs of a later call, unless some are
        # made into others first.
        places = _PLACES | {"rewards": 0 if extent.token_rewards else 10}
        tensors = {name: x for name in places if isinstance(x := getattr(call, name), Tensor)}
        self._given = tuple((places[name], name) for name in tensors)
        converted = any(x.dtype == torch.bool for x in tensors.values())
        self._as_they_are = call.dones is None and call.length_adaptive is None and not converted
        self._token_baseline = TokenBaseline(extent, self._plan) if rule == "otb" else None
        whiten = KINDS[call.kind].whiten if call.whiten == "auto" else call.whiten
        self._whitens, self._defers = whiten != "none", whiten == "defer"
        self._finishes = whiten == "global" or not call.in_loss is call.weights is None
        self._whitening = Whitening(self._plan, call.whiten_ddof, call.whiten_eps, call.whiten_eps_mode)

    def run(self, call: AdvantageCall) -> AdvantageResult:
        """Advantages, targets and statistics of a call."""
        rows = self._bare or SequenceLayout.of(
            self._tokens, self._extent.sequences, call.mask, call.lengths, call.cu_seqlens
        )
        if self._locates:
            rows = rows.located(self._plan)
        if self._token_baseline is not None:
            out, targets, invalid, members = self._token_baseline(call, rows)
            return self._finished(call, rows, out, targets, invalid, members)
        made = self._scanned(call, rows)
        if made.invalid is None:
            raise RuntimeError("a recursion without flags")
        if self._whitens or self._finishes:
            return self._finished(call, rows, made.out, made.targets, made.invalid)
        stats = filled(AdvantageStats, invalid=made.invalid)
        return filled(AdvantageResult, advantages=made.out, returns=made.targets, stats=stats)

    def _scanned(self, call: AdvantageCall, rows: SequenceLayout) -> ScanOutput:
        """Advantages and targets as the scan gives them, 0 where masked, and which sequences are not finite."""
        bound = self._recursion
        if bound is not None and self._as_they_are:
            given: list[Tensor | None] = [None] * 14
            given[7], given[12], given[13] = rows.mask, rows.ends, rows.bounds
            for at, name in self._given:
                given[at] = getattr(call, name)
            made = bound(given)
            return _carried(made, rows, call.values, self._plan) if call.masked_out == "carry" else made
        rewards, values = _real(call.rewards), _maybe(call.values)
        stop, lam, lam_value = call.dones, call.lam, call.lam_value
        if stop is not None:
            stop = stop.contiguous().view(torch.uint8)
            if call.done_index == "before":
                stop = run(Recursion("scan", rows, stop, 0.0, exclusive=True), self._plan, "stop").out
        if call.length_adaptive is not None:
            lam = _adapted(call.length_adaptive, rows)
        per_token = self._extent.token_rewards
        recursion = Recursion(
            self._rule, rows, rewards if per_token else None, values=values, q_values=_maybe(call.q_values),
            ratio=_maybe(call.ratio), lam=_real(lam) if isinstance(lam, Tensor) else lam,
            lam_value=_real(lam_value) if isinstance(lam_value, Tensor) else lam_value, stop=stop,
            init=_maybe(call.bootstrap), outcome=None if per_token else rewards, baseline=_maybe(call.baseline),
            ratio_clip=call.ratio_clip, trace_clip=call.trace_clip, gamma=call.gamma, masked=call.masked_time,
        )  # fmt: skip
        if bound is None:
            bound = self._recursion = BoundRecursion(self._plan.launcher, recursion)
        made = bound(recursion.tensors)
        return _carried(made, rows, values, self._plan) if call.masked_out == "carry" else made

    def _finished(
        self, call: AdvantageCall, rows: SequenceLayout, out: Tensor, targets: Tensor | None, invalid: Tensor,
        group_count: Tensor | None = None,
    ) -> AdvantageResult:  # fmt: skip
        """Whitening, weights and masks over sequences."""
        in_loss, in_stats, weights = call.in_loss, call.in_stats, call.weights
        # Without masks over sequences those count that are not invalid.
        chosen, which = (invalid, "others") if in_loss is None else (in_loss & ~invalid, "these")
        stats: dict[str, Tensor] = {}
        summary = None
        if self._whitens:
            member, members = chosen, which
            if in_stats is not None:
                member, members = (in_stats & ~invalid if in_loss is None else chosen & in_stats), "these"
            summary = self._whitening.summary(out, rows, member, members, process_group=call.process_group)
            n, _, _, _, mean, var, rstd, _ = summary.unbind()
            stats = {"count": n, "mean": mean, "var": var, "rstd": rstd}
        if self._finishes:
            weight = None if weights is None else _real(weights)
            used = None if self._defers else summary
            carry = call.masked_out == "carry"
            self._whitening.apply(out, out, rows, used, chosen, which, weights=weight, carry=carry)
        return AdvantageResult(out, targets, AdvantageStats(invalid, group_count, **stats))


def _carried(made: ScanOutput, rows: SequenceLayout, values: Tensor | None, plan: Plan) -> ScanOutput:
    """The same, a masked token holding what the next valid one does."""
    out = run(Recursion("scan", rows, made.out, 0.0, carry=True), plan, "carried").out
    if made.targets is None:
        raise RuntimeError("a recursion without targets")
    if values is None:
        targets = run(Recursion("scan", rows, made.targets, 0.0, carry=True), plan, "targets").out
        return ScanOutput(out, targets, invalid=made.invalid)
    counted = run(Recursion("scan", rows, torch.ones_like(out), 0.0), plan, "counted").out > 0
    return ScanOutput(out, torch.where(counted, made.targets, out + values.float()), invalid=made.invalid)


def _adapted(alpha: float, rows: SequenceLayout) -> float | Tensor:
    """1 - 1 / max(alpha L, 1) for the L valid tokens of each sequence."""
    if rows.bounds is None and rows.mask is None and rows.ends is None:
        return 1.0 - 1.0 / max(alpha * rows.width, 1.0)
    return 1.0 - 1.0 / (alpha * _counts(rows).float()).clamp(min=1.0)


def _counts(rows: SequenceLayout) -> Tensor:  # [B] int64
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
    """Of a dtype that a kernel can read."""
    return x.float() if x.dtype == torch.bool else x


def fits(call: AdvantageCall) -> Reason | None:
    """The state is fp32: a call with a float64 tensor, or with 2^31 tokens in a sequence, is for another."""
    return refused_float64({k: v for k, v in call.as_dict().items() if isinstance(v, Tensor)})
