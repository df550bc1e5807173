"""An operator gets one more optional argument: plugins written before serve every call that does not use it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import pytest
import torch

import rlkernel as rlk
from rlkernel import dispatch, plans
from rlkernel_conformance.example_calls import base
from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, FallbackWarning, ResolutionError
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import Feature
from rlkernel_core.spec.logprob import LogprobCall, LogprobResult
from rlkernel_torch.logprob import logprob as reference
from tests.argument_changes import CHANGES

BEFORE = OPERATORS["logprob"]


@dataclass(slots=True, eq=False)
class ShiftedCall(LogprobCall):
    """logprob of a later minor version: all that it had, and `shift`, which is added to every log-probability."""

    _: KW_ONLY
    shift: float = 0.0


def check(call: ShiftedCall) -> None:
    BEFORE.check(call)
    checks.number("shift", call.shift)


AFTER = replace(
    BEFORE,
    record=ShiftedCall,
    check=check,
    features=(*BEFORE.features, Feature("shift", "a number added to every log-probability")),
)


def written_before(call: LogprobCall) -> LogprobResult:
    """A plugin's function that knows nothing of `shift`."""
    known = LogprobCall.of(call)
    return reference(known)


def written_after(call: ShiftedCall) -> LogprobResult:
    """A plugin's function that knows it."""
    found = reference(call)
    return replace(found, logprob=found.logprob + call.shift)


def backend(name: str, target: Any, supports: frozenset[str]) -> Backend:
    """The manifest of a plugin that claims these features."""
    where = f"{__name__}:{target.__name__}"
    impl = Impl(op=BEFORE.id, target=where, requires=Requires(device="cpu"), supports=supports)
    return Backend(name=name, api=API_VERSION, impls=(impl,))


OLD = backend("old", written_before, BEFORE.feature_names)
NEW = backend("new", written_after, AFTER.feature_names)


@pytest.fixture
def logprob(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The front door of the operator with one more argument."""
    rlk.refresh()
    monkeypatch.setattr("rlkernel_core.spec.logprob.SPEC", AFTER)
    plans.key_function.cache_clear()
    yield dispatch.operator(AFTER)
    monkeypatch.undo()
    plans.key_function.cache_clear()
    rlk.refresh()


def calls() -> Iterator[dict[str, Any]]:
    """Calls that use every argument there was."""
    yield base("logprob")
    for name, change in CHANGES["logprob"]().items():
        if name != "validate":  # whose change is a refusal
            yield {**base("logprob"), **change.given, name: change.value}


def test_the_new_argument_stands_in_the_signature_with_its_default(logprob) -> None:
    assert list(inspect.signature(logprob).parameters) == [*BEFORE.parameters, "shift"]
    assert inspect.signature(logprob).parameters["shift"].default == 0.0


def test_a_plugin_written_before_serves_every_call_that_does_not_use_it(logprob) -> None:
    with rlk.registered(OLD), rlk.use("old"):
        for given in calls():
            for arguments in (given, {**given, "shift": 0.0}):
                expected = reference(BEFORE.call(**given))
                found = logprob(**arguments)
                assert (logprob.last.decision.backend, logprob.last.decision.rejected[0].reason.stage) == (
                    "old",
                    "policy",
                )
                torch.testing.assert_close(found.logprob, expected.logprob, rtol=0, atol=0)


def test_a_call_that_uses_it_is_refused_by_name(logprob) -> None:
    with rlk.registered(OLD), rlk.use("old"):
        logprob(**base("logprob"))
        for _ in range(2):
            with pytest.raises(ResolutionError, match="old .*features/missing: it does not claim shift"):
                logprob(**base("logprob"), shift=1.0)


def test_a_call_that_uses_it_goes_to_the_next_backend_that_has_it(logprob) -> None:
    with rlk.registered(OLD), rlk.registered(NEW), rlk.use("old", "new"):
        plain = logprob(**base("logprob"))
        with pytest.warns(FallbackWarning, match="new runs instead of old.*does not claim shift"):
            shifted = logprob(**base("logprob"), shift=1.0)
        assert (logprob.last.decision.backend, logprob.last.decision.call.features) == ("new", {"shift"})
        torch.testing.assert_close(shifted.logprob, plain.logprob + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(logprob(**base("logprob")).logprob, plain.logprob)
            assert logprob.last.decision.backend == "old"
            assert torch.equal(logprob(**base("logprob"), shift=2.0).logprob, plain.logprob + 2)


def test_a_bad_value_of_it_is_named_before_any_plugin_is_asked(logprob) -> None:
    with rlk.registered(OLD), rlk.use("old"):
        logprob(**base("logprob"))
        for value in (True, "far", float("nan"), False):
            with pytest.raises(ArgumentError, match="shift"):
                logprob(**base("logprob"), shift=value)
