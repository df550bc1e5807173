"""Kinds that give one advantage per token by a recursion over time."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_torch.advantage.call import Estimate, Prepared
from rlkernel_torch.advantage.layout import Layout, next_valid
from rlkernel_torch.advantage.steps import (
    Factor,
    Steps,
    as_turns,
    clipped,
    discounted,
    lambda_returns,
    retrace,
    vtrace,
)

_TOKENS = ("values", "q_values", "ratio")


def over_steps(call: Prepared) -> Estimate:
    """Advantages and returns as rows [R, T]; a sequence with a valid value that is not finite gets 0."""
    layout = call.layout
    if layout is None:
        raise RuntimeError("a kind over tokens was let through without tokens")
    rewards = _rewards(call, layout)
    rows = {n: layout.rows(call[n]) for n in _TOKENS if call[n] is not None}
    if "ratio" in rows:
        rows["rho"] = clipped(rows["ratio"], call["ratio_clip"])
        rows["trace"] = clipped(rows.pop("ratio"), call["trace_clip"])
    invalid = _invalid(call, layout, [rewards, *rows.values()])
    unmasked, layout = layout.valid, layout.only(layout.valid & ~layout.spread(invalid))
    rows = {n: layout.select(x) for n, x in rows.items()}
    per_sequence = {n: torch.where(invalid, 0.0, call[n]) for n in ("bootstrap", "baseline") if call[n] is not None}
    steps = Steps(
        layout,
        layout.select(rewards),
        call["gamma"],
        _going_on(call, layout),
        per_sequence.get("bootstrap"),
        call["masked_time"],
    )
    head = None
    if call["turns"] is not None:
        steps, head = as_turns(steps, layout.rows(call["turns"].long()))
        rows = {n: steps.layout.select(x) for n, x in rows.items()}
    advantages, returns = _kind(call, steps, rows)
    if "baseline" in per_sequence:
        advantages = advantages - layout.spread(per_sequence["baseline"])
    if head is not None:
        advantages, returns = advantages.gather(-1, head), returns.gather(-1, head)
    advantages, returns = _masked(call, layout, unmasked, advantages, returns)
    return Estimate(advantages, invalid, returns)


def _kind(call: Prepared, steps: Steps, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Advantages and returns, meaningful at the steps."""
    kind, values = call["kind"], rows.get("values")
    if values is None:
        returns = discounted(steps)
        return returns, returns
    if kind == "returns":
        returns = discounted(steps)
        return returns - values, returns
    if kind == "gae":
        lam = _lam(call, steps, call["lam"])
        if call["length_adaptive"] is not None:
            length = steps.layout.counts().to(values.dtype)
            lam = steps.layout.spread(1.0 - 1.0 / (call["length_adaptive"] * length).clamp(min=1.0))
        policy = lambda_returns(steps, values, lam)
        if call["lam_value"] is None:
            return policy - values, policy
        return policy - values, lambda_returns(steps, values, _lam(call, steps, call["lam_value"]))
    trace = rows["trace"] * _lam(call, steps, call["lam"])
    if kind == "vtrace":
        targets, advantages = vtrace(steps, values, rows["rho"], trace)
        return advantages, targets
    returns = retrace(steps, values, rows.get("q_values", values), trace)
    return returns - values, returns


def _lam(call: Prepared, steps: Steps, lam: float | Tensor) -> Factor:
    """A number, or rows."""
    if not isinstance(lam, Tensor):
        return float(lam)
    if tuple(lam.shape) == call.extent.tokens:
        return steps.layout.select(steps.layout.rows(lam))
    return steps.layout.spread(lam)


def _rewards(call: Prepared, layout: Layout) -> Tensor:
    """Rewards as rows; one per sequence stands on its last valid token."""
    if call.extent.token_rewards:
        return layout.rows(call.rewards)
    last, _ = layout.last()
    return torch.where(last, layout.spread(call.rewards), 0.0)


def _invalid(call: Prepared, layout: Layout, rows: list[Tensor]) -> Tensor:  # [B] bool
    """Sequences with something that is not finite where it counts."""
    bad = torch.zeros_like(layout.valid)
    for x in rows:
        bad = bad | ~x.isfinite()
    for name in ("lam", "lam_value"):
        if isinstance(call[name], Tensor) and tuple(call[name].shape) == call.extent.tokens:
            bad = bad | ~layout.rows(call[name]).isfinite()
    invalid = layout.totals((bad & layout.valid).to(call.rewards.dtype)) > 0
    for name in ("bootstrap", "baseline"):
        if call[name] is not None:
            invalid = invalid | ~call[name].isfinite()
    return invalid if call.extent.token_rewards else invalid | ~call.rewards.isfinite()


def _going_on(call: Prepared, layout: Layout) -> Tensor | None:
    """1 where the episode goes on after the step, 0 where it ends."""
    if call["dones"] is None:
        return None
    done = layout.select(layout.rows(call["dones"]), torch.zeros_like(layout.valid)).to(call.rewards.dtype)
    return 1.0 - (done if call["done_index"] == "after" else next_valid(layout, done))


def _masked(
    call: Prepared, layout: Layout, unmasked: Tensor, advantages: Tensor, returns: Tensor
) -> tuple[Tensor, Tensor]:
    """Masked positions hold 0, or what the next valid one holds; those of an invalid sequence that are `unmasked` 0."""
    if call["masked_out"] == "zero":
        return layout.select(advantages), layout.select(returns)
    carried = layout.select(advantages, next_valid(layout, advantages))
    if call["values"] is None:
        return carried, layout.select(returns, next_valid(layout, returns))
    masked = torch.where(unmasked, 0.0, carried + layout.rows(call["values"]))
    return carried, layout.select(returns, masked)
