"""Attacks on linear_divergence@1."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from rlkernel_conformance.clauses.divergence_rows import TEMPERATURES, allowed, definition_of, kinds, listed
from rlkernel_conformance.clauses.linear_divergence_heads import (
    FORMS,
    OPERANDS,
    WIDE,
    Heads,
    agree,
    back,
    cases,
    check,
    judged,
    least_of,
    of_logits,
    plainly,
    scaled,
    with_leaves,
)
from rlkernel_conformance.clauses.linear_logprob_heads import check_gradients, operand_gradients
from rlkernel_conformance.compare import plain, require, same_bits, within
from rlkernel_conformance.memory import does_not_grow, peak
from rlkernel_conformance.subject import Subject


@attack("LD-01", cases)
def divergences_match_float64(subject: Subject, case: Heads) -> None:
    """Every kind, every form of teacher."""
    given = case.given(subject)
    out = judged(subject, given)
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    require(out.dtype == wide, f"divergences of {case.dtype} are {out.dtype}")


@attack("LD-02", plainly(D=64, temperature=1.0, N=8))
def logits_of_16_bits_are_not_rounded(subject: Subject, case: Heads) -> None:
    """A student that is the teacher, but for noise: rounded logits would be far from it."""
    for dtype in {"bfloat16", "float16"} & set(subject.dtypes):
        given = replace(case, dtype=dtype, V=max(case.V, 33), form="logits").given(subject)
        given["teacher"] = (given["hidden"].double() @ given["weight"].double().T).float()
        out = plain(subject(**given), "divergence")
        require(bool((np.abs(out) <= 2e-6 if case.kind != "tv" else np.abs(out) <= 1e-5).all()), f"is {out.tolist()}")


@attack(
    "LD-03", lambda s: st.builds(Heads, N=st.just(2), D=st.just(3), V=st.integers(2, 9000), seed=st.integers(0, 99))
)
def every_column_counts_once(subject: Subject, case: Heads) -> None:
    """Hidden states of zeros, and a teacher that is sure of the last id: forward KL is log V."""
    case = replace(case, dtype=subject.dtypes[0], form="logits", kind=kinds(subject)[0])
    given = case.given(subject)
    given["hidden"] = torch.zeros_like(given["hidden"])
    given["teacher"] = torch.zeros_like(given["teacher"])
    given["teacher"][:, -1] = 60.0
    out = plain(judged(subject, given), "divergence")
    if case.kind == "forward_kl":
        error = float(np.abs(np.exp(out - math.log(case.V)) - 1).max()) * case.V
        require(error < 0.5, f"{case.V} columns count as {np.exp(out).tolist()}")


def extra(subject: Subject, case: Heads) -> int:
    """Bytes at the peak of a call and its backward pass beyond its results and gradients."""
    call, leaves = with_leaves(subject, case.given(subject))

    def run() -> Any:
        out = subject(**call)
        if leaves:
            out.sum().backward()
        return out

    back(subject, replace(case, N=128).given(subject))  # what first calls load and keep is not their workspace
    most, out = peak(subject, run)
    return most - out.nbytes - sum(x.grad.nbytes for x in leaves.values() if x.grad is not None)


@attack("LD-04", plainly(D=8, E=4, V=WIDE), scale=0.05)
def memory_does_not_grow_with_rows(subject: Subject, case: Heads) -> None:
    """Twice or three times the rows: a few numbers more per row, a tenth of a row of logits at most."""
    form = "head" if FORMS["head"] in subject.claims else "logits"
    case = replace(case, form=form, kind=kinds(subject)[-1])  # the cheapest of those that are
    does_not_grow(lambda n: extra(subject, replace(case, N=n)), most=WIDE * 4 / 10)


@attack("LD-05", plainly(form="head", temperature=1.0))
def the_forms_of_a_teacher_agree(subject: Subject, case: Heads) -> None:
    """In fp32, or what is claimed of it."""
    dtype = "float32" if "float32" in subject.dtypes else subject.dtypes[0]
    given = replace(case, dtype=dtype, V=min(case.V, 33)).given(subject)
    logits = of_logits(given)["teacher"]
    agree(subject, given, {**given, "teacher_weight": None, "teacher": logits.float()})
    if "teacher_ids" in subject.claims:
        every = listed(logits.float(), logits.shape[1])
        agree(subject, given, {**given, "teacher_weight": None, **every})


@attack("LD-06", plainly())
def rows_have_their_own_temperatures(subject: Subject, case: Heads) -> None:
    """A tensor of each side's temperatures, row by row."""
    given = case.given(subject)
    T = torch.tensor([TEMPERATURES[(case.seed + i) % 4] for i in range(case.N)], device=subject.device)
    judged(subject, {**given, "temperature": T})
    if "teacher_ids" not in given and "teacher_temperature" in subject.claims:
        judged(subject, {**given, "temperature": T, "teacher_temperature": T.flip(0)})


