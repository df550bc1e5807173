"""No false alarm: a backend that claims less than plain torch, and does what it claims, passes every clause."""

from __future__ import annotations

import random

import pytest

import rlkernel_torch
from rlkernel import policy
from rlkernel_conformance.harness import carry_out
from rlkernel_conformance.leak_check import CLAUSE
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.run import due_on
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ConfigError
from rlkernel_core.manifest import Backend
from rlkernel_core.spec import OPERATORS

FEW = Profile("few", 3, 60, thorough=False)
PLAIN = {i.op.partition("@")[0]: i for i in rlkernel_torch.backend.impls}


def claiming(op: str, features: frozenset[str]) -> Backend:
    """Plain torch's implementation of one operator, with these claims."""
    small = PLAIN[op].model_copy(update={"supports": features})
    return Backend(name="small", api=rlkernel_torch.backend.api, impls=(small,))


def some_of(op: str, share: float, seed: int) -> frozenset[str]:
    """A share of plain torch's claims, and of each family that every call needs one."""
    drawn, whole = random.Random(f"{op} {share} {seed}"), sorted(PLAIN[op].supports)
    kept = {feature for feature in whole if drawn.random() < share}
    for family in OPERATORS[op].one_of:
        kept.add(drawn.choice([feature for feature in OPERATORS[op].family(family) if feature in whole]))
    return frozenset(kept)


@pytest.mark.filterwarnings("ignore::rlkernel_core.errors.FallbackWarning")  # captures that run eagerly say so
@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("op", [op for op in OPERATORS if op != "capture"])  # whose clauses take minutes
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
