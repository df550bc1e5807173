"""What a plan's key tells apart, and what it does not: of a draw's seed and step only how wide they are."""

from dataclasses import MISSING, fields

import pytest
import torch
import torch.distributed as dist

from rlkernel.plans import key_of, key_or_none
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.sample import SampleCall

LOGITS = torch.zeros(1, 8)


def key(**changes):
    return key_or_none("sample", SampleCall(LOGITS, **{"seed": 1, "step": 1, **changes}))


@pytest.mark.parametrize("name", ["seed", "step"])
def test_numbers_that_a_kernel_takes_alike_share_a_plan(name) -> None:
    assert key(**{name: 0}) == key(**{name: 16}) == key(**{name: 2**31 - 1})
    assert key(**{name: 2**31}) == key(**{name: 2**64 - 1})


@pytest.mark.parametrize("name", ["seed", "step"])
def test_numbers_of_another_width_tensors_and_what_is_no_such_number_have_plans_of_their_own(name) -> None:
    kinds = [1, 2**31, 2**64, True, 1.0, torch.tensor([1])]
    assert len({key(**{name: kind}) for kind in kinds}) == len(kinds)


def test_options_are_told_apart_by_value_and_by_type() -> None:
    options = [{}, {"top_n": 1}, {"top_n": True}, {"top_k": 1}, {"top_k": 2}, {"stream": 1}, {"entropy": True}]
    assert len({key(**o) for o in options}) == len(options)


def test_a_process_group_has_plans_of_its_own_whatever_its_name() -> None:
    """A plan may keep its group: a later group of that name would wait for ranks that are gone."""
    first, second = (dist.ProcessGroup(dist.HashStore(), 0, 1) for _ in range(2))
    assert key_of(first) == key_of(first)
    assert key_of(first) != key_of(second)


@pytest.mark.parametrize("op", list(OPERATORS))
def test_a_record_is_its_fields_alone_which_the_front_door_writes_without_its_constructor(op) -> None:
    record = OPERATORS[op].record
    assert not hasattr(record, "__post_init__")
    assert [f.name for f in fields(record) if not f.init or f.default_factory is not MISSING] == []
