"""Attacks on divergence@1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import same_results
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.clauses.divergence_rows import (
    SIDES,
    TEMPERATURES,
    Rows,
    agree,
    allowed,
    allowed_gradient,
    cases,
    definition_of,
    dtype_of,
    gradient,
    judged,
    kinds,
    plainly,
    with_leaf,
)
from rlkernel_conformance.clauses.number_masks import PLACES, Masked, masked_rows
from rlkernel_conformance.compare import plain, require, same_bits, within
from rlkernel_conformance.subject import Subject


@attack("DV-01", cases, examples=(Rows(2, 4099, 1, "jsd", 0.9, "holes"), Rows(2, 33, 4, "reverse_kl", K=5)))
def divergences_match_float64(subject: Subject, case: Rows) -> None:
    """Every kind, by logits and by lists."""
    if case.dtype in subject.dtypes and case.kind in kinds(subject):
        judged(subject, case.given(subject))


@attack("DV-02", plainly(K=0, teacher_temperature=None))
def what_nearly_agrees_keeps_its_digits(subject: Subject, case: Rows) -> None:
    """Equal sides, and such that differ by 1e-3 of a nat: the divergence is 1e-8 to 1e-6."""
    given = replace(case, dtype="float32" if "float32" in subject.dtypes else case.dtype).given(subject)
    equal = plain(subject(**{**given, "teacher": given["logits"]}), "divergence")
    require(bool((equal >= 0).all() and (equal <= 1e-6).all()), f"equal sides have divergences {equal.tolist()}")
    noise = 0.001 * draw.normal((case.N, case.V), case.seed + 5, subject.device)
    x = given["logits"].double()
    near = {**given, "logits": (x + noise).to(given["logits"].dtype), "teacher": given["logits"]}
    found, want = plain(subject(**near), "divergence"), definition_of(near).values
    require(bool((found >= 0).all()), f"a divergence is negative: {found.min()!r}")
    if case.kind != "tv":
        error = np.abs(found - want)
        require(bool((error <= 0.02 * want + 1e-12).all()), f"near 0 it is {found.tolist()}, expected {want.tolist()}")


@attack("DV-03", lambda s: st.builds(Rows, N=st.just(2), V=st.integers(2, 9000), seed=st.integers(0, 999)))
def every_column_counts_once(subject: Subject, case: Rows) -> None:
    """A flat student, and a teacher that is sure of the last id: forward KL is log V."""
    case = replace(case, kind=kinds(subject)[0])
    x = torch.zeros(case.N, case.V, device=subject.device)
    teacher = x.clone()
    teacher[:, -1] = 60.0
    judged(subject, {"logits": x, "teacher": teacher, "kind": case.kind})
    if "kind:forward_kl" in subject.claims:
        out = plain(subject(x, teacher, kind="forward_kl"), "divergence")
        error = float(np.abs(np.exp(out - math.log(case.V)) - 1).max()) * case.V
        require(error < 0.5, f"{case.V} columns count as {np.exp(out).tolist()}")


@attack("DV-04", plainly(K=0, temperature=1.0, teacher_temperature=None))
def a_constant_on_a_row_changes_nothing(subject: Subject, case: Rows) -> None:
    """Shifts of either side by +-1000, in float32 where they round."""
    given = case.given(subject)
    for side in SIDES:
        for shift in (-1000.0, 1000.0):
            moved = {**given, side: (given[side].double() + shift).to(given[side].dtype)}
            back = {**moved, side: (moved[side].double() - shift).to(given[side].dtype)}
            agree(subject, back, moved)


@attack("DV-05", plainly(K=0))
def minus_infinity_has_no_mass(subject: Subject, case: Rows) -> None:
    """On either side, and on both; with gradients."""
    case = replace(case, V=max(case.V, 3), N=3)
    given = case.given(subject)
    hole = torch.arange(case.V, device=subject.device) % 3 == 1
    for sides in (SIDES[:1], SIDES[1:], SIDES):
        call = {**given, **{s: torch.where(hole, -torch.inf, given[s]) for s in sides}}
        out = judged(subject, call)
        if "grad" in subject.claims and bool(out.isfinite().all()):
            found, want = gradient(subject, call), definition_of(call, np.ones(case.N))
            within(subject, "grad", found, want.grad, allowed_gradient(subject, dtype_of(call), want))
            zero = found[:, hole] if "logits" in sides else found[:, :0]
            require(bool((zero == 0).all()), f"logits of -inf have gradients {zero.tolist()}")


@attack("DV-25", masked_rows, examples=(Masked(193, 0), Masked(1283, 8, temperature=0.5)), scale=0.3)
def a_number_masks_as_minus_infinity_does(subject: Subject, case: Masked) -> None:
    """Of either side and of both."""
    if case.dtype not in subject.dtypes:
        return
    masked = [(p, sides) for p in PLACES for sides in (SIDES, SIDES[:1], SIDES[1:])]
    given: dict[str, Any] = {"temperature": case.temperature}
    for k, side in enumerate(SIDES):
        x = 2 * draw.normal((len(masked), case.V), case.seed + k, "cpu")
        for i, (place, sides) in enumerate(masked):
            if side in sides:  # of one side alone it enters the divergence: over the temperature, in bits perhaps
                least = 1.0 if sides == SIDES else min(1.0, case.temperature) / 4
                x[i].masked_fill_(case.mask(place, i), case.value(i, least))
        given[side] = x.to(getattr(torch, case.dtype)).to(subject.device)
    g = draw.normal((len(given["logits"]),), case.seed + 9, subject.device, "float32")
    for kind in kinds(subject):
        one = {**given, "kind": kind}
        want = definition_of(one, plain(g, "g"))
        within(subject, "divergence", subject(**one), want.values, allowed(subject, case.dtype, want))
        if "grad" in subject.claims:
            within(subject, "grad", gradient(subject, one, g), want.grad, allowed_gradient(subject, case.dtype, want))


@attack("DV-06", plainly(K=0, teacher_temperature=None))
def temperature_is_applied_once(subject: Subject, case: Rows) -> None:
    """To both sides; powers of two round nothing."""
    for T in (0.5, 2.0):
        given = {**case.given(subject), "temperature": T}
        agree(subject, given, {**given, "temperature": 1.0, **{s: given[s] / T for s in SIDES}})


@attack("DV-07", plainly(K=0))
def each_side_has_its_own_temperature(subject: Subject, case: Rows) -> None:
    """The teacher's is its own, and without one the student's."""
    given = replace(case, teacher_temperature=None).given(subject)
    same_bits("divergence", subject(**given, teacher_temperature=case.temperature), subject(**given), "by its own name")
    for T in (0.5, 2.0):
        own = {**given, "temperature": 1.0, "teacher_temperature": T}
        agree(subject, own, {**own, "teacher": given["teacher"] / T, "teacher_temperature": None})
        judged(subject, {**given, "teacher_temperature": T})


@attack("DV-08", plainly())
def rows_have_their_own_temperature(subject: Subject, case: Rows) -> None:
    """A tensor of each side's temperatures against the definition, row by row."""
    given = replace(case, teacher_temperature=None).given(subject)
    T = torch.tensor([TEMPERATURES[(case.seed + i) % 4] for i in range(case.N)], device=subject.device)
    judged(subject, {**given, "temperature": T})
    if "teacher_ids" not in given and "teacher_temperature" in subject.claims:
        judged(subject, {**given, "teacher_temperature": T})