@attack("LD-07", plainly())
def masked_rows_may_hold_anything(subject: Subject, case: Heads) -> None:
    """NaN in hidden and teacher, NaN upstream: results 0, d_hidden 0, nothing in d_weight."""
    given = replace(case, N=case.N + 1).given(subject)
    mask = torch.arange(case.N + 1, device=subject.device) % 2 == 0
    some = {n: x[mask] if isinstance(x, Tensor) and not n.endswith("weight") else x for n, x in given.items()}
    for name in ("hidden", "teacher"):
        given[name] = torch.where(mask[:, None], given[name], torch.nan)
    out, found = back(subject, {**given, "mask": mask}, torch.where(mask, 1.0, torch.nan))
    require(bool((out[~mask] == 0).all()), f"masked rows give {out[~mask].tolist()}")
    want = definition_of(of_logits(some))
    within(subject, "divergence", out[mask], want.values, allowed(subject, case.dtype, want))
    if found:
        require(bool((found["hidden"][~mask] == 0).all()), "a masked row has a gradient")
        found["hidden"] = found["hidden"][mask]
        check(subject, some, found, np.ones(int(mask.sum())))


@attack("LD-08", lambda s: cases(s).map(lambda c: replace(c, V=min(c.V, 127))))
def gradients_match_float64(subject: Subject, case: Heads) -> None:
    """Of both operands, each row with an upstream gradient of its own."""
    given = case.given(subject)
    g = draw.normal((case.N,), case.seed + 20, subject.device, "float32")
    _, found = back(subject, given, g)
    check(subject, given, found, plain(g, "g"))


@attack("LD-09", plainly(N=600, D=16, V=2100, form="logits", temperature=1.0, kind="forward_kl"), scale=0.05)
def errors_do_not_grow_with_rows_or_columns(subject: Subject, case: Heads) -> None:
    """Operands of 16 bits, where an accumulator of 16 bits would show."""
    if case.kind not in kinds(subject):
        return
    for dtype in [d for d in ("bfloat16", "float16") if d in subject.dtypes] or subject.dtypes[:1]:
        given = replace(case, dtype=dtype).given(subject)
        _, found = back(subject, given)
        logits = of_logits(given)
        dz = torch.softmax(logits["logits"], -1) - torch.softmax(logits["teacher"].double(), -1)
        check_gradients(subject, found, operand_gradients(scaled(given), plain(dz, "dz")), dtype, 0.0)


@attack("LD-10", plainly(), scale=0.5)
def frozen_operands_get_nothing_and_change_nothing(subject: Subject, case: Heads) -> None:
    """Each operand alone."""
    given = case.given(subject)
    _, every = back(subject, given)
    for name in OPERANDS:
        _, some = back(subject, given, frozen=(name,))
        require(name not in some, f"a frozen {name} has a gradient")
        want = {n: plain(every[n], n) for n in some}
        check_gradients(subject, some, want, case.dtype, least_of(given, np.ones(case.N)))


@attack("LD-11", cases, scale=0.5)
def gradients_on_and_off_agree(subject: Subject, case: Heads) -> None:
    """The same bits, with one operand frozen too."""
    given = case.given(subject)
    with torch.no_grad():
        off = subject(**given)
    for frozen in ((), ("weight",), ("hidden",)):
        on = subject(**with_leaves(subject, given, frozen)[0])
        same_bits("divergence", on.detach(), off, "with gradients on")


