"""What the clauses of logprob leave to this backend: its own limit."""

import torch
from rlkernel_core.spec.logprob import LogprobCall

from rlkernel_template.logprob import fits

IDS = torch.zeros(1 << 16, dtype=torch.int64, device="meta")


def test_more_logits_than_it_can_copy_are_refused_with_a_reason() -> None:
    reason = fits(LogprobCall(torch.empty(1 << 16, 1 << 15, device="meta"), IDS))
    assert (reason.slug, "2147483648" in reason.text) == ("shape/unsupported", True)


def test_fewer_are_taken() -> None:
    assert fits(LogprobCall(torch.empty((1 << 16) - 1, 1 << 15, device="meta"), IDS[1:])) is None
