"""Short ways to build, fill and balance a rollout buffer in tests."""

from __future__ import annotations

import torch

from rlkernel_core.spec.rollouts import Field
from rlkernel_torch.direct import rollout_buffer

TOKEN = {"token": Field("int32")}


def buffer(tokens=64, seqs=8, **options):
    return rollout_buffer(tokens, seqs, **({"page_tokens": 4, "fields": TOKEN} | options))


def tokens(*values):
    return {"token": torch.tensor(values, dtype=torch.int32)}


def fill(buf, groups, lengths, *, version=0, reward=None, status="stop", limit=None):
    """Reserve, append `lengths` tokens (100 * row + position) at once, and finish."""
    slots = buf.reserve(limit or max(*lengths, 1), groups, version=version)
    flat = [100 * i + t for i, n in enumerate(lengths) for t in range(n)]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    buf.append(slots, tokens(*flat), cu_seqlens=ends)
    buf.finish(slots, reward, status=status)
    return slots


def balanced(stats):
    assert stats.appended == stats.popped + stats.stored + sum(stats.dropped.values())
    assert stats.reserved_seqs == stats.popped_seqs + stats.stored_seqs + sum(stats.dropped_seqs.values())
