"""sample: threads, numbers and tensors of them, large seeds, and what it refuses."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlkernel_conformance.sampling_batches import Batch, random_batch
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.sampling import LogitBias, Penalties, TokenLists
from rlkernel_torch.direct import sample

OPTIONS = {"raw_logprob": True, "entropy": True, "kept_capacity": 7, "top_n": 3, "rank": True}


def fields(result, rows=None) -> dict:
    found = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    return {n: v if rows is None else v[rows] for n, v in found.items() if v is not None}


def assert_same(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=0, rtol=0, equal_nan=True, msg=name)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_batch(21, 1003, 23)


@pytest.fixture(scope="module")
def whole(batch) -> dict:
    return fields(sample(batch.logits, **batch.arguments(), **OPTIONS))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_rows_are_bitwise_the_same_in_any_batch(batch, whole, n, threads) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in np.array_split(np.random.default_rng(0).permutation(23), -(-23 // n)):
            part = Batch(batch.logits[rows], [batch.rows[i] for i in rows])
            arguments = batch.arguments() | part.arguments()  # the same features, whoever uses them
            for name in ("allowed", "penalties", "bias"):
                arguments[name] = Batch(part.logits, part.rows).arguments().get(name)
            assert_same(fields(sample(part.logits, **arguments, **OPTIONS)), {k: v[rows] for k, v in whole.items()})
    finally:
        torch.set_num_threads(before)


def test_numbers_mean_the_same_as_tensors_of_them() -> None:
    x = torch.randn(6, 90, generator=torch.Generator().manual_seed(0)) * 3
    numbers = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.03, "step": 5}
    types = {"top_k": torch.int32, "step": torch.int64}
    plain = fields(sample(x, seed=torch.arange(6), **numbers))
    for shape in ((), (1,), (6,)):
        tensors = {n: torch.full(shape, v, dtype=types.get(n, torch.float32)) for n, v in numbers.items()}
        assert_same(fields(sample(x, seed=torch.arange(6), **tensors)), plain)


def test_seeds_and_steps_are_unsigned_64_bit_numbers() -> None:
    x = torch.zeros(1, 1000)
    for big in (2**63, 2**64 - 1, 2**63 + 12345):
        bits = torch.tensor([big - 2**64])
        unsigned = bits.view(torch.uint64)
        for name, other in (("seed", "step"), ("step", "seed")):
            drawn = {int(sample(x, **{name: v, other: 3}).token) for v in (big, bits, unsigned)}
            assert len(drawn) == 1


X = torch.zeros(2, 40)
WORDS = torch.zeros(2, 2, dtype=torch.int32)
ONES = torch.ones(2)
REFUSED = [
    ({"logits": torch.zeros(40)}, "logits"),
    ({"logits": torch.zeros(2, 0)}, "logits"),
    ({"logits": torch.zeros(2, 4, dtype=torch.int64)}, "logits"),
    ({"logits": torch.zeros(2, 4, requires_grad=True)}, "logits"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": torch.ones(3)}, "temperature"),
    ({"temperature": torch.ones(2, 1)}, "temperature"),
    ({"temperature": torch.ones(2, dtype=torch.int64)}, "temperature"),
    ({"top_k": 2.0}, "top_k"),
    ({"top_k": torch.ones(2)}, "top_k"),
    ({"top_p": "0.9"}, "top_p"),
    ({"min_p": True}, "min_p"),
    ({"seed": 0}, "seed"),
    ({"seed": torch.zeros(1, dtype=torch.int64)}, "seed"),
    ({"seed": torch.ones(2)}, "seed"),
    ({"seed": None}, "seed"),
    ({"step": -1}, "step"),
    ({"step": 2**64}, "step"),
    ({"filter_order": "topk"}, "filter_order"),
    ({"tie": "random"}, "tie"),
    ({"vocab_size": 41}, "vocab_size"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"slot": torch.zeros(3, dtype=torch.int64)}, "slot"),
    ({"allowed": WORDS.long()}, "allowed"),
    ({"allowed": WORDS[:, :1]}, "allowed"),
    ({"allowed": WORDS[:1]}, "allowed"),
    ({"banned": [1]}, "banned"),
    ({"banned": TokenLists(torch.tensor([1]), torch.tensor([0, 1]))}, "banned.offsets"),
    ({"bias": LogitBias(torch.tensor([1]), ONES, torch.tensor([0, 1, 1]))}, "bias.values"),
    ({"penalties": {"repetition": 2}}, "penalties"),
    ({"penalties": Penalties(repetition=0.0)}, "penalties.repetition"),
    ({"penalties": Penalties(frequency=torch.ones(3))}, "penalties.frequency"),
    ({"penalties": Penalties(prompt_bits=WORDS[:1])}, "penalties.prompt_bits"),
    ({"penalties": Penalties(output_ids=torch.zeros(3, 1, dtype=torch.int64))}, "penalties.output_ids"),
    ({"penalties": Penalties(output_counts=torch.zeros(2, 1, dtype=torch.int64))}, "penalties.output_counts"),
    ({"top_n": 41}, "top_n"),
    ({"top_n_from": "tempered"}, "top_n_from"),
    ({"kept_capacity": -1}, "kept_capacity"),
    ({"stream": 2**32}, "stream"),
]


@pytest.mark.parametrize("wrong, argument", REFUSED, ids=lambda x: str(x)[:40])
def test_bad_arguments_are_named(wrong, argument) -> None:
    arguments = {"logits": X, "seed": torch.arange(2), "step": 0} | wrong
    with pytest.raises(ArgumentError) as caught:
        sample(arguments.pop("logits"), **arguments)
    assert caught.value.argument == argument


def test_a_wrong_type_is_a_type_error() -> None:
    with pytest.raises(ArgumentTypeError):
        sample([[0.0]], seed=0, step=0)


def test_rows_may_share_noise_where_it_is_not_used_or_steps_tell_them_apart() -> None:
    assert sample(X, temperature=0.0, seed=0, step=0).token.tolist() == [0, 0]
    sample(X, seed=0, step=torch.arange(2))
    sample(X[:1], seed=0, step=0)


def test_parameters_that_require_gradients_are_fine_without_gradients() -> None:
    with torch.no_grad():
        assert sample(torch.nn.Parameter(X), seed=torch.arange(2), step=0).logprob.requires_grad is False


def test_asking_for_the_support_without_keeping_ids_is_refused() -> None:
    with pytest.raises(ArgumentError, match="kept_capacity"):
        sample(X, seed=torch.arange(2), step=0).support()


def test_needs_name_every_feature_but_the_invariants() -> None:
    spec = OPERATORS["sample"]
    needs = {"logits": X, "seed": 0, "step": 0}
    everything = needs | {
        "temperature": ONES, "top_k": 1, "top_p": 0.5, "min_p": 0.1, "penalties": Penalties(), "allowed": WORDS,
        "bias": 0, "banned": 0, "tie": "keep_all", "vocab_size": 3, "slot": ONES, "raw_logprob": True, "top_n": 1,
        "entropy": True, "kept_capacity": 1, "stream": 1, "rank": True,
    }  # fmt: skip
    needed = frozenset().union(
        *(
            spec.needs(spec.call(**everything, filter_order=order, top_n_from=law))
            for order in ("joint", "topp_topk")
            for law in ("raw", "processed")
        )
    )
    assert needed == spec.feature_names - {"deterministic", "batch_invariant", "capturable"}
    assert spec.needs(spec.call(**needs)) == frozenset()
