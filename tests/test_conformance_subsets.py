"""No false alarm: a backend that claims less than plain torch, and does what it claims, passes every clause."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

import rlkernel_torch
from rlkernel import policy
from rlkernel_conformance.clauses.rollout_refusals import REFUSALS, Held, a_refusal_changes_nothing
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.harness import carry_out
from rlkernel_conformance.leak_check import CLAUSE, attacks_with_leak_check
from rlkernel_conformance.memory import does_not_grow
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.run import due_on
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ConfigError
from rlkernel_core.manifest import Backend
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.policy_loss import KINDS
from tests import strangers

FEW = Profile("few", 3, 60, thorough=False)
PLAIN = {i.op.partition("@")[0]: i for i in rlkernel_torch.backend.impls}


def claiming(op: str, features: frozenset[str]) -> Backend:
    """Plain torch's implementation of one operator, with these claims."""
    small = PLAIN[op].model_copy(update={"supports": features})
    return Backend(name="small", api=rlkernel_torch.backend.api, impls=(small,))


def some_of(op: str, share: float, seed: int) -> frozenset[str]:
    """A share of plain torch's claims, of each family that every call needs one, and what a kind of loss needs."""
    drawn, whole = random.Random(f"{op} {share} {seed}"), sorted(PLAIN[op].supports)
    kept = {feature for feature in whole if drawn.random() < share}
    for family in OPERATORS[op].one_of:
        kept.add(drawn.choice([feature for feature in OPERATORS[op].family(family) if feature in whole]))
    if any(KINDS[kind].levels == ("sequence",) for kind in KINDS if f"kind:{kind}" in kept):
        kept.add("level:sequence")  # without it no call reaches such a kind
    return frozenset(kept)


HEADS = ("linear_logprob", "linear_policy_loss")  # a quarter of a minute each


@pytest.mark.filterwarnings("ignore::rlkernel_core.errors.FallbackWarning")  # captures that run eagerly say so
@pytest.mark.parametrize(
    ("op", "share"),
    [
        pytest.param(op, share, marks=[pytest.mark.slow] if share and op in HEADS else [])
        for op in OPERATORS
        if op != "capture"  # its clauses take minutes
        for share in (0.0, 0.4)
    ],
)
def test_plain_torch_with_some_of_its_claims_passes_every_clause(op: str, share: float) -> None:
    with policy.registered(claiming(op, some_of(op, share, seed=1))):
        subject = Subject("small", op)
        with subject.chosen():
            found = [carry_out(subject, a, FEW, shrink=False) for a in due_on(subject)[0] if a.clause.id != CLAUSE.id]
    assert [(o.clause, o.message) for o in found if o.failed] == []


@pytest.mark.parametrize("op", [op for op in OPERATORS if OPERATORS[op].one_of])
def test_an_implementation_that_no_call_can_reach_is_an_invalid_manifest(op: str) -> None:
    with pytest.raises(ConfigError, match=rf"claims no {OPERATORS[op].one_of[0]}:\.\.\., and every call needs one"):
        with policy.registered(claiming(op, frozenset())):
            pass


# Claims that once got a red badge for nothing.
NAMED = (
    ("advantage", {"kind:gae"}),
    ("policy_loss", {"kind:dppo_tv", "aggregate:token_mean"}),
    ("policy_loss", {"kind:dro", "aggregate:token_mean", "grad"}),
    ("affine_suffix_scan", set()),
    ("linear_policy_loss", {"kind:ppo", "aggregate:token_mean"}),
)
# Clauses of capture that take less than a second each; the others live whole lives of drawn steps.
QUICK_OF_CAPTURE = {"GC-04", "GC-06", "GC-14", "GC-17", "GC-19", "GC-23", "GC-25", "GC-92", "GC-93", "GC-94", "GC-95"}
WAYS = {"outputs:view", "rng:forbid", "on_guard_fail:raise", "on_capture_error:raise"}


def failures(manifest: Backend, op: str, *, only: Collection[str] = (), effort: Profile = FEW) -> list[tuple[str, str]]:
    with policy.registered(manifest):
        subject = Subject(manifest.name, op)
        with subject.chosen():
            due = [a for a in due_on(subject)[0] if (a.clause.id in only if only else a.clause.id != CLAUSE.id)]
            found = [carry_out(subject, attack, effort, shrink=False) for attack in due]
    return [(o.clause, o.message) for o in found if o.failed]


@pytest.mark.parametrize(("op", "claims"), NAMED, ids=[f"{op}-{'-'.join(sorted(c))}" for op, c in NAMED])
def test_claims_that_were_once_blamed_for_nothing_pass(op: str, claims: set[str]) -> None:
    assert failures(claiming(op, frozenset(claims)), op) == []


@pytest.mark.filterwarnings("ignore::rlkernel_core.errors.FallbackWarning")  # captures that run eagerly say so
@pytest.mark.parametrize("more", [set(), {"outputs:clone", "rng:follow", "on_guard_fail:recapture", "guard:call"}])
def test_a_capture_with_views_that_forbids_draws_passes_what_is_quick(more: set[str]) -> None:
    manifest = claiming("capture", frozenset(WAYS | more))
    assert failures(manifest, "capture", only=QUICK_OF_CAPTURE, effort=Profile("one", 1, 60, thorough=False)) == []


def test_a_check_that_refuses_with_a_reason_is_no_fault() -> None:
    manifest = strangers.backend("group_filter", "torch_group_filter", check="small_groups_only")
    assert failures(manifest, "group_filter") == []


def test_a_check_that_raises_is_a_fault() -> None:
    manifest = strangers.backend("group_filter", "torch_group_filter", check="raises")
    ((clause, message),) = failures(manifest, "group_filter", only={"GF-01"})
    assert (clause, "shape/check-failed" in message) == ("GF-01", True), message


def test_a_wrong_result_is_no_leak() -> None:
    manifest = strangers.backend("group_filter", "wrong_count")
    attack = attacks_with_leak_check("group_filter")
    with policy.registered(manifest):
        subject = Subject(manifest.name, "group_filter")
        with subject.chosen():
            counts, leak = (carry_out(subject, attack[c], FEW, shrink=False) for c in ("GF-06", CLAUSE.id))
    assert (counts.status, counts.fault, leak.status) == ("violated", "wrong_result", "held")


def test_memory_of_a_block_of_4096_rows_is_no_growth() -> None:
    does_not_grow(lambda rows: min(rows, 4096) * 4096, most=400)
    with pytest.raises(Violation, match="extra memory grows by 4096 bytes a row between 8192 and 16384 rows"):
        does_not_grow(lambda rows: rows * 4096, most=400)


@pytest.mark.parametrize(
    ("op", "function", "clause"),
    [("policy_loss", "rounds_strided_loss", "PL-27"), ("linear_logprob", "rounds_strided_heads", "LL-24")],
)
def test_strided_tensors_may_round_otherwise_than_contiguous_ones(op: str, function: str, clause: str) -> None:
    assert failures(strangers.backend(op, function), op, only={clause}) == []


@pytest.mark.parametrize("word", REFUSALS)
def test_a_buffer_whose_finished_group_is_one_token_refuses_and_keeps_it(word: str) -> None:
    subject = Subject("torch", "rollout_buffer")
    with subject.chosen():
        a_refusal_changes_nothing(subject, Held((1,), word))  # a pop of one token is full here: nothing to refuse
