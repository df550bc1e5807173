"""What a call of the head is said to need: as the plan that runs needs it, and within the caller's limit."""

from types import SimpleNamespace

import pytest
import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_triton import backend
from rlkernel_triton.claims import CLAIMS
from rlkernel_triton.launchers.planning import planning_for
from rlkernel_triton.linear_logprob import launch as linear_logprob
from rlkernel_triton.linear_policy_loss import launch as linear_policy_loss

N, D, V = 300, 64, 1000
HEAD = (torch.zeros(N, D), torch.zeros(V, D), torch.zeros(N, dtype=torch.long))


@pytest.fixture(autouse=True)
def planned():
    """On a machine without a GPU too: a tile, which the need depends on, is one of an architecture."""
    with planning_for("sm_90"):
        yield


def head(**options: object) -> int:
    return linear_logprob.workspace(OPERATORS["linear_logprob"].call(*HEAD, **options))


def loss(**options: object) -> int:
    made = OPERATORS["linear_policy_loss"].call(*HEAD, torch.zeros(N), torch.zeros(N), **options)
    return linear_policy_loss.workspace_of(made)


def test_the_manifest_names_them() -> None:
    told = {impl.op.partition("@")[0] for impl in backend.impls if impl.workspace}
    assert told == {"linear_logprob", "linear_policy_loss"} == {op for op, claim in CLAIMS.items() if claim.workspace}


@pytest.mark.parametrize("needed", [head, loss])
def test_a_call_needs_no_more_than_its_limit(needed) -> None:
    most = needed()
    assert 0 < needed(max_workspace_bytes=most) <= most


@pytest.mark.parametrize("needed", [head, loss])
def test_a_limit_that_is_too_low_is_the_calls_own_error(needed) -> None:
    with pytest.raises(ArgumentError, match="max_workspace_bytes"):
        needed(max_workspace_bytes=1)


def test_saved_logits_count() -> None:
    assert head(backward="save") - head(backward="recompute") >= N * V * 4


def test_a_loss_of_shards_needs_what_the_head_and_the_loss_need() -> None:
    group = SimpleNamespace(size=lambda: 2)
    call = OPERATORS["linear_policy_loss"].call(*HEAD, torch.zeros(N), torch.zeros(N), group=group)
    assert linear_policy_loss.workspace_of(call) > head(group=group)
