"""lm_head_sample: the tokens of sample on the head's logits, without the logits."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlkernel_conformance.sampling_batches import pack
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.sampling import LogitBias, Penalties, TokenLists
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_tokens_are_those_of_sample(dtype, temperature) -> None:
    hidden, weight = operands(dtype)
    assert_equals_sample(hidden, weight, {}, REQUEST | {"temperature": temperature})


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


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}], ids=["tiles", "stored"])
def test_edits_act_on_tiles_as_on_rows(filters) -> None:
    hidden, weight = operands()
    g = np.random.default_rng(0)
    arguments = {
        **REQUEST,
        **filters,
        "allowed": pack(g.random((N, V)) < 0.5),
        "banned": TokenLists(torch.tensor([0, 1023, 1024, 2499, 2500, -1, 7]), torch.tensor([0, 3, *[6] * 7, 7])),
        "logit_bias": LogitBias(
            torch.tensor([5, 1500, 5, 2048, 9999]),
            torch.tensor([3.0, 9.0, 1.0, -math.inf, 5.0]),
            torch.tensor([0, 2, *[4] * 6, 5, 5]),
        ),
        "penalties": Penalties(
            1.3,
            0.2,
            torch.full((N,), 0.1),
            pack(g.random((N, V)) < 0.1),
            torch.from_numpy(g.integers(-1, V + 5, (N, 40))),
        ),
    }
    assert_equals_sample(hidden, weight, {}, arguments)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}], ids=["tiles", "stored"])
def test_bias_scale_cap_and_padding_of_the_head(filters) -> None:
    hidden, weight = operands(scale=2.0)
    bias = torch.randn(V, generator=torch.Generator().manual_seed(5))
    bias[3] = -math.inf
    x = (hidden.double() @ weight.double().T + bias.double()) * 0.5
    x = torch.where(x == -math.inf, x, 4 * torch.tanh(x / 4)).float()
    head = {"bias": bias, "logit_scale": 0.5, "softcap": 4.0}
    assert_equals_sample(hidden, weight, head, REQUEST | filters, x)
    padded = torch.cat((weight, torch.full((60, D), math.nan)))
    assert_equals_sample(hidden, padded, {}, REQUEST | filters | {"vocab_size": V}, hidden @ weight.T)


def test_mixed_dtypes() -> None:
    hidden, weight = operands(torch.bfloat16)
    plain = lm_head_sample(hidden, weight, **REQUEST)
    mixed = lm_head_sample(hidden.float(), weight, **REQUEST)
    assert torch.equal(plain.logprob, mixed.logprob)


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_degenerate_rows_whatever_tile_they_fall_in(temperature) -> None:
    """Logits are chosen through an identity head."""
    size = 2100
    x = torch.randn(8, size, generator=torch.Generator().manual_seed(0))
    x[0, 1500] = math.nan
    x[1, [5, 1100, 1101, 2099]] = math.inf
    x[2, 2050] = math.inf
    x[3] = -math.inf
    x[4, :2000] = -math.inf
    x[5, [3, 2000]] = torch.tensor([3e38, -3e38])
    x[6] = 0.25
    x[7, 1024:] = -math.inf

    arguments = {"seed": torch.arange(8), "step": 1, "temperature": temperature, "raw_logprob": True}
    expected = fields(sample(x, **arguments))
    bias = LogitBias(
        torch.arange(size).repeat(8), x.reshape(-1), torch.arange(9) * size
    )  # logits of 0 + bias: NaN is refused there, so row 0 is compared below
    bias.values[:size] = x[0].nan_to_num(nan=-math.inf)
    actual = fields(lm_head_sample(torch.zeros(8, 4), torch.zeros(size, 4), **arguments, logit_bias=bias))
    for name in expected.keys() - {"raw_logprob", "status"}:
        torch.testing.assert_close(actual[name], expected[name], atol=2e-6, rtol=2e-6, msg=name)
    assert actual["status"].tolist() == [0, *expected["status"].tolist()[1:]]
    torch.testing.assert_close(actual["raw_logprob"][4], torch.tensor(-math.log(size)))


def test_nan_and_inf_of_the_head_stay_in_their_rows() -> None:
    hidden, weight = operands()
    plain = fields(lm_head_sample(hidden, weight, **REQUEST))
    hidden[4] = math.nan
    hidden[5] = torch.full((D,), 1e38)
    poisoned = fields(lm_head_sample(hidden, weight, **REQUEST))
    others = torch.tensor([0, 1, 2, 3, 6, 7, 8])
    for name, value in plain.items():
        assert torch.equal(value[others], poisoned[name][others])
    assert (poisoned["status"][4] & 3).tolist() == 3


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_no_tensor_of_rows_by_vocabulary_exists_without_filters() -> None:
    hidden, weight = torch.randn(50, 8), torch.randn(40_000, 8)
    with Largest() as seen:
        lm_head_sample(hidden, weight, seed=torch.arange(50), step=0, raw_logprob=True)
    assert seen.elements < 50 * 40_000 / 5
    with Largest() as seen:
        lm_head_sample(hidden, weight, seed=torch.arange(50), step=0, top_k=5)
    assert seen.elements >= 50 * 40_000


def test_rows_are_bitwise_the_same_in_any_batch() -> None:
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(150, D, generator=g), torch.randn(V, D, generator=g)
    seeds = torch.arange(150)
    whole = fields(lm_head_sample(hidden, weight, seed=seeds, step=0))
    for rows in ([0], [149, 3], list(range(70, 140)), [64, 63]):
        part = fields(lm_head_sample(hidden[rows], weight, seed=seeds[rows], step=0))
        for name, value in part.items():
            assert torch.equal(value, whole[name][rows])


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    result = lm_head_sample(torch.zeros(0, 4), torch.zeros(9, 4), seed=none, step=0, raw_logprob=True)
    assert (result.token.shape, result.raw_logprob.shape) == ((0,), (0,))
    assert lm_head_sample(torch.zeros(0, 4), torch.zeros(9, 4), seed=none, step=0, top_k=2).token.shape == (0,)


def test_shapes_do_not_depend_on_data() -> None:
    hidden, weight = operands()
    with FakeTensorMode() as mode:
        h, w, seeds = (mode.from_tensor(x) for x in (hidden, weight, torch.arange(N)))
        assert lm_head_sample(h, w, seed=seeds, step=0).token.shape == (N,)
        assert lm_head_sample(h, w, seed=seeds, step=0, top_p=0.5, kept_capacity=3).kept_ids.shape == (N, 3)


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
