"""Parity of two backends: one against itself is exactly 0, a rounding shows within its bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.parity import drift, markdown, parity
from rlkernel_core.errors import ConfigError, UnknownNameError
from rlkernel_core.manifest import API_VERSION, Backend, Impl
from rlkernel_core.spec import OPERATORS
from rlkernel_torch import backend as reference
from rlkernel_torch.logprob import logprob

pytestmark = pytest.mark.usefixtures("fresh")


def rounded(call):
    """Log-probabilities as bf16 holds them: 8 bits, so a relative error of at most 2^-9 (half a step)."""
    out = logprob(call)
    return replace(out, logprob=out.logprob.bfloat16().float())


def rounding() -> Backend:
    (claimed,) = reference.of("logprob@1")
    impl = Impl(op=claimed.op, target=f"{__name__}:rounded", requires=claimed.requires, supports=claimed.supports)
    return Backend(name="rounding", api=API_VERSION, impls=(impl,))


@pytest.mark.parametrize("op", OPERATORS)
def test_a_backend_is_exactly_itself(op) -> None:
    row = parity("torch", "torch", ops=(op,), calls=1, rows=6)["operators"][op]
    worst = row.pop("max_abs_delta")
    assert (max(worst.values()) if isinstance(worst, dict) else worst) == 0.0
    assert {n: x for n, x in row.items() if n not in {"tokens", "same_tokens"}} in (
        {},
        {"p99_abs_delta": 0.0, "kl0": 0.0, "clipfrac0": 0.0},
    )


def test_a_rounding_to_bf16_drifts_as_far_as_its_bits_allow() -> None:
    with rlk.registered(rounding()):
        row = parity("torch", "rounding", ops=("logprob",), calls=4, rows=64)["operators"]["logprob"]
    lowest = 16.0  # log p of a token among 64, with standard normal logits, is above -16
    bound = lowest * 2**-9
    assert row["tokens"] == 256
    assert 2**-12 < row["p99_abs_delta"] <= row["max_abs_delta"] <= bound
    assert 0 < row["kl0"] <= math.expm1(bound) - bound  # k3 grows with |delta|
    assert row["clipfrac0"] == 0.0  # bound < log 1.2


def test_drift_is_what_its_definitions_say() -> None:
    a, b = torch.tensor([-1.0, -2.0, -torch.inf, -3.0]), torch.tensor([-1.0, -1.5, -torch.inf, -3.01])
    row = drift(a, b)
    deltas = [0.0, 0.5, 0.0, b[3].item() + 3.0]
    assert row["kl0"] == pytest.approx(sum(math.exp(d) - 1 - d for d in deltas) / 4)
    assert (row["clipfrac0"], row["max_abs_delta"], row["tokens"]) == (0.25, 0.5, 4)


def test_what_cannot_be_compared_is_an_error() -> None:
    with rlk.registered(rounding()), pytest.raises(ConfigError, match="sample: rounding"):
        parity("torch", "rounding", ops=("sample",))
    with pytest.raises(UnknownNameError, match="did you mean 'logprob'"):
        parity("torch", "torch", ops=("logprb",))


def test_the_table_has_a_row_for_every_operator() -> None:
    found = parity("torch", "torch", ops=("logprob", "whiten"), calls=1, rows=4)
    assert markdown(found).splitlines()[-2:] == ["| `logprob` | 0 | 0 | 0 | 0 |", "| `whiten` | 0 |  |  |  |"]
