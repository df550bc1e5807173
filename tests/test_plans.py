"""Plans: calls of one key are alike in all that a check, a decision or an implementation's `fits` may look at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rlkernel as rlk
from rlkernel import plans, policy
from rlkernel.decide import call_of
from rlkernel.plans import MOST, Table, key_or_none
from rlkernel.provenance import plans as planned
from rlkernel_conformance.example_calls import base
from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.logprob import LogprobResult
from tests.argument_changes import CHANGES
from tests.implementations import HERE, acme

PLANNED = [op for op, spec in OPERATORS.items() if spec.planned]
LOGITS, IDS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 6, 2])
# Numbers that compare equal, or nearly mean the same, and are not the same argument.
NUMBERS = (True, 1, 1.0, False, 0, 0.0, -1, -1.0, 2, 2.0, 0.5, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400, None)
WORDS = ("none", "token", "mean", "any", "no_such_choice", "", "1")
PREPARED: list[tuple[int, ...]] = []


@pytest.fixture(autouse=True)
def nothing_counted(fresh: None) -> None:
    PREPARED.clear()


def misaligned(x: Tensor) -> Tensor:
    """The same values and strides, two bytes or more beyond a multiple of 16."""
    room = torch.empty(x.numel() + 32, dtype=x.dtype, device=x.device)
    start = next(i for i in range(1, 17) if (room.data_ptr() + i * room.element_size()) % 16)
    return room[start : start + x.numel()].view(x.shape).copy_(x)


# What a plan may depend on in a tensor, changed one by one.
DIFFERENT: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda x: x.to(torch.float16 if x.dtype is torch.float32 else torch.float32),
    "one row less": lambda x: x[:-1],
    "one more dimension": lambda x: x[None],
    "strides": lambda x: torch.stack([x, x], -1)[..., 0],
    "alignment": misaligned,
    "requires_grad": lambda x: x.detach().clone().requires_grad_(),
    "device": lambda x: x.to("meta"),
    "layout": lambda x: x.to_sparse(),
}


def alike(value: Any) -> Any:
    """An argument of the same key: new storage, and other values where a tensor's values may differ."""
    if isinstance(value, Tensor):
        if value.is_sparse or value.is_meta:
            return value
        size = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1 if value.numel() else 0
        room = torch.zeros(size + 16, dtype=value.dtype)
        pointers = [(room.data_ptr() + i * room.element_size()) % plans.ALIGNMENT for i in range(16)]
        start = pointers.index(value.data_ptr() % plans.ALIGNMENT)
        new = room.as_strided(value.shape, value.stride(), start)
        new.copy_(value.detach().flip(0) if value.dim() else value.detach())
        return new.requires_grad_(value.requires_grad)
    if isinstance(value, QuantTensor):
        return replace(value, parts={name: part.clone() for name, part in value.parts.items()})
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: alike(getattr(value, f.name)) for f in fields(value) if f.init})
    if isinstance(value, tuple):
        return tuple(alike(v) for v in value)
    return value


def drawn_value(draw: st.DrawFn, value: Any) -> Any:
    """Another value in place of one: a twisted tensor, a number or a word that may be bad."""
    if isinstance(value, Tensor):
        twist = draw(st.sampled_from([None, *DIFFERENT]))
        if twist is not None:
            try:
                return DIFFERENT[twist](value)
            except RuntimeError:  # integers have no gradient
                return value
        return value
    if isinstance(value, str):
        return draw(st.sampled_from([*WORDS, value]))
    return draw(st.sampled_from([*NUMBERS, value]))


@st.composite
def calls(draw: st.DrawFn, op: str) -> dict[str, Any]:
    """Arguments of a call: the base call, one that an argument's change is about, and up to two arguments replaced."""
    arguments = base(op)
    changes = CHANGES[op]()
    name = draw(st.sampled_from([None, *changes]))
    if name is not None:
        change = changes[name]
        arguments |= change.given
        arguments |= {name: change.value} if draw(st.booleans()) else {}
    parameters = OPERATORS[op].parameters
    for name in draw(st.lists(st.sampled_from(list(parameters)), max_size=2, unique=True)):
        arguments[name] = drawn_value(draw, arguments.get(name, parameters[name].default))
    return arguments


