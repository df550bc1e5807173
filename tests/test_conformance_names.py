"""What a report says of a failure: the call that failed, the result that was wrong, how many clauses hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import rlkernel_torch
from rlkernel import policy
from rlkernel_conformance.documents import badge
from rlkernel_conformance.harness import Outcome, carry_out
from rlkernel_conformance.leak_check import attacks_with_leak_check
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.report import report
from rlkernel_conformance.reproduce import script
from rlkernel_conformance.subject import Subject, in_words
from rlkernel_core.manifest import Backend
from rlkernel_core.spec.policy_loss import LossResult
from rlkernel_core.spec.sampling import Penalties
from rlkernel_torch.policy_loss import policy_loss

FEW = Profile("few", 8, 60, thorough=False)


def wrong_for_dro(call: Any) -> LossResult:
    out = policy_loss(call)
    return replace(out, loss=out.loss + 1) if call.kind == "dro" else out


def wrong_fraction(call: Any) -> LossResult:
    out = policy_loss(call)
    return replace(out, stats=replace(out.stats, clip_low=out.stats.clip_low + 1))


def found(function: str, clause: str) -> tuple[Subject, Outcome]:
    plain = next(i for i in rlkernel_torch.backend.impls if i.op == "policy_loss@1")
    impl = plain.model_copy(update={"target": f"{__name__}:{function}", "gradient": None})
    with policy.registered(Backend(name="wrong", api=rlkernel_torch.backend.api, impls=(impl,))):
        subject = Subject("wrong", "policy_loss")
        with subject.chosen():
            return subject, carry_out(subject, attacks_with_leak_check("policy_loss")[clause], FEW, shrink=False)


def test_a_property_that_loops_over_kinds_names_the_call_that_failed() -> None:
    _, outcome = found("wrong_for_dro", "PL-04")
    assert outcome.status == "violated"
    assert "kind='dro'" in outcome.call
    assert outcome.call.startswith("policy_loss(logprob=float")
    assert f"# its last call: {outcome.call}" in outcome.reproduce


def test_a_wrong_statistic_is_named() -> None:
    _, outcome = found("wrong_fraction", "PL-25")
    assert outcome.message.startswith("stats.clip_low is "), outcome.message


def test_a_case_that_makes_no_call_shows_that_of_no_other() -> None:
    subject = Subject("torch", "policy_loss")
    subject.called.append("policy_loss(of='another case')")
    attack = attacks_with_leak_check("policy_loss")["PL-04"]
    with subject.chosen():
        carry_out(subject, replace(attack, prop=lambda *_: None), FEW, shrink=False)
    assert "last call" not in script(subject, attack, None)


def test_arguments_are_told_without_their_values() -> None:
    x = torch.zeros(4, 3)
    said = [in_words(v) for v in (x, x.t(), x[0, 0], Penalties(1.5, output_ids=x.long()), (1, x), "grpo")]
    assert said == [
        "float32[4, 3]",
        "float32[3, 4] of strides [1, 3]",
        "float32[]",
        "Penalties(repetition=1.5, output_ids=int64[4, 3])",
        "(1, float32[4, 3])",
        "'grpo'",
    ]


def test_a_badge_counts_clauses_that_hold_of_those_that_the_claims_call_for() -> None:
    subject = Subject("torch", "whiten")
    statuses = {"WH-01": "held", "WH-02": "violated", "WH-03": "fault", "WH-05": "not_claimed"}
    outcomes = [Outcome("whiten", c, c, s, "unknown" if s == "fault" else None) for c, s in statuses.items()]
    assert badge(report({subject: [replace(o, executed=1) for o in outcomes]}, FEW))["message"] == "fails, 1 of 3 hold"