@attack("LD-12", plainly(), scale=0.5)
def one_bad_row_spoils_one_row(subject: Subject, case: Heads) -> None:
    """NaN in hidden states and in the teacher."""
    given = replace(case, N=3).given(subject)
    want, whole = back(subject, given, frozen=("weight",))
    for name in ("hidden", "teacher"):
        bad = given[name].clone()
        bad[1] = torch.nan
        out, found = back(subject, {**given, name: bad}, frozen=("weight",))
        require(bool(out[1].isnan()), f"a row of NaN in {name} gives {out[1].item()!r}")
        same_bits("divergence", out[[0, 2]], want[[0, 2]], f"beside a row of NaN in {name}")
        if found:
            same_bits("d_hidden", found["hidden"][[0, 2]], whole["hidden"][[0, 2]], f"beside a row of NaN in {name}")
    for name, head in (("hidden", "weight"), ("teacher", "teacher_weight")):
        beside_one_without_a_law(subject, given, name, head)


def beside_one_without_a_law(subject: Subject, given: Mapping[str, Any], name: str, head: str) -> None:
    """All logits of one row of a side are -inf: by a column of its head that other rows do not read."""
    least = torch.finfo(given[name].dtype).min
    if least**2 < 1e38 or (name == "teacher" and given.get("teacher_ids") is not None):  # products of fp16 are finite
        return
    call = dict(given)
    bad = call[name].clone()
    if call.get(head) is None:
        bad[1] = -torch.inf
    else:
        large = (-least) ** 0.75
        bad[:, 0], weight = 0.0, call[head].clone()
        weight[:, 0] = -large
        call |= {name: bad.clone(), head: weight}
        bad[1, 0] = large
    want, whole = back(subject, call, frozen=("weight",))
    out, found = back(subject, {**call, name: bad}, frozen=("weight",))
    require(bool(out[1].isnan()), f"a row whose logits are all -inf, by {name}, gives {out[1].item()!r}")
    same_bits("divergence", out[[0, 2]], want[[0, 2]], f"beside such a row, by {name}")
    if found:
        require(bool(found["hidden"][1].isnan().all()), f"its d_hidden is {found['hidden'][1].tolist()}")
        same_bits("d_hidden", found["hidden"][[0, 2]], whole["hidden"][[0, 2]], f"beside such a row, by {name}")


@attack("LD-13", cases, scale=0.5)
def layout_changes_nothing(subject: Subject, case: Heads) -> None:
    """Padded rows and transposed storage; rows in two dimensions."""
    given = case.given(subject)
    want = subject(**given)
    calls = [
        {**given, name: view}
        for name in ("hidden", "weight", "teacher", "teacher_weight")
        if name in given
        for view in (draw.strided(given[name]), given[name].t().contiguous().t())
    ]
    calls.append({n: x[None] if isinstance(x, Tensor) and not n.endswith("weight") else x for n, x in given.items()})
    for call in calls:
        found = subject(**call).reshape(want.shape)
        if "batch_invariant" in subject.claims:
            same_bits("divergence", found, want, "in another layout")
        bound = 2 * allowed(subject, case.dtype, definition_of(of_logits(given)))
        within(subject, "divergence", found, plain(want, "divergence"), bound)


@attack("LD-14", plainly(), scale=0.3)
def no_rows_give_empty_results_and_zero_gradients(subject: Subject, case: Heads) -> None:
    """N = 0, and all rows masked."""
    given = case.given(subject)
    calls = [{n: x[:0] if isinstance(x, Tensor) and not n.endswith("weight") else x for n, x in given.items()}]
    if "mask" in subject.claims:
        calls.append({**given, "mask": torch.zeros(case.N, dtype=torch.bool, device=subject.device)})
    for call in calls:
        out, found = back(subject, call)
        require(out.tolist() == [0.0] * call["hidden"].shape[0], f"no rows give {out.tolist()}")
        for name, x in found.items():
            require(x.shape == call[name].shape, f"no rows have d_{name} of {list(x.shape)}")
            require(bool((x == 0).all()), f"no rows have d_{name} {x.tolist()}")


