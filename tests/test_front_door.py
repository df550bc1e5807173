"""What `import rlkernel` offers: the same to a reader, to a type checker and at run time."""

from __future__ import annotations

import ast
from inspect import signature
from pathlib import Path

import pytest

import rlkernel as rlk
from rlkernel_conformance.example_calls import base
from rlkernel_core.spec import OPERATORS

SOURCE = ast.parse(Path(rlk.__file__).read_text())
TYPED = next(n for n in SOURCE.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))


def test_every_operator_and_type_is_declared_for_type_checkers() -> None:
    declared = {a.asname for n in TYPED.body if isinstance(n, ast.ImportFrom) for a in n.names if a.asname}
    declared |= {t.id for n in TYPED.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    assert {n for n in declared if not n.startswith("_")} == set(dir(rlk)) - {"__version__"}


@pytest.mark.parametrize("name", dir(rlk))
def test_every_name_can_be_had(name) -> None:
    assert getattr(rlk, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="logprb"):
        rlk.logprb  # noqa: B018


def test_every_operator_is_served_by_the_reference() -> None:
    from rlkernel_torch import backend

    assert {i.op for i in backend.impls} == {s.id for s in OPERATORS.values()}


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_a_record_holds_every_argument_by_name_with_its_default(op) -> None:
    spec, given = OPERATORS[op], base(op)
    call = spec.call(**given)
    defaults = {name: p.default for name, p in spec.parameters.items() if p.default is not p.empty}
    assert call.as_dict().keys() == spec.parameters.keys()
    assert {name: id(value) for name, value in call.as_dict().items()} == {
        name: id(value) for name, value in {**defaults, **given}.items()
    }
    with pytest.raises(AttributeError):
        call.no_such_argument = 1  # a slip of the pen in an implementation is an error


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_every_operator_has_a_check_of_its_record(op) -> None:
    spec = OPERATORS[op]
    assert list(signature(spec.check).parameters) == ["call"]
    spec.check(spec.call(**base(op)))


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_every_clause_has_its_own_number_and_attacks_a_feature_that_exists(op) -> None:
    spec = OPERATORS[op]
    ids = [c.id for c in spec.clauses]
    assert len(ids) == len(set(ids))
    assert {c.feature for c in spec.clauses if c.feature and not c.feature.endswith("*")} - spec.feature_names == set()
