"""Argument checks of the policy losses, and the resolved options they return.

`configure` fills in the defaults of a kind and refuses what has no meaning for it; `check_tensors` compares layouts.
Both look at metadata only, so both are allowed inside a captured graph. Imports no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.policy_kinds import (
    AGGREGATES,
    KINDS,
    KLS,
    REQUIRED,
    Correction,
    GammaGate,
    LossConfig,
    Rejection,
)

if TYPE_CHECKING:
    from rlkernel_core.spec.linear_policy_loss import LinearPolicyLossCall
    from rlkernel_core.spec.policy_loss import LossFields, PolicyLossCall

_KIND_OPTIONS = ("clip", "dual_clip", "log_ratio_limit", "tau", "gamma", "ratio_cap", "dro_beta")
# Numbers, or 0-dim tensors on the device of the others.
_SCALARS = ("denominator", "kl_coef", "entropy_coef", "entropy_denominator")


def configure(call: LossFields, *, entropy: Any) -> LossConfig:
    """Options with the kind's defaults; `entropy` is that of the call, a tensor or whether it is computed."""
    kind, horizon, aggregate = call.kind, call.horizon, call.aggregate
    what = KINDS[checks.choice("kind", kind, KINDS)]
    level = what.levels[0] if call.level is None else checks.choice("level", call.level, ("token", "sequence"))
    if level not in what.levels:
        raise ArgumentError("level", repr(level), f"kind={kind!r} is defined per {what.levels[0]}", "Leave it out.")
    options = {name: _option(name, kind, getattr(call, name)) for name in _KIND_OPTIONS}
    aggregate = what.aggregate if aggregate is None else checks.choice("aggregate", aggregate, AGGREGATES)
    checks.flags(count_empty=call.count_empty, kl_importance=call.kl_importance)
    checks.process_group("process_group", call.process_group)
    _check_denominators(aggregate, call.denominator, horizon, call.count_empty, call.entropy_aggregate)
    kl = _check_kl(call.ref_logprob, call.kl, call.kl_coef, call.kl_clamp, call.kl_importance)
    _check_entropy(entropy, call.entropy_coef, call.entropy_aggregate, call.entropy_denominator)
    _check_rollout(kind, call.rollout_logprob, call.correction, call.rejection)
    return LossConfig(
        surrogate=what.surrogate,
        level=level,
        own_gradient=what.own_gradient,
        aggregate=aggregate,
        horizon=horizon,
        count_empty=call.count_empty,
        kl=kl,
        kl_clamp=(20.0, 10.0) if call.kl_clamp is None else call.kl_clamp,
        kl_importance=call.kl_importance,
        entropy_aggregate=call.entropy_aggregate,
        correction=call.correction,
        rejection=call.rejection,
        **{name: value for name, value in options.items() if value is not None},
    )


def _option(name: str, kind: str, value: Any) -> Any:
    """The value of an option of a kind, its default filled in."""
    known = KINDS[kind].options
    if name not in known:
        if value is not None:
            takers = ", ".join(k for k, v in KINDS.items() if name in v.options)
            raise ArgumentError(name, value, f"kind={kind!r} has no such option", f"Leave it out, or use {takers}.")
        return None
    if value is None:
        if known[name] == REQUIRED:
            raise ArgumentError(name, None, f"kind={kind!r} needs it and has no default", f"Pass {name}=...")
        return known[name]
    if name == "clip":
        return checks.pair(name, value, at_least=0.0, infinite=True)
    if name == "tau":
        return checks.pair(name, value, above=0.0)
    if name == "gamma":
        checks.instance(name, value, GammaGate)
        return value
    if name == "log_ratio_limit" and isinstance(value, float) and value == math.inf:
        return value
    return checks.number(name, value, above=1.0 if name in {"dual_clip", "ratio_cap"} else 0.0)