def outcome(op: str, call: Any) -> Any:
    """What the operator's check and needs say: the kind of the call, or the argument that is refused."""
    try:
        return call_of(OPERATORS[op], call)
    except (ArgumentError, UnknownNameError) as error:
        return type(error), getattr(error, "argument", None)


def refusal(function: Callable[[Any], object], given: Any) -> tuple[type, str] | None:
    """The kind of error that a function raises about an argument, and which; None where it raises none."""
    try:
        function(given)
    except ArgumentError as error:
        return type(error), error.argument
    return None


@pytest.mark.parametrize("op", PLANNED)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_calls_of_one_key_are_checked_and_decided_alike(op, data) -> None:
    spec = OPERATORS[op]
    first, second = (data.draw(calls(op)) for _ in range(2))
    same = {name: alike(value) for name, value in first.items()}
    records = [spec.call(**arguments) for arguments in (first, same, second)]
    keys = [key_or_none(op, record) for record in records]
    outcomes = [outcome(op, record) for record in records]
    if keys[0] is not None:
        assert keys[0] == keys[1]
    for other in (1, 2):
        if keys[0] is not None and keys[0] == keys[other]:
            assert outcomes[0] == outcomes[other]


@pytest.mark.parametrize("op", PLANNED)
def test_every_base_call_has_a_key_and_its_arguments_share_it_with_new_values(op) -> None:
    arguments = base(op)
    key = key_or_none(op, OPERATORS[op].call(**arguments))
    assert key is not None
    assert key == key_or_none(op, OPERATORS[op].call(**{n: alike(v) for n, v in arguments.items()}))
    with torch.no_grad():
        assert key != key_or_none(op, OPERATORS[op].call(**arguments))


@pytest.mark.parametrize("op", PLANNED)
@pytest.mark.parametrize("what", [what for what in DIFFERENT if what != "layout"])
def test_a_tensor_that_differs_in_what_a_plan_may_look_at_has_another_key(op, what) -> None:
    arguments = base(op)
    key = key_or_none(op, OPERATORS[op].call(**arguments))
    twisted = 0
    for name, value in arguments.items():
        if isinstance(value, Tensor) and (value.is_floating_point() or what != "requires_grad"):
            changed = OPERATORS[op].call(**{**arguments, name: DIFFERENT[what](value)})
            assert key != key_or_none(op, changed)
            twisted += 1
    assert twisted or op in {"dequantize", "prepack"}


@pytest.mark.parametrize("op", PLANNED)
def test_every_argument_that_can_change_a_result_changes_the_key_unless_it_is_varying(op) -> None:
    spec = OPERATORS[op]
    for name, change in CHANGES[op]().items():
        given_with = {**base(op), **change.given}
        before, after = (
            key_or_none(op, spec.call(**arguments)) for arguments in (given_with, {**given_with, name: change.value})
        )
        was = given_with.get(name, spec.parameters[name].default)
        same = alike_in_shape(was, change.value) or (name in spec.varying and type(change.value) is int)
        assert (before == after) is same, name


def alike_in_shape(was: Any, value: Any) -> bool:
    """Whether two arguments differ in the values of tensors alone, or not at all."""
    if isinstance(was, Tensor) and isinstance(value, Tensor):
        return (was.shape, was.stride(), was.dtype) == (value.shape, value.stride(), value.dtype)
    if isinstance(was, QuantTensor) and isinstance(value, QuantTensor):
        return was.plan_key == value.plan_key
    return was is value


# The front door with plans in its tables: what is checked once a shape is refused all the same.


@pytest.mark.parametrize("op", PLANNED)
def test_a_value_that_equals_a_planned_one_is_still_checked(op) -> None:
    spec, run = OPERATORS[op], getattr(rlk, op)
    run(**base(op))
    for name, p in spec.parameters.items():
        started = base(op).get(name, p.default)
        for value in NUMBERS if not isinstance(started, Tensor) else ():
            arguments = {**base(op), name: value}
            if (expected := refusal(spec.check, spec.call(**arguments))) is not None:
                assert expected == refusal(lambda given, run=run: run(**given), arguments)