@attack("DV-09", plainly())
def masked_rows_may_hold_anything(subject: Subject, case: Rows) -> None:
    """NaN on either side, ids out of range, NaN upstream."""
    given = replace(case, N=case.N + 1).given(subject)
    mask = torch.arange(case.N + 1, device=subject.device) % 2 == 0
    want = subject(**given)
    for side in SIDES:
        given[side] = torch.where(mask[:, None], given[side], torch.nan)
    if "teacher_ids" in given:
        given["teacher_ids"] = torch.where(mask[:, None], given["teacher_ids"], 2**40)
    call, leaf = with_leaf(subject, given)
    out = subject(**call, mask=mask)
    require(bool((out[~mask] == 0).all()), f"masked rows give {out[~mask].tolist()}")
    same_bits("divergence", out[mask], want[mask], "beside masked rows")
    if out.requires_grad:
        (found,) = torch.autograd.grad(out, leaf, torch.where(mask, 1.0, torch.nan).to(out.dtype))
        require(bool((found[~mask] == 0).all()), "a masked row has a gradient")
        require(bool(found[mask].isfinite().all()), "a masked row spoils the gradient of another")


@attack("DV-10", plainly(K=0, temperature=1.0, teacher_temperature=None))
def the_kinds_agree(subject: Subject, case: Rows) -> None:
    """Swapped sides; bounds."""
    given, beta = case.given(subject), 0.5 if case.beta is None else case.beta
    swapped = {**given, "logits": given["teacher"], "teacher": given["logits"]}
    if {"kind:forward_kl", "kind:reverse_kl"} <= subject.claims:
        agree(subject, {**given, "kind": "forward_kl", "beta": None}, {**swapped, "kind": "reverse_kl", "beta": None})
    if "kind:jsd" in subject.claims:
        one = {**given, "kind": "jsd", "beta": beta}
        agree(subject, one, {**swapped, "kind": "jsd", "beta": 1 - beta})
        most = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        out = subject(**one)
        require(bool((out <= most + 1e-5).all()), f"a JSD is {out.max().item()!r}, above {most!r}")
    if "kind:tv" in subject.claims:
        out = subject(**{**given, "kind": "tv", "beta": None})
        require(bool(((out >= 0) & (out <= 1 + 1e-5)).all()), f"TV is {out.tolist()}")


