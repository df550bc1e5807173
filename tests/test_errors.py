"""Errors cross process borders whole: class, message and attributes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

import pytest
import torch

import rlkernel
import rlkernel_core
from rlkernel_core import errors
from rlkernel_core.decision import Call, Decision, OpPolicy, Rejected
from rlkernel_core.errors import ArgumentError, RLKernelError, UnknownNameError
from rlkernel_core.reasons import Reason

DECISION = Decision(
    Call("logprob@1", "cpu", "float32", grad=True, features=frozenset({"entropy"})),
    OpPolicy(("acme", "auto"), "error", frozenset({"deterministic"})),
    None,
    None,
    None,
    (Rejected("acme", Reason("shape", "unsupported", "3 rows", "pad"), "a:b"),),
)
IN_HOSTS = ("integrations.torchtitan_losses",)  # modules that a host imports, and that import it
ARGUMENTS = {
    ArgumentError: ("temperature", -1.0, "must be > 0", "Pass 1."),
    errors.FileError: ("rlkernel.lock", "line 3", "is no JSON", "Write it anew."),
    UnknownNameError: ("backend", "acm", ["acme", "torch"]),
    errors.ApiMismatchError: ((9, 9), (1, 0)),
    errors.ResolutionError: ("nobody", DECISION),
    errors.MemoryBudgetError: ("a model", 3 << 30, 2 << 30, "2 GiB of 8 available", "Take int4."),
}


def tree(root: type[BaseException]) -> Iterator[type[BaseException]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


def everything() -> list[type[BaseException]]:
    """All our errors and warnings, wherever they are defined."""
    for package in (rlkernel_core, rlkernel):
        for found in walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.endswith(("__main__", *IN_HOSTS)):
                import_module(found.name)
    found = [*tree(RLKernelError), *tree(errors.RLKernelWarning)]
    # A backend, which other tests may have imported, has errors of its own.
    return [c for c in found if c.__module__.partition(".")[0] in {"rlkernel", "rlkernel_core"}]


def made(cls: type[BaseException]) -> BaseException:
    arguments = next((args for base, args in ARGUMENTS.items() if issubclass(cls, base)), ("what happened",))
    return cls(*arguments)


@pytest.mark.parametrize("cls", everything(), ids=lambda c: c.__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_an_error_survives_whole(cls, again) -> None:
    error = made(cls)
    other = again(error)
    assert (type(other), str(other)) == (cls, str(error))
    assert {k: str(v) for k, v in vars(other).items()} == {k: str(v) for k, v in vars(error).items()}


@pytest.mark.parametrize("cls", everything(), ids=lambda c: c.__name__)
def test_an_error_is_in_the_tree_and_in_the_front_door(cls) -> None:
    assert f"── {cls.__name__}" in errors.__doc__ or cls.__name__ in {"RLKernelError", "RLKernelWarning"}
    assert getattr(rlkernel, cls.__name__) is cls


def test_an_argument_that_cannot_be_sent_is_sent_as_text() -> None:
    error = ArgumentError("fn", lambda: 0, "is no kernel", "Pass one.")
    assert "<lambda>" in pickle.loads(pickle.dumps(error)).got


def test_an_unknown_name_prints_without_quotes_and_is_a_key_error() -> None:
    error = UnknownNameError("backend", "acm", {"acme"})
    assert (str(error), isinstance(error, KeyError)) == ("unknown backend 'acm'; did you mean 'acme'?", True)


@pytest.mark.parametrize("name", [3, None, ("logprob",), torch.float32])
def test_a_name_that_is_no_text_is_unknown_like_any_other(name) -> None:
    from rlkernel_core.spec import OPERATORS

    assert name not in OPERATORS
    with pytest.raises(UnknownNameError, match="unknown operator"):
        OPERATORS[name]


def test_a_decision_survives_whole() -> None:
    assert pickle.loads(pickle.dumps(DECISION)) == DECISION
