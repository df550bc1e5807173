"""The fixture of RL batches: what it promises, and rlkernel's own operators on it."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.batches import EXTREMES, RLBatch, rl_batch
from rlkernel_core.errors import ArgumentError, UnknownNameError


def same(a: RLBatch, b: RLBatch) -> bool:
    return all(torch.equal(getattr(a, f.name).nan_to_num(), getattr(b, f.name).nan_to_num()) for f in fields(a))


def test_a_seed_gives_the_same_batch_and_another_seed_another() -> None:
    assert same(rl_batch(7), rl_batch(7))
    assert not same(rl_batch(7), rl_batch(8))


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_has_every_extreme(seed: int) -> None:
    batch = rl_batch(seed)
    ratio = (batch.logprob - batch.old_logprob)[batch.mask]
    found = {
        "long": batch.lengths[0] == batch.mask.shape[1] and batch.lengths[1:].max() <= batch.mask.shape[1] // 3,
        "empty": batch.lengths[-1] == 0 and not batch.mask[-1].any(),
        "hole": batch.mask[0, 0] and not batch.mask[0, 1] and batch.mask[0, 3],
        "equal group": (batch.advantages[batch.group == 3] == 0).all() and batch.rewards[-1] == 12.3,
        "minus infinity": (batch.logprob[batch.mask] == -torch.inf).sum() == 1,
        "huge ratio": ratio.nan_to_num(neginf=0).max() > 59 and ratio[ratio.isfinite()].min() < -59,
        "poison": batch.logprob[~batch.mask].isnan().any() and (batch.ids[~batch.mask] == -100).any(),
    }
    assert found.keys() == EXTREMES.keys()
    assert [name for name, there in found.items() if not bool(there)] == []


def test_without_extremes_everything_is_finite_and_lengths_still_differ() -> None:
    batch = rl_batch(3, extremes=())
    assert all(getattr(batch, f.name).double().isfinite().all() for f in fields(batch))
    assert len(set(batch.lengths.tolist())) > 1
    assert (batch.advantages.abs() < 10).all()


@pytest.mark.parametrize("seed", range(3))
def test_packed_is_the_padded_batch_without_padding(seed: int) -> None:
    batch = rl_batch(seed)
    packed = batch.packed()
    for i, n in enumerate(batch.lengths.tolist()):
        mine = slice(int(packed.cu_seqlens[i]), int(packed.cu_seqlens[i + 1]))
        assert torch.equal(packed.mask[mine], batch.mask[i, :n])
        assert torch.equal(packed.logprob[mine].nan_to_num(), batch.logprob[i, :n].nan_to_num())
    assert packed.logits.shape == (int(batch.lengths.sum()), batch.logits.shape[-1])


@pytest.mark.parametrize("seed", range(3))
def test_operators_take_a_batch_in_either_layout(seed: int) -> None:
    batch = rl_batch(seed, extremes=set(EXTREMES) - {"minus infinity", "huge ratio"})
    packed = batch.packed()
    scored = rlk.logprob(batch.logits, batch.ids, mask=batch.mask).logprob
    assert torch.allclose(scored[batch.mask], batch.logprob[batch.mask], atol=1e-5)
    losses = [
        rlk.policy_loss(b.logprob, b.old_logprob, b.advantages, mask=b.mask, **more).loss
        for b, more in ((batch, {}), (packed, {"cu_seqlens": packed.cu_seqlens}))
    ]
    assert losses[0].isfinite()
    assert torch.allclose(*losses, rtol=1e-5, atol=1e-6)
    group = rlk.advantage(batch.rewards, kind="grpo", group=batch.group)
    assert torch.allclose(group.advantages, batch.advantages, atol=1e-4)


@pytest.mark.parametrize("kind", ["grpo", "cispo", "sapo", "gmpo"])
def test_losses_of_huge_ratios_are_finite(kind: str) -> None:
    batch = rl_batch(1, extremes=set(EXTREMES) - {"minus infinity"})
    leaf = batch.logprob.clone().requires_grad_()
    loss = rlk.policy_loss(leaf, batch.old_logprob, batch.advantages, mask=batch.mask, kind=kind).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert (gradient[~batch.mask] == 0).all()


def test_a_size_that_is_too_small_and_an_unknown_extreme_are_named() -> None:
    with pytest.raises(ArgumentError, match="length: must be >= 6"):
        rl_batch(length=2)
    with pytest.raises(UnknownNameError, match="'equal group'"):
        rl_batch(extremes=("equal groups",))
