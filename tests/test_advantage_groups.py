"""Advantages over groups by the plain-torch backend: what its clauses do not say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlkernel_core.definitions import advantage as oracle
from rlkernel_torch.direct import advantage


def draw(B, groups, seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, generator=g, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, groups, (B,), generator=g) * 7919 - 5  # ids are names
    lengths = torch.randint(1, 30, (B,), generator=g)
    return x, ids, lengths


def estimate(x, kind, ids, lengths=None, **kw):
    if kind == "opo":
        kw["lengths"] = lengths
    return advantage(x, kind=kind, group=ids, **kw).advantages


def close(actual, expected, atol=1e-9):
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=1e-9, atol=atol)


def test_the_peers_rounding_noise_can_be_had():
    amplified = [
        estimate(torch.full((n,), x), "grpo", n, constant="peer").abs().max() for n in range(3, 30) for x in (0.7, 12.3)
    ]
    assert max(amplified) > 0.01


def test_without_a_degree_of_freedom_the_std_is_0_and_so_is_the_advantage():
    assert torch.equal(torch.zeros(2), estimate(torch.tensor([0.0, 1.0]), "grpo", 2, ddof=2))


def test_passk_ties_go_to_the_first():
    x = torch.tensor([1.0, 3.0, 3.0, 0.0, 2.0, 4.0])
    a = estimate(x, "passk", torch.tensor([0, 0, 0, 1, 1, 1]), scale="none")
    assert a.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 2.0]


def test_leave_one_out_std_with_equal_others():
    # NeMo-RL#1518: 7 x 0.3 and one 1.0: the std of the seven equal others is 0, not 9e-5.
    x = torch.tensor([1.0] + [0.3] * 7)
    a = estimate(x, "grpo", 8, leave_one_out=True, low_std="center")
    close(a, oracle.nemo_grpo(x.double(), np.zeros(8)), 1e-5)
    assert a[0] == pytest.approx(0.7)
    y, ids, _ = draw(30, 6, 6)
    close(estimate(y, "grpo", ids, leave_one_out=True, low_std="center"), oracle.nemo_grpo(y, ids), 1e-8)


def test_statistics_of_gdpo_have_a_column_for_each_reward():
    stats = advantage(torch.randn(18, 3, generator=torch.Generator().manual_seed(8)), kind="gdpo", group=3).stats
    assert stats.group_mean.shape == (18, 3)


class Operations(TorchDispatchMode):
    """Counts what torch carries out."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_operations_of_groups_of_a_size_do_not_grow_with_the_batch() -> None:
    found = []
    for B in (16, 4096):
        with Operations() as operations:
            advantage(torch.zeros(B), kind="grpo", group=8)
        found.append(operations.number)
    assert found[0] == found[1]