def _scalar(name: str, x: Any, *, above: float | None = None) -> None:
    """A finite number or a 0-dim tensor without gradient."""
    if checks.is_tensor(x):
        checks.tensor(name, x, ndim=0, kind="real")
        _constant(name, x)
    else:
        checks.number(name, x, above=above)


def _constant(name: str, x: Any) -> None:
    if x.requires_grad:
        raise ArgumentError(
            name,
            checks.describe(x),
            "is a constant of the loss and must not require a gradient",
            f"Pass {name}.detach().",
        )


def _check_denominators(
    aggregate: str, denominator: Any, horizon: float | None, count_empty: bool, entropy_aggregate: str | None
) -> None:
    if denominator is not None:
        if aggregate == "token_sum":
            raise ArgumentError("denominator", denominator, "token_sum divides by nothing", "Leave it out.")
        _scalar("denominator", denominator, above=0.0)
    if horizon is not None:
        if "seq_mean_token_sum_norm" not in (aggregate, entropy_aggregate):  # a tuple: the latter is not checked yet
            raise ArgumentError(
                "horizon", horizon, f"has no meaning for {aggregate}", 'Leave it out, or use "seq_mean_token_sum_norm".'
            )
        checks.number("horizon", horizon, above=0.0)
    if count_empty and (denominator is not None or not aggregate.startswith("seq_")):
        raise ArgumentError(
            "count_empty",
            count_empty,
            "only says how sequences are counted for a local mean over sequences",
            "Leave it out, or leave out denominator and use a seq_ aggregation.",
        )


def _check_kl(
    ref: Any, kl: str | None, kl_coef: Any, kl_clamp: tuple[float, float] | None, kl_importance: bool
) -> str | None:
    _scalar("kl_coef", kl_coef)
    if kl is not None:
        checks.choice("kl", kl, KLS)
    if kl_clamp is not None:
        checks.pair("kl_clamp", kl_clamp, above=0.0)
    if ref is None:
        for name, value, off in (
            ("kl", kl, None),
            ("kl_coef", kl_coef, 0.0),
            ("kl_clamp", kl_clamp, None),
            ("kl_importance", kl_importance, False),
        ):
            if checks.is_tensor(value) or value != off:
                raise ArgumentError(name, value, "there is no reference policy", "Pass ref_logprob too.")
        return None
    kl = kl or "k3"
    if kl_clamp is not None and not kl.startswith("low_var"):
        raise ArgumentError("kl_clamp", kl_clamp, f"kl={kl!r} has no clamp", 'Leave it out, or use kl="low_var".')
    return kl


def _check_entropy(entropy: Any, entropy_coef: Any, entropy_aggregate: str | None, entropy_denominator: Any) -> None:
    _scalar("entropy_coef", entropy_coef)
    if entropy_aggregate is not None:
        checks.choice("entropy_aggregate", entropy_aggregate, AGGREGATES)
    if entropy_denominator is not None:
        _scalar("entropy_denominator", entropy_denominator, above=0.0)
    if entropy is None or entropy is False:
        for name, value, off in (
            ("entropy_coef", entropy_coef, 0.0),
            ("entropy_aggregate", entropy_aggregate, None),
            ("entropy_denominator", entropy_denominator, None),
        ):
            if checks.is_tensor(value) or value != off:
                raise ArgumentError(name, value, "there is no entropy", "Pass entropy too.")
    if entropy_denominator is not None and entropy_aggregate in {None, "token_sum"}:
        raise ArgumentError(
            "entropy_denominator",
            entropy_denominator,
            "the bonus takes the policy term's denominator, and token_sum has none",
            "Pass entropy_aggregate (a mean) too.",
        )


