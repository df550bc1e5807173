"""Advantages in every layout, under poison and at the edges; whitening."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rlkernel_core.definitions import advantage as oracle
from rlkernel_core.spec.advantage_kinds import KINDS
from rlkernel_torch.direct import advantage

SETTINGS = settings(derandomize=True, deadline=None, max_examples=25)
STEPS = {
    "gae": ("values",),
    "returns": (),
    "vtrace": ("values", "ratio"),
    "retrace": ("values", "ratio", "q_values"),
    "reinforce_pp": (),
}


def ragged(lengths, seed=0, width=None, dtype=torch.float32):
    """The same tokens padded and packed; padding holds NaN and the turns of a far-off conversation."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    B, T = len(lengths), width or int(lengths.max()) if len(lengths) else 0
    keep = torch.arange(T) < lengths[:, None]
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    padded, packed = {}, {}
    for name in ("rewards", "values", "ratio", "q_values"):
        x = torch.randn(B, T, generator=g).to(dtype)
        padded[name] = torch.where(keep, x.exp() if name == "ratio" else x, torch.nan)
        packed[name] = padded[name][keep]
    turns = torch.randint(0, 3, (B, T), generator=g).sort(-1).values
    padded["turns"], packed["turns"] = torch.where(keep, turns, 2**60), turns[keep]
    return padded, packed, keep, lengths, cu


@SETTINGS
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from(list(STEPS)))
def test_layouts_agree_bitwise(lengths, seed, kind):
    padded, packed, keep, lens, cu = ragged(lengths, seed, width=41)
    kw = {"gamma": 0.97} | ({} if kind in {"returns", "reinforce_pp"} else {"lam": 0.9})
    kw |= {"whiten": "none"} if kind == "reinforce_pp" else {"bootstrap": torch.ones(len(lens))}
    tokens = {n: padded[n] for n in STEPS[kind]}
    a = advantage(padded["rewards"], kind=kind, mask=keep, **tokens, **kw)
    b = advantage(padded["rewards"], kind=kind, lengths=lens, **tokens, **kw)
    c = advantage(
        packed["rewards"], kind=kind, cu_seqlens=cu, reward_level="token", **{n: packed[n] for n in STEPS[kind]}, **kw
    )
    assert torch.equal(a.advantages, b.advantages)
    assert torch.equal(a.advantages[keep], c.advantages)
    assert torch.equal(a.returns[keep], c.returns)


