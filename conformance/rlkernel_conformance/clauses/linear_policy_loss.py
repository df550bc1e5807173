"""Attacks on linear_policy_loss@1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves, same_results
from rlkernel_conformance.clauses import linear_policy_loss_ranks
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.clauses.linear_logprob_heads import (
    Head,
    check_gradients,
    definition,
    of_shard,
    with_leaves,
)
from rlkernel_conformance.clauses.linear_policy_loss_steps import (
    Step,
    check_factor,
    check_loss,
    check_operands,
    one_of_each,
    run,
    size_of,
    steps,
    where_claimed,
)
from rlkernel_conformance.clauses.policy_loss_batches import Batch, kind_levels
from rlkernel_conformance.compare import Violation, close, plain, require, same_bits
from rlkernel_conformance.memory import does_not_grow, least_workspace, peak
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import policy_loss as oracle
from rlkernel_core.spec.logprob import Support
from rlkernel_core.spec.policy_loss import KINDS

__all__ = ["linear_policy_loss_ranks"]  # the attacks of that module are registered together

WIDE = 1024  # a row of logits in fp32 is 4096 bytes: one that is kept per row of hidden shows

# dX rounds when it is made and when it is scaled, here both times the same way in the few elements that hold its norm.
ROUNDED_TWICE = Step(
    Batch(B=3, T=4, seed=3822, per_token=True, kl="k3", kl_importance=True, correction="truncated tokens"),
    Head(N=12, D=6, V=33, seed=3822, dtype="bfloat16", softcap=5.0),
)

MANY = Step(Batch(B=10, T=60, seed=1, per_token=True, masked=False), Head(N=600, D=16, V=33, seed=1, dtype="bfloat16"))


def clip_kind(subject: Subject, level: str = "token") -> str | None:
    """A claimed kind with the clipped surrogate."""
    return next((k for k, at in kind_levels(subject) if at == level and KINDS[k].surrogate == "clip"), None)


def of_kind(subject: Subject, step: Step, level: str = "token", **batch: Any) -> Step | None:
    """The step with a kind that clips; None where none is claimed."""
    kind = clip_kind(subject, level)
    return None if kind is None else replace(step, batch=replace(step.batch, kind=kind, level=level, **batch))


@attack("LPL-01", steps, examples=one_of_each())
@where_claimed
def the_loss_is_that_of_the_plain_operators(subject: Subject, case: Step) -> None:
    """Loss, statistics, log-probabilities and entropies, at every combination of options."""
    given = case.given(subject)
    out, grads = run(subject, given)
    check_loss(subject, case, out.loss)
    args, named = case.expected(subject)
    size = 1 + 4 * size_of(case, subject)
    for name, want in oracle.statistics(*args, **named).items() if "stats" in subject.claims else ():
        have = getattr(out.stats, name)
        if have is None:
            raise Violation(f"stats.{name} is None")
        scale = size if name == "policy_loss" else 8.0
        close(subject, "stats", have, want, case.dtype(subject), scale=scale, name=f"stats.{name}")
    mask = args[3].reshape(-1)
    for name, want in (("logprob", args[0]), ("entropy", named.get("entropy"))):
        if name == "logprob" and "logprob" not in subject.claims:
            continue
        have = getattr(out, name)
        require((have is None) == (want is None), f"{name} is {have!r}")
        if have is not None:
            require(not have.requires_grad, f"{name} carries a gradient")
            close(
                subject,
                "logprob",
                have.reshape(-1),
                np.where(mask, want.reshape(-1), 0.0),
                case.dtype(subject),
                scale=2.0,
            )
    if grads:
        check_operands(subject, case, grads)


@attack("LPL-02", steps, scale=0.5, examples=(ROUNDED_TWICE,))
@where_claimed
def gradients_match_float64(subject: Subject, case: Step) -> None:
    """DX, dW and dbias, the loss multiplied by a number that is no power of two."""
    scale = (1.7, 0.3, -2.9)[case.batch.seed % 3]
    _, grads = run(subject, case.given(subject), scale=scale)
    check_operands(subject, case, grads, scale=scale)
    if case == ROUNDED_TWICE:
        for dtype in {"bfloat16", "float16"} & set(subject.dtypes):
            many = replace(MANY, head=replace(MANY.head, dtype=dtype)).given(subject)
            (_, once), (_, scaled) = run(subject, many), run(subject, many, scale=0.3)
            check_factor(once, scaled, 0.3)


def extra(subject: Subject, case: Step, rows: int, **more: Any) -> int:
    """Bytes at the peak of a call and its backward pass beyond results and gradients."""
    batch = replace(case.batch, B=rows // 64, T=64, masked=False)
    wide = Step(batch, replace(case.head, N=rows, D=8, V=WIDE, bias=False, dtype=subject.dtypes[0]))
    zeros = torch.zeros(batch.B, batch.T, device=subject.device)
    head = wide.head.given(subject)
    head["hidden"], head["ids"] = head["hidden"].reshape(batch.B, 64, -1), head["ids"].reshape(batch.B, 64)
    call, leaves = with_leaves({**head, "old_logprob": zeros - 7, "advantages": zeros + 0.5, "kind": batch.kind})

    def both_ways() -> Any:
        out = subject(**call, **more)
        out.loss.backward()
        return out

    both_ways()
    for x in leaves.values():
        x.grad = None
    most, out = peak(subject, both_ways)
    kept = [out.loss, out.logprob, *(x.grad for x in leaves.values())]
    return most - sum(x.nbytes for x in kept if x is not None)


@attack("LPL-03", lambda s: steps(s, plainly=True), scale=0.05)
def memory_does_not_grow_with_rows(subject: Subject, case: Step) -> None:
    """Twice or three times the rows: a few numbers more per row, a tenth of a row of logits at most."""
    one = of_kind(subject, case)
    if one is None or "grad" not in subject.claims:
        return
    does_not_grow(lambda n: extra(subject, one, n), most=WIDE * 4 / 10)


@attack("LPL-04", lambda s: steps(s, plainly=True), scale=0.05)
def the_limit_is_kept_and_the_minimum_named(subject: Subject, case: Step) -> None:
    """A limit of one byte is refused with the least that is accepted; within that the call stays."""
    one = of_kind(subject, case)
    if one is None or "grad" not in subject.claims:
        return

    def used(limit: int) -> int:
        return extra(subject, one, 128, max_workspace_bytes=limit)

    limit = least_workspace(used, used)
    out, grads = run(subject, one.given(subject, max_workspace_bytes=2 * limit))
    check_loss(subject, one, out.loss)
    check_operands(subject, one, grads)


@attack("LPL-05", lambda s: steps(s, plainly=True, B=10, T=60, D=16, V=2100, bias=False, masked=False), scale=0.05)
def errors_do_not_grow_with_tiles_or_blocks(subject: Subject, case: Step) -> None:
    """Many rows and tiles; operands of 16 bits, where an accumulator of 16 bits would show."""
    one = of_kind(subject, case)
    if one is None:
        return
    batch = one.batch
    for dtype in [d for d in ("bfloat16", "float16") if d in subject.dtypes] or subject.dtypes[:1]:
        given = replace(one.head, dtype=dtype, temperature=1.0).given(subject)
        shaped = {"hidden": given["hidden"].reshape(batch.B, batch.T, -1), "ids": given["ids"].reshape(batch.B, -1)}
        g = draw.normal((batch.B, batch.T), batch.seed + 20, subject.device, "float32")
        # Without old log-probabilities the gradient is -A at every token, and the probabilities' own.
        more = {"old_logprob": None, "advantages": g, "kind": batch.kind, "aggregate": "token_mean"}
        if not {"on_policy", "aggregate:token_mean"} <= subject.claims:
            return
        _, found = run(subject, {**given, **shaped, **more})
        exact = {n: given[n].double() for n in ("hidden", "weight")}
        dz = torch.softmax(exact["hidden"] @ exact["weight"].T, -1)
        dz[torch.arange(len(dz), device=dz.device), given["ids"]] -= 1
        dz *= g.reshape(-1, 1).double() / g.numel()
        want = {"hidden": plain(dz @ exact["weight"], "dX"), "weight": plain(dz.T @ exact["hidden"], "dW")}
        check_gradients(subject, found, want, dtype, 0.0)


@attack("LPL-06", lambda s: steps(s, plainly=True, bias="bias" in s.claims), scale=0.2)
def frozen_operands_get_nothing_and_change_nothing(subject: Subject, case: Step) -> None:
    """Each operand alone, and all but one, against all."""
    given = case.given(subject)
    out, every = run(subject, given)
    for frozen in [(n,) for n in every] + [tuple(m for m in every if m != n) for n in every]:
        if len(frozen) == len(every):
            continue
        alone, some = run(subject, given, frozen)
        close(subject, "loss", alone.loss, out.loss.item(), case.dtype(subject), scale=1 + size_of(case, subject))
        check_operands(subject, case, some)


@attack("LPL-07", lambda s: steps(s, masked=True), scale=0.5)
def masked_tokens_may_hold_anything(subject: Subject, case: Step) -> None:
    """NaN in hidden, in old and in rollout, and ids far out of range, under the mask."""
    given = case.given(subject)
    want, gradients = run(subject, given)
    mask = given["mask"]
    dirty = {**given, "hidden": torch.where(mask[..., None], given["hidden"], torch.nan)}
    dirty["ids"] = torch.where(mask, given["ids"], 2**40)
    for name in ("old_logprob", "ref_logprob", "rollout_logprob"):
        if given.get(name) is not None:
            dirty[name] = torch.where(mask, given[name], torch.nan)
    found, grads = run(subject, dirty)
    close(subject, "loss", found.loss, want.loss.item(), case.dtype(subject), scale=1 + size_of(case, subject))
    if grads:
        require(bool((grads["hidden"][~mask.reshape(-1)] == 0).all()), "a masked token has a gradient")
        check_operands(subject, case, grads)
        check_operands(subject, case, gradients)


@attack("LPL-08", lambda s: steps(s, plainly=True, per_token=True, T=4), scale=0.5)
def rows_that_weigh_nothing_add_nothing(subject: Subject, case: Step) -> None:
    """Advantage 0 at some tokens: dX is 0 there, and dW does not know what hidden holds."""
    one = of_kind(subject, case)
    if one is None:
        return
    adv = one.batch.arrays()["adv"]
    light = (np.arange(adv.size) % 2 == one.batch.seed % 2).reshape(adv.shape)
    given = one.given(subject, adv=np.where(light, 0.0, adv))
    out, grads = run(subject, given)
    check_loss(subject, one, out.loss, adv=np.where(light, 0.0, adv))
    rows = torch.from_numpy(light.reshape(-1)).to(subject.device)
    require(bool((grads["hidden"][rows] == 0).all()), "a token of no weight has a gradient")
    other = draw.normal(tuple(given["hidden"].shape), one.batch.seed + 9, subject.device, one.head.dtype)
    where = rows.reshape(given["ids"].shape)[..., None]
    _, more = run(subject, {**given, "hidden": torch.where(where, other, given["hidden"])})
    same_bits("dW", more["weight"], grads["weight"], "whatever the tokens of no weight hold")


@attack("LPL-09", lambda s: steps(s, plainly=True, on_policy=False), scale=0.5)
def the_returned_log_probabilities_make_the_ratio_one(subject: Subject, case: Step) -> None:
    """A second call on the same weights, with gradients and without, per token and per sequence."""
    for level in ("token", "sequence"):
        one = of_kind(subject, case, level)
        if one is None:
            continue
        given = one.given(subject)
        with torch.no_grad():
            first = subject(**given).logprob
        if first is None:
            raise Violation("logprob is None")
        for old in (first, run(subject, given)[0].logprob):
            stats = run(subject, {**given, "old_logprob": old})[0].stats
            if "stats" not in subject.claims:
                continue
            ends = stats.ratio_min.item(), stats.ratio_max.item()
            require(ends == (1.0, 1.0), f"ratios of a policy to itself lie within {ends}")


@attack("LPL-10", lambda s: steps(s, plainly=True, level="sequence", T=4), scale=0.5)
def sequence_ratios_see_every_token(subject: Subject, case: Step) -> None:
    """Loss and gradients where one ratio belongs to a sequence; more rows than fit a small block."""
    out, grads = run(subject, case.given(subject))
    check_loss(subject, case, out.loss)
    if grads:
        check_operands(subject, case, grads)


@attack("LPL-11", lambda s: steps(s, plainly=True, V=33, softcap=1.5, packed=False), scale=0.5)
def the_heads_options_mean_what_they_mean(subject: Subject, case: Step) -> None:
    """Bias, scale, a cap that bends and temperature; a support."""
    case = replace(case, head=replace(case.head, logit_scale=2.0 if "logit_scale" in subject.claims else 1.0))
    out, grads = run(subject, case.given(subject))
    check_loss(subject, case, out.loss)
    if grads:
        check_operands(subject, case, grads)
    if "support" not in subject.claims:
        return
    head = case.operands(subject)
    rng = np.random.default_rng(case.batch.seed)
    chosen = plain(head["ids"], "ids")
    kept = [sorted({int(i), *rng.choice(33, size=5).tolist()}) for i in chosen]
    offsets = torch.tensor([0, *np.cumsum([len(k) for k in kept])], device=subject.device)
    support = Support(torch.tensor(np.concatenate(kept), device=subject.device), offsets)
    lp = definition(head, kept=kept).logprob.reshape(case.batch.B, case.batch.T)
    change = {"lp": lp, "old": lp - 3 / 32}
    out = subject(**case.given(subject, old=change["old"], support=support))
    check_loss(subject, case, out.loss, **change)


@attack("LPL-12", lambda s: steps(s, T=3), scale=0.2)
def shards_equal_the_whole(subject: Subject, case: Step) -> None:
    """Two ranks with shards of different sizes."""
    case = replace(case, head=replace(case.head, V=max(case.head.V, 7)))
    given = case.given(subject)
    cuts = [0, case.head.V // 3, case.head.V]

    def on_rank(rank: int, group: Any) -> Any:
        return run(subject, {**of_shard(given, slice(cuts[rank], cuts[rank + 1])), "group": group})

    ranks = on_ranks(subject, 2, on_rank)
    for out, _ in ranks:
        check_loss(subject, case, out.loss)
    if ranks[0][1]:
        everywhere = {"hidden", "lora.A"} & set(ranks[0][1])
        joined = {n: torch.cat([grads[n] for _, grads in ranks]) for n in ranks[0][1] if n not in everywhere}
        for _, grads in ranks:
            check_operands(subject, case, {**joined, **{n: grads[n] for n in everywhere}})
    same_results(ranks[1][0], ranks[0][0], "on another rank")


@attack("LPL-19", lambda s: steps(s, B=3, packed=False), scale=0.2)
def ranks_are_one_batch(subject: Subject, case: Step) -> None:
    """Two and three ranks with sequences of their own, one of them with none."""
    given = case.given(subject)
    rows = {n for n, x in given.items() if isinstance(x, torch.Tensor) and n not in {"weight", "bias"}}

    def on_share(share: slice, group: Any) -> Any:
        return run(subject, {n: x[share] if n in rows else x for n, x in given.items()} | {"process_group": group})

    whole = subject(**given)
    for bounds in ((0, 1, 3), (0, 2, 2, 3)):
        ranks = on_ranks(subject, len(bounds) - 1, lambda r, g, b=bounds: on_share(slice(b[r], b[r + 1]), g))
        for out, _ in ranks:
            check_loss(subject, case, out.loss)
            for name, have in leaves(out.stats).items() if "stats" in subject.claims else ():
                want = plain(getattr(whole.stats, name), name)
                scale = 4 + 10 * size_of(case, subject)
                close(subject, "stats", have, want, case.dtype(subject), scale=scale, name=f"stats.{name}")
        of = [grads for _, grads in ranks]
        mean = {n: sum(g[n] for g in of) / len(of) for n in of[0] if n != "hidden"}
        if "hidden" in of[0]:
            mean["hidden"] = torch.cat([g["hidden"] for g in of]) / len(of)
        if mean:
            check_operands(subject, case, mean)


@attack("LPL-20", lambda s: steps(s, rank=3), scale=0.5)
def lora_is_a_part_of_the_head(subject: Subject, case: Step) -> None:
    """Loss, and gradients of A, B and hidden with the head frozen, and trained."""
    given = case.given(subject)
    for frozen in ((), ("weight", "bias")):
        out, grads = run(subject, given, frozen)
        check_loss(subject, case, out.loss)
        if grads:
            check_operands(subject, case, grads)


@attack("LPL-13", steps, scale=0.5)
def an_id_out_of_range_makes_the_loss_nan(subject: Subject, case: Step) -> None:
    """Below, above and far above, at an unmasked token that is not rejected."""
    case = replace(case, batch=replace(case.batch, rejection=""))
    given = case.given(subject)
    for bad in (-1, case.head.V, 2**40):
        ids = given["ids"].clone()
        ids.reshape(-1)[0] = bad
        loss = subject(**{**given, "ids": ids}).loss.item()
        require(math.isnan(loss) or ("mask" in given and not given["mask"].reshape(-1)[0]), f"id {bad} gives {loss!r}")


@attack("LPL-14", lambda s: steps(s, plainly=True, masked="mask" in s.claims), scale=0.5)
def no_tokens_give_zero(subject: Subject, case: Step) -> None:
    """All masked, NaN in hidden; and no row at all."""
    given = case.given(subject)
    calls = []
    if "mask" in given:
        nothing = {"mask": torch.zeros_like(given["mask"]), "hidden": torch.full_like(given["hidden"], torch.nan)}
        calls.append({**given, **nothing})
    per_token = {"hidden", "ids", "old_logprob", "mask", "advantages"}
    calls.append({k: x[:0] if k in per_token and isinstance(x, torch.Tensor) else x for k, x in given.items()})
    for call in calls:
        out, grads = run(subject, call)
        require(out.loss.item() == 0, f"the loss of no token is {out.loss.item()!r}")
        for name, x in grads.items():
            require(bool((x == 0).all()), f"the gradient of {name} of no token is not 0")


def another(case: Step) -> Step:
    """A step of the same shapes from another seed."""
    seed = case.batch.seed + 1
    return replace(case, batch=replace(case.batch, seed=seed), head=replace(case.head, seed=seed))


def given_of(subject: Subject, case: Step) -> dict[str, Any]:
    """The arguments of a step."""
    return case.given(subject)


derive(
    "linear_policy_loss",
    given_of,
    inputs_untouched=lambda s: steps(s, B=3, T=4, masked="mask" in s.claims),
    determinism=steps,
    scale=0.5,
)
derive("linear_policy_loss", given_of, capture=steps, another=another)
