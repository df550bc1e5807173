"""What a call leaves alone: its inputs, the process, the caller's memory; and what it does not depend on: strides."""

from __future__ import annotations

import random

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.example_calls import B, N, T, base
from rlkernel_core.spec import OPERATORS
from tests.argument_changes import CHANGES
from tests.needy_calls import calls
from tests.observed import observed, tensors

# Operators whose result is tensors; what capture and rollout_buffer return has tests of its own.
PLAIN = [name for name in OPERATORS if name not in {"capture", "rollout_buffer"}]
# Arguments whose memory a result may share, as their pages say.
SHARED = {("quantize", "out"), ("prepack", "w")}
WRITTEN = {("quantize", "out")}


def parts(value):
    """Tensors of an argument or result, those of a quantized weight too."""
    return list(value.parts.values()) if isinstance(value, rlk.QuantTensor) else tensors(value)


def bits(x):
    return x.detach().clone().contiguous().reshape(-1).view(torch.uint8)


def place(x):
    return x.untyped_storage().data_ptr()


def process():
    """Global state that a call could disturb."""
    return {
        "torch generator": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


def run(operator, given):
    """The result, or None where the tables hold a call that is refused."""
    try:
        return getattr(rlk, operator)(**given)
    except rlk.ArgumentError:
        return None


@pytest.mark.parametrize("operator", PLAIN)
def test_inputs_and_the_process_stay_as_they_are_and_results_are_the_callers_own(operator) -> None:
    written, disturbed, shared = set(), set(), set()
    for given in calls(operator, None):
        held = {name: parts(value) for name, value in given.items()}
        before = {name: [bits(t) for t in ts] for name, ts in held.items()}
        state = process()
        result = run(operator, given)
        disturbed |= {name for name, value in process().items() if value != state[name]}
        for name, ts in held.items():
            if any(not torch.equal(bits(t), b) for t, b in zip(ts, before[name], strict=True)):
                written.add((operator, name))
        owner = {place(t): name for name, ts in held.items() for t in ts if t.numel()}
        shared |= {
            (operator, owner[place(t)])
            for t in parts(() if result is None else result)
            if t.numel() and place(t) in owner
        }
    assert (written - WRITTEN, disturbed, shared - SHARED) == (set(), set(), set())


@pytest.mark.parametrize("operator", [name for name in PLAIN if name not in {"quantize", "dequantize", "prepack"}])
def test_results_share_no_memory_with_each_other(operator) -> None:
    for given in calls(operator, None):
        result = run(operator, given)
        places = [place(t) for t in tensors(result) if t.numel()]
        assert len(places) == len(set(places))


def strided(x):
    """The same values with gaps between them."""
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize("operator", PLAIN)
def test_strided_arguments_give_the_bits_of_contiguous_ones(operator) -> None:
    start = base(operator)
    cases = [(start, name) for name in start]
    for name, change in CHANGES[operator]().items():
        cases.append(({**start, **change.given, name: change.value}, name))
    differ = []
    for given, name in cases:
        if not isinstance(given[name], torch.Tensor) or not given[name].dim():
            continue
        views = [strided(given[name])]
        if given[name].dim() == 2:
            views.append(given[name].t().contiguous().t())
        want = observed(operator, given)
        differ += [name for view in views if observed(operator, {**given, name: view}) != want]
    assert differ == []


def emptied(value):
    """An argument of a call without rows."""
    if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] in {N, B * T}:
        return value[:0]
    if isinstance(value, rlk.Support | rlk.TokenLists):
        return type(value)(value.ids[:0], value.offsets[:1])
    if isinstance(value, rlk.LogitBias):
        return rlk.LogitBias(value.ids[:0], value.values[:0], value.offsets[:1])
    if isinstance(value, rlk.Penalties):
        return rlk.Penalties(frequency=value.frequency, output_ids=value.output_ids[:0])
    return value


BY_ROWS = [name for name in PLAIN if name not in {"quantize", "dequantize", "prepack", "verify"}]


@pytest.mark.parametrize("operator", BY_ROWS)
def test_no_rows_give_no_rows_and_nothing_that_is_not_a_number(operator) -> None:
    for given in calls(operator, None):
        result = run(operator, given)
        if result is None:
            continue
        empty = {name: value[:1] if name == "cu_seqlens" else emptied(value) for name, value in given.items()}
        found = getattr(rlk, operator)(**empty)
        for full, none in zip(tensors(result), tensors(found), strict=True):
            if full.dim() and full.shape[0] in {N, B * T}:
                assert none.shape == (0, *full.shape[1:])
            assert bool(none.isfinite().all())
        if operator.endswith("policy_loss"):
            assert found.loss == 0


def test_no_requests_are_verified_to_nothing() -> None:
    given = {name: x[:0] if isinstance(x, torch.Tensor) else x for name, x in base("verify").items()}
    found = rlk.verify(**{**given, "cu_draft": torch.zeros(1, dtype=torch.int64)})
    assert {t.shape[0] for t in tensors(found)} == {0}


def test_a_weight_without_elements_is_refused() -> None:
    with pytest.raises(rlk.ArgumentError, match="weight: has no elements"):
        rlk.quantize(torch.zeros(0, 32), "nf4")