@SETTINGS
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(0, 1000))
def test_turns_and_masks_inside_packed_sequences(lengths, seed):
    padded, packed, keep, _, cu = ragged(lengths, seed)
    inner = torch.rand(keep.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    kw = {"kind": "gae", "gamma": 0.9, "lam": 0.8}
    a = advantage(padded["rewards"], mask=keep & inner, values=padded["values"], turns=padded["turns"], **kw)
    b = advantage(
        packed["rewards"], mask=inner[keep], cu_seqlens=cu, values=packed["values"], turns=packed["turns"],
        reward_level="token", **kw,
    )  # fmt: skip
    assert torch.equal(a.advantages[keep], b.advantages)


def test_packed_sequences_may_start_late_and_end_early():
    r = torch.arange(10.0)
    r[[0, 1, 8, 9]] = torch.nan
    x = advantage(r, kind="returns", cu_seqlens=torch.tensor([2, 5, 5, 8]))
    assert x.advantages.tolist() == [0, 0, 9, 7, 4, 18, 13, 7, 0, 0]


def test_a_sequence_does_not_depend_on_the_batch_or_its_padding():
    padded, _, keep, lens, _ = ragged([7, 30, 19, 1], 3, width=33)
    whole = advantage(padded["rewards"], kind="gae", values=padded["values"], mask=keep, lam=0.9).advantages
    for i, n in enumerate(lens):
        alone = advantage(padded["rewards"][i : i + 1, :n], kind="gae", values=padded["values"][i : i + 1, :n], lam=0.9)
        assert torch.equal(whole[i, :n], alone.advantages[0])


def test_what_masked_positions_hold_changes_nothing():
    padded, _, keep, _, _ = ragged([5, 9, 2], 4)
    for kind, names in STEPS.items():
        for poison in (torch.nan, torch.inf, -torch.inf, 1e38):
            tokens = {n: torch.where(keep, padded[n], poison) for n in ("rewards", *names)}
            clean = {n: torch.where(keep, padded[n], 0.0) for n in ("rewards", *names)}
            a = advantage(kind=kind, mask=keep, **tokens)
            assert torch.equal(advantage(kind=kind, mask=keep, **clean).advantages, a.advantages)
            assert not a.stats.invalid.any()
            assert (a.advantages[~keep] == 0).all()


def test_a_sequence_with_nan_is_invalid_and_alone_in_it():
    padded, packed, keep, _, cu = ragged([6, 8, 5], 5)
    for name in ("rewards", "values"):
        bad = {n: x.clone() for n, x in packed.items()}
        bad[name][8] = torch.nan  # in the second sequence
        a = advantage(bad["rewards"], kind="gae", values=bad["values"], cu_seqlens=cu, lam=0.9, whiten="global")
        assert a.stats.invalid.tolist() == [False, True, False]
        assert (a.advantages[6:14] == 0).all()
        left = advantage(
            packed["rewards"], kind="gae", values=packed["values"], cu_seqlens=cu, lam=0.9, whiten="global",
            in_loss=torch.tensor([True, False, True]),
        )  # fmt: skip
        assert torch.equal(left.advantages, a.advantages)
    outcome = torch.tensor([1.0, torch.nan, 0.0])
    a = advantage(outcome, kind="gae", values=padded["values"], mask=keep, lam=0.9)
    assert a.stats.invalid.tolist() == [False, True, False]
    assert (a.advantages[1] == 0).all()


def test_strided_views_give_the_bits_of_contiguous_tensors():
    g = torch.Generator().manual_seed(6)
    r, v, m = torch.randn(9, 6, 2, generator=g), torch.randn(9, 14, generator=g), torch.rand(6, 9, generator=g) < 0.7
    args = {"rewards": r[..., 0].t(), "values": v.t()[1:7], "mask": m}
    a = advantage(kind="gae", lam=0.9, **args)
    b = advantage(kind="gae", lam=0.9, **{n: x.contiguous() for n, x in args.items()})
    assert torch.equal(b.advantages, a.advantages)


def test_nothing_to_do():
    empty = torch.zeros(0)
    for kind in ("grpo", "rloo", "passk", "opo"):
        kw = {"lengths": torch.zeros(0, dtype=torch.int64)} if kind == "opo" else {}
        assert advantage(empty, kind=kind, group=4, **kw).advantages.shape == (0,)
    for shape in ((0, 5), (3, 0), (0, 0)):
        x = torch.zeros(shape)
        a = advantage(x, kind="gae", values=x, whiten="global", turns=x.long(), dones=x.bool(), bootstrap=x.sum(1))
        assert a.advantages.shape == shape
    for cu in ([0], [0, 0, 0]):
        a = advantage(empty, kind="returns", cu_seqlens=torch.tensor(cu), mask=empty.bool(), reward_level="token")
        assert a.advantages.shape == (0,)
    none = torch.zeros(2, 4, dtype=torch.bool)
    poison = torch.full((2, 4), torch.nan)
    a = advantage(poison, kind="gae", values=poison, mask=none, whiten="global")
    assert torch.equal(torch.zeros(2, 4), a.advantages)
    assert a.stats.count == 0
    assert torch.equal(torch.zeros(2), advantage(poison[:, 0], kind="grpo", group=2).advantages)


def test_results_are_constants_and_inputs_stay_as_they_are():
    r, v = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    before = r.detach().clone(), v.detach().clone()
    a = advantage(r, kind="gae", values=v, lam=0.9, whiten="global")
    b = advantage(r[:, 0], kind="grpo", group=2)
    tensors = [a.advantages, a.returns, b.advantages, *(x for x in vars(b.stats).values() if x is not None)]
    assert not any(t.requires_grad for t in tensors)
    assert torch.equal(before[0], r.detach())
    assert torch.equal(before[1], v.detach())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float16])
