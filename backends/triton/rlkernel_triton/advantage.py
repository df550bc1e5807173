"""advantage@1 on the device: kinds over tokens are one launch of the suffix scan, whitening two more.

Kinds over groups are one launch where groups have a size (group_advantage/). Turns and the token baseline are the
definition's own torch operations, scans in log2 T passes. Nothing synchronises or depends on data for a shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.reasons import Reason
from rlkernel_core.reference.advantage.estimate import advantage as in_torch
from rlkernel_core.reference.advantage.moments import across_ranks
from rlkernel_core.spec.advantage import AdvantageResult, AdvantageStats
from rlkernel_core.spec.advantage_checks import Extent, check
from rlkernel_core.spec.advantage_kinds import KINDS
from rlkernel_triton.group_advantage.launch import MADE, Numbers, Whitening, by_group
from rlkernel_triton.recursion import Rows, Scanned, run
from rlkernel_triton.suffix_scan import refused_float64
from rlkernel_triton.whitening import moments, whitened

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Kind -> the rule of the scan that it is.
_RULES = {
    "gae": "gae",
    "returns": "returns",
    "reinforce_pp": "returns",
    "remax": "returns",
    "vtrace": "vtrace",
    "retrace": "retrace",
}


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
    args = locals()
    extent = check(args)
    if kind in MADE:
        return _by_group(args, extent)
    rule = _RULES.get(kind)
    if rule is None or turns is not None:
        return in_torch(**args)
    if extent.tokens is None or (kind == "remax" and not extent.token_rewards):
        return in_torch(**args)
    rows = Rows.of(extent.tokens, extent.sequences, mask, lengths, cu_seqlens)
    made = _scanned(rule, args, extent, rows)
    return _finished(args, rows, made)


def _by_group(args: dict[str, Any], extent: Extent) -> AdvantageResult:
    """A kind over groups, its choices made numbers."""
    kind = KINDS[args["kind"]]
    scale = kind.scale if args["scale"] == "auto" else args["scale"]
    whiten = kind.whiten if args["whiten"] == "auto" else args["whiten"]
    described = any(args[n] is not None for n in ("mask", "lengths", "cu_seqlens"))
    rows = None
    if extent.tokens is not None:
        rows = Rows.of(extent.tokens, extent.sequences, args["mask"], args["lengths"], args["cu_seqlens"])
    result = by_group(
        args["rewards"],
        kind=args["kind"],
        group=args["group"],
        scale=scale,
        numbers=Numbers(
            ddof=args["ddof"],
            eps=args["eps"],
            eps_mode=args["eps_mode"],
            min_std=args["min_std"],
            center=args["low_std"] == "center",
            raw_alone=args["singleton"] == "raw",
            raw_invalid=args["invalid"] == "raw",
            peer=args["constant"] == "peer",
            step_weight=args["step_weight"],
        ),
        sequences=extent.sequences,
        token_rewards=extent.token_rewards,
        rows=rows,
        **{n: args[n] for n in ("lengths", "cu_seqlens", "leave_one_out", "valid_range", "in_stats", "in_loss")},
        **{n: args[n] for n in ("weights", "reward_weights", "step_rewards", "anchor", "process_group")},
        described=described,
        whitening=None
        if whiten == "none"
        else Whitening(
            apply=whiten == "global",
            by_token=args["whiten_level"] != "sequence" and (described or extent.token_rewards),
            ddof=args["whiten_ddof"],
            eps=args["whiten_eps"],
            eps_mode=args["whiten_eps_mode"],
        ),
        token_output=extent.token_output,
    )
    if args["singleton"] == "error":
        _refuse_singletons(args, result.stats)
    return result


def _refuse_singletons(args: dict[str, Any], stats: AdvantageStats) -> None:
    """The one check that reads values: singleton="error" asks for it."""
    if stats.group_count is None:
        return
    alone = stats.group_count < 2
    alone = (alone if alone.dim() == 1 else alone.any(1)) & ~stats.invalid
    chosen = alone if args["in_loss"] is None else alone & args["in_loss"]
    found = chosen.nonzero().flatten().tolist()
    if found:
        raise ArgumentError(
            "group",
            f"fewer than two valid members for sequences {found[:8]}",
            "every group needs two with singleton='error'",
            "Drop those sequences, or pass singleton='zero'.",
        )


def _scanned(rule: str, args: dict[str, Any], extent: Extent, rows: Rows) -> Scanned:
    """Advantages and targets as the scan gives them, 0 where masked, and which sequences are not finite."""
    tokens = {n: None if args[n] is None else _real(args[n]) for n in ("values", "q_values", "ratio")}
    rewards = _real(args["rewards"])
    if not extent.token_rewards or args["masked_time"] != "skip":
        rows = rows.located()
    stop = args["dones"]
    if stop is not None:
        stop = stop.contiguous().view(torch.uint8)
        if args["done_index"] == "before":
            stop = run("scan", rows, b=stop, a=0.0, exclusive=True).out
    lam: float | Tensor = args["lam"]
    if args["length_adaptive"] is not None:
        lam = _adapted(args["length_adaptive"], rows)
    made = run(
        rule,
        rows,
        b=rewards if extent.token_rewards else None,
        outcome=None if extent.token_rewards else rewards,
        **tokens,
        ratio_clip=args["ratio_clip"],
        trace_clip=args["trace_clip"],
        gamma=args["gamma"],
        lam=_real(lam) if isinstance(lam, Tensor) else lam,
        lam_value=_real(args["lam_value"]) if isinstance(args["lam_value"], Tensor) else args["lam_value"],
        stop=stop,
        init=None if args["bootstrap"] is None else _real(args["bootstrap"]),
        baseline=None if args["baseline"] is None else _real(args["baseline"]),
        masked=args["masked_time"],
    )
    return _carried(made, rows, tokens["values"]) if args["masked_out"] == "carry" else made


def _carried(made: Scanned, rows: Rows, values: Tensor | None) -> Scanned:
    """The same, a masked token holding what the next valid one does."""
    out = run("scan", rows, b=made.out, a=0.0, carry=True).out
    if made.targets is None:
        raise RuntimeError("a recursion without targets")
    if values is None:
        return Scanned(out, run("scan", rows, b=made.targets, a=0.0, carry=True).out, invalid=made.invalid)
    counted = run("scan", rows, b=torch.ones_like(out), a=0.0).out > 0
    return Scanned(out, torch.where(counted, made.targets, out + values.float()), invalid=made.invalid)


def _finished(args: dict[str, Any], rows: Rows, made: Scanned) -> AdvantageResult:
    """Whitening, weights and masks over sequences."""
    out, invalid = made.out, made.invalid
    if invalid is None:
        raise RuntimeError("a recursion without flags")
    kind = KINDS[args["kind"]]
    whiten = kind.whiten if args["whiten"] == "auto" else args["whiten"]
    in_loss, in_stats, weights = args["in_loss"], args["in_stats"], args["weights"]
    stats: dict[str, Tensor] = {}
    whole = rstd = None
    if whiten != "none":
        member = ~invalid
        for chosen in (in_loss, in_stats):
            member = member if chosen is None else member & chosen
        total = across_ranks(moments(out, rows, member), args["process_group"])
        factor = total.rstd(args["whiten_ddof"], args["whiten_eps"], args["whiten_eps_mode"])
        stats = {"count": total.n, "mean": total.mean, "var": total.variance(args["whiten_ddof"]), "rstd": factor}
        if whiten == "global":
            whole, rstd = total, factor
    if whole is not None or in_loss is not None or weights is not None:
        chosen = ~invalid if in_loss is None else in_loss & ~invalid
        weight = None if weights is None else _real(weights)
        carry = args["masked_out"] == "carry"
        out = whitened(out, out, rows, whole, rstd, chosen=chosen, weights=weight, carry=carry)
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


def _real(x: Tensor) -> Tensor:
    """Without gradient, and of a dtype that a kernel can read."""
    x = x.detach()
    return x.float() if x.dtype == torch.bool else x


def fits(
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
) -> Reason | None:
    """The state is fp32: a call with a float64 tensor, or with 2^31 tokens in a sequence, is for another."""
    given = {k: v for k, v in locals().items() if isinstance(v, Tensor)}
    return refused_float64(given)
