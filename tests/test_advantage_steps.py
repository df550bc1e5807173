"""Advantages over time: GAE, returns, V-trace, Retrace, turns, against loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel_core.definitions import advantage as oracle
from rlkernel_torch.direct import advantage
from tests.advantage_batches import batch, close, gae_rows, poisoned, rows

SETTINGS = settings(derandomize=True, deadline=None, max_examples=25)


@SETTINGS
@given(
    st.integers(1, 70),
    st.integers(0, 10_000),
    st.sampled_from([(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5), (1.0, 0.0)]),
    st.booleans(),
    st.booleans(),
)
def test_gae_is_the_recursion_over_valid_tokens(T, seed, gl, with_boot, with_done):
    b = batch(3, T, seed)
    boot, done = b["boot"] if with_boot else None, b["done"] if with_done else None
    x = advantage(
        poisoned(b["r"], b["mask"]),
        kind="gae",
        values=poisoned(b["v"], b["mask"]),
        mask=b["mask"],
        gamma=gl[0],
        lam=gl[1],
        bootstrap=boot,
        dones=done,
    )
    A, R = gae_rows(b, *gl, boot=boot, done=done)
    close(x.advantages, A)
    close(x.returns, R)


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


def test_lambda_per_row_and_per_token_weigh_the_next_state():
    b = batch(4, 40, 1)
    row = b["lam"][:, 0].contiguous()
    for lam in (row, b["lam"]):
        x = advantage(b["r"], kind="gae", values=b["v"], mask=b["mask"], gamma=0.97, lam=lam, bootstrap=b["boot"])
        close(x.advantages, gae_rows(b, 0.97, lam, boot=b["boot"])[0])
    equal = advantage(b["r"], kind="gae", values=b["v"], gamma=0.9, lam=torch.full((4, 40), 0.8, dtype=torch.float64))
    close(equal.advantages, advantage(b["r"], kind="gae", values=b["v"], gamma=0.9, lam=0.8).advantages, 1e-12)


def test_decoupled_lambda_uses_one_for_each_output():
    b = batch()
    x = advantage(b["r"], kind="gae", values=b["v"], mask=b["mask"], gamma=0.9, lam=0.3, lam_value=1.0)
    policy = advantage(b["r"], kind="gae", values=b["v"], mask=b["mask"], gamma=0.9, lam=0.3)
    critic = advantage(b["r"], kind="gae", values=b["v"], mask=b["mask"], gamma=0.9, lam=1.0)
    assert torch.equal(policy.advantages, x.advantages)
    assert torch.equal(critic.returns, x.returns)


def test_length_adaptive_lambda_counts_valid_tokens():
    b = batch()
    alpha = 0.05
    n = b["mask"].sum(1).double()
    lam = 1 - 1 / (alpha * n).clamp(min=1)
    x = advantage(b["r"], kind="gae", values=b["v"], mask=b["mask"], length_adaptive=alpha, lam_value=1.0)
    y = advantage(b["r"], kind="gae", values=b["v"], mask=b["mask"], lam=lam, lam_value=1.0)
    assert torch.equal(y.advantages, x.advantages)


def test_limits_of_gamma_and_lambda():
    b = batch(keep=1.0)
    r, v, boot = b["r"], b["v"], b["boot"]
    nxt = torch.cat([v[:, 1:], boot[:, None]], 1)
    togo = r.flip(1).cumsum(1).flip(1) + boot[:, None]
    gae = lambda g, lam: advantage(r, kind="gae", values=v, gamma=g, lam=lam, bootstrap=boot).advantages  # noqa: E731
    close(gae(1.0, 1.0), togo - v)
    close(gae(0.9, 0.0), r + 0.9 * nxt - v)
    close(gae(0.0, 0.7), r - v)


def test_a_scan_may_be_split_at_any_token():
    b = batch(3, 50, 2, keep=1.0)
    kw = {"kind": "returns", "gamma": 0.97}
    whole = advantage(b["r"], bootstrap=b["boot"], **kw)
    for cut in (1, 17, 49):
        right = advantage(b["r"][:, cut:], bootstrap=b["boot"], **kw)
        left = advantage(b["r"][:, :cut], bootstrap=right.returns[:, 0], **kw)
        close(torch.cat([left.returns, right.returns], 1), whole.returns, 1e-12)


def test_dropping_masked_tokens_changes_nothing():
    # OpenRLHF, TRL, ROLL, SkyRL and slime let masked tokens take part (ROLL#447).
    b = batch(1, 60, 3)
    m = b["mask"][0]
    for kind, more in (
        ("gae", {"values": "v", "lam": 0.9}),
        ("returns", {}),
        ("vtrace", {"values": "v", "ratio": "ratio", "lam": 0.9}),
        ("retrace", {"values": "v", "q_values": "q", "ratio": "ratio", "lam": 0.9}),
    ):
        extra = {k: b[x] if isinstance(x, str) else x for k, x in more.items()}
        compact = {k: x[:, m] if isinstance(x, torch.Tensor) else x for k, x in extra.items()}
        masked = advantage(b["r"], kind=kind, mask=b["mask"], gamma=0.97, dones=b["done"], **extra)
        packed = advantage(b["r"][:, m], kind=kind, gamma=0.97, dones=b["done"][:, m], **compact)
        close(masked.advantages[:, m], packed.advantages, 1e-12)
        close(masked.returns[:, m], packed.returns, 1e-12)


def test_returns_and_what_masked_tokens_do_to_time():
    b = batch(4, 30, 4)
    for masked in ("skip", "step", "reset"):
        x = advantage(b["r"], kind="returns", mask=b["mask"], gamma=0.9, dones=b["done"], masked_time=masked)
        G = np.stack(
            [oracle.returns_row(b["r"][i].numpy(), b["mask"][i], 0.9, 0.0, b["done"][i], masked) for i in range(4)]
        )
        close(x.advantages, G)


def test_values_and_baseline_are_subtracted_from_returns():
    b = batch()
    plain = advantage(b["r"], kind="returns", mask=b["mask"], gamma=0.9)
    less = advantage(b["r"], kind="returns", mask=b["mask"], gamma=0.9, values=b["v"], baseline=b["boot"])
    want = torch.where(b["mask"], plain.returns - b["v"] - b["boot"][:, None], 0.0)
    close(less.advantages, want, 1e-12)
    assert torch.equal(plain.returns, less.returns)


@SETTINGS
@given(st.integers(1, 50), st.integers(0, 1000), st.sampled_from([None, 0.7, 1.0]), st.sampled_from([None, 0.5]))
def test_vtrace_and_retrace_match_their_papers(T, seed, rho_bar, c_bar):
    b = batch(3, T, seed)
    top = [np.inf if x is None else x for x in (rho_bar, c_bar)]
    kw = {"mask": b["mask"], "gamma": 0.97, "lam": 0.9, "bootstrap": b["boot"], "dones": b["done"]}
    v, ratio = poisoned(b["v"], b["mask"]), poisoned(b["ratio"], b["mask"])
    x = advantage(b["r"], kind="vtrace", values=v, ratio=ratio, ratio_clip=rho_bar, trace_clip=c_bar, **kw)
    n = {k: t.numpy() for k, t in b.items()}
    A, vs = rows(
        lambda i: oracle.vtrace_row(
            n["r"][i], n["v"][i], n["mask"][i], n["ratio"][i], 0.97, 0.9, *top, n["boot"][i], n["done"][i]
        ),
        3,
    )
    close(x.advantages, A, 1e-9)
    close(x.returns, vs, 1e-9)
    y = advantage(b["r"], kind="retrace", values=v, q_values=b["q"], ratio=ratio, trace_clip=c_bar, **kw)
    A, Q = rows(
        lambda i: oracle.retrace_row(
            n["r"][i], n["v"][i], n["q"][i], n["mask"][i], n["ratio"][i], 0.97, 0.9, top[1], n["boot"][i], n["done"][i]
        ),
        3,
    )
    close(y.advantages, A, 1e-9)
    close(y.returns, Q, 1e-9)


def test_an_infinite_ratio_is_clipped_not_invalid():
    b = batch(2, 9, keep=1.0)
    ratio = torch.full_like(b["r"], torch.inf)
    x = advantage(b["r"], kind="vtrace", values=b["v"], ratio=ratio, lam=0.9)
    y = advantage(b["r"], kind="gae", values=b["v"], lam=0.9)
    close(x.returns, y.returns, 1e-10)


@SETTINGS
@given(st.integers(1, 40), st.integers(0, 1000))
def test_a_turn_is_one_step(T, seed):
    b = batch(3, T, seed)
    x = advantage(
        b["r"], kind="gae", values=b["v"], mask=b["mask"], turns=b["turns"], gamma=0.9, lam=0.8, bootstrap=b["boot"]
    )
    n = {k: t.numpy() for k, t in b.items()}
    A, R = rows(
        lambda i: oracle.turn_gae_row(n["r"][i], n["v"][i], n["mask"][i], n["turns"][i], 0.9, 0.8, n["boot"][i]),
        3,
    )
    close(x.advantages, A)
    close(x.returns, R)


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


def test_masked_positions_can_carry_the_next_advantage():
    b = batch(3, 25, 9)
    x = advantage(b["r"], kind="gae", values=b["v"], mask=b["mask"], gamma=0.9, lam=0.9, masked_out="carry")
    A, R = gae_rows(b, 0.9, 0.9, carry=True)
    close(x.advantages, A)
    close(x.returns, R)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_dtypes_give_the_fp32_result_of_their_values(dtype):
    b = batch(2, 300, 10, dtype, keep=1.0)
    x = advantage(b["r"], kind="gae", values=b["v"], gamma=1.0, lam=1.0)
    y = advantage(b["r"].float(), kind="gae", values=b["v"].float(), gamma=1.0, lam=1.0)
    assert x.advantages.dtype == torch.float32
    assert torch.equal(y.advantages, x.advantages)


def test_remax_subtracts_the_greedy_reward():
    b = batch(3, 8, 11)
    x = advantage(b["r"], kind="remax", baseline=b["boot"], mask=b["mask"])
    togo = torch.where(b["mask"], b["r"], 0).flip(1).cumsum(1).flip(1)
    close(x.advantages, torch.where(b["mask"], togo - b["boot"][:, None], 0))
    y = advantage(b["boot"], kind="remax", baseline=b["boot"] * 0.5)
    assert torch.equal(b["boot"] * 0.5, y.advantages)


def test_reinforce_pp_is_whitened_reward_to_go():
    b = batch(4, 16, 12)
    x = advantage(b["r"], kind="reinforce_pp", mask=b["mask"], gamma=0.95)
    G = np.stack([oracle.returns_row(b["r"][i].numpy(), b["mask"][i], 0.95) for i in range(4)])
    close(x.advantages, oracle.whiten(G, b["mask"]))
    close(x.returns, G)


def test_otb_matches_its_definition():
    b = batch(6, 9, 13)
    m = b["mask"].numpy()
    logp, s2 = -b["ratio"], b["lam"]
    gid = torch.tensor([2, 0, 2, 5, 0, 2])
    x = advantage(
        poisoned(b["r"], b["mask"]), kind="otb", group=gid, mask=b["mask"], eps=1e-8,
        logprob=poisoned(logp, b["mask"]), sum_pi_squared=poisoned(s2, b["mask"]),
    )  # fmt: skip
    A, G = oracle.otb(np.where(m, b["r"], 0), m, np.where(m, logp, 0), np.where(m, s2, 0), gid)
    close(x.advantages, A, 1e-9)
    close(x.returns, np.where(m, G, 0), 1e-9)