def test_any_real_dtype_of_rewards(dtype):
    x = torch.tensor([0, 1, 1, 0, 1, 1]).to(dtype)
    a = advantage(x, kind="grpo", group=3).advantages
    assert a.dtype == torch.float32
    assert torch.equal(advantage(x.float(), kind="grpo", group=3).advantages, a)


def test_token_output_of_a_kind_over_groups():
    x, keep = torch.tensor([0.0, 1.0, 3.0, 3.0]), torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1]]).bool()
    a = advantage(x, kind="dr_grpo", group=2, mask=keep, output="token").advantages
    assert torch.equal(torch.where(keep, torch.tensor([-0.5, 0.5, 0.0, 0.0])[:, None], 0.0), a)
    cu = torch.tensor([0, 2, 3, 3, 6])
    packed = advantage(x, kind="dr_grpo", group=2, cu_seqlens=cu, mask=torch.ones(6).bool(), output="token").advantages
    assert packed.tolist() == [-0.5, -0.5, 0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", ["std_add", "var_add", "var_clamp", "threshold"])
def test_whitening_is_masked_two_pass_and_may_be_deferred(mode):
    padded, _, keep, _, _ = ragged([17, 40, 3], 7)
    kw = {"kind": "returns", "mask": keep, "whiten_eps": 1e-3, "whiten_eps_mode": mode, "whiten_ddof": 0}
    plain = advantage(padded["rewards"], kind="returns", mask=keep)
    white = advantage(padded["rewards"], whiten="global", **kw)
    want = oracle.whiten(plain.advantages.double(), keep.numpy(), 0, 1e-3, mode)
    np.testing.assert_allclose(white.advantages.numpy(), want, atol=2e-6)
    later = advantage(padded["rewards"], whiten="defer", **kw)
    assert torch.equal(plain.advantages, later.advantages)
    applied = torch.where(keep, (later.advantages - later.stats.mean) * later.stats.rstd, 0.0)
    torch.testing.assert_close(white.advantages, applied, rtol=1e-6, atol=1e-6)
    assert white.stats.count == 60
    assert torch.equal(plain.returns, white.returns)


def test_a_constant_batch_whitens_to_exactly_zero():
    # slime: constant advantage 30.1 -> a variance of -3.7e-4 -> NaN; 0.1 -> 1 / std = 10500.
    for value in (30.1, 0.1, 12.3, -7e5):
        r = torch.zeros(3, 7)
        r[:, -1] = value
        a = advantage(r, kind="reinforce_pp", mask=torch.ones(3, 7, dtype=torch.bool))
        assert torch.equal(torch.zeros(3, 7), a.advantages)


def test_in_stats_of_the_whitening():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1e6, 1e6]])
    a = advantage(x, kind="reinforce_pp", gamma=0.0, in_stats=torch.tensor([True, True, False]))
    assert a.stats.mean == 2.5
    assert a.advantages[2, 0] > 1e5


def test_no_value_is_read_off_the_device():
    # A fake tensor has no values: .item(), bool() or a shape that depends on data raises.
    with FakeTensorMode():
        r = torch.empty(6, 9)
        ids, seq, mask = torch.empty(6, dtype=torch.int64), torch.empty(6), torch.empty(6, 9, dtype=torch.bool)
        tokens = {"values": r, "ratio": r, "logprob": r, "sum_pi_squared": r, "baseline": seq}
        rest = {"group": ids, "step_rewards": seq, "anchor": ids}
        for kind, k in KINDS.items():
            x = torch.empty(6, 2) if kind == "gdpo" else seq
            args = {n: (tokens | rest)[n] for n in k.requires}
            a = advantage(x, kind=kind, mask=mask, whiten="global", in_stats=seq > 0, in_loss=seq > 0, **args)
            want = (6, 9) if k.family != "group" and kind != "remax" else (6,)
            assert tuple(a.advantages.shape) == want
        cu = torch.empty(4, dtype=torch.int64)
        a = advantage(torch.empty(9), kind="gae", values=torch.empty(9), cu_seqlens=cu, turns=torch.empty(9).long())
        assert tuple(a.advantages.shape) == (9,)