def _check_rollout(kind: str, rollout: Any, correction: Correction | None, rejection: Rejection | None) -> None:
    for name, value, cls in (("correction", correction, Correction), ("rejection", rejection, Rejection)):
        if value is None:
            continue
        checks.instance(name, value, cls)
        if rollout is None:
            raise ArgumentError(name, value, "there is nothing to correct against", "Pass rollout_logprob too.")
    if correction is None:
        return
    if kind == "vespo" and (correction.level != "token" or correction.normalize):
        raise ArgumentError(
            "correction", correction, "vespo multiplies token weights into its gate", 'Use level="token", no normalize.'
        )
    if kind == "gmpo" and correction.level == "token":
        raise ArgumentError(
            "correction", correction, "gmpo has one ratio per sequence", 'Use level="geometric" or "sequence".'
        )


def check_tensors(
    call: PolicyLossCall | LinearPolicyLossCall, config: LossConfig, first: Any, *, name: str, entropy: Any = None
) -> None:
    """The tensors of one call share a device and a layout, padded [B, T] or packed [N]; `name` is that of `first`."""
    mask, cu_seqlens, advantages = call.mask, call.cu_seqlens, call.advantages
    others = {
        "old_logprob": call.old_logprob,
        "ref_logprob": call.ref_logprob,
        "rollout_logprob": call.rollout_logprob,
        "entropy": entropy,
    }
    checks.tensor(name, first, ndim=(1, 2), kind="floating" if name == "logprob" else "integer")
    shape = tuple(first.shape)
    for other, x in others.items():
        checks.aligned(other, x, shape, name, kind="floating", beside=first, where=name)
        if x is not None and other != "entropy":
            _constant(other, x)
    for scalar in _SCALARS:
        if checks.is_tensor(getattr(call, scalar)):
            checks.same_device(scalar, getattr(call, scalar), first, name)
    checks.aligned("mask", mask, shape, name, kind="bool", beside=first, where=name)
    _check_sequences(first, cu_seqlens, config, name)
    _check_horizon(call, config)
    checks.tensor("advantages", advantages, ndim=(1, 2), kind="floating")
    checks.same_device("advantages", advantages, first, name)
    _constant("advantages", advantages)
    if len(shape) == 2:
        fine = tuple(advantages.shape) in (shape, shape[:1], (shape[0], 1))  # no set: sizes may be symbols
        want = f"[B] or [B, T] with [B, T] = {list(shape)}"
    else:
        packed = None if cu_seqlens is None else (cu_seqlens.shape[0] - 1, 1)
        fine = tuple(advantages.shape) in (shape, packed)
        want = f"[N] with N = {shape[0]}" + ("" if packed is None else f", or [B, 1] with B = {packed[0]}")
    if not fine:
        raise ArgumentError(
            "advantages", checks.describe(advantages), f"must be {want}", "Give one per token or one per sequence."
        )


def _check_sequences(first: Any, cu_seqlens: Any, config: LossConfig, name: str) -> None:
    if first.dim() == 2:
        if cu_seqlens is not None:
            raise ArgumentError(
                "cu_seqlens", checks.describe(cu_seqlens), "describes packed tokens", f"Pass {name} as [N], or a mask."
            )
        return
    if cu_seqlens is None:
        if config.per_sequence is not None:
            raise ArgumentError(
                "cu_seqlens",
                None,
                f"{config.per_sequence} works per sequence, and [N] alone has none",
                "Pass cu_seqlens.",
            )
        return
    checks.tensor("cu_seqlens", cu_seqlens, ndim=1, kind="integer")
    checks.same_device("cu_seqlens", cu_seqlens, first, name)
    if cu_seqlens.shape[0] < 1:
        raise ArgumentError("cu_seqlens", checks.describe(cu_seqlens), "must be [B + 1]", "Start it with 0.")


def _check_horizon(call: PolicyLossCall | LinearPolicyLossCall, config: LossConfig) -> None:
    if config.horizon is not None or "seq_mean_token_sum_norm" not in {config.aggregate, config.entropy_aggregate}:
        return
    if call.cu_seqlens is not None:
        raise ArgumentError("horizon", None, "a packed batch has no padded length to default to", "Pass horizon.")
    if call.process_group is not None:
        raise ArgumentError("horizon", None, "ranks may be padded to different lengths", "Pass horizon.")
