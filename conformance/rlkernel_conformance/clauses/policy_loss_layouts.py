"""Attacks on policy_loss@1: batches, masks, layouts, ranks, and what every operator owes its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves, refused, same_results
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.clauses.policy_loss_batches import (
    OPTIONS,
    Batch,
    Found,
    arguments,
    batches,
    call,
    check_gradient,
    check_loss,
    expected,
    judged,
    kind_levels,
)
from rlkernel_conformance.compare import close, plain, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.policy_loss import KINDS, Correction, GammaGate, Rejection


def agree(subject: Subject, case: Batch, found: Any, want: Any) -> None:
    """Two losses are equal but for rounding."""
    atol, rtol = subject.tolerance("loss", case.dtype)
    close(subject, "loss", found, want, case.dtype, scale=1 + rtol / atol * expected(case).size)


def grad(subject: Subject) -> bool:
    """Whether gradients are claimed."""
    return "grad" in subject.claims


# Argument -> (fields of the batch, other options, one value, another). None: the argument is left out.
EFFECTS: Final[Mapping[str, tuple[dict[str, Any], dict[str, Any], Any, Any]]] = {
    "level": ({}, {}, "token", "sequence"),
    "clip": ({}, {}, None, (0.01, 0.02)),
    "dual_clip": ({}, {}, None, 1.01),
    "log_ratio_limit": ({}, {}, None, 0.05),
    "tau": ({"kind": "sapo"}, {}, None, (2.0, 3.0)),
    "gamma": ({"kind": "vespo", "level": "sequence"}, {}, None, GammaGate(k_pos=1.0, k_neg=1.0)),
    "ratio_cap": ({"kind": "dppo_tv"}, {"clip": (0.9, 0.9)}, None, 1.01),
    "dro_beta": ({"kind": "dro"}, {}, 0.1, 0.2),
    "aggregate": ({}, {}, "token_mean", "token_sum"),
    "denominator": ({}, {}, None, 3.0),
    "horizon": ({"aggregate": "seq_mean_token_sum_norm"}, {}, None, 3.0),
    "count_empty": ({"aggregate": "seq_mean_token_mean"}, {}, False, True),
    "kl": ({"kl": "k3"}, {}, None, "k2"),
    "kl_coef": ({"kl": "k3"}, {}, 0.0, 0.1),
    "kl_clamp": ({"kl": "low_var"}, {}, None, (0.1, 0.01)),
    "kl_importance": ({"kl": "k3"}, {}, False, True),
    "entropy_coef": ({"bonus": True}, {}, 0.0, 0.1),
    "entropy_aggregate": ({"bonus": True}, {}, None, "token_sum"),
    "entropy_denominator": ({"bonus": True}, {"entropy_aggregate": "token_mean"}, None, 3.0),
    "correction": ({"rollout": True}, {}, None, Correction("token", high=1.1)),
    "correction ": ({"rollout": True}, {}, Correction("token", high=1.1), Correction("token", "mask", high=1.1)),
    "correction  ": (
        {"rollout": True},
        {},
        Correction("token", high=1.1),
        Correction("token", high=1.1, normalize=True),
    ),
    "rejection": ({"rollout": True}, {}, None, Rejection("k1", "token", high=1.1)),
    "rejection ": ({"rollout": True}, {}, Rejection("k2", "token", high=0.1), Rejection("k3", "token", high=0.1)),
    "rejection  ": ({"rollout": True}, {}, Rejection("k1", "token", high=1.05), Rejection("k1", "any", high=1.05)),
}


def _tall(subject: Subject) -> st.SearchStrategy[Batch]:
    seeds, dtypes = st.sampled_from((3, 4, 5)), st.sampled_from(subject.dtypes)
    return st.builds(Batch, B=st.just(4), T=st.just(24), seed=seeds, dtype=dtypes)


@attack("PL-09", _tall, scale=0.1)
def every_argument_has_an_effect(subject: Subject, case: Batch) -> None:
    """Two values of every option that is claimed, all else equal; some sequence is empty."""
    for name, (fields, options, *values) in EFFECTS.items():
        one = replace(case, **fields)
        x = one.arrays()
        x["mask"][1] = False
        outcomes = []
        for value in values:
            given = arguments(subject, one, mask=x["mask"], **options)
            given = {k: v for k, v in (given | {name.strip(): value}).items() if v is not None}
            if not subject.spec.needs(subject.spec.call(**given)) <= subject.claims:
                break
            leaf = given["logprob"].requires_grad_(grad(subject))
            out = subject(**given)
            gradient = torch.autograd.grad(out.loss, leaf)[0] if leaf.requires_grad else leaf
            outcomes.append([*leaves(out).values(), gradient])
        if len(outcomes) == 2:
            a, b = outcomes
            changed = len(a) != len(b) or any(not torch.equal(p, q) for p, q in zip(a, b, strict=True))
            require(changed, f"{name.strip()} changes nothing between {values[0]!r} and {values[1]!r}")


@attack("PL-10", lambda s: batches(s, plainly=True, rollout="rollout" in s.claims), scale=0.2)
def options_of_other_kinds_are_refused(subject: Subject, case: Batch) -> None:
    """Every option that a kind lacks, for every kind; corrections that two of them cannot have."""
    options: dict[str, Any] = {
        "clip": (0.2, 0.2),
        "dual_clip": 3.0,
        "log_ratio_limit": 5.0,
        "tau": (1.0, 1.0),
        "gamma": GammaGate(),
        "ratio_cap": 3.0,
        "dro_beta": 0.5,
    }
    for kind, level in kind_levels(subject):
        given = arguments(subject, replace(case, kind=kind, level=level))
        for name in options.keys() - KINDS[kind].options.keys():
            refused(subject, name, {**given, name: options[name]})
        if kind in {"vespo", "gmpo"} and {"correction", "rollout"} <= subject.claims:
            rules = {"vespo": "token", "gmpo": "geometric"}
            good = {**given, "correction": Correction(rules.pop(kind))}
            refused(subject, "correction", {**given, "correction": Correction(*rules.values())}, good)


@attack("PL-11", lambda s: batches(s, correction="", rejection="", packed=False, dtype=s.dtypes[0]), scale=0.5)
def losses_of_ranks_add_up(subject: Subject, case: Batch) -> None:
    """The batch cut in two, each part with the count of the whole; a number and a tensor."""
    if case.B < 2 or case.aggregate == "token_sum":
        return
    x = case.arrays()
    counted = x["mask"].sum() if case.aggregate == "token_mean" else x["mask"].any(1).sum()
    cut = 1 + case.seed % (case.B - 1)
    whole = call(subject, case)
    total, gradients = 0.0, []
    for rows in (slice(0, cut), slice(cut, case.B)):
        part = replace(case, B=len(x["mask"][rows]))
        count: Any = float(counted)
        if case.seed % 2:
            count = torch.tensor(count, device=subject.device)
        found = call(subject, part, denominator=count, **{n: a[rows] for n, a in x.items()})
        total += found.result.loss.item()
        gradients.append(found.dlogprob)
    agree(subject, case, whole.result.loss, total)
    if whole.dlogprob is not None:
        want = np.concatenate(gradients)
        size = 1 + 1e4 * np.abs(want).max()
        close(subject, "grad_logprob", torch.from_numpy(whole.dlogprob), want, case.dtype, scale=size)


@attack("PL-12", lambda s: batches(s, plainly=True, masked="mask" in s.claims, on_policy=False), scale=0.5)
def without_a_denominator_the_local_tokens_count(subject: Subject, case: Batch) -> None:
    """Ratio 1 and advantage 1: the loss is minus the sum of the weights."""
    for kind, level in kind_levels(subject):
        if KINDS[kind].surrogate == "clip":
            case = replace(case, kind=kind, level=level, per_token=False)
            break
    else:
        return
    x = case.arrays()
    n, S = x["mask"].sum(), x["mask"].any(1).sum()
    want = {
        "token_mean": 1.0,
        "token_sum": n,
        "seq_mean_token_sum": n / S,
        "seq_mean_token_mean": 1.0,
        "seq_mean_token_sum_norm": n / S / 7.0,
    }
    found = call(subject, case, old=x["lp"], adv=np.ones(case.B))
    close(subject, "loss", found.result.loss, -want[case.aggregate], case.dtype)


@attack("PL-13", lambda s: batches(s, masked=True, correction="", rejection=""), scale=0.5)
def empty_sequences_count_only_where_asked(subject: Subject, case: Batch) -> None:
    """One sequence without a token, with and without count_empty."""
    if "mask" not in subject.claims or case.B < 2 or not case.aggregate.startswith("seq_"):
        return
    mask = case.arrays()["mask"]
    mask[case.seed % case.B] = False
    if not mask.any():
        return
    for change in ({}, {"count_empty": True}) if "count_empty" in subject.claims else ({},):
        check_loss(subject, case, call(subject, case, mask=mask, grad=False, **change), mask=mask, **change)


@attack("PL-14", lambda s: batches(s, masked=True), scale=0.5)
def nothing_to_learn_from_is_a_connected_zero(subject: Subject, case: Batch) -> None:
    """Every token masked, and NaN under the mask."""
    x = case.arrays()
    nothing = {"mask": np.zeros_like(x["mask"]), "lp": np.full_like(x["lp"], np.nan)}
    if not grad(subject):
        require(call(subject, case, **nothing).result.loss.item() == 0, "the loss of no token is not 0")
        return
    given = arguments(subject, case, **nothing)
    leaf = given["logprob"].requires_grad_()
    out = subject(**given)
    require(out.loss.requires_grad, "the loss of no token has no gradient")
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    require(out.loss.item() == 0, f"the loss of no token is {out.loss.item()!r}")
    require(bool((gradient == 0).all()), f"the gradient of no token is {gradient.tolist()}")
    for name, value in leaves(out.stats).items() if "stats" in subject.claims else ():
        require(value.item() == 0, f"stats.{name} of no token is {value.item()!r}")


@attack("PL-15", lambda s: batches(s, masked=True))
def what_a_mask_hides_changes_no_bit(subject: Subject, case: Batch) -> None:
    """NaN, inf and numbers of any size under the mask, in every tensor."""
    x = case.arrays()
    hidden = ~x["mask"]
    dirty = dict(x)
    for i, name in enumerate(("lp", "old", "ref", "roll", "entropy", "adv")):
        poison = (np.nan, np.inf, -np.inf, 1e30)[(case.seed + i) % 4]
        if dirty[name].ndim == 2:
            dirty[name] = np.where(hidden, poison, dirty[name])
    del dirty["mask"]
    want, found = (call(subject, case, **change) for change in ({}, dirty))
    same_results(found.result, want.result, "with poison under the mask")
    for one, two in ((found.dlogprob, want.dlogprob), (found.dentropy, want.dentropy)):
        if one is not None:
            require(bool((one == two).all()), "poison under the mask reaches a gradient")
            require(not one[hidden].any(), "a masked token has a gradient")


@attack("PL-16", lambda s: batches(s, packed=True), scale=0.5)
def packed_is_padded(subject: Subject, case: Batch) -> None:
    """The rows of a padded batch end to end; sequences of one token, and empty ones."""
    one, two = (call(subject, replace(case, packed=packed)) for packed in (True, False))
    agree(subject, case, one.result.loss, two.result.loss.item())
    judged(subject, case, one)
    size = 4 + 10 * expected(case).size
    for name, value in leaves(two.result.stats).items() if "stats" in subject.claims else ():
        have = getattr(one.result.stats, name)
        close(subject, "stats", have, value.item(), case.dtype, scale=size, name=f"stats.{name}")


@attack("PL-17", lambda s: batches(s, packed=True), scale=0.5)
def the_tail_of_a_packed_batch_does_not_count(subject: Subject, case: Batch) -> None:
    """Tokens of no sequence that hold NaN and are not masked."""
    judged(subject, case, call(subject, case, tail=1 + case.seed % 5))


@attack("PL-18", lambda s: batches(s, on_policy=True, rollout=False, correction="", rejection=""), scale=0.5)
def without_old_log_probabilities_the_current_ones_are_old(subject: Subject, case: Batch) -> None:
    """None against the same numbers."""
    same = replace(case, on_policy=False)
    found, want = call(subject, case), call(subject, same, old=case.arrays()["lp"])
    agree(subject, case, found.result.loss, want.result.loss.item())
    if found.dlogprob is not None:
        check_gradient(subject, case, found)


@attack("PL-27", lambda s: batches(s, packed=False), scale=0.5)
def layout_changes_nothing(subject: Subject, case: Batch) -> None:
    """Padded rows, transposed storage and expanded advantages, against the definition and against contiguous ones."""
    given = arguments(subject, case)
    want = subject(**given)
    views = {
        "logprob": draw.strided(given["logprob"]),
        "advantages": given["advantages"].reshape(case.B, -1).expand(case.B, case.T),
    }
    for name in ("old_logprob", "mask", "ref_logprob", "entropy", "rollout_logprob"):
        if given.get(name) is not None:
            views[name] = given[name].t().contiguous().t()
    found = subject(**{**given, **views})
    check_loss(subject, case, Found(found))
    size = 4 + 10 * expected(case).size
    for name, value in leaves(found.stats).items() if "stats" in subject.claims else ():
        expect = plain(getattr(want.stats, name), name)
        close(subject, "stats", value, expect, case.dtype, scale=size, name=f"stats.{name} of strided views")


@attack("PL-28", lambda s: batches(s, dtype=s.dtypes[0]), scale=0.5)
def the_order_of_sequences_means_nothing(subject: Subject, case: Batch) -> None:
    """The sequences in another order."""
    order = np.random.default_rng(case.seed).permutation(case.B)
    x = case.arrays()
    one = call(subject, case)
    two = call(subject, case, **{n: a[order] for n, a in x.items()})
    agree(subject, case, two.result.loss, one.result.loss.item())
    if one.dlogprob is not None:
        want = one.dlogprob[order]
        size = 1 + 1e4 * np.abs(want).max()
        close(subject, "grad_logprob", torch.from_numpy(two.dlogprob), want, case.dtype, scale=size)


@attack("PL-29", lambda s: batches(s, plainly=True), scale=0.3)
def no_tokens_at_all_work(subject: Subject, case: Batch) -> None:
    """B = 0, T = 0, and no packed token."""
    shapes: list[tuple[int, ...]] = [(0, 4), (3, 0), (0, 0)]
    for shape in [*shapes, (0,)] if "packed" in subject.claims else shapes:
        x = torch.zeros(shape, dtype=getattr(torch, case.dtype), device=subject.device)
        leaf = x.clone().requires_grad_(grad(subject))
        given: dict[str, Any] = {"kind": case.kind, "aggregate": case.aggregate, "horizon": None}
        given |= {"level": case.level, **OPTIONS.get(case.kind, {})}
        if case.aggregate == "seq_mean_token_sum_norm":
            given["horizon"] = 3.0
        if len(shape) == 1:
            given["cu_seqlens"] = torch.zeros(1, dtype=torch.int64, device=subject.device)
        out = subject(leaf, x, x if len(shape) == 1 else x[:, 0] if shape[1] else x.sum(1), **given)
        require(out.loss.item() == 0, f"the loss of {list(shape)} is {out.loss.item()!r}")
        if leaf.requires_grad:
            require(torch.autograd.grad(out.loss, leaf)[0].shape == x.shape, f"{list(shape)} has no gradient")


@attack("PL-31", lambda s: batches(s, on_policy=False, rollout="rollout" in s.claims), scale=0.3)
def constants_that_require_a_gradient_are_refused(subject: Subject, case: Batch) -> None:
    """Old, reference and rollout log-probabilities, and advantages."""
    good = arguments(subject, case)
    for name in ("old_logprob", "ref_logprob", "rollout_logprob", "advantages"):
        if good.get(name) is not None:
            refused(subject, name, {**good, name: good[name].clone().requires_grad_()}, good)


derive("policy_loss", arguments, inputs_untouched=batches, determinism=batches, scale=0.5)
derive("policy_loss", arguments, capture=batches)
