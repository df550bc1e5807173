"""Sums over sequences of a batch."""

from __future__ import annotations

import torch

from rlkernel_common.sequences import Packed


def test_the_sum_of_a_long_packed_sequence_loses_nothing_on_the_way() -> None:
    x = torch.full((1 << 17,), 0.1)
    found = Packed.of(torch.tensor([0, x.numel()]), x.numel()).sum(x)
    assert torch.equal(x.double().sum().float(), found[0])
