"""A request draws the same wherever it stands: batch, row, slot, stride, dtype; and what sample refuses."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkernel_conformance.sampling_batches import Batch, pack, random_batch
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


def test_the_same_call_twice_gives_the_same_bits(batch, whole) -> None:
    assert_same(fields(sample(batch.logits, **batch.arguments(), **OPTIONS)), whole)


def test_strided_rows_give_the_bits_of_contiguous_ones(batch, whole) -> None:
    wide = torch.full((46, 1100), math.nan)
    wide[::2, 50:1053] = batch.logits
    transposed = batch.logits.T.contiguous().T
    for view in (wide[::2, 50:1053], transposed):
        assert not view.is_contiguous()
        assert_same(fields(sample(view, **batch.arguments(), **OPTIONS)), whole)


def test_dtypes_of_equal_values_give_equal_results() -> None:
    batch = random_batch(5, 100, 8, torch.bfloat16, kinds=("normal", "ties", "posinf", "nan"))
    narrow = sample(batch.logits, **batch.arguments(), **OPTIONS)
    assert_same(fields(sample(batch.logits.float(), **batch.arguments(), **OPTIONS)), fields(narrow))


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


def test_slots_gather_parameters_and_padding_rows_stand_for_nothing(batch) -> None:
    arguments = batch.arguments()
    slot = torch.tensor([4, 0, 22, -1, 4])
    logits = batch.logits[[4, 0, 22, 3, 4]].clone()
    logits[3] = math.nan
    rowwise = {"allowed": arguments["allowed"][[4, 0, 22, 3, 4]]}
    arguments.pop("bias")  # per row, like `allowed`; a ragged one is not gathered in a line
    result = fields(sample(logits, **arguments | rowwise, slot=slot.int(), **OPTIONS))
    part = Batch(batch.logits[[4, 0, 22]], [batch.rows[i] for i in (4, 0, 22)])
    expected = part.arguments()
    expected.pop("bias")
    expected = fields(sample(part.logits, **expected, **OPTIONS))
    assert_same({n: v[:3] for n, v in result.items()}, expected)
    assert_same({n: v[4:] for n, v in result.items()}, {n: v[:1] for n, v in expected.items()})
    padding = {n: v[3].tolist() for n, v in result.items()}
    assert padding.pop("kept_ids") == [-1] * 7
    assert padding.pop("top_ids") == [-1] * 3
    assert padding.pop("top_logprobs") == [-math.inf] * 3
    assert padding.pop("rank") == padding.pop("threshold_id") == -1
    assert set(padding.values()) == {0}


def test_a_slot_out_of_range_is_flagged() -> None:
    x = torch.zeros(2, 4)
    result = sample(x, temperature=torch.ones(3), seed=torch.arange(3), step=0, slot=torch.tensor([2, 3]))
    assert result.status.tolist() == [0, 8]


def test_inputs_are_read_only(batch) -> None:
    arguments = batch.arguments()
    parts = [batch.logits, *(v for v in arguments.values() if isinstance(v, torch.Tensor))]
    parts += [*vars(arguments["penalties"]).values(), *vars(arguments["bias"]).values()]
    before = [p.clone() for p in parts]
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    sample(batch.logits, **arguments, **OPTIONS)
    for a, b in zip(parts, before, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype


def test_shapes_do_not_depend_on_data(batch) -> None:
    """Fake tensors have no data, so whatever looks at a value fails on them."""
    arguments = batch.arguments()
    real = fields(sample(batch.logits, **arguments, **OPTIONS))
    with FakeTensorMode() as mode:

        def fake(x):
            if isinstance(x, torch.Tensor):
                return mode.from_tensor(x)
            return type(x)(**{n: fake(v) for n, v in vars(x).items()}) if dataclasses.is_dataclass(x) else x

        result = sample(fake(batch.logits), **{n: fake(v) for n, v in arguments.items()}, **OPTIONS)
        support = result.support()
    assert {n: (v.shape, v.dtype) for n, v in fields(result).items()} == {
        n: (v.shape, v.dtype) for n, v in real.items()
    }
    assert support.ids.shape == (23 * 7,)


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


def test_every_feature_has_a_clause() -> None:
    spec = OPERATORS["sample"]
    assert spec.feature_names == {c.feature for c in spec.clauses} - {None}
    assert len({c.id for c in spec.clauses}) == len(spec.clauses)


def test_the_largest_masks_are_read_as_bits() -> None:
    full = pack(np.ones((2, 40), bool))
    assert full.dtype == torch.int32
    plain = fields(sample(X, seed=torch.arange(2), step=0))
    assert_same(fields(sample(X, seed=torch.arange(2), step=0, allowed=full)), plain)
