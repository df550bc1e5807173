"""Layouts of policy_loss: padded and packed, masks, empty sequences, no tokens, any stride."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.policy_loss import Correction, Rejection
from rlkernel_torch.direct import policy_loss
from tests.policy_batches import KIND_LEVELS, REQUIRED, batch, run, same, tensor

repeatable = settings(derandomize=True, deadline=None, max_examples=25)


def pack(b, tail=0):
    """The rows of a padded batch end to end, masked tokens included, and `tail` tokens of no sequence."""
    B, T = b.lp.shape
    fill = np.full(tail, np.nan)
    flat = {n: np.concatenate([getattr(b, n).reshape(-1), fill]) for n in ("lp", "old", "ref", "roll", "entropy")}
    mask = np.concatenate([b.mask.reshape(-1), np.ones(tail, bool)])
    return flat, mask, torch.arange(0, B * T + 1, T, dtype=torch.int32)


@pytest.mark.parametrize("kind,level", KIND_LEVELS)
def test_packed_is_padded(kind, level):
    b = batch(7, B=5, T=6, empty=True)
    options = {
        "kind": kind,
        "level": level,
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
        "rejection": Rejection("k1", "geometric", low=0.8, high=1.25),
        **REQUIRED.get(kind, {}),
    }
    if kind == "dr_grpo":
        options["horizon"] = 6.0
    padded, g, h = run(b, ref=True, entropy=True, roll=True, **options)
    flat, mask, starts = pack(b, tail=3)
    lp, entropy = tensor(flat["lp"], grad=True), tensor(flat["entropy"], grad=True)
    packed = policy_loss(
        lp,
        tensor(flat["old"]),
        tensor(b.adv)[:, None],
        mask=torch.tensor(mask),
        cu_seqlens=starts,
        ref_logprob=tensor(flat["ref"]),
        entropy=entropy,
        rollout_logprob=tensor(flat["roll"]),
        **options,
    )
    packed.loss.backward()
    same(packed.loss, padded.loss)
    same(lp.grad[:-3].reshape(g.shape), g)
    same(entropy.grad[:-3].reshape(h.shape), h)
    assert not lp.grad[-3:].any()
    for name in vars(packed.stats):
        same(getattr(packed.stats, name), getattr(padded.stats, name))


def test_per_token_advantages_of_a_packed_batch():
    b = batch(8, per_token=True)
    flat, mask, starts = pack(b)
    got = policy_loss(
        tensor(flat["lp"]), tensor(flat["old"]), tensor(b.adv).flatten(), mask=torch.tensor(mask), cu_seqlens=starts
    )
    same(got.loss, run(b)[0].loss.detach())


def test_a_bag_of_tokens_needs_no_sequences():
    b = batch(9, per_token=True)
    flat, mask, _ = pack(b)
    got = policy_loss(
        tensor(flat["lp"]), tensor(flat["old"]), tensor(b.adv).flatten(), mask=torch.tensor(mask), kind="dapo"
    )
    want = run(b, kind="dapo")[0]
    same(got.loss, want.loss.detach())
    assert got.stats.sequences is None
    for options in ({"kind": "grpo"}, {"kind": "ppo", "level": "sequence"}):
        with pytest.raises(ArgumentError, match="cu_seqlens"):
            policy_loss(tensor(flat["lp"]), None, tensor(b.adv).flatten(), **options)


@pytest.mark.parametrize("kind,level", KIND_LEVELS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_a_mask_hides_changes_no_bit(kind, level, poison):
    clean = batch(10, per_token=True, empty=True)
    options = {
        "kind": kind,
        "level": level,
        "kl_coef": 0.1,
        "kl_importance": True,
        "entropy_coef": 0.1,
        "ref": True,
        "entropy": True,
        "roll": True,
        "rejection": Rejection("k3", "any", high=0.8),
        **REQUIRED.get(kind, {}),
    }
    want = run(clean, **options)
    dirty = batch(10, per_token=True, empty=True)
    for name in ("lp", "old", "ref", "roll", "entropy", "adv"):
        getattr(dirty, name)[~dirty.mask] = poison
    got = run(dirty, **options)
    assert (got[0].loss, got[0].stats) == (want[0].loss, want[0].stats)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[2], want[2])
    assert not got[1][~torch.tensor(clean.mask)].any()


@pytest.mark.parametrize("kind,level", KIND_LEVELS)
def test_an_all_masked_batch_gives_a_connected_zero(kind, level):
    b = batch(11)
    b.mask[:] = False
    b.lp[0, 0] = math.nan
    result, gradient, dentropy = run(
        b, kind=kind, level=level, entropy=True, entropy_coef=0.1, ref=True, kl_coef=0.1, **REQUIRED.get(kind, {})
    )
    assert result.loss.item() == 0
    assert not gradient.any()
    assert not dentropy.any()
    assert {float(v) for v in vars(result.stats).values() if v is not None} == {0.0}


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_no_tokens_at_all(shape):
    for kind, level in KIND_LEVELS:
        lp = torch.zeros(shape, requires_grad=True)
        options = REQUIRED.get(kind, {})
        result = policy_loss(lp, torch.zeros(shape), torch.zeros(shape[0]), kind=kind, level=level, **options)
        result.loss.backward()
        assert (result.loss.item(), lp.grad.shape) == (0.0, torch.Size(shape))
    empty = torch.zeros(0, requires_grad=True)
    starts = torch.zeros(1, dtype=torch.int64)
    assert policy_loss(empty, empty.detach(), torch.zeros(0), cu_seqlens=starts).loss.item() == 0


def test_empty_sequences_count_only_when_asked():
    b = batch(12, B=4, empty=True)
    skipped = run(b, kind="grpo")[0]
    counted = run(b, kind="grpo", count_empty=True)[0]
    same(counted.loss, skipped.loss * 3 / 4)
    assert skipped.stats.sequences.item() == 3


def test_horizon_defaults_to_the_padded_length():
    b = batch(13)
    same(run(b, kind="dr_grpo")[0].loss, run(b, kind="dr_grpo", horizon=5.0)[0].loss)
    with pytest.raises(ArgumentError, match="horizon"):
        policy_loss(torch.zeros(3), None, torch.zeros(3), kind="dr_grpo", cu_seqlens=torch.tensor([0, 3]))


@given(seed=st.integers(0, 10**6), kind_level=st.sampled_from(KIND_LEVELS))
@repeatable
def test_permuting_sequences_permutes_gradients(seed, kind_level):
    kind, level = kind_level
    b = batch(seed, B=5, T=4, empty=True)
    order = np.random.default_rng(seed).permutation(5)
    shuffled = type(b)(**{n: getattr(b, n)[order] for n in vars(b)})
    options = {"kind": kind, "level": level, "roll": True, **REQUIRED.get(kind, {})}
    one, g, _ = run(b, **options)
    two, h, _ = run(shuffled, **options)
    same(two.loss, one.loss)
    same(h, g[torch.tensor(order)])


@given(seed=st.integers(0, 10**6), padding=st.integers(1, 9))
@repeatable
def test_padding_changes_nothing(seed, padding):
    b = batch(seed)
    wide = batch(seed)
    for name in ("lp", "old", "ref", "roll", "entropy"):
        setattr(wide, name, np.pad(getattr(b, name), ((0, 0), (0, padding)), constant_values=np.nan))
    wide.mask = np.pad(b.mask, ((0, 0), (0, padding)))
    for kind in ("grpo", "gspo", "gmpo"):
        one, g, _ = run(b, kind=kind, ref=True, kl_coef=0.1, roll=True)
        two, h, _ = run(wide, kind=kind, ref=True, kl_coef=0.1, roll=True)
        same(two.loss, one.loss)
        same(h[:, : g.shape[1]], g)


def test_strided_and_expanded_tensors_give_the_bits_of_contiguous_ones():
    b = batch(18, B=3, T=4)
    want = policy_loss(tensor(b.lp), tensor(b.old), tensor(b.adv), mask=torch.tensor(b.mask), kind="gspo")
    strided = torch.tensor(np.repeat(b.lp, 2, axis=1))[:, ::2]
    turned = torch.tensor(np.ascontiguousarray(b.old.T)).T
    per_token = torch.tensor(b.adv)[:, None].expand(3, 4)
    got = policy_loss(strided, turned, per_token, mask=torch.tensor(b.mask), kind="gspo")
    assert (got.loss, got.stats) == (want.loss, want.stats)


@pytest.mark.parametrize("names", [("old", "mask"), ("lp", "old", "ref", "roll", "entropy", "mask")])
def test_transposed_tensors_give_the_bits_of_contiguous_ones(names):
    # Elementwise results keep the layout of their inputs, and sums run in the order of memory.
    b = batch(21, B=7, T=9, spread=0.4)
    x = {n: torch.tensor(getattr(b, n)) for n in ("lp", "old", "adv", "ref", "roll", "entropy", "mask")}
    x = {n: v.float() if v.is_floating_point() else v for n, v in x.items()}

    def outcome(lp, old, ref, roll, entropy, mask, **_):
        options = {"ref_logprob": ref, "kl_coef": 0.1, "entropy": entropy, "entropy_coef": 0.1}
        weights = Correction("token", "truncate", high=1.2)
        return policy_loss(lp, old, x["adv"], mask=mask, rollout_logprob=roll, correction=weights, **options)

    want, got = outcome(**x), outcome(**{**x, **{n: x[n].T.contiguous().T for n in names}})
    assert (got.loss, got.stats) == (want.loss, want.stats)


def test_fake_tensors_go_through():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        lp = torch.zeros(3, 5, requires_grad=True)
        for kind, level in KIND_LEVELS:
            result = policy_loss(
                lp, torch.zeros(3, 5), torch.zeros(3), kind=kind, level=level, **REQUIRED.get(kind, {})
            )
            assert result.loss.shape == ()
        packed = torch.zeros(15, requires_grad=True)
        starts = torch.zeros(4, dtype=torch.int32)
        assert policy_loss(packed, None, torch.zeros(15), cu_seqlens=starts, kind="gspo").loss.shape == ()
