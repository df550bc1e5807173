"""Every argument of every operator, given what it is not: refused by name and with a remedy, never in torch's words."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.bad_arguments import fine, of_tensor, of_type
from rlkernel_conformance.example_calls import EXAMPLES, base
from rlkernel_core.spec import OPERATORS
from tests.argument_changes import CHANGES

ARGUMENTS = [(operator, name) for operator in OPERATORS for name in OPERATORS[operator].parameters]
# Refusals that have an error of their own: by operator and argument, for strings.
OWN_ERROR = {
    ("quantize", "format"): rlk.UnknownNameError,
    ("fake_quantize", "format"): rlk.UnknownNameError,
    ("prepack", "layout"): rlk.LayoutError,
}


def test_every_operator_and_every_optional_argument_is_in_the_tables() -> None:
    assert set(OPERATORS) == set(EXAMPLES) == set(CHANGES)
    for operator, spec in OPERATORS.items():
        optional = {name for name, p in spec.parameters.items() if p.default is not p.empty}
        assert optional - set(CHANGES[operator]()) == set()
        assert set(CHANGES[operator]()) - set(spec.parameters) == set()


@pytest.mark.filterwarnings("ignore::rlkernel_core.errors.FallbackWarning")  # on_capture_error="eager" says so
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("operator, name", ARGUMENTS, ids=lambda word: word)
def test_a_bad_value_is_refused_by_name_and_with_a_remedy(operator: str, name: str) -> None:
    call, spec = getattr(rlk, operator), OPERATORS[operator]
    change = CHANGES[operator]().get(name)
    given = base(operator) | (dict(change.given) if change else {})
    valid = given.get(name, change.value if change else None)
    bad = of_type(str(spec.parameters[name].annotation))
    if isinstance(valid, torch.Tensor):
        bad |= of_tensor(valid)
    with contextlib.suppress(rlk.RLKernelError):  # a decided kind of call refuses what an undecided one does
        call(**{name: valid, **given})
    accepted, unnamed = [], []
    for what, value in bad.items():
        error = refusal(call, {**given, name: value})
        if error is None:
            accepted.append(what)
        elif not (names(error, name) or name == spec.primary or type(error) is OWN_ERROR.get((operator, name))):
            unnamed.append(what)
    assert (accepted, unnamed) == ([what for what in bad if what in fine(operator, name, {**given, name: valid})], [])


def refusal(call: Any, given: dict[str, Any]) -> Exception | None:
    """The typed error of a call, or None; any other exception passes through."""
    try:
        call(**given)
    except (rlk.ArgumentError, rlk.UnknownNameError, rlk.LayoutError) as error:
        return error
    return None


def names(error: Exception, name: str) -> bool:
    """The message is about this argument and has a remedy."""
    return isinstance(error, rlk.ArgumentError) and name in str(error) and len(error.remedy) > 3


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_unknown_argument_gets_a_suggestion(operator: str) -> None:
    given = base(operator)
    last = list(OPERATORS[operator].parameters)[-1]
    with pytest.raises(rlk.ArgumentTypeError, match=f"{operator} has no such argument.*{last}"):
        getattr(rlk, operator)(**given, **{last + "s": 1})


NESTED = [
    ("logprob", "support"),
    ("policy_loss", "gamma"),
    ("policy_loss", "correction"),
    ("policy_loss", "rejection"),
    ("sample", "penalties"),
    ("sample", "bias"),
    ("sample", "banned"),
    ("qmatmul", "lora"),
    ("shape_rewards", "running"),
    ("capture", "buckets"),
    ("rollout_buffer", "fields"),
]
# Bad values that a field takes: lists of ids may be of any length, edits of any sign, padding of any value.
FINE_IN_FIELDS = {
    "logprob.support.ids": ("a row less", "a row more"),
    "sample.banned.ids": ("a row less", "a row more"),
    "sample.penalties.frequency": ("-1", "-1.5"),
    "sample.penalties.presence": ("-1", "-1.5"),
    "qmatmul.lora.scale": ("-1", "-1.5"),
    "shape_rewards.running.count": ("bool tensor", "float tensor", "integer tensor", "8-bit floats"),
    "shape_rewards.running.mean": ("bool tensor", "integer tensor", "8-bit floats"),
    "shape_rewards.running.m2": ("bool tensor", "integer tensor", "8-bit floats"),
    "capture.buckets.valid": (),
    "capture.buckets.out": ("-1",),
    "rollout_buffer.fields.default": ("nan", "inf", "-inf", "-1", "-1.5", "10**400"),
}


def made(whole: Any, change: dict[str, Any]) -> Any:
    return dataclasses.replace(whole, **change)


@pytest.mark.parametrize("operator, name", NESTED)
def test_a_bad_field_is_refused_by_name(operator: str, name: str) -> None:
    call, change = getattr(rlk, operator), CHANGES[operator]()[name]
    given = base(operator) | dict(change.given)
    whole = next(iter(change.value.values())) if name == "fields" else change.value
    whole = whole[0] if name == "buckets" else whole
    for field in dataclasses.fields(whole):
        bad = of_type(str(field.type))
        if isinstance(getattr(whole, field.name), torch.Tensor):
            bad |= of_tensor(getattr(whole, field.name))
        accepted, unnamed = [], []
        for what, value in bad.items():
            error = refusal(made, {"whole": whole, "change": {field.name: value}})  # some refuse when they are made
            part = None if error else made(whole, {field.name: value})
            error = error or refusal(
                call, {**given, name: {"fields": {"token": part}, "buckets": (part,)}.get(name, part)}
            )
            if error is None:
                accepted.append(what)
            elif not names(error, field.name):
                unnamed.append(what)
        fine = FINE_IN_FIELDS.get(f"{operator}.{name}.{field.name}", ())
        assert (field.name, accepted, unnamed) == (field.name, [w for w in bad if w in fine], [])
