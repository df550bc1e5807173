"""Advantages over time by the plain-torch backend: long scans, and what its clauses do not say."""

from __future__ import annotations

import torch

from rlkernel_core.definitions import advantage as oracle
from rlkernel_torch.direct import advantage
from tests.advantage_batches import batch, close, gae_rows


def test_scans_of_every_length_up_to_131072_match_float64():
    for T in (1, 2, 31, 127, 128, 129, 2047, 2048, 2049, 8191, 131072):
        b = batch(1, T, T, torch.float32, keep=0.9)
        x = advantage(b["r"], kind="gae", values=b["v"], mask=b["mask"], gamma=0.99, lam=0.95)
        A, R = oracle.gae_row(b["r"][0].double().numpy(), b["v"][0].double().numpy(), b["mask"][0], 0.99, 0.95)
        close(x.advantages[0], A, 2e-5)
        close(x.returns[0], R, 2e-5)


def test_a_large_value_offset_costs_rounding_of_the_values_only():
    b = batch(2, 2048, 5, torch.float32, keep=1.0)
    b["v"], b["r"] = b["v"] + 1000, 0.01 * b["r"]
    for lam in (0.95, 1.0):
        x = advantage(b["r"], kind="gae", values=b["v"], gamma=1.0, lam=lam, bootstrap=b["boot"])
        close(x.advantages, gae_rows(b, 1.0, lam, boot=b["boot"])[0], 5e-3)


def test_values_and_baseline_are_subtracted_from_returns():
    b = batch()
    plain = advantage(b["r"], kind="returns", mask=b["mask"], gamma=0.9)
    less = advantage(b["r"], kind="returns", mask=b["mask"], gamma=0.9, values=b["v"], baseline=b["boot"])
    want = torch.where(b["mask"], plain.returns - b["v"] - b["boot"][:, None], 0.0)
    close(less.advantages, want, 1e-12)
    assert torch.equal(plain.returns, less.returns)


def test_an_infinite_ratio_is_clipped_not_invalid():
    b = batch(2, 9, keep=1.0)
    ratio = torch.full_like(b["r"], torch.inf)
    x = advantage(b["r"], kind="vtrace", values=b["v"], ratio=ratio, lam=0.9)
    y = advantage(b["r"], kind="gae", values=b["v"], lam=0.9)
    close(x.returns, y.returns, 1e-10)


def test_done_before_is_done_after_one_step_earlier():
    # CleanRL keeps the flag with the observation: dones[t + 1] means that step t was the last.
    b = batch(3, 20, 7, keep=1.0)
    after = b["done"]
    before = torch.cat([torch.zeros(3, 1, dtype=torch.bool), after[:, :-1]], 1)
    after = torch.cat([after[:, :-1], torch.zeros(3, 1, dtype=torch.bool)], 1)
    kw = {"kind": "gae", "values": b["v"], "gamma": 0.9, "lam": 0.9, "bootstrap": b["boot"]}
    x = advantage(b["r"], dones=before, done_index="before", **kw)
    assert torch.equal(advantage(b["r"], dones=after, **kw).advantages, x.advantages)


def test_an_outcome_reward_stands_on_the_last_valid_token():
    b = batch(3, 12, 8)
    last = [int(m.nonzero()[-1]) for m in b["mask"]]
    r = torch.zeros(3, 12, dtype=torch.float64)
    r[range(3), last] = b["boot"]
    kw = {"kind": "gae", "values": b["v"], "mask": b["mask"], "gamma": 0.9, "lam": 0.9}
    assert torch.equal(advantage(r, **kw).advantages, advantage(b["boot"], **kw).advantages)


def test_remax_subtracts_the_greedy_reward():
    b = batch(3, 8, 11)
    x = advantage(b["r"], kind="remax", baseline=b["boot"], mask=b["mask"])
    togo = torch.where(b["mask"], b["r"], 0).flip(1).cumsum(1).flip(1)
    close(x.advantages, torch.where(b["mask"], togo - b["boot"][:, None], 0))
    y = advantage(b["boot"], kind="remax", baseline=b["boot"] * 0.5)
    assert torch.equal(b["boot"] * 0.5, y.advantages)
