"""Advantages and what stands around them by the plain-torch backend: long scans, and what the clauses do not say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlkernel_core.definitions import advantage as oracle
from rlkernel_core.definitions.scan import scan_row
from rlkernel_core.spec.advantage_kinds import KINDS
from rlkernel_torch.direct import advantage, affine_suffix_scan, whiten


def batch(B: int = 4, T: int = 33, seed: int = 0, dtype: torch.dtype = torch.float64, keep: float = 0.7) -> Any:
    """Rewards r, values v, a bootstrap, a mask and ends of episodes."""
    g = torch.Generator().manual_seed(seed)
    r, v = torch.randn(2, B, T, generator=g, dtype=torch.float64).to(dtype).unbind()
    boot = torch.randn(B, generator=g, dtype=torch.float64).to(dtype)
    return {"r": r, "v": v, "boot": boot, "mask": torch.rand(B, T, generator=g) < keep,
            "done": torch.rand(B, T, generator=g) < 0.1}  # fmt: skip


def close(actual: Tensor, expected: Any, atol: float = 1e-10) -> None:
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=0, atol=atol)


def test_scans_of_every_length_up_to_131072_match_float64() -> None:
    for T in (1, 2, 31, 127, 128, 129, 2047, 2048, 2049, 8191, 131072):
        b = batch(1, T, T, torch.float32, keep=0.9)
        x = advantage(b["r"], kind="gae", values=b["v"], mask=b["mask"], gamma=0.99, lam=0.95)
        A, R = oracle.gae_row(b["r"][0].double().numpy(), b["v"][0].double().numpy(), b["mask"][0], 0.99, 0.95)
        close(x.advantages[0], A, 2e-5)
        close(x.returns[0], R, 2e-5)


def test_a_scan_of_131072_steps_in_fp32_loses_a_few_roundings() -> None:
    a = float(torch.tensor(0.999))  # as stored: rounding a moves y by up to 2^-25 / (1 - a)
    b = torch.randn(1, 131072, generator=torch.Generator().manual_seed(0))
    want, _ = scan_row(np.full(131072, a), b[0].double().numpy(), np.ones(131072))
    close(affine_suffix_scan(b, a).y[0], want, 1e-5 * abs(want).max())
    # a bf16 state would give -85.0 for a sum of -87.5; only the loads may be bf16
    low = b[:, :4096].bfloat16()
    assert torch.equal(affine_suffix_scan(low.float(), 1.0).y, affine_suffix_scan(low, 1.0).y)


def test_a_large_value_offset_costs_rounding_of_the_values_only() -> None:
    b = batch(2, 2048, 5, torch.float32, keep=1.0)
    b["v"], b["r"] = b["v"] + 1000, 0.01 * b["r"]
    r, v, mask, boot = (b[n].double().numpy() for n in ("r", "v", "mask", "boot"))
    for lam in (0.95, 1.0):
        x = advantage(b["r"], kind="gae", values=b["v"], gamma=1.0, lam=lam, bootstrap=b["boot"])
        want = [oracle.gae_row(r[i], v[i], mask[i] > 0, 1.0, lam, boot[i])[0] for i in range(2)]
        close(x.advantages, np.stack(want), 5e-3)


def test_values_and_baseline_are_subtracted_from_returns() -> None:
    b = batch()
    plain = advantage(b["r"], kind="returns", mask=b["mask"], gamma=0.9)
    less = advantage(b["r"], kind="returns", mask=b["mask"], gamma=0.9, values=b["v"], baseline=b["boot"])
    close(less.advantages, torch.where(b["mask"], plain.returns - b["v"] - b["boot"][:, None], 0.0), 1e-12)
    assert torch.equal(plain.returns, less.returns)


def test_an_infinite_ratio_is_clipped_not_invalid() -> None:
    b = batch(2, 9, keep=1.0)
    ratio = torch.full_like(b["r"], torch.inf)
    x = advantage(b["r"], kind="vtrace", values=b["v"], ratio=ratio, lam=0.9)
    close(x.returns, advantage(b["r"], kind="gae", values=b["v"], lam=0.9).returns)


def test_done_before_is_done_after_one_step_earlier() -> None:
    # CleanRL keeps the flag with the observation: dones[t + 1] means that step t was the last.
    b = batch(3, 20, 7, keep=1.0)
    never = torch.zeros(3, 1, dtype=torch.bool)
    before, after = (torch.cat(x, 1) for x in ([never, b["done"][:, :-1]], [b["done"][:, :-1], never]))
    kw = {"kind": "gae", "values": b["v"], "gamma": 0.9, "lam": 0.9, "bootstrap": b["boot"]}
    x = advantage(b["r"], dones=before, done_index="before", **kw)
    assert torch.equal(advantage(b["r"], dones=after, **kw).advantages, x.advantages)


def test_an_outcome_reward_stands_on_the_last_valid_token() -> None:
    b = batch(3, 12, 8)
    r = torch.zeros(3, 12, dtype=torch.float64)
    r[range(3), [int(m.nonzero()[-1]) for m in b["mask"]]] = b["boot"]
    kw = {"kind": "gae", "values": b["v"], "mask": b["mask"], "gamma": 0.9, "lam": 0.9}
    assert torch.equal(advantage(r, **kw).advantages, advantage(b["boot"], **kw).advantages)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(0, 1000))
def test_turns_and_masks_inside_packed_sequences(lengths, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(lengths)
    keep = torch.arange(T) < torch.tensor(lengths)[:, None]
    rewards, values = (torch.where(keep, torch.randn(B, T, generator=g), torch.nan) for _ in range(2))
    turns = torch.where(keep, torch.randint(0, 3, (B, T), generator=g).sort(-1).values, 2**60)
    inner = torch.rand(B, T, generator=g) < 0.6
    kw = {"kind": "gae", "gamma": 0.9, "lam": 0.8}
    a = advantage(rewards, mask=keep & inner, values=values, turns=turns, **kw)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    packed = {"values": values[keep], "turns": turns[keep], "mask": inner[keep], "reward_level": "token"}
    assert torch.equal(a.advantages[keep], advantage(rewards[keep], cu_seqlens=cu, **packed, **kw).advantages)


def test_packed_sequences_may_start_late_and_end_early() -> None:
    r = torch.arange(10.0)
    r[[0, 1, 8, 9]] = torch.nan
    x = advantage(r, kind="returns", cu_seqlens=torch.tensor([2, 5, 5, 8]))
    assert x.advantages.tolist() == [0, 0, 9, 7, 4, 18, 13, 7, 0, 0]


def test_token_output_of_packed_sequences_of_a_kind_over_groups() -> None:
    x, cu = torch.tensor([0.0, 1.0, 3.0, 3.0]), torch.tensor([0, 2, 3, 3, 6])
    packed = advantage(x, kind="dr_grpo", group=2, cu_seqlens=cu, mask=torch.ones(6).bool(), output="token").advantages
    assert packed.tolist() == [-0.5, -0.5, 0.5, 0.0, 0.0, 0.0]


def test_in_stats_of_the_whitening() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1e6, 1e6]])
    a = advantage(x, kind="reinforce_pp", gamma=0.0, in_stats=torch.tensor([True, True, False]))
    assert a.stats.mean == 2.5
    assert a.advantages[2, 0] > 1e5


def test_a_whitened_value_is_a_constant_and_may_be_left_as_it_was() -> None:
    x = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    assert not whiten(x).y.requires_grad
    assert torch.equal(x, whiten(x, apply=False).y)


def test_the_peers_rounding_noise_can_be_had() -> None:
    noise = [
        advantage(torch.full((n,), x), kind="grpo", group=n, constant="peer").advantages.abs().max()
        for n in range(3, 30)
        for x in (0.7, 12.3)
    ]
    assert max(noise) > 0.01


def test_without_a_degree_of_freedom_the_std_is_0_and_so_is_the_advantage() -> None:
    assert not advantage(torch.tensor([0.0, 1.0]), kind="grpo", group=2, ddof=2).advantages.any()


def test_leave_one_out_std_with_equal_others() -> None:
    # NeMo-RL#1518: 7 x 0.3 and one 1.0: the std of the seven equal others is 0, not 9e-5.
    x = torch.tensor([1.0] + [0.3] * 7)
    a = advantage(x, kind="grpo", group=8, leave_one_out=True, low_std="center").advantages
    close(a, oracle.nemo_grpo(x.double(), np.zeros(8)), 1e-5)
    assert a[0] == pytest.approx(0.7)


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


def test_no_value_is_read_off_the_device() -> None:
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