@attack("LD-16", cases, scale=0.5)
def a_row_is_the_same_in_any_batch(subject: Subject, case: Heads) -> None:
    """Alone, reversed and at the end of a large batch: values and d_hidden."""
    given = case.given(subject)

    def part(index: Any) -> dict[str, Tensor]:
        rows = {n: x[index] if isinstance(x, Tensor) and not n.endswith("weight") else x for n, x in given.items()}
        out, found = back(subject, rows, frozen=("weight",))
        return {"divergence": out, **found}

    every = torch.arange(case.N, device=subject.device)
    want = part(every)
    same_results({n: x.flip(0) for n, x in part(every.flip(0)).items()}, want, "in a reversed batch")
    for i in range(case.N):
        same_results(part(every[i : i + 1]), {n: x[i : i + 1] for n, x in want.items()}, "alone")
    same_results({n: x[-case.N :] for n, x in part(every.repeat(40)).items()}, want, "at the end of a large batch")


@attack("LD-20", lambda s: cases(s).map(lambda c: replace(c, V=min(c.V, 127))), scale=0.5)
def what_is_saved_changes_nothing(subject: Subject, case: Heads) -> None:
    """Upstream gradients of 1e-6 and 1e6, where the dtype has room; backward twice; recompute's divergences."""
    given = case.given(subject)
    call = {**given, "backward": "save"}
    same_bits("divergence", subject(**call), subject(**given), "with backward='save'")
    call, leaves = with_leaves(subject, call)
    if not leaves:
        return
    out = subject(**call)
    g = draw.normal((case.N,), case.seed + 21, subject.device, "float32")
    for scale in (1 / 16, 16.0) if case.dtype == "float16" else (1e-6, 1e6):
        found = torch.autograd.grad(out, list(leaves.values()), g.to(out.dtype) * scale, retain_graph=True)
        some = {n: x.double() / scale for n, x in zip(leaves, found, strict=True)}
        if case.dtype in {"bfloat16", "float16"}:
            some = as_of_two_roundings(given, some, plain(g, "g"))
        check(subject, given, some, plain(g, "g"))


def as_of_two_roundings(given: Mapping[str, Any], found: Mapping[str, Tensor], g: Any) -> dict[str, Tensor]:
    """Gradients with an error of the head's as two roundings to 16 bits make it, for which the tolerance is.

    What is kept was rounded before it meets the upstream gradient, so that the head's has three, whose squares add up.
    """
    want = operand_gradients(scaled(given), definition_of(of_logits(given), g).grad)
    known = {name: torch.from_numpy(want[name]) for name in found if name == "weight"}
    return {name: known[name].lerp(x.cpu(), 1.5**-0.5) if name in known else x for name, x in found.items()}


@attack("LD-21", plainly(form="list", K=5), scale=0.5)
def a_wrong_list_spoils_its_row(subject: Subject, case: Heads) -> None:
    """And no other: ids beyond the vocabulary and below -1, an id twice, too much mass."""
    given = replace(case, N=3, V=max(case.V, 12)).given(subject)
    want, whole = back(subject, given, frozen=("weight",))
    ids = given["teacher_ids"]
    wrong = [("teacher_ids", v) for v in (given["weight"].shape[0], -2, 2**40, int(ids[1, 1]))] + [("teacher", 0.2)]
    for name, value in wrong:
        changed = given[name].clone()
        changed[1, 0] = value
        out, found = back(subject, {**given, name: changed}, frozen=("weight",))
        require(bool(out[1].isnan()), f"{name} with {value} gives {out[1].item()!r}, not NaN")
        same_bits("divergence", out[[0, 2]], want[[0, 2]], f"beside a row whose {name} has {value}")
        if found:
            require(bool(found["hidden"][1].isnan().all()), f"{name} with {value} has a d_hidden that is not NaN")
            rest = found["hidden"][[0, 2]]
            same_bits("d_hidden", rest, whole["hidden"][[0, 2]], f"beside a row whose {name} has {value}")


def with_mask(subject: Subject, case: Heads) -> dict[str, Any]:
    """The call with a mask, where that is claimed."""
    given = case.given(subject)
    if "mask" in subject.claims:
        given["mask"] = torch.arange(case.N, device=subject.device) % 2 == case.seed % 2
    return given


derive("linear_divergence", lambda s, c: c.given(s), inputs_untouched=cases, determinism=cases, scale=0.5)
derive("linear_divergence", with_mask, capture=plainly())
