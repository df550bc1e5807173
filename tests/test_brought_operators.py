"""A plugin brings an operator of its own: examples/own_operator, called, explained, configured and proved."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rlkernel as rlk
from rlkernel import policy
from rlkernel_conformance.profiles import profile
from rlkernel_conformance.run import run
from rlkernel_core.errors import ArgumentError, ConfigError
from rlkernel_core.manifest import Backend, Operator
from rlkernel_core.spec import OPERATORS

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_operator"
X = torch.tensor([[-1.0, 0.5, 3.0]])
pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def acme(monkeypatch) -> Iterator[Backend]:
    """The example's manifest, which can be imported."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from acme_relu2 import backend

    yield backend
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_relu2"]:
        del sys.modules[name]


@pytest.fixture
def brought(acme) -> Iterator[Backend]:
    """The same, registered and in the order."""
    with rlk.registered(acme), rlk.use("acme", "auto"):
        yield acme


def test_it_is_called_by_name_and_the_decision_is_kept(brought) -> None:
    assert rlk.acme_relu2(X).tolist() == [[0.0, 0.25, 9.0]]
    [ran] = rlk.status()
    assert (ran.decision.call.op, ran.decision.backend) == ("acme_relu2@1", "acme")
    assert rlk.last_decision("acme_relu2") == ran.decision


def test_it_has_gradients(brought) -> None:
    x = X.clone().requires_grad_()
    rlk.acme_relu2(x).sum().backward()
    assert x.grad.tolist() == [[0.0, 1.0, 6.0]]


def test_its_check_refuses_by_name(brought) -> None:
    with pytest.raises(ArgumentError, match="x"):
        rlk.acme_relu2(torch.tensor(1.0))


def test_a_compiled_function_breaks_there_and_gives_the_same(brought) -> None:
    compiled = torch.compile(lambda x: rlk.acme_relu2(x) + 1, backend="eager")
    assert compiled(X).tolist() == [[1.0, 1.25, 10.0]]


def test_it_goes_with_its_plugin(acme) -> None:
    with rlk.registered(acme):
        assert "acme_relu2" in OPERATORS
    assert "acme_relu2" not in OPERATORS
    with pytest.raises(AttributeError, match="acme_relu2"):
        rlk.acme_relu2  # noqa: B018 asking is the test


def test_an_installed_plugin_brings_it_when_its_name_is_said(acme, plug) -> None:
    plug("acme", "from acme_relu2 import backend")
    assert "acme_relu2" not in OPERATORS
    with rlk.use("acme", "auto"):
        assert rlk.acme_relu2(X).tolist() == [[0.0, 0.25, 9.0]]


def test_outside_the_order_it_is_known_and_does_not_run(acme, plug) -> None:
    plug("acme", "from acme_relu2 import backend")
    explained = rlk.explain("acme_relu2", X).decision
    assert (explained.backend, {r.reason.slug for r in explained.rejected}) == (
        None,
        {"policy/third-party", "operator/absent"},
    )


def test_a_policy_names_it_as_any_operator(acme, plug, tmp_path, monkeypatch) -> None:
    plug("acme", "from acme_relu2 import backend")
    (tmp_path / "rlkernel.toml").write_text('[rlkernel.ops.acme_relu2]\norder = ["acme"]\nneed = ["batch_invariant"]\n')
    monkeypatch.chdir(tmp_path)
    policy.refresh()
    assert rlk.acme_relu2(X).tolist() == [[0.0, 0.25, 9.0]]


@pytest.mark.parametrize("name", ["acme_relu3", "other_relu2"])
def test_a_policy_for_an_operator_that_nobody_brings_is_an_error(name, acme, plug) -> None:
    plug("acme", "from acme_relu2 import backend")
    with pytest.raises(ConfigError, match=name):
        rlk.configure("acme", **{name: "acme"})


@pytest.mark.parametrize(
    ("name", "spec", "said"),
    [
        ("acme", "acme_relu2.run:relu2", "is a function, not a rlkernel_core.spec.OpSpec"),
        ("acme", "acme_relu2.spec:NONE", "has no attribute 'NONE'"),
        ("other", "acme_relu2.spec:SPEC", "should begin with the backend's name, 'other_'"),
        ("acme", "rlkernel_core.spec.glu:SPEC", "should begin with the backend's name, 'acme_'"),
    ],
)
def test_what_is_no_operator_of_the_backend_is_a_reason(name, spec, said, acme) -> None:
    manifest = Backend(name=name, api=(2, 0), operators=(Operator(spec=spec),), impls=())
    with pytest.raises(ConfigError, match=said), rlk.registered(manifest):
        pass


def test_its_own_clauses_and_those_of_all_operators_hold(acme, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    found = run("acme", profile("quick"), ops=("acme_relu2",), manifest="acme_relu2:backend")
    ((name, operator),) = found["operators"].items()
    assert (name, operator["verdict"]) == ("acme_relu2@1", "holds")
    shared = [f"ACME-{n}" for n in range(91, 99)]
    assert [c["clause"] for c in operator["clauses"]] == ["ACME-01", "ACME-02", "ACME-03", "ACME-04", *shared, "CO-01"]
