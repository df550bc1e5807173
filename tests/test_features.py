"""Every feature is needed by some call, and that call runs; what no call can need is on a short list."""

from __future__ import annotations

import contextlib

import pytest

import rlkernel as rlk
from rlkernel_core.spec import OPERATORS
from rlkernel_torch import backend
from tests.needy_calls import BY_POLICY, calls

CLAIMED = {impl.op.partition("@")[0]: impl.supports for impl in backend.impls}
# What an implementation of the definition cannot promise, and why.
NOT_CLAIMED = {"qmatmul": {"batch_invariant"}}  # the order of summation inside a BLAS product depends on the rows


@pytest.mark.filterwarnings("ignore::rlkernel_core.errors.FallbackWarning")  # on_capture_error="eager" says so
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_feature_is_needed_by_a_call_that_runs_or_asked_for_by_a_policy(operator, alone) -> None:
    spec, run = OPERATORS[operator], getattr(rlk, operator)
    reached, unnamed = set(), set()
    for given in calls(operator, alone):
        needs = spec.needs(spec.call(**given))
        unnamed |= needs - spec.feature_names
        if needs <= reached:
            continue
        with contextlib.suppress(rlk.ArgumentError, rlk.CaptureError):  # some changes show by their refusal
            run(**given)
            reached |= run.last.decision.call.features
            assert needs == run.last.decision.call.features
    assert (spec.feature_names - reached - BY_POLICY - {*spec.optional}, unnamed, reached - spec.feature_names) == (
        set(),
        set(),
        set(),
    )


def test_the_reference_claims_every_feature_but_these() -> None:
    assert {op: s.feature_names - CLAIMED[op] for op, s in OPERATORS.items() if s.feature_names - CLAIMED[op]} == (
        NOT_CLAIMED
    )


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_policy_can_ask_for_what_no_call_needs(operator) -> None:
    spec = OPERATORS[operator]
    asked = sorted(spec.feature_names & BY_POLICY - NOT_CLAIMED.get(operator, set()))
    given = next(iter(calls(operator, None)))
    with rlk.use(**{operator: {"need": asked}}):
        getattr(rlk, operator)(**given)
    missing = sorted(NOT_CLAIMED.get(operator, ()))
    if missing:
        with rlk.use(**{operator: {"need": missing}}), pytest.raises(rlk.ResolutionError, match=missing[0]):
            getattr(rlk, operator)(**given)
