"""The clauses of every operator that the manifest claims, attacked by the conformance suite in processes apart."""

import pytest
import torch
from rlkernel_conformance.profiles import profile
from rlkernel_conformance.run import run

from rlkernel_template import backend

DEVICE = "cpu"
OPERATORS = [impl.op.partition("@")[0] for impl in backend.impls]


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    try:
        torch.empty(1, device=DEVICE)
    except (RuntimeError, AssertionError) as error:
        pytest.skip(f"no {DEVICE} device here: {error}")


@pytest.mark.parametrize("op", OPERATORS)
def test_no_clause_is_refuted(op) -> None:
    (found,) = run("template", profile("quick"), ops=[op], devices=(DEVICE,))["operators"].values()
    assert [c for c in found["clauses"] if c["status"] in {"violated", "fault"}] == []
