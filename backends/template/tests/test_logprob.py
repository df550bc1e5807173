"""What the clauses of logprob leave to this backend: its own limit."""

import torch

from rlkernel_template.logprob import fits


def test_more_logits_than_it_can_copy_are_refused_with_a_reason() -> None:
    reason = fits(torch.empty(1 << 16, 1 << 15, device="meta"))
    assert (reason.slug, "2147483648" in reason.text) == ("shape/unsupported", True)


def test_fewer_are_taken() -> None:
    assert fits(torch.empty((1 << 16) - 1, 1 << 15, device="meta")) is None
