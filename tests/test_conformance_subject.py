"""The backend under attack: what it may refuse, and what that is not."""

from __future__ import annotations

import functools

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ResolutionError
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.reasons import Reason
from rlkernel_core.reference.advantage.whitening import whiten as right
from rlkernel_core.spec.whiten import whiten as spec

PICKY = Backend(
    name="picky",
    api=API_VERSION,
    impls=(
        Impl(
            op="whiten@1",
            target="tests.test_conformance_subject:whiten",
            requires=Requires(device="cpu", dtypes=("float32",)),
            check="tests.test_conformance_subject:fits",
        ),
    ),
)


@functools.wraps(spec)
def whiten(*args, **kwargs):
    return right(*args, **kwargs)


@functools.wraps(spec)
def fits(x, *args, **kwargs):
    return None if x.is_contiguous() else Reason("shape", "unsupported", "rows that are apart")


@pytest.fixture
def subject():
    with rlk.registered(PICKY), (found := Subject("picky", "whiten")).chosen():
        yield found


def test_a_call_that_its_check_refuses_has_no_result(subject) -> None:
    assert subject.unless_refused(torch.randn(4, 6).t()) is None


def test_a_call_that_its_check_admits_has_one(subject) -> None:
    x = torch.arange(6.0)
    assert torch.equal(subject.unless_refused(x).y, right(x).y)


def test_a_call_beyond_its_claims_is_an_error(subject) -> None:
    with pytest.raises(ResolutionError, match="dtype"):
        subject.unless_refused(torch.randn(6, dtype=torch.float64))
