"""Advantages over groups: every kind against float64, and the cases where frameworks disagree or break."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlkernel_core.definitions import advantage as oracle
from rlkernel_core.errors import ArgumentError
from rlkernel_torch.advantage.groups import Groups
from rlkernel_torch.direct import advantage

SETTINGS = settings(derandomize=True, deadline=None, max_examples=30)
KINDS = ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "passk", "gpg")
CENTRED = ("grpo", "dr_grpo", "rloo")


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


@SETTINGS
@given(st.sampled_from(KINDS), st.integers(0, 40), st.integers(1, 6), st.integers(0, 10_000))
def test_every_kind_is_its_formula_on_ragged_groups(kind, B, groups, seed):
    x, ids, lengths = draw(B, groups, seed)
    close(estimate(x, kind, ids, lengths), oracle.group(x, ids, kind, lens=lengths))


@pytest.mark.parametrize("mode", ["std_add", "var_add", "var_clamp", "threshold"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_where_eps_goes_and_degrees_of_freedom(mode, ddof):
    x, ids, _ = draw(24, 5, 1)
    x[ids == ids[0]] *= 0.01
    for eps in (1e-8, 0.03):
        a = estimate(x, "grpo", ids, eps=eps, eps_mode=mode, ddof=ddof)
        close(a, oracle.group(x, ids, "grpo", eps=eps, mode=mode, ddof=ddof))


def test_fp32_is_close_to_float64():
    x, ids, lengths = draw(4097, 512, 2, torch.float32)
    for kind in KINDS:
        want = oracle.group(x.double(), ids, kind, lens=lengths)
        got = estimate(x, kind, ids, lengths).double().numpy()
        if kind == "maxrl":  # a mean near 0 amplifies its own rounding
            near = np.abs(want) > 100
            got, want = np.where(near, 0, got), np.where(near, 0, want)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", [*KINDS, "reinforce_pp_baseline"])
@pytest.mark.parametrize(
    ("n", "value"), [(8, 0.7), (7, 0.9), (12, 12.3), (7, 0.3), (16, 30.1), (5, 0.1), (9, 1e5 + 0.1), (3, -1e-20)]
)
def test_a_constant_group_is_exactly_zero(kind, n, value):
    # verl gives 12 x 12.3 -> -0.637 all of one sign, NeMo-RL 7 x 0.3 and one 1.0 -> 7428 (NeMo-RL#1518),
    # slime's one-pass variance goes negative at 30.1 -> NaN.
    x = torch.full((n,), value, dtype=torch.float32)
    a = estimate(x, kind, torch.zeros(n, dtype=torch.int64), torch.arange(1, n + 1))
    assert torch.equal(torch.zeros(n), a)


def test_the_peers_rounding_noise_can_be_had():
    amplified = [
        estimate(torch.full((n,), x), "grpo", n, constant="peer").abs().max() for n in range(3, 30) for x in (0.7, 12.3)
    ]
    assert max(amplified) > 0.01


def test_a_group_of_one():
    x = torch.tensor([0.5, 2.0, 3.0])
    ids = torch.tensor([4, 9, 9])
    for kind in KINDS:
        assert estimate(x, kind, ids, torch.tensor([1, 1, 1]))[0] == 0.0
    assert estimate(x, "grpo", ids, singleton="raw")[0] == pytest.approx(0.5 / (1 + 1e-6))
    for kind in ("dr_grpo", "rloo", "opo", "gpg", "maxrl"):
        assert estimate(x, kind, ids, torch.tensor([1, 1, 1]), singleton="raw")[0] == 0.5
    with pytest.raises(ArgumentError, match="fewer than two valid members for sequences \\[0\\]"):
        estimate(x, "grpo", ids, singleton="error")
    assert torch.isfinite(estimate(x, "grpo", ids[1:].repeat(2)[:3], singleton="error")).all()


def test_two_members_under_population_and_sample_std():
    x = torch.tensor([0.0, 1.0])
    close(estimate(x, "grpo", 2, eps=0.0), [-(0.5**0.5), 0.5**0.5], 1e-6)
    close(estimate(x, "grpo", 2, eps=0.0, ddof=0), [-1.0, 1.0], 1e-6)
    # ddof = 2 leaves no degree of freedom: the std is 0, and so is the advantage
    assert torch.equal(torch.zeros(2), estimate(x, "grpo", 2, ddof=2))


def test_invalid_rewards_are_not_contagious():
    # One NaN poisons the whole batch in TRL (trl#5773).
    x = torch.tensor([1.0, torch.nan, 3.0, 0.0, torch.inf, 2.0, 5.0, torch.nan])
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    for kind in KINDS:
        a = estimate(x, kind, ids, torch.ones(8, dtype=torch.int64))
        close(a, oracle.group(x, ids, kind, lens=np.ones(8)), 1e-5)
        assert torch.equal(torch.zeros(3), a[[1, 4, 7]])
    assert estimate(x, "rloo", ids)[2] == 2.0
    stats = advantage(x, kind="grpo", group=ids).stats
    assert stats.invalid.tolist() == [False, True, False, False, True, False, False, True]
    assert stats.group_count.tolist() == [2, 2, 2, 2, 2, 2, 1, 1]


def test_a_reward_out_of_range_is_invalid_and_may_stay_raw():
    x = torch.tensor([0.2, 0.8, 7.0, -1.0])
    a = advantage(x, kind="dr_grpo", group=4, valid_range=(0.0, 1.0))
    close(a.advantages, [-0.3, 0.3, 0.0, 0.0], 1e-7)
    raw = advantage(x, kind="dr_grpo", group=4, valid_range=(0.0, 1.0), invalid="raw")
    close(raw.advantages, [-0.3, 0.3, 7.0, -1.0], 1e-6)


def test_in_stats_and_in_loss_are_two_masks():
    x = torch.tensor([0.0, 1.0, 5.0, 9.0])
    counted = torch.tensor([True, True, True, False])
    trained = torch.tensor([True, True, False, True])
    a = estimate(x, "dr_grpo", 4, in_stats=counted, in_loss=trained)
    close(a, [-2.0, -1.0, 0.0, 7.0], 1e-6)
    # The baseline of a sequence outside the statistics is the mean of all members (NeMo-RL: S / (n - 1)).
    assert estimate(torch.tensor([1.0, 1.0, 1.0, 9.0]), "rloo", 4, in_stats=counted)[3] == 8.0


def test_large_offsets_lose_only_the_rounding_of_the_inputs():
    # One-pass E[x^2] - E[x]^2 in fp32 gives a variance of 0 at 1e4.
    x = torch.tensor([0.0, 0.25, 0.5, 1.0, 0.0, 1.0])
    for offset in (2.0**14, 2.0**17, -(2.0**17)):
        for kind in CENTRED:
            assert torch.equal(estimate(x, kind, 3), estimate(x + offset, kind, 3))
    for kind in CENTRED:
        shifted = torch.randn(64, generator=torch.Generator().manual_seed(0)) + 1e5
        close(estimate(shifted, kind, 8), oracle.group(shifted.double(), np.arange(64) // 8, kind), 2e-4)


@SETTINGS
@given(st.sampled_from(KINDS), st.integers(0, 1000))
def test_permuting_sequences_permutes_advantages(kind, seed):
    x, ids, lengths = draw(21, 4, seed)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(seed))
    straight = estimate(x, kind, ids, lengths)
    close(estimate(x[order], kind, ids[order], lengths[order]), straight[order].numpy())
    close(estimate(x, kind, -3 * ids + 1, lengths), straight.numpy())


def test_properties_of_the_centred_kinds():
    x, ids, _ = draw(40, 1, 3)
    for kind in CENTRED:
        assert abs(float(estimate(x, kind, ids).sum())) < 1e-12
    close(estimate(x, "rloo", ids), (40 / 39 * estimate(x, "dr_grpo", ids)).numpy(), 1e-12)
    close(estimate(3 * x, "grpo", ids, eps=0.0), estimate(x, "grpo", ids, eps=0.0).numpy(), 1e-12)


def test_uniform_groups_by_size_are_groups_by_id():
    x, _, lengths = draw(24, 1, 4, torch.float32)
    for kind in KINDS:
        assert torch.equal(estimate(x, kind, torch.arange(24) // 6, lengths), estimate(x, kind, 6, lengths))


def test_groups_of_different_sizes_are_not_one_batch():
    # slime views ragged groups as one group of the whole batch.
    x = torch.tensor([0.0, 1.0, 10.0, 11.0, 12.0])
    close(estimate(x, "dr_grpo", torch.tensor([0, 0, 1, 1, 1])), [-0.5, 0.5, -1.0, 0.0, 1.0], 1e-6)


def test_a_group_does_not_depend_on_its_neighbours():
    x, ids, lengths = draw(64, 9, 5, torch.float32)
    for kind in ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "passk"):
        whole = estimate(x, kind, ids, lengths)
        for one in ids.unique():
            at = ids == one
            assert torch.equal(whole[at], estimate(x[at], kind, ids[at], lengths[at]))


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


def test_scale_by_the_std_of_the_batch():
    x, ids, _ = draw(20, 4, 7)
    a = estimate(x, "grpo", ids, scale="batch", eps=1e-4)
    want = oracle.group(x, ids, "dr_grpo") / (np.std(x.numpy(), ddof=1) + 1e-4)
    close(a, want)


def test_gdpo_normalises_each_reward_on_its_own():
    g = torch.Generator().manual_seed(8)
    R = torch.randn(18, 3, generator=g, dtype=torch.float64)
    R[4, 1] = torch.nan
    ids, w = torch.arange(18) % 3, torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    lengths = torch.arange(1, 19)
    summed = sum(float(w[k]) * oracle.group(R[:, k], ids, "grpo") for k in range(3))
    close(advantage(R, kind="gdpo", group=ids, reward_weights=w, whiten="none").advantages, summed)
    x = advantage(R, kind="gdpo", group=ids, reward_weights=w, lengths=lengths)
    tokens = np.repeat(summed, lengths)
    at = lengths.cumsum(0) - 1
    close(x.advantages, oracle.whiten(tokens, np.ones(len(tokens), bool))[at])
    y = advantage(R, kind="gdpo", group=ids, reward_weights=w)
    close(y.advantages, oracle.whiten(summed, np.ones(18, bool)))
    assert y.stats.group_mean.shape == (18, 3)


def test_gigpo_adds_the_advantage_among_equal_states():
    x, ids, _ = draw(24, 3, 9)
    steps, _, _ = draw(24, 3, 10)
    anchor = torch.arange(24) % 4
    pairs = [f"{a}/{b}" for a, b in zip(ids, anchor, strict=True)]
    want = oracle.group(x, ids, "dr_grpo") + 0.8 * oracle.group(steps, np.array(pairs), "dr_grpo")
    a = advantage(x, kind="gigpo", group=ids, step_rewards=steps, anchor=anchor, step_weight=0.8).advantages
    close(a, want)


def test_token_rewards_are_summed_over_valid_tokens():
    g = torch.Generator().manual_seed(11)
    r, mask = torch.randn(6, 5, generator=g), torch.rand(6, 5, generator=g) < 0.6
    x = torch.where(mask, r, 0).sum(1)
    poisoned = torch.where(mask, r, torch.nan)
    close(
        advantage(poisoned, kind="dr_grpo", group=3, mask=mask).advantages,
        advantage(x, kind="dr_grpo", group=3).advantages.numpy(),
        1e-6,
    )


def test_weights_multiply_the_result_and_zero_selects():
    x = torch.tensor([0.0, 2.0, torch.nan, 1.0])
    a = estimate(x, "dr_grpo", 4, weights=torch.tensor([2.0, 0.0, 0.0, 1.0]))
    close(a, [-2.0, 0.0, 0.0, 0.0], 1e-6)


def test_reinforce_pp_baseline_whitens_over_tokens():
    x, ids, lengths = draw(12, 3, 12)
    a = advantage(x, kind="reinforce_pp_baseline", group=ids, lengths=lengths).advantages
    tokens = np.repeat(oracle.group(x, ids, "dr_grpo"), lengths)
    white = oracle.whiten(tokens, np.ones(len(tokens), bool))
    close(a, white[lengths.cumsum(0) - 1])


@SETTINGS
@given(size=st.integers(1, 9), groups=st.integers(0, 6), seed=st.integers(0, 99))
def test_groups_of_a_size_have_the_bits_of_groups_by_ids(size, groups, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    B = size * groups
    x, member = torch.randn(3, B, generator=g), torch.rand(B, generator=g) > 0.3
    by_size = Groups.of(size, B, x.device)
    by_ids = Groups.of(torch.arange(B) // size, B, x.device)
    assert torch.equal(by_size.total(x), by_ids.total(x))
    assert torch.equal(by_size.heads(member), by_ids.heads(member))


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
