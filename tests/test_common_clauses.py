"""Clauses that every operator has: plain torch keeps them, and each mutant fails just the one that it names."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.attack import Attack, Table
from rlkernel_conformance.clauses import attacks_on
from rlkernel_conformance.clauses.advantage_steps import Large
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.harness import carry_out, clauses_of
from rlkernel_conformance.mutants import Mutant, mutants_of
from rlkernel_conformance.mutation_run import attacks_for
from rlkernel_conformance.poisoned_storage import Poisoned
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.subject import Subject
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import common_clauses, prefix_of
from rlkernel_torch.advantage.estimate import advantage

pytestmark = pytest.mark.usefixtures("fresh")

FEW = Profile("test", 2, 60)
SOME = Profile("test", 8, 60)
ROWS = Profile("test", 4, 60, thorough=False)  # of a table; plain torch's report is of every row
ALL = Profile("test", 400, 60)  # rows of a table: the first that fails ends it
# Operators whose mutants take longest under the clauses that they do not name; the mutants of the others are the same.
LONG = {
    "advantage",
    "attention",
    "linear_divergence",
    "linear_logprob",
    "linear_policy_loss",
    "lm_head_sample",
    "policy_loss",
    "qmatmul",
    "quantize",
    "sample",
    "verify",
}


def common(op: str) -> list[Attack]:
    wanted = {c.id for c in common_clauses(prefix_of(OPERATORS[op]))}
    return [a for a in attacks_on(op) if a.clause.id in wanted]


def failed(subject: Subject, attacks: list[Attack], effort: Profile = FEW) -> dict[str, str]:
    with subject.chosen():
        outcomes = [carry_out(subject, a, effort, shrink=False) for a in attacks]
    return {o.clause: o.message for o in outcomes if o.failed}


def common_mutants(op: str) -> list[Mutant]:
    wanted = {a.clause.id for a in common(op)}
    return [m for m in mutants_of(op) if m.clause in wanted]


@pytest.mark.parametrize("op", OPERATORS)
def test_plain_torch_keeps_what_every_operator_owes(op) -> None:
    drawn, tables = ([a for a in common(op) if isinstance(a.cases, Table) == is_table] for is_table in (False, True))
    assert failed(Subject("torch", op), drawn, SOME) | failed(Subject("torch", op), tables, ROWS) == {}


def failed_by_mutants(op: str, *, alone: bool) -> dict[str, set[str]]:
    """The clauses that each mutant fails, of those of its kind; `alone`: of the one that it names."""
    found = {}
    for mutant in common_mutants(op):
        with rlk.registered(mutant.manifest):
            attacks = [a for a in attacks_for(mutant, mutant.subject) if not alone or a.clause.id == mutant.clause]
            effort = ALL if any(isinstance(a.cases, Table) for a in attacks) else FEW
            found[mutant.name] = set(failed(mutant.subject, attacks, effort))
    return found


@pytest.mark.parametrize("op", sorted(LONG))
def test_each_mutant_fails_the_clause_that_it_names(op) -> None:
    assert {mutant.name: {mutant.clause} for mutant in common_mutants(op)} == failed_by_mutants(op, alone=True)


@pytest.mark.parametrize("op", [pytest.param(o, marks=[pytest.mark.slow] if o in LONG else []) for o in OPERATORS])
def test_each_mutant_fails_the_clause_that_it_names_and_no_other_of_these(op) -> None:
    assert {mutant.name: {mutant.clause} for mutant in common_mutants(op)} == failed_by_mutants(op, alone=False)


@pytest.mark.parametrize("op", OPERATORS)
def test_each_of_these_clauses_has_a_mutant(op) -> None:
    assert {a.clause.id for a in common(op)} == {mutant.clause for mutant in common_mutants(op)}


@pytest.mark.parametrize("op", OPERATORS)
def test_the_same_number_is_the_same_sentence(op) -> None:
    texts = {c.id.rpartition("-")[2]: c.text for c in OPERATORS[op].clauses[-8:]}
    assert texts == {c.id.rpartition("-")[2]: c.text for c in common_clauses("LP")}


def test_fresh_storage_is_poisoned_and_what_is_written_is_not() -> None:
    with Poisoned(high=True):
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2, dtype=torch.int64)).tolist() == [2**63 - 1] * 2
        assert torch.ones(2).new_empty(2).isnan().all()
        assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]


def wraps_at_4096(call):
    """As offsets in 32 bits wrap at 2^31, these wrap at 2^12: the last row is written to the first."""
    out = advantage(call)
    if call.rewards.numel() > 4096:
        out.returns[0] = out.returns[-1]
        out.returns[-1] = 0
    return out


def test_the_attack_on_large_batches_finds_offsets_that_wrap() -> None:
    attack = next(a for a in attacks_on("advantage") if a.clause.id == "AD-27")
    right, wrong = Subject("torch", "advantage"), Subject("wraps", "advantage")
    claims = OPERATORS["advantage"].feature_names
    target = f"{__name__}:wraps_at_4096"
    impl = Impl(op="advantage@1", target=target, requires=Requires(device="*"), supports=claims)
    with rlk.registered(Backend(name="wraps", api=API_VERSION, impls=(impl,))):
        assert "96 GiB" in next(o.message for o in clauses_of(wrong)[1] if o.clause == "AD-27")
        with right.chosen():
            attack.prop(right, Large(5000, T=64))
        with wrong.chosen(), pytest.raises(Violation, match="times the tolerance"):
            attack.prop(wrong, Large(5000, T=64))
