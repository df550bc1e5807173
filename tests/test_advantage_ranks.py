"""Whitening and batch statistics across ranks: two processes over gloo, one of them without tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlkernel_common.moments import merged, moments
from tests import advantage_ranks as ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank saved."""
    out = tmp_path_factory.mktemp("ranks")
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(ranks.__file__)), str(rank), str(out / "store"), str(out)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks.WORLD)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    return [torch.load(out / f"{rank}.pt") for rank in range(ranks.WORLD)]


@pytest.mark.parametrize("split", ["uneven", "empty"])
def test_ranks_give_what_one_rank_with_all_data_gives(found, split):
    whole = ranks.run(*ranks.data(0)["empty"], None)
    for name, want in whole.items():
        got = torch.cat([f[split][name] for f in found])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=name)


def test_a_rank_whose_tokens_are_all_masked_takes_part(found):
    # AReaL returns before its all_reduce there, and the other ranks hang.
    assert torch.equal(torch.zeros(12, 10), found[1]["masked"]["whiten"])
    torch.testing.assert_close(found[0]["masked"]["whiten"], ranks.run(*ranks.data(0)["empty"], None)["whiten"])


def test_a_constant_over_all_ranks_is_exactly_zero(found):
    for f in found:
        for split in f.values():
            assert not split["constant"].any()


@pytest.mark.parametrize("shares", [(10, 10), (1, 19), (0, 20), (20, 0), (7, 0, 6, 7)])
def test_merged_moments_are_those_of_all_values(shares):
    x = torch.randn(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1000
    parts = [moments(p, torch.ones_like(p, dtype=torch.bool)) for p in x.split(shares)]
    total = parts[0]
    for part in parts[1:]:
        total = merged(total, part)
    assert total.n == 20
    torch.testing.assert_close(total.mean, x.mean(), rtol=1e-14, atol=0)
    torch.testing.assert_close(total.variance(1), x.var(), rtol=1e-12, atol=0)
