"""The rule of docs/public_names.py: what a public docstring says, held over every public name and every operator."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from torch import Tensor

from docs import public_names
from docs.public_names import Public, complaints
from rlkernel_core.errors import ArgumentError

MODULES = [module for modules in public_names.PAGES.values() for module in modules]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_says_what_it_is_with_shapes_units_and_errors(module) -> None:
    names = public_names.public(module)
    assert names
    assert [line for name in names for line in complaints(name)] == []


def test_every_operator_says_what_each_argument_is() -> None:
    assert [line for record in public_names.records() for line in complaints(record)] == []


def without_docstring(x):
    return x


def without_an_argument(x: int, y: int) -> int:
    """Adds y."""
    return x + y


def without_a_shape(x: Tensor) -> Tensor:
    """The same x."""
    return x


def without_a_unit(timeout: float) -> None:
    """Waits for timeout."""


def without_an_error(x: int) -> None:
    """Looks at x."""
    raise ArgumentError("x", x, "is wrong", "Pass another.")


def with_everything(x: Tensor, timeout: float) -> Tensor:
    """Looks at x.

    Args:
        x: [N, V] logits.
        timeout: seconds.

    Returns:
        [N] the largest of each row.

    Raises:
        ArgumentError: always.
    """
    raise ArgumentError("x", x, "is wrong", "Pass another.")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (without_docstring, ["m.f: no docstring"]),
        (without_an_argument, ["m.f: the docstring does not name the argument 'x'"]),
        (without_a_shape, ["m.f(x): a tensor without its shape", "m.f: no shape of the tensor that it returns"]),
        (without_a_unit, ["m.f(timeout): no unit; say seconds"]),
        (without_an_error, ["m.f: the docstring does not name ArgumentError, which it raises"]),
        (with_everything, []),
    ],
)
def test_what_a_function_does_not_say_is_a_complaint(function, expected) -> None:
    assert complaints(Public("m", "f", function)) == expected


class WithoutAField:
    """A record."""

    said: int  # how many
    unsaid: int
    tensor: Tensor  # of logits


def test_what_a_field_does_not_say_is_a_complaint() -> None:
    expected = ["m.f.unsaid: nothing says what it is", "m.f.tensor: a tensor without its shape"]
    assert complaints(Public("m", "f", WithoutAField)) == expected


def test_a_constant_without_a_comment_is_a_complaint(monkeypatch, tmp_path) -> None:
    (tmp_path / "constants.py").write_text("A = 1\nB = 2  # two\n# three\nC = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {name: complaints(Public("constants", name, value)) for name, value in (("A", 1), ("B", 2), ("C", 3))}
    assert found == {"A": ["constants.A: no comment says what this constant is"], "B": [], "C": []}
    assert isinstance(sys.modules.pop("constants"), ModuleType)
