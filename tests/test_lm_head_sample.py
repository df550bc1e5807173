"""lm_head_sample: the arguments of a draw reach it, what it refuses, and what a call needs."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_torch.direct import lm_head_sample, sample

V, D, N = 2500, 16, 9  # three tiles, the last one ragged


def operands(dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(0)
    return torch.randn(N, D, generator=g).to(dtype), (torch.randn(V, D, generator=g) * scale).to(dtype)


def fields(result):
    found = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    return {n: v for n, v in found.items() if v is not None}


def assert_equals_sample(hidden, weight, head, arguments, logits=None):
    """Ids and counts bitwise; values within the rounding of the sums."""
    if logits is None:
        logits = hidden.double() @ weight.double().T
        logits = logits.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    expected = fields(sample(logits, **{"bias" if n == "logit_bias" else n: v for n, v in arguments.items()}))
    actual = fields(lm_head_sample(hidden, weight, **head, **arguments))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        tolerance = 2e-5 if value.is_floating_point() else 0
        torch.testing.assert_close(actual[name], value, atol=tolerance, rtol=tolerance, equal_nan=True, msg=name)


REQUEST = {"seed": torch.arange(N), "step": 3, "raw_logprob": True}


@pytest.mark.parametrize(
    "arguments",
    [
        {"top_k": 20},
        {"top_p": 0.9, "kept_capacity": 30},
        {"min_p": 0.05, "entropy": True},
        {"top_n": 4, "rank": True},
        {"stream": 1},
        {"temperature": torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 1.0, 1.0, 0.3, math.nan])},
        {"slot": torch.tensor([3, -1, 0, 1, 2, 4, 8, 7, -1])},
    ],
    ids=str,
)
def test_arguments_of_the_draw_reach_it(arguments) -> None:
    hidden, weight = operands()
    assert_equals_sample(hidden, weight, {}, REQUEST | arguments)


@pytest.mark.parametrize(
    "wrong, argument",
    [
        ({"hidden": torch.zeros(N, D, 1)}, "hidden"),
        ({"weight": torch.zeros(V, D + 1)}, "weight"),
        ({"weight": torch.zeros(0, D)}, "weight"),
        ({"weight": torch.zeros(V, D, requires_grad=True)}, "weight"),
        ({"bias": torch.zeros(V + 1)}, "bias"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"seed": 0}, "seed"),
        ({"vocab_size": V + 1}, "vocab_size"),
        ({"logit_bias": torch.zeros(V)}, "logit_bias"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(wrong, argument) -> None:
    hidden, weight = operands()
    arguments = {"hidden": hidden, "weight": weight} | REQUEST | wrong
    with pytest.raises(ArgumentError) as caught:
        lm_head_sample(arguments.pop("hidden"), arguments.pop("weight"), **arguments)
    assert caught.value.argument == argument


def test_every_feature_is_needed_by_some_call() -> None:
    spec = OPERATORS["lm_head_sample"]
    x, given = torch.zeros(1, 1), {"seed": 0, "step": 0}
    assert spec.needs(spec.call(x, x, **given)) == frozenset()
    head = spec.call(x, x.half(), **given, bias=0, logit_bias=0, logit_scale=2.0, softcap=1.0)
    assert spec.needs(head) == {"mixed_dtypes", "bias", "logit_bias", "logit_scale", "softcap"}
