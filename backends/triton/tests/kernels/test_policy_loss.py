"""Policy losses on Triton over several spans of tokens, against plain torch in float64; the rest: test_clauses.py."""

from dataclasses import fields

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.policy_kinds import Correction, Rejection
from rlkernel_torch.direct import policy_loss as definition

B, T = 3, 50


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(layout="padded", seed=0):
    """A step whose log-probabilities are near the old ones; NaN where masked."""
    shape = (B, T) if layout == "padded" else (B * T,)
    old = random(*shape, seed=seed) - 3
    mask = random(*shape, seed=seed + 1) > -0.7
    logprob = torch.where(mask, old + 0.3 * random(*shape, seed=seed + 2), torch.nan)
    given = {"logprob": logprob, "old_logprob": old, "advantages": random(*shape, seed=seed + 3), "mask": mask}
    if layout == "packed":
        given["cu_seqlens"] = torch.tensor([0, 40, 40, B * T - 9])
    return given


def agree(given, device, **more):
    """Loss, gradients and statistics against the reference; returns what was found."""
    results = []
    for f, dtype in ((rlk.policy_loss, torch.float32), (definition, torch.float64)):
        here = {
            n: x.to(device, dtype if x.is_floating_point() else x.dtype) if isinstance(x, torch.Tensor) else x
            for n, x in {**given, **more}.items()
        }
        leaves = {n: here[n].detach().clone().requires_grad_() for n in ("logprob", "entropy") if n in here}
        out = f(**here | leaves)
        (1.5 * out.loss).backward()
        results.append((out, [x.grad for x in leaves.values()]))
    (out, grads), (want, exact) = results
    torch.testing.assert_close(out.loss.double(), want.loss, atol=1e-6, rtol=2e-5)
    for mine, theirs in zip(grads, exact, strict=True):
        torch.testing.assert_close(
            mine.double(), theirs, atol=1e-8 + 3e-5 * max([0.0, *theirs.abs().flatten().tolist()]), rtol=3e-5
        )
    for field in fields(want.stats):
        mine, theirs = getattr(out.stats, field.name), getattr(want.stats, field.name)
        assert (mine is None) == (theirs is None), field.name
        if theirs is not None:
            torch.testing.assert_close(mine.double(), theirs.double(), atol=2e-6, rtol=2e-5)
    return out


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_a_batch_of_several_spans_of_tokens(device, kind, layout) -> None:
    agree(batch(layout), device, kind=kind)


@pytest.mark.parametrize("rule", [Correction(high=1.1), Correction(high=1.1, normalize=True)])
def test_ranks_with_several_spans_of_tokens_are_one_batch(device, rule) -> None:
    given = batch() | {"rollout_logprob": random(B, T, seed=9) - 3}
    want = agree(given, device, correction=rule)
    bounds = (0, 2, 2, B)

    def on_rank(rank: int, group: object) -> object:
        mine = {n: x[bounds[rank] : bounds[rank + 1]].to(device) for n, x in given.items()}
        return rlk.policy_loss(**mine, correction=rule, process_group=group)

    subject = Subject("triton" if device == "cuda" else "triton-interpreter", "policy_loss", device)
    for out in on_ranks(subject, 3, on_rank):
        torch.testing.assert_close(out.loss, want.loss)
        for field in fields(want.stats):
            torch.testing.assert_close(getattr(out.stats, field.name), getattr(want.stats, field.name))


def test_a_batch_of_many_spans_adds_up_in_one_order(device) -> None:
    given = {n: x.repeat(4, 1) for n, x in batch().items()}
    first, second = (agree(given, device, kind="grpo").loss for _ in range(2))
    assert torch.equal(first, second)


def test_a_rollout_that_is_unknown_at_some_tokens_is_corrected_and_rejected_as_defined(device) -> None:
    rollout = batch()["old_logprob"] + 0.3 * random(B, T, seed=11)
    rollout[0, 3] = torch.nan
    rules = {
        "correction": Correction("sequence", high=1.5, normalize=True),
        "rejection": Rejection("k3", "any", high=0.4),
    }
    agree(batch(), device, kind="gspo", rollout_logprob=rollout, **rules)
