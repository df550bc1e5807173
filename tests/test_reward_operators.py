"""whiten, group_filter and shape_rewards: what stands around an advantage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_core.definitions import advantage as oracle
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.shape_rewards import RunningMoments
from rlkernel_torch.direct import group_filter, shape_rewards, whiten

SETTINGS = settings(derandomize=True, deadline=None, max_examples=30)


@SETTINGS
@given(st.integers(0, 60), st.integers(0, 1000), st.sampled_from(["std_add", "var_add", "var_clamp", "threshold"]))
def test_whiten_is_its_formula(n, seed, mode):
    g = torch.Generator().manual_seed(seed)
    x, mask = torch.randn(n, generator=g, dtype=torch.float64), torch.rand(n, generator=g) < 0.7
    got = whiten(torch.where(mask, x, torch.nan), mask=mask, eps=1e-3, eps_mode=mode)
    np.testing.assert_allclose(got.y.numpy(), oracle.whiten(x, mask.numpy(), 1, 1e-3, mode), atol=1e-10)
    assert mask.sum() == got.count


def test_whitened_values_have_mean_0_and_variance_1_at_any_offset():
    for offset in (0.0, 1e2, 1e5):
        x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) + offset
        y = whiten(x, eps=0.0).y.double()
        assert abs(float(y.mean())) < 1e-6
        assert float(y.var()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("mode", ["std_add", "var_add", "var_clamp", "threshold"])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_a_constant_whitens_to_exactly_zero(mode, eps):
    for value in (30.1, 0.1, 12.3, -1e6):
        assert not whiten(torch.full((777,), value), eps=eps, eps_mode=mode).y.any()


def test_whiten_options():
    x = torch.tensor([1.0, 2.0, 4.0, torch.nan, 9.0])
    mask = torch.tensor([True, True, True, True, False])
    plain = whiten(x, mask=mask)
    assert plain.count == 3  # a valid NaN is in no moment
    assert plain.y[3] == 0.0
    scaled = whiten(x, mask=mask, shift_mean=False)
    torch.testing.assert_close(scaled.y[:3], plain.y[:3] + plain.mean)
    carried = whiten(x, mask=mask, masked_out="carry")
    torch.testing.assert_close(carried.y[4], (9.0 - plain.mean) * plain.rstd)
    only = whiten(x[:3], apply=False)
    assert torch.equal(x[:3], only.y)
    repeated = whiten(torch.tensor([1.0, 1.0, 1.0, 5.0]))
    counted = whiten(torch.tensor([1.0, 5.0]), counts=torch.tensor([3, 1]))
    torch.testing.assert_close(counted.y, repeated.y[2:])
    rows = torch.arange(6.0).view(2, 3)
    torch.testing.assert_close(whiten(rows, lengths=torch.tensor([1, 2])).mean, torch.tensor(7 / 3))
    x.requires_grad_()
    assert not whiten(x).y.requires_grad
    for empty in (torch.zeros(0), torch.zeros(3, 0)):
        assert whiten(empty).y.shape == empty.shape
    assert not whiten(torch.full((3,), torch.nan)).y.any()


def test_what_counts_no_times_is_in_no_moment():
    # A sequence without tokens came first, and its value was taken for the shift: 0.0005 instead of 0.
    constant = whiten(torch.tensor([5.0, 12.3, 12.3, 12.3]), counts=torch.tensor([0, 3, 1, 2]), eps=1e-3)
    assert constant.y[1:].tolist() == [0.0, 0.0, 0.0]
    nothing = whiten(torch.tensor([1.0, -2.0]), counts=torch.tensor([0, 0]))
    assert (nothing.y.tolist(), nothing.mean, nothing.rstd) == ([0.0, 0.0], 0.0, 0.0)


@SETTINGS
@given(st.integers(0, 30), st.integers(0, 1000), st.sampled_from(["std", "mean", "distinct"]), st.integers(1, 3))
def test_group_filter_is_a_loop_over_groups(B, seed, rule, least):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 3, (B,), generator=g) / 2
    x = torch.where(torch.rand(B, generator=g) < 0.1, torch.nan, x)
    ids, valid = torch.randint(0, 5, (B,), generator=g), torch.rand(B, generator=g) < 0.8
    got = group_filter(x, group=ids, rule=rule, valid=valid, min_members=least)
    kept = 0
    for i in ids.unique():
        at = ids == i
        v = x[at & valid & x.isfinite()].double().numpy()
        ok = (
            len(v) >= least
            and {
                "std": len(v) > 1 and v.std() > 0,
                "mean": len(v) > 0 and 0 < v.mean() < 1,
                "distinct": len(set(v)) > 1,
            }[rule]
        )
        kept += bool(ok)
        assert (got.group_keep[at] == bool(ok)).all()
        assert torch.equal(at & valid & x.isfinite() & bool(ok), at & got.keep)
    assert (kept, len(ids.unique()), int(got.keep.sum())) == (
        int(got.kept_groups),
        int(got.groups),
        int(got.kept_sequences),
    )


def test_a_constant_group_never_has_a_spread():
    for n, value in ((8, 0.7), (7, 0.9), (12, 12.3)):
        assert not group_filter(torch.full((n,), value), group=n).keep.any()


def test_rewards_whose_signals_cancel_keep_their_group():
    # SkyRL#2104: the sum of the two rewards is constant.
    R = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0], [2.0, 2.0], [1.0, 0.0], [1.0, 1.0]])
    assert group_filter(R, group=2).group_keep.tolist() == [True, True, False, False, True, True]
    assert group_filter(R, group=2, combine="all").group_keep.tolist() == [True, True, False, False, False, False]
    assert group_filter(R.sum(1), group=2).group_keep.tolist() == [False, False, False, False, True, True]


MASK = torch.tensor([[True, True, False, True], [True, False, False, False], [False, False, False, False]])


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("clamps", [(None, None), (20.0, 10.0)])
def test_kl_in_the_reward(kind, clamps):
    g = torch.Generator().manual_seed(1)
    lp, ref = torch.randn(2, 3, 4, generator=g, dtype=torch.float64).unbind()
    lp[0, 0] += 30
    poison = torch.where(MASK, lp, torch.nan)
    x = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    out = shape_rewards(
        x,
        mask=MASK,
        kl=kind,
        kl_coef=0.1,
        logprob=poison,
        ref_logprob=ref,
        kl_input_clamp=clamps[0],
        kl_clamp=clamps[1],
    )
    d = (lp - ref).numpy()
    d = d if clamps[0] is None else d.clip(-clamps[0], clamps[0])
    kl = {"k1": d, "abs": abs(d), "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[kind]
    kl = np.where(MASK, kl if clamps[1] is None else kl.clip(-clamps[1], clamps[1]), 0.0)
    want = -0.1 * kl
    want[0, 3] += 1.0
    want[1, 0] -= 2.0
    np.testing.assert_allclose(out.rewards.numpy(), want, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(out.kl.numpy(), kl.sum(1), rtol=1e-12)


def test_k3_keeps_its_precision_near_zero():
    d = torch.tensor([[1e-3, -1e-4]])
    out = shape_rewards(torch.zeros(1), kl="k3", kl_coef=1.0, logprob=d, ref_logprob=torch.zeros(1, 2))
    np.testing.assert_allclose(-out.rewards[0].numpy(), [0.5e-6, 0.5e-8], rtol=2e-3)


def test_overlong_penalty_is_linear_over_the_buffer():
    x, lengths = torch.zeros(5), torch.tensor([5, 80, 90, 100, 120])
    kw = {"lengths": lengths, "max_length": 100, "overlong_buffer": 20, "overlong_factor": 0.5}
    capped = shape_rewards(x, **kw)
    np.testing.assert_allclose(capped.rewards.numpy(), [0, 0, -0.25, -0.5, -0.5])
    np.testing.assert_allclose(capped.penalty.numpy(), [0, 0, -0.25, -0.5, -0.5])
    # DAPO's own code keeps growing beyond the limit; OpenRLHF stops there.
    np.testing.assert_allclose(shape_rewards(x, overlong_cap=False, **kw).rewards.numpy(), [0, 0, -0.25, -0.5, -1.0])


def test_clip_then_normalise():
    x = torch.tensor([-9.0, 1.0, 2.0, 30.0, torch.nan])
    out = shape_rewards(x, clip=(-5.0, 5.0), normalise="batch", eps=0.0).rewards
    v = np.array([-5.0, 1.0, 2.0, 5.0])
    np.testing.assert_allclose(out[:4].numpy(), (v - v.mean()) / v.std(ddof=1), rtol=1e-6)
    assert out[4].isnan()  # the advantage sees an invalid sequence
    scaled = shape_rewards(x[:4], clip=(-5.0, 5.0), normalise="batch", center=False, eps=0.0).rewards
    np.testing.assert_allclose(scaled.numpy(), v / v.std(ddof=1), rtol=1e-6)


def test_running_state_is_explicit_and_merges_batches():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(40, generator=g) + 1000
    state = None
    for part in x.split((7, 0, 30, 3)):
        before = state
        kept = None if state is None else [t.clone() for t in vars(state).values()]
        out = shape_rewards(part, normalise="running", running=state)
        state = out.running
        if kept is not None:
            assert all(torch.equal(a, b) for a, b in zip(kept, vars(before).values(), strict=True))
    assert isinstance(state, RunningMoments)
    torch.testing.assert_close(state.mean, x.mean())
    torch.testing.assert_close(state.m2 / 39, x.var(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.rewards, (x[37:] - x.mean()) / x.std(), rtol=1e-4, atol=1e-4)


def test_packed_rewards_stand_on_the_last_token():
    cu, mask = torch.tensor([0, 3, 3, 5]), torch.tensor([True, True, False, True, True])
    out = shape_rewards(torch.tensor([1.0, 2.0, 3.0]), cu_seqlens=cu, mask=mask, output="token")
    assert out.rewards.tolist() == [0.0, 1.0, 0.0, 0.0, 3.0]


X = torch.zeros(3)
REFUSED = [
    (shape_rewards, "logprob", X, {"kl": "k1", "kl_coef": 0.1}),
    (shape_rewards, "kl_coef", X, {"kl_coef": 0.1}),
    (shape_rewards, "kl", X, {"kl": "k4"}),
    (shape_rewards, "overlong_buffer", X, {"max_length": 10, "lengths": torch.ones(3).long()}),
    (shape_rewards, "lengths", X, {"max_length": 10, "overlong_buffer": 2}),
    (shape_rewards, "clip", X, {"clip": (1.0, 0.0)}),
    (shape_rewards, "clip", torch.zeros(3, 4), {"clip": (0.0, 1.0)}),
    (shape_rewards, "output", X, {"output": "token"}),
    (shape_rewards, "running", X, {"running": RunningMoments(X[0], X[0], X[0])}),
    (group_filter, "group", X, {"group": 2}),
    (group_filter, "rule", X, {"group": 3, "rule": "var"}),
    (group_filter, "low", X, {"group": 3, "low": 1.0, "high": 1.0}),
    (group_filter, "valid", X, {"group": 3, "valid": torch.ones(3)}),
    (whiten, "mask and lengths", torch.zeros(3, 2), {"mask": torch.ones(3, 2).bool(), "lengths": torch.ones(3).long()}),
    (whiten, "mask", X, {"mask": torch.ones(4).bool()}),
    (whiten, "eps", X, {"eps": -1.0}),
    (whiten, "eps_mode", X, {"eps_mode": "add"}),
]


@pytest.mark.parametrize(("operator", "argument", "x", "kw"), REFUSED)
def test_a_bad_argument_is_named(operator, argument, x, kw):
    with pytest.raises(ArgumentError) as error:
        operator(x, **kw)
    assert argument == error.value.argument
