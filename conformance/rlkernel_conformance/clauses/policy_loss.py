"""Attacks on policy_loss@1: its terms against their formulas.

What a batch may look like: policy_loss_layouts. One that is split over ranks: policy_loss_ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses import policy_loss_layouts, policy_loss_ranks
from rlkernel_conformance.clauses.policy_loss_batches import (
    CORRECTIONS,
    REJECTIONS,
    Batch,
    batches,
    call,
    check_gradient,
    claimed,
    expected,
    judged,
    kind_levels,
    takes,
)
from rlkernel_conformance.compare import Violation, close, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import policy_loss as oracle
from rlkernel_core.spec.policy_loss import KINDS

__all__ = ["policy_loss_layouts", "policy_loss_ranks"]  # the attacks of all modules are registered together


def clip_kinds(subject: Subject, *, level: str | None = None) -> list[tuple[str, str]]:
    """Claimed kinds with the clipped surrogate."""
    return [(k, at) for k, at in kind_levels(subject) if KINDS[k].surrogate == "clip" and level in {None, at}]


def clipped(subject: Subject, **fixed: Any) -> st.SearchStrategy[Batch]:
    """Batches without further terms, to be called with a kind that clips."""
    return batches(subject, plainly=True, **fixed)


def of_kind(subject: Subject, case: Batch, *, level: str | None = None) -> Batch | None:
    """The case with one of the claimed kinds that clip; None where none is claimed."""
    kinds = clip_kinds(subject, level=level)
    if not kinds:
        return None
    kind, at = kinds[case.seed % len(kinds)]
    return replace(case, kind=kind, level=at)


@attack("PL-01", lambda s: batches(s).map(lambda c: replace(c, T=5 * c.T)))
def losses_match_float64(subject: Subject, case: Batch) -> None:
    """Every combination of kind, KL, bonus, correction, rejection, layout and dtype."""
    found = judged(subject, case, call(subject, case, grad=False))
    if "stats" not in subject.claims:
        return
    args, named = case.definition()
    atol, rtol = subject.tolerance("stats", case.dtype)
    scale = 1 + rtol / atol * expected(case).size
    want = oracle.statistics(*args, **named)["policy_loss"]
    have = found.result.stats.policy_loss
    close(subject, "stats", have, want, case.dtype, scale=scale, name="stats.policy_loss")


@attack("PL-02", batches)
def gradients_match_float64(subject: Subject, case: Batch) -> None:
    """Gradients of logprob and entropy, stop-gradients honored."""
    check_gradient(subject, case, call(subject, case))


@attack("PL-03", lambda s: clipped(s, per_token=False, on_policy=False), scale=0.5)
def on_policy_the_gradient_is_minus_omega_times_the_advantage(subject: Subject, case: Batch) -> None:
    """Old and current log-probabilities are the same numbers."""
    chosen = of_kind(subject, case)
    if chosen is None:
        return
    x = chosen.arrays()
    found = call(subject, chosen, old=x["lp"])
    omega = np.zeros(x["lp"].shape)
    for at, token in expected(chosen, old=x["lp"]).tokens.items():
        omega[at] = token.omega
    want = -omega * x["adv"][:, None]
    close(subject, "grad_logprob", torch.from_numpy(found.dlogprob), want, chosen.dtype)


@attack("PL-04", lambda s: batches(s).map(lambda c: replace(c, B=2, T=3, correction="", rejection="")), scale=0.2)
def every_kind_has_its_own_value_and_gradient(subject: Subject, case: Batch) -> None:
    """One batch under all claimed kinds and levels, near the old policy or far from it; a small limit of log-ratios."""
    for kind, level in kind_levels(subject):
        one = replace(case, kind=kind, level=level, spread=(0.2, 1.5)[case.seed % 2])
        limited = "log_ratio_limit" in KINDS[kind].options
        for change in ({}, {"log_ratio_limit": 0.25}) if limited else ({},):
            judged(subject, one, **change)


@attack("PL-05", lambda s: clipped(s, spread=1.2), scale=0.5)
def each_bound_holds_its_own_side(subject: Subject, case: Batch) -> None:
    """Two different bounds; the gradient at a held token is 0."""
    chosen = of_kind(subject, case, level="token")
    if chosen is None:
        return
    clip = ((0.1, 0.4), (0.5, 0.13), (0.3, np.inf))[case.seed % 3]
    found = judged(subject, chosen, clip=clip)
    if found.dlogprob is not None:
        for at, token in expected(chosen, clip=clip).tokens.items():
            require(not (token.low or token.high) or found.dlogprob[at] == 0, f"held token {at} has a gradient")
            require(token.low or token.high or found.dlogprob[at] != 0, f"free token {at} has no gradient")


@attack("PL-06", lambda s: clipped(s, spread=1.6), scale=0.5)
def the_loss_of_negative_advantages_is_bounded(subject: Subject, case: Batch) -> None:
    """Ratios far above dual_clip; bounds on either side of 1 + high."""
    chosen = of_kind(subject, case)
    if chosen is None:
        return
    change = {"dual_clip": (1.05, 1.3, 3.0)[case.seed % 3], "clip": (0.1, 0.2)}
    judged(subject, chosen, **change)


@attack("PL-07", lambda s: clipped(s, level="sequence", spread=0.15), scale=0.5)
def a_sequence_has_one_ratio(subject: Subject, case: Batch) -> None:
    """Loss, range of the ratio, and one gradient at all tokens of a sequence."""
    chosen = of_kind(subject, case, level="sequence")
    if chosen is None:
        return
    found = judged(subject, chosen)
    every = [t.rho for t in expected(chosen).tokens.values()]
    if "stats" in subject.claims:
        for name, want in (("ratio_max", max(every)), ("ratio_min", min(every))):
            have = getattr(found.result.stats, name)
            close(subject, "stats", have, want, chosen.dtype, name=f"stats.{name}")
    if found.dlogprob is None:
        return
    mask = chosen.arrays()["mask"]
    for i in range(chosen.B if not KINDS[chosen.kind].own_gradient else 0):
        g = found.dlogprob[i][mask[i]]
        even = float(np.ptp(g)) if g.size else 0.0
        require(even <= 1e-2 * float(np.abs(g).max(initial=0.0)), f"sequence {i} has gradients {g.tolist()}")


@attack("PL-08", lambda s: clipped(s, per_token=False, aggregate="seq_mean_token_mean", spread=0.15), scale=0.5)
def one_advantage_per_sequence_makes_gspo_token_gspo(subject: Subject, case: Batch) -> None:
    """Loss and gradient of the two kinds."""
    if not {"kind:gspo", "kind:gspo_token", "grad"} <= subject.claims:
        return
    one, two = (call(subject, replace(case, kind=k, level="sequence")) for k in ("gspo", "gspo_token"))
    close(subject, "loss", two.result.loss, one.result.loss.item(), case.dtype)
    size = 1 + 1e4 * np.abs(one.dlogprob).max()
    close(subject, "grad_logprob", torch.from_numpy(two.dlogprob), one.dlogprob, case.dtype, scale=size)


@attack("PL-19", lambda s: clipped(s, B=2, T=3), scale=0.2)
def kl_estimators_have_their_values_and_slopes(subject: Subject, case: Batch) -> None:
    """All claimed estimators on one batch; no advantage, so that the loss is the KL term alone."""
    nothing = np.zeros(case.arrays()["adv"].shape)
    for kl in claimed(subject, "kl:"):
        one = replace(case, kl=kl)
        judged(subject, one, adv=nothing)


@attack("PL-20", batches, scale=0.5)
def the_kl_term_is_differentiated_as_a_product(subject: Subject, case: Batch) -> None:
    """Any estimator and kind against the definition; for k3 per token the gradient is r q."""
    kls = claimed(subject, "kl:")
    if not kls or "grad" not in subject.claims:
        return
    case = replace(case, kl=kls[case.seed % len(kls)], kl_importance=True)
    judged(subject, case)
    one = of_kind(subject, case, level="token")
    if one is None or "kl:k3" not in subject.claims:
        return
    one = replace(one, kl="k3", correction="", rejection="", bonus=False)
    x = one.arrays()
    found = call(subject, one, adv=np.zeros(x["adv"].shape))
    old = x["lp"] if one.on_policy else x["old"]
    want = np.zeros(x["lp"].shape)
    for at, token in expected(one).tokens.items():
        want[at] = 0.25 * token.omega * np.exp(x["lp"][at] - old[at]) * (x["lp"][at] - x["ref"][at])
    size = 1 + 1e4 * np.abs(want).max()
    close(subject, "grad_logprob", torch.from_numpy(found.dlogprob), want, one.dtype, scale=size)


@attack("PL-21", lambda s: batches(s, bonus=True, rejection=""), scale=0.5)
def the_bonus_lowers_the_loss_by_the_aggregated_entropy(subject: Subject, case: Batch) -> None:
    """The loss with and without a bonus; its own aggregation where that is claimed."""
    ways = [f for f in claimed(subject, "aggregate:") if "entropy_aggregate" in subject.claims]
    way = {"entropy_aggregate": ways[case.seed % len(ways)], "horizon": 7.0} if ways else {}
    if way and "seq_mean_token_sum_norm" not in {case.aggregate, way["entropy_aggregate"]}:
        way.pop("horizon")
    with_bonus = call(subject, case, **way)
    without = call(subject, case, entropy_coef=0.0, **way)
    want = expected(case, **way)
    bonus = sum(t.omega_entropy * t.entropy for t in want.tokens.values()) * 0.125
    gap = without.result.loss.detach().double() - with_bonus.result.loss.detach().double()
    atol, rtol = subject.tolerance("loss", case.dtype)
    close(subject, "loss", gap, bonus, case.dtype, scale=4 * (1 + rtol / atol * want.size))
    if with_bonus.dlogprob is not None:
        check_gradient(subject, case, with_bonus, **way)


@attack("PL-22", batches, scale=0.5)
def a_correction_weighs_the_policy_term_alone(subject: Subject, case: Batch) -> None:
    """Every correction, with a KL term and a bonus beside it, off policy and on."""
    names = [n for n in CORRECTIONS if takes(case.kind, n)]
    case = replace(case, correction=names[case.seed % len(names)])
    judged(subject, case)


@attack("PL-23", lambda s: batches(s, masked=True, on_policy=False), scale=0.5)
def rejected_tokens_are_as_masked(subject: Subject, case: Batch) -> None:
    """A rejection against a mask without the tokens that it takes out."""
    case = replace(case, rejection=sorted(REJECTIONS)[case.seed % len(REJECTIONS)])
    found = judged(subject, case)
    kept = np.zeros((case.B, case.T), bool)
    for at in expected(case).tokens:
        kept[at] = True
    if "stats" in subject.claims:
        left = found.result.stats.tokens.item()
        require(left == kept.sum(), f"{left} tokens are left, expected {kept.sum()}")
    if "mask" not in subject.claims:
        return
    masked = call(subject, replace(case, rejection="", rollout=True), mask=kept)
    atol, rtol = subject.tolerance("loss", case.dtype)
    size = 1 + rtol / atol * expected(case).size
    close(subject, "loss", found.result.loss, masked.result.loss.item(), case.dtype, scale=size)


@attack("PL-24", lambda s: batches(s, masked=True), scale=0.5)
def an_unknown_rollout_counts_as_old(subject: Subject, case: Batch) -> None:
    """NaN at some tokens against the old log-probability there."""
    correction = "truncated tokens" if "correction" in subject.claims and takes(case.kind, "truncated tokens") else ""
    case = replace(case, correction=correction, rejection="", rollout=True)
    x = case.arrays()
    unknown = np.random.default_rng(case.seed).random(x["lp"].shape) < 0.4
    unknown[:, 0] = True
    old = x["lp"] if case.on_policy else x["old"]
    found = call(subject, case, roll=np.where(unknown, np.nan, x["roll"]))
    same = {"roll": np.where(unknown, old, x["roll"])}
    judged(subject, case, found, **same)
    if "stats" not in subject.claims:
        return
    have = found.result.stats.rollout_missing
    if have is None:
        raise Violation("rollout_logprob was given and rollout_missing is None")
    want = (unknown & x["mask"]).sum() / x["mask"].sum()
    close(subject, "stats", have, want, case.dtype, name="stats.rollout_missing")


@attack("PL-25", lambda s: batches(s).map(lambda c: replace(c, spread=0.8)), scale=0.5)
def statistics_are_their_formulas(subject: Subject, case: Batch) -> None:
    """All of them; without a gradient; those of inputs that were not given are None."""
    change = {"dual_clip": 1.3} if KINDS[case.kind].surrogate == "clip" and "dual_clip" in subject.claims else {}
    found = call(subject, case, **change)
    args, named = case.definition(**change)
    want = oracle.statistics(*args, **named)
    stats = vars(found.result.stats)
    size = expected(case).size
    for name, have in stats.items():
        if have is None:
            require(name not in want, f"stats.{name} is None")
            continue
        require(name in want, f"stats.{name} is given, and nothing it could be made of")
        require(have.dim() == 0 and not have.requires_grad, f"stats.{name} is no plain number: {have!r}")
        scale = 1 + 10 * size if name == "policy_loss" else 4.0
        close(subject, "stats", have, want[name], case.dtype, scale=scale, name=f"stats.{name}")


@attack("PL-26", lambda s: clipped(s, on_policy=False, per_token=False), scale=0.1)
def huge_log_ratios_stay_finite(subject: Subject, case: Batch) -> None:
    """Log-ratios of +-1e4 under every kind, with the limit of the kind and with none."""
    dtypes = [d for d in subject.dtypes if d != "float16"]  # which holds no such log-ratio
    for kind, level in kind_levels(subject) if dtypes else ():
        one = replace(case, kind=kind, level=level, dtype=dtypes[0], B=2, T=2)
        x, limited = one.arrays(), "log_ratio_limit" in KINDS[kind].options
        for gap in (1e4, -1e4):
            ways: list[dict[str, Any]] = [{}]
            if limited and (gap < 0 or KINDS[kind].surrogate == "clip"):  # what bounds a gain bounds no loss
                ways += [{"log_ratio_limit": np.inf, "adv": adv} for adv in (np.abs(x["adv"]), 0 * x["adv"])]
            for way in ways:
                found = call(subject, one, old=x["lp"] - gap, **way)
                require(bool(found.result.loss.isfinite()), f"{kind} at {gap:+g} has loss {found.result.loss.item()!r}")
                if found.dlogprob is not None:
                    finite = bool(np.isfinite(found.dlogprob).all())
                    require(finite, f"{kind} at {gap:+g} has a gradient that is not finite")
