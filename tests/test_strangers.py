"""Who has other noise, fewer results or fewer edge policies than plain torch can pass, and is refused by name."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel import policy
from rlkernel_conformance.example_calls import base
from rlkernel_conformance.harness import Outcome, carry_out
from rlkernel_conformance.leak_check import CLAUSE
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.run import due_on
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ResolutionError
from rlkernel_core.spec.sample_clauses import PHILOX
from tests import strangers

FEW = Profile("few", 6, 60, thorough=False)
LAW = Profile("law", 20, 60, thorough=False)


def attacked(op: str, function: str = "", only: tuple[str, ...] = (), effort: Profile = FEW) -> list[Outcome]:
    """How the stranger fares under every clause that its claims call for, or under some."""
    with policy.registered(strangers.backend(op, function)):
        subject = Subject("stranger", op)
        with subject.chosen():
            due = [a for a in due_on(subject)[0] if a.clause.id != CLAUSE.id and (not only or a.clause.id in only)]
            return [carry_out(subject, attack, effort, shrink=False) for attack in due]


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[pytest.mark.slow] if op == "sample" else [])  # a quarter of a minute
        for op in strangers.LACKING
        if op != "linear_logprob"
    ],
)
def test_a_stranger_that_keeps_its_claims_passes_every_clause(op: str) -> None:
    found = attacked(op)
    assert [(o.clause, o.message) for o in found if o.failed] == []
    assert len([o for o in found if o.status == "held"]) >= 20


def test_other_noise_of_another_law_is_refuted_by_the_law() -> None:
    failed = {o.clause for o in attacked("sample", "biased", only=("SA-03", "SA-39"), effort=LAW) if o.failed}
    assert failed == {"SA-03"}


def test_other_noise_that_does_not_repeat_is_refuted() -> None:
    failed = {o.clause for o in attacked("sample", "unrepeatable", only=("SA-03", "SA-39"), effort=LAW) if o.failed}
    assert failed == {"SA-39"}


@pytest.mark.parametrize(
    ("op", "feature"),
    [("sample", PHILOX.name), ("logprob", "lse"), ("policy_loss", "stats"), ("advantage", "stats")],
)
def test_who_needs_what_a_stranger_does_not_claim_is_refused_by_name(op: str, feature: str) -> None:
    given = base(op) | ({"singleton": "any"} if op == "advantage" else {})
    with policy.registered(strangers.backend(op)):
        with rlk.use("stranger"):
            getattr(rlk, op)(**given)
        refused = pytest.raises(ResolutionError, match=f"features/missing: it does not claim {feature}")
        with rlk.use("stranger", need=(feature,)), refused:
            getattr(rlk, op)(**given)


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({}, "singleton_zero"),
        ({"singleton": "any", "ddof": 0}, "ddof"),
        ({"singleton": "any", "whiten": "defer"}, "stats"),
    ],
)
def test_an_edge_policy_that_is_not_claimed_is_refused_by_name(change: dict[str, object], feature: str) -> None:
    refused = pytest.raises(ResolutionError, match=f"features/missing: it does not claim {feature}")
    with policy.registered(strangers.backend("advantage")), rlk.use("stranger"), refused:
        rlk.advantage(**base("advantage") | change)


def test_a_graph_has_the_results_that_its_implementation_claims() -> None:
    given = base("logprob")
    with policy.registered(strangers.backend("logprob")), rlk.use("stranger"):
        out = torch.compile(rlk.logprob, backend="aot_eager", fullgraph=True)(given["logits"], given["ids"])
        expected = rlk.logprob(**given)
    assert out.lse is None
    assert torch.equal(out.logprob, expected.logprob)