@attack("DV-11", cases, examples=(Rows(2, 127, 3, "jsd", 0.1, K=64), Rows(2, 1000, 5, "reverse_kl", None, "peaked")))
def gradients_match_float64(subject: Subject, case: Rows) -> None:
    """Every kind, by logits and by lists."""
    if case.dtype not in subject.dtypes or case.kind not in kinds(subject):
        return
    given = case.given(subject)
    g = draw.normal((case.N,), case.seed + 9, subject.device, "float32")
    found, want = gradient(subject, given, g), definition_of(given, plain(g, "g"))
    within(subject, "grad", found, want.grad, allowed_gradient(subject, case.dtype, want))
    require(found.dtype == given["logits"].dtype, f"the gradient of {case.dtype} is {found.dtype}")


@attack("DV-12", plainly())
def gradients_of_a_row_sum_to_zero(subject: Subject, case: Rows) -> None:
    """A constant on all logits changes nothing."""
    given = case.given(subject)
    want = definition_of(given, np.ones(case.N))
    total = gradient(subject, given).double().sum(1)
    _, rtol = subject.tolerance("grad", dtype_of(given))
    bound = (1e-5 + rtol) * want.grad_size + rtol * np.abs(want.grad).sum(1) + want.slack.sum(1)
    within(subject, "grad", total, np.zeros(case.N), bound)


@attack("DV-13", cases)
def gradients_on_and_off_agree(subject: Subject, case: Rows) -> None:
    """The same bits."""
    given = case.given(subject)
    with torch.no_grad():
        off = subject(**given)
    same_bits("divergence", subject(**with_leaf(subject, given)[0]), off, "with gradients on")


@attack("DV-14", plainly(K=0, temperature=1.0, teacher_temperature=None))
def a_list_of_all_ids_is_the_teacher(subject: Subject, case: Rows) -> None:
    """In an order of its own, of another integer dtype, and beside padding that holds NaN."""
    case = replace(case, V=min(case.V, 33))
    given = case.given(subject)
    log_t = torch.log_softmax(given["teacher"].double(), -1).to(given["logits"].dtype)
    order = torch.randperm(case.V, generator=torch.Generator().manual_seed(case.seed)).to(subject.device)
    ids = order.expand(case.N, -1)
    whole = {**given, "teacher": log_t.gather(1, ids), "teacher_ids": ids}
    agree(subject, given, whole)
    padded = {
        **given,
        "teacher": torch.nn.functional.pad(whole["teacher"], (1, 2), value=torch.nan),
        "teacher_ids": torch.nn.functional.pad(ids, (1, 2), value=-1).int(),
    }
    agree(subject, given, padded)
    if "grad" in subject.claims:
        want = definition_of(given, np.ones(case.N))
        found, dtype = gradient(subject, padded), dtype_of(given)
        within(subject, "grad", found, want.grad, 4 * allowed_gradient(subject, dtype, want) + 1e-6)


@attack("DV-15", plainly(K=5))
def the_tail_is_one_mass(subject: Subject, case: Rows) -> None:
    """The student's unlisted logits permuted; a list that holds all of the teacher's mass."""
    case = replace(case, V=max(case.V, 12))
    given = case.given(subject)
    listed_ids = torch.zeros(case.N, case.V, dtype=torch.bool, device=subject.device)
    listed_ids.scatter_(1, given["teacher_ids"], True)
    moved = given["logits"].clone()
    for row, out in zip(moved, listed_ids, strict=True):
        row[~out] = row[~out].flip(0)
    agree(subject, given, {**given, "logits": moved})
    sure = {**given, "teacher": given["teacher"] - given["teacher"].logsumexp(1, keepdim=True)}
    out = judged(subject, sure)
    require(bool(out.isfinite().all()), f"a list with all of the mass has divergences {out.tolist()}")


@attack("DV-16", plainly(K=5))
def a_wrong_list_spoils_its_row(subject: Subject, case: Rows) -> None:
    """And no other: ids beyond the vocabulary and below -1, an id twice, too much mass."""
    given = replace(case, N=3, V=max(case.V, 12)).given(subject)
    want, ids = subject(**given), given["teacher_ids"]
    wrong = [("teacher_ids", v) for v in (given["logits"].shape[1], -2, 2**40, int(ids[1, 1]))] + [("teacher", 0.2)]
    for name, value in wrong:
        changed = given[name].clone()
        changed[1, 0] = value
        call, leaf = with_leaf(subject, {**given, name: changed})
        out = subject(**call)
        require(bool(out[1].isnan()), f"{name} with {value} gives {out[1].item()!r}, not NaN")
        same_bits("divergence", out[[0, 2]].detach(), want[[0, 2]].detach(), f"beside a row whose {name} has {value}")
        if out.requires_grad:
            (found,) = torch.autograd.grad(out.sum(), leaf)
            require(bool(found[1].isnan().all()), f"{name} with {value} has a gradient that is not NaN")
            require(bool(found[[0, 2]].isfinite().all()), f"{name} with {value} spoils another row's gradient")


