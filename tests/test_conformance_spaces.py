"""Covering arrays, spaces of calls, and what a table of cases does where one fails."""

from __future__ import annotations

import dataclasses
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis.errors import Unsatisfiable, UnsatisfiedAssumption

import rlkernel as rlk
from rlkernel_conformance.attack import Coverage, Table
from rlkernel_conformance.clauses import attacks_on
from rlkernel_conformance.compare import Violation, within
from rlkernel_conformance.harness import carry_out, try_all
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.spaces import space_of
from rlkernel_conformance.spaces.covering import Rule, covering
from rlkernel_conformance.spaces.layouts import LAYOUTS, laid_out
from rlkernel_conformance.spaces.space import Point, judge
from rlkernel_conformance.subject import Subject
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec.logprob import LogprobResult
from rlkernel_torch.logprob import logprob

FACTORS = {"a": (0, 1, 2), "b": ("x", "y"), "c": (True, False), "d": (0, 1, 2, 3)}


def test_every_pair_of_levels_stands_in_a_row() -> None:
    rows = covering(FACTORS).rows
    wanted = {(f, x, g, y) for f, g in combinations(FACTORS, 2) for x, y in product(FACTORS[f], FACTORS[g])}
    assert wanted == {(f, row[f], g, row[g]) for row in rows for f, g in combinations(FACTORS, 2)}
    assert len(rows) < 3 * 2 * 2 * 4 / 2


def test_rules_hold_in_every_row_and_what_they_forbid_is_no_pair() -> None:
    rule = Rule(("a", "b", "c"), lambda a, b, c: not (a == 2 and b == "y") and (c or a < 2))
    array = covering(FACTORS, (rule,))
    assert all(rule.holds(row["a"], row["b"], row["c"]) for row in array.rows)
    assert (("a", 2), ("b", 1)) not in array.pairs
    assert array.covered(FACTORS, array.rows) == array.pairs


def test_a_pair_is_covered_by_no_row_with_a_level_that_hides_it() -> None:
    array = covering(FACTORS, masking={"d": (3,)})
    alone = [row for row in array.rows if row["d"] != 3]
    assert array.pairs - array.covered(FACTORS, alone) == {p for p in array.pairs if ("d", 3) in p}
    assert array.covered(FACTORS, array.rows) == array.pairs


def test_a_level_that_stands_beside_hiding_ones_alone_hides_too() -> None:
    rule = Rule(("a", "d"), lambda a, d: a < 2 or d == 3)
    array = covering(FACTORS, (rule,), masking={"d": (3,)})
    assert array.masking == {("a", 2), ("d", 3)}
    assert array.covered(FACTORS, array.rows) == array.pairs


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("x", [torch.arange(6.0).view(2, 3), torch.arange(4), torch.tensor([True, False])])
def test_a_layout_keeps_values(layout, x) -> None:
    assert torch.equal(laid_out(x, layout), x)


def a_table(rows: list[int]) -> Table:
    return Table(lambda _: rows, lambda _, case: iter(range(case)), lambda _, done: Coverage(len(done), len(rows)))


def fails_from(least: int, seen: list[int]):
    def body(case: int) -> None:
        seen.append(case)
        if case == 13:
            raise UnsatisfiedAssumption
        if case >= least:
            raise ValueError(case)

    return body


def test_a_failing_row_is_made_simpler_and_the_simplest_is_the_last_that_ran() -> None:
    seen: list[int] = []
    with pytest.raises(ValueError, match="5"):
        try_all(fails_from(5, seen), a_table([1, 13, 9, 20]), Subject("torch", "logprob"), examples=9)
    assert seen[-1] == 5
    assert 20 not in seen


def test_a_table_without_a_case_is_unsatisfiable() -> None:
    with pytest.raises(Unsatisfiable):
        try_all(fails_from(1, []), a_table([13]), Subject("torch", "logprob"), examples=9)


def ignores_the_mask_where_entropy_is_wanted(call):
    if call.entropy and call.mask is not None:
        call.mask = torch.ones_like(call.mask)
    return logprob(call)


def test_a_bug_of_two_options_is_found_and_both_are_named() -> None:
    claims = frozenset({"mask", "entropy", "softcap", "deterministic"})
    target = f"{__name__}:ignores_the_mask_where_entropy_is_wanted"
    impl = Impl(op="logprob@1", target=target, requires=Requires(device="*"), supports=claims)
    wrong = Backend(name="wrong", api=API_VERSION, impls=(impl,))
    attack = next(a for a in attacks_on("logprob") if a.clause.id == "LP-97")
    subject = Subject("wrong", "logprob")
    with rlk.registered(wrong), subject.chosen():
        outcome = carry_out(subject, attack, Profile("test", 20, 60))
    assert outcome.status == "violated"
    assert "entropy=True" in outcome.message
    assert "mask=" in outcome.message
    assert "softcap" not in outcome.message


def test_a_bound_that_is_nan_allows_nothing() -> None:
    with pytest.raises(Violation, match="expected nan"):
        within(Subject("torch", "logprob"), "y", torch.ones(2), [1.0, float("nan")], [0.5, float("nan")])


class OfConstants(torch.autograd.Function):
    """The log-probability, whose backward pass takes the normalizer for a constant."""

    @staticmethod
    def forward(ctx, logits, ids):
        lse = logits.logsumexp(-1)
        ctx.save_for_backward(logits, lse, ids)
        return logits.gather(-1, ids[..., None])[..., 0] - lse

    @staticmethod
    def backward(ctx, upstream):
        logits, lse, ids = ctx.saved_tensors
        p = (logits - lse[..., None]).exp()
        return upstream[..., None] * (torch.nn.functional.one_hot(ids, p.shape[-1]) - p), None


def of_constants(call):
    return LogprobResult(OfConstants.apply(call.logits, call.ids))


def of_autograd(call):
    return LogprobResult(call.logits.log_softmax(-1).gather(-1, call.ids[..., None])[..., 0])


def second_order(run) -> None:
    """Judge a call of a backend whose gradient is differentiated again."""
    claims = frozenset({"grad", "deterministic"})
    impl = Impl(op="logprob@1", target=f"{__name__}:{run.__name__}", requires=Requires(device="*"), supports=claims)
    subject, space = Subject("twice", "logprob"), space_of("logprob")
    with rlk.registered(Backend(name="twice", api=API_VERSION, impls=(impl,))), subject.chosen():
        simplest = {name: levels[0] for name, levels in space.all_factors(subject).items()}
        anything = dataclasses.replace(space, expected=lambda *_: {})
        judge(anything, subject, Point(3, {**simplest, "upstream": "second order"}))


def test_a_second_derivative_that_is_right_is_let_pass() -> None:
    second_order(of_autograd)


def test_a_second_derivative_that_takes_what_was_saved_for_constants_is_refuted() -> None:
    with pytest.raises(Violation, match="a gradient of a gradient is given"):
        second_order(of_constants)


def test_an_infinite_bound_allows_nan_and_no_other_infinity() -> None:
    subject, nan = Subject("torch", "logprob"), torch.tensor([torch.nan])
    within(subject, "logprob", nan, [0.0], [np.inf])
    with pytest.raises(Violation):
        within(subject, "logprob", torch.zeros(1), [np.inf], [np.inf])