# One seed for several rows is refused: calls of one row, or one request.
ONE_ROW: dict[str, Callable[[], dict[str, Any]]] = {
    "sample": lambda: {"logits": base("sample")["logits"][:1]},
    "lm_head_sample": lambda: {"hidden": base("lm_head_sample")["hidden"][:1]},
    "verify": lambda: {"target_logits": base("verify")["target_logits"][:5], "cu_draft": torch.tensor([0, 4])},
}


@pytest.mark.parametrize("op", [op for op in PLANNED if OPERATORS[op].varying])
def test_varying_integers_share_a_plan_and_are_refused_out_of_range(op) -> None:
    spec, run = OPERATORS[op], getattr(rlk, op)
    given_with = {**base(op), **ONE_ROW[op](), "seed": 7}
    run(**given_with)
    (before,) = [p for p in planned() if p.op == op]
    for name in spec.varying:
        for value in (0, 1, 2, 2**31 - 1):
            run(**{**given_with, name: value})
    assert [p for p in planned() if p.op == op] == [before]
    for name in spec.varying:  # a kernel takes wider numbers as another type
        for value in (2**31, 2**40 + 3, 2**62):
            run(**{**given_with, name: value})
    wide = before.plans + len(spec.varying)
    assert [p.plans for p in planned() if p.op == op] == [wide]
    for name in spec.varying:
        for value in (-1, 2**64, True, 1.0):
            with pytest.raises(ArgumentError, match=name):
                run(**{**given_with, name: value})
    run(**{**given_with, "seed": torch.arange(1)})
    assert [p.plans for p in planned() if p.op == op] == [wide + 1]


# What runs: prepared once a shape, and never for another.


def prepares(call: Any) -> Callable[[Any], LogprobResult]:
    """What runs calls of this shape answers with the number of preparations so far."""
    PREPARED.append((*call.logits.shape, *call.logits.stride()))
    number = float(len(PREPARED))

    def run(call: Any) -> LogprobResult:
        one = torch.full(call.ids.shape, number)
        return LogprobResult(one, one, invalid=torch.zeros(call.ids.shape, dtype=torch.bool))

    return run


def prepares_nothing(call: Any) -> Any:
    return None


def preparing(target: Callable[[Any], Any] = prepares) -> Backend:
    impl = Impl(
        op="logprob@1",
        target=f"{__name__}:{target.__name__}",
        requires=Requires(device="cpu"),
        supports=OPERATORS["logprob"].feature_names,
        prepared=True,
    )
    return Backend(name="acme", api=API_VERSION, impls=(impl,))


def answer(logits: Tensor = LOGITS, **kwargs: Any) -> float:
    return float(rlk.logprob(logits, IDS, **kwargs).logprob[0])


def test_a_shape_is_prepared_once() -> None:
    with rlk.registered(preparing()), rlk.use("acme"):
        assert [answer(), answer(LOGITS + 1), answer(LOGITS[:, :5]), answer(), answer(LOGITS[:, :5])] == [1, 1, 2, 1, 2]
    assert PREPARED == [(4, 8, 8, 1), (4, 5, 8, 1)]


@pytest.mark.parametrize("what", ["dtype", "strides", "alignment", "requires_grad"])
def test_a_plan_is_not_reused_for_another(what) -> None:
    changed = DIFFERENT[what](LOGITS)
    with rlk.registered(preparing()), rlk.use("acme"):
        assert [answer(), answer(changed), answer(), answer(changed)] == [1, 2, 1, 2]


def test_a_plan_is_not_reused_in_another_grad_mode() -> None:
    wanted = LOGITS.clone().requires_grad_()
    with rlk.registered(preparing()), rlk.use("acme"):
        first = answer(wanted)
        with torch.no_grad():
            second = answer(wanted)
        assert [first, second, answer(wanted)] == [1, 2, 1]


def test_flags_and_numbers_have_plans_of_their_own() -> None:
    with rlk.registered(preparing()), rlk.use("acme"):
        given_with: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"entropy": True}, {"top_logprobs": 1}]
        assert [answer(**g) for g in [*given_with, *given_with]] == [1, 2, 3, 4, 1, 2, 3, 4]


