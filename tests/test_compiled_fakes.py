"""What a graph believes an operator returns is what plain torch returns: form, sizes, dtypes and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rlkernel as rlk
from rlkernel.discover import load_target
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_torch import PAIRS, direct
from tests.needy_calls import calls

COMPILED = sorted(set(OPERATORS) - {"capture", "rollout_buffer"})


# Quantizing names its weight as differentiable so that one that asks for a gradient can be refused.
DIFFERENTIABLE_OPS = sorted(op for op in COMPILED if OPERATORS[op].differentiable and op != "quantize")


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def described(value: Any) -> Any:
    from rlkernel.torchlib.call_codec import outline

    form, tensors = outline(value)
    return form, [(tuple(t.shape), t.dtype, t.device) for t in tensors]


def placed(x: Tensor | None, call: Any, result: Any) -> Any:
    """Where a saved tensor is found: an argument, a result, or a new one of this size and dtype."""
    from rlkernel.torchlib.call_codec import outline

    known = [*outline(call)[1], *outline(result)[1]]
    at = next((at for at, t in enumerate(known) if t is x), None)
    return at if x is None or at is not None else (tuple(x.shape), x.dtype, x.device)


@pytest.mark.parametrize("op", COMPILED)
def test_a_fake_has_the_form_of_the_result(op, group) -> None:
    from rlkernel.torchlib.fakes import FAKES

    seen = 0
    for given in calls(op, group):
        if given.get("out") is not None:
            continue  # refused under torch.compile
        result = answered(op, given)
        if result is None:
            continue
        assert described(result) == described(FAKES[op](OPERATORS[op].call(**given))), given
        seen += 1
    assert seen > 0


@pytest.mark.parametrize("op", DIFFERENTIABLE_OPS)
def test_the_fields_that_carry_gradients_are_told(op, group) -> None:
    carrying: set[str] = set()
    for given in calls(op, group):
        leaves = {n: _leaf(x) if n in OPERATORS[op].differentiable else x for n, x in given.items()}
        result = answered(op, leaves)
        if result is None:
            continue
        named = {"": result} if isinstance(result, Tensor) else vars(result)
        carrying |= {n for n, x in named.items() if isinstance(x, Tensor) and x.requires_grad}
    assert set(OPERATORS[op].carrying) == carrying


@pytest.mark.parametrize("op", sorted(PAIRS))
def test_a_pair_saves_what_it_says(op, group) -> None:
    seen = 0
    for given in calls(op, group):
        leaves = {n: _leaf(x) if n in OPERATORS[op].differentiable else x for n, x in given.items()}
        if answered(op, leaves) is None:
            continue
        call, kind = OPERATORS[op].call(**leaves), load_target(PAIRS[op])
        pair = kind(call)
        result, saved = pair.forward(call)
        said = kind.saved_like(call, result, pair.wanted)
        assert [placed(x, call, result) for x in said] == [placed(x, call, result) for x in saved], given
        seen += 1
    assert seen > 0


def answered(op: str, given: dict[str, Any]) -> Any:
    """The result of plain torch; None for those calls of the tables that it refuses."""
    try:
        return getattr(direct, op)(**given)
    except ArgumentError:
        return None


def _leaf(x: Any) -> Any:
    return x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def test_operators_without_gradients_have_no_such_fields() -> None:
    assert sorted(op for op in COMPILED if OPERATORS[op].carrying) == DIFFERENTIABLE_OPS
    assert not rlk.quantize(torch.randn(4, 8), "int8_channel").parts["codes"].requires_grad
