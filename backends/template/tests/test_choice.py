"""Installed, it is listed; it runs where an order names it and nowhere else."""

import inspect
from importlib import import_module

import pytest
import rlkernel as rlk

from rlkernel_template import backend

DEVICE = "cpu"
OPERATORS = [impl.op.partition("@")[0] for impl in backend.impls]


@pytest.mark.parametrize("op", OPERATORS)
def test_it_is_refused_until_the_order_names_it(op) -> None:
    with rlk.use("auto"):
        decision = rlk.explain(op).decision
    assert {r.backend: r.reason.slug for r in decision.rejected}["template"] == "policy/third-party"


@pytest.mark.parametrize("impl", backend.impls, ids=OPERATORS)
def test_it_runs_where_the_order_names_it(impl) -> None:
    with rlk.use("template"):
        decision = rlk.explain(impl.op.partition("@")[0], device=DEVICE).decision
    assert (decision.backend, decision.target) == ("template", impl.target)


@pytest.mark.parametrize("impl", backend.impls, ids=OPERATORS)
def test_what_is_claimed_is_written(impl) -> None:
    module = import_module(impl.target.partition(":")[0])
    assert "raise NotWrittenError" not in inspect.getsource(module)