@attack("DV-17", plainly())
def a_row_without_a_divergence_spoils_only_itself(subject: Subject, case: Rows) -> None:
    """NaN, +inf and -inf alone, on either side; temperatures without a meaning."""
    given = replace(case, N=3).given(subject)
    before = subject(**given)
    bad: list[dict[str, Any]] = []
    for side in SIDES if "teacher_ids" not in given else SIDES[:1]:
        for value, columns in ((torch.nan, 0), (torch.inf, 0), (-torch.inf, slice(None))):
            x = given[side].clone()
            x[1, columns] = value
            bad.append({side: x})
    if "per_row_temperature" in subject.claims:
        T = [
            torch.tensor([case.temperature, t, case.temperature], device=subject.device) for t in (0.0, -1.0, torch.inf)
        ]
        bad += [{"temperature": t} for t in T]
    for change in bad:
        call, leaf = with_leaf(subject, {**given, **change})
        out = subject(**call)
        name = next(iter(change))
        require(bool(out[1].isnan()), f"a bad row of {name} gives {out[1].item()!r}, not NaN")
        same_bits("divergence", out[[0, 2]].detach(), before[[0, 2]], f"beside a bad row of {name}")
        if out.requires_grad:
            (found,) = torch.autograd.grad(out.sum(), leaf)
            require(bool(found[1].isnan().all()), f"a bad row of {name} has a gradient that is not NaN")
            require(bool(found[[0, 2]].isfinite().all()), f"a bad row of {name} spoils another row's gradient")


@attack("DV-18", cases, scale=0.5)
def layout_changes_nothing(subject: Subject, case: Rows) -> None:
    """Padded rows and transposed storage; rows in two dimensions."""
    given = case.given(subject)
    want = subject(**given)
    for name in [n for n in ("logits", "teacher", "teacher_ids") if n in given]:
        views = [given[name].t().contiguous().t()]
        views += [draw.strided(given[name])] if given[name].is_floating_point() else []
        for view in views:
            same_results(subject(**{**given, name: view}), want, f"with strided {name}")
    shaped = subject(**{n: x[None] if isinstance(x, Tensor) else x for n, x in given.items()})
    same_bits("divergence", shaped[0], want, "in two dimensions")


@attack("DV-19", plainly(), scale=0.2)
def no_rows_give_empty_results(subject: Subject, case: Rows) -> None:
    """And an empty gradient."""
    given = {n: x[:0] if isinstance(x, Tensor) else x for n, x in case.given(subject).items()}
    call, leaf = with_leaf(subject, given)
    out = subject(**call)
    require(tuple(out.shape) == (0,), f"no rows give {list(out.shape)}")
    if out.requires_grad:
        (found,) = torch.autograd.grad(out.sum(), leaf)
        require(found.shape == leaf.shape, f"no rows have a gradient of {list(found.shape)}")


@attack("DV-21", cases, scale=0.5)
def a_row_is_the_same_in_any_batch(subject: Subject, case: Rows) -> None:
    """Alone, reversed and at the end of a large batch: values and gradients."""
    given = case.given(subject)

    def part(index: Any) -> dict[str, Tensor]:
        call, leaf = with_leaf(subject, {n: x[index] if isinstance(x, Tensor) else x for n, x in given.items()})
        out = subject(**call)
        found = {"divergence": out.detach()}
        return found | ({"d_logits": torch.autograd.grad(out.sum(), leaf)[0]} if out.requires_grad else {})

    every = torch.arange(case.N, device=subject.device)
    want = part(every)
    same_results({n: x.flip(0) for n, x in part(every.flip(0)).items()}, want, "in a reversed batch")
    for i in range(case.N):
        same_results(part(every[i : i + 1]), {n: x[i : i + 1] for n, x in want.items()}, "alone")
    repeated = part(every.repeat(40))
    same_results({n: x[-case.N :] for n, x in repeated.items()}, want, "at the end of a large batch")


def with_mask(subject: Subject, case: Rows) -> dict[str, Any]:
    """The call with a mask, where that is claimed."""
    given = case.given(subject)
    if "mask" in subject.claims:
        given["mask"] = torch.arange(case.N, device=subject.device) % 2 == case.seed % 2
    return given


derive("divergence", lambda s, c: c.given(s), inputs_untouched=cases, determinism=cases, scale=0.5)
derive("divergence", with_mask, capture=plainly())
