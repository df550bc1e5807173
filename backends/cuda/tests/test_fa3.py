"""The backend `fa3`: a reason for all that keeps it from running, foreseen. What it computes: emulated/test_fa3.py."""

import pytest

import rlkernel as rlk
from rlkernel import decide
from rlkernel.survey import Situation, foresee
from rlkernel_cuda.fa3 import backend

HERE = {"fa3-fwd": "0.0.3", "torch": "2.11.0"}


def foreseen(monkeypatch, packages=HERE, *, order="fa3", features=(), **where):
    """The reason of a machine with some packages, or None where it would run."""
    monkeypatch.setattr(decide, "PackageVersions", lambda: packages)
    given = {"device": "cuda", "arch": "sm90", "dtype": "bfloat16", **where}
    with rlk.registered(backend), rlk.use(order, fallback="error" if order == "fa3" else None):
        decision = foresee("attention", Situation(features=frozenset(features), **given), locked=False)
    return next((r.reason.slug for r in decision.rejected if r.backend == "fa3"), None)


@pytest.mark.parametrize(
    ("packages", "where", "slug"),
    [
        ({"torch": "2.11.0"}, {}, "environment/missing-package"),
        ({**HERE, "fa3-fwd": "0.0.2"}, {}, "environment/package-version"),
        ({**HERE, "torch": "2.9.1"}, {}, "environment/package-version"),
        (HERE, {"arch": "sm80"}, "arch/unsupported"),
        (HERE, {"dtype": "float16"}, "dtype/unsupported"),
        (HERE, {"features": {"window"}}, "features/missing"),
        (HERE, {"features": {"softcap"}}, "features/missing"),
        (HERE, {"features": {"sinks"}}, "features/missing"),
        (HERE, {"order": "auto"}, "policy/third-party"),
    ],
)
def test_what_keeps_it_from_running_is_a_reason(monkeypatch, packages, where, slug) -> None:
    assert foreseen(monkeypatch, packages, **where) == slug


def test_where_it_is_named_it_runs_on_hopper_with_pages(monkeypatch) -> None:
    assert foreseen(monkeypatch, features={"paged", "batch_invariant"}) is None