def test_what_prepares_no_function_is_named() -> None:
    with rlk.registered(preparing(prepares_nothing)), rlk.use("acme"):
        with pytest.raises(rlk.ResolutionError, match="prepares_nothing prepares calls of logprob@1 and returned None"):
            answer()


def test_what_is_bound_plans_each_shape_and_keeps_its_plans() -> None:
    with rlk.registered(preparing()):
        with rlk.use("acme"):
            bound = rlk.logprob.bind(LOGITS, IDS)
        answers = [float(bound(x, IDS).logprob[0]) for x in (LOGITS, LOGITS[:, :5], LOGITS, LOGITS[:, :5])]
    assert answers == [1, 2, 1, 2]
    assert float(bound(LOGITS, IDS).logprob[0]) == 1  # the backend has gone, what is bound stays
    assert float(bound(LOGITS[:, :3], IDS).logprob[0]) == 3


def test_what_is_bound_refuses_what_its_implementation_does_not_claim() -> None:
    with rlk.registered(acme()), rlk.use("acme"):
        bound = rlk.logprob.bind(LOGITS, IDS)
    for _ in range(2):
        with pytest.raises(rlk.ResolutionError, match=f"logprob was bound to {HERE}:ones .* does not take .*entropy"):
            bound(LOGITS, IDS, entropy=True)
        with pytest.raises(ArgumentError, match="temperature"):
            bound(LOGITS, IDS, temperature=-1.0)


# When plans end.


def test_plans_end_when_what_is_installed_changes() -> None:
    with rlk.registered(preparing()), rlk.use("acme"):
        first = answer()
        with rlk.registered(acme(name="zeta")):
            second = answer()
        third = answer()
        rlk.refresh()
        assert [first, second, third, answer(), answer()] == [1, 2, 3, 4, 4]


def test_policies_have_plans_of_their_own_and_find_them_again() -> None:
    with rlk.registered(preparing()):
        for _ in range(2):
            with rlk.use("acme"):
                assert answer() == 1
            with rlk.use("acme", fallback="error"):
                assert answer() == 2
            assert answer() < 0  # the reference


def test_a_plan_made_while_a_backend_goes_is_not_kept() -> None:
    began, gone = threading.Event(), threading.Event()

    def waits(call: Any) -> Callable[[Any], LogprobResult]:
        began.set()
        assert gone.wait(60)
        return prepares(call)

    globals()["waits"] = waits
    try:
        with ThreadPoolExecutor(1) as pool:
            with rlk.registered(preparing(waits)):
                rlk.configure("acme", "torch")
                running = pool.submit(answer)
                assert began.wait(60)
            gone.set()
            assert running.result(60) == 1
            rlk.configure("torch")
        assert all(not t for scope in policy.scopes() for t in scope.tables.values())
    finally:
        del globals()["waits"]


def test_a_full_table_drops_its_oldest_plans_and_says_how_many(monkeypatch) -> None:
    monkeypatch.setattr(plans, "MOST", 8)
    with rlk.registered(preparing()), rlk.use("acme"):
        for width in range(1, 9):
            answer(LOGITS.expand(4, 8)[:, :width], temperature=1.0)
        assert [(p.plans, p.made, p.evicted) for p in planned()] == [(8, 8, 0)]
        answer(temperature=2.0)
        assert [(p.plans, p.made, p.evicted) for p in planned()] == [(7, 9, 2)]
        assert answer(temperature=2.0) == 9
        assert answer(LOGITS[:, :3], temperature=1.0) == 3
        assert answer(LOGITS[:, :1]) == 10  # the oldest is planned anew


def test_a_table_never_holds_more_than_its_bound() -> None:
    table = Table()
    for number in range(MOST + MOST // 2):
        table.keep((number,), plans.Plan(abs, None))  # type: ignore[arg-type]  # no table looks at the choice
    assert (len(table) <= MOST, len(table) + table.evicted, table.made) == (True, MOST + MOST // 2, MOST + MOST // 2)


def test_what_makes_something_that_lives_on_is_never_planned() -> None:
    buffers = [rlk.rollout_buffer(256, 8) for _ in range(2)]
    assert buffers[0] is not buffers[1]
    assert planned() == []
