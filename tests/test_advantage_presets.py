"""Presets against what each framework computes, as its formulas say; its own numbers: test_peer_advantages.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkernel_core.definitions import advantage as oracle
from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.advantage_kinds import KINDS
from rlkernel_core.spec.advantage_presets import PRESETS, advantage_preset
from rlkernel_torch.direct import advantage

X = torch.tensor([0.0, 1.0, 0.25, 1.0, 0.5, 0.5, 0.5, 0.75])
IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
R = torch.tensor([[0.5, -1.0, 2.0, 0.25, 1.0], [1.0, 0.5, -0.5, 0.0, 3.0]])
V = torch.tensor([[0.1, 0.9, -0.4, 0.3, 0.2], [0.6, -0.1, 0.7, 0.5, -0.3]])
MASK = torch.tensor([[True, True, False, True, True], [True, False, True, True, False]])
LENGTHS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def close(actual, expected, atol=2e-6):
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=0, atol=atol)


def of(framework, estimator, rewards=X, **kw):
    return advantage(rewards, **kw, **advantage_preset(framework, estimator)).advantages


def test_every_preset_is_a_call_that_the_operator_takes():
    spec = OPERATORS["advantage"]
    for framework, rows in PRESETS.items():
        for estimator, preset in rows.items():
            assert set(preset.kwargs) <= KINDS[preset.kind].uses, (framework, estimator)
            assert set(preset.kwargs) <= set(spec.parameters)
            assert preset.source


def test_eps_and_population_std_tell_frameworks_apart():
    x, ids = X[:4].double(), np.zeros(4)
    for framework, eps in (("verl", 1e-6), ("trl", 1e-4), ("slime", 1e-6), ("areal", 1e-5), ("skyrl", 1e-6)):
        close(of(framework, "grpo", x, group=4), oracle.group(x, ids, "grpo", eps=eps), 1e-12)
    close(of("openrlhf", "group_norm", x, group=4), oracle.group(x, ids, "grpo", eps=1e-9), 1e-12)
    close(of("nemo_rl", "grpo", x, group=4), oracle.nemo_grpo(x, ids), 1e-12)


def test_tritonforge_keeps_invalid_rewards_raw():
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.rand(16, generator=g, dtype=torch.float64) * 1.6 - 0.3
        ids = torch.randint(0, 5, (16,), generator=g)
        close(of("tritonforge", "grpo", x, group=ids), oracle.tritonforge(x, ids), 1e-12)


def test_verl_gae_whitens_what_it_carries_into_the_padding():
    a = of("verl", "gae", R.double(), values=V.double(), mask=MASK, gamma=0.9, lam=0.8)
    rows = [oracle.gae_row(R[i].double().numpy(), V[i].double().numpy(), MASK[i], 0.9, 0.8, carry=True) for i in (0, 1)]
    A = np.stack([x for x, _ in rows])
    valid = A[MASK.numpy()]
    close(a, (A - valid.mean()) / np.sqrt(valid.var(ddof=1) + 1e-8), 1e-7)
    assert (a[~MASK] != 0).all()


def test_openrlhf_takes_masked_tokens_for_steps():
    m = MASK.double().numpy()
    rows = [
        oracle.gae_masked_steps_row(R[i].double().numpy(), V[i].double().numpy(), m[i], 0.9, 0.8)[0] for i in (0, 1)
    ]
    a = of("openrlhf", "gae", R.double(), values=V.double(), mask=MASK, gamma=0.9, lam=0.8)
    close(a, oracle.whiten(np.stack(rows), MASK.numpy(), 0, 1e-8, "var_clamp"), 1e-7)
    G = np.stack([oracle.returns_row(R[i].double().numpy(), MASK[i], 0.9, masked="step") for i in (0, 1)])
    b = of("openrlhf", "reinforce", R.double(), mask=MASK, gamma=0.9)
    close(b, oracle.whiten(G, MASK.numpy(), 0, 1e-8, "var_clamp"), 1e-7)


def test_verl_of_january_restarts_the_return_at_masked_tokens():
    for framework, masked in (("verl", "skip"), ("verl_jan26", "reset")):
        G = np.stack([oracle.returns_row(R[i].double().numpy(), MASK[i], 0.9, masked=masked) for i in (0, 1)])
        a = of(framework, "reinforce_plus_plus", R.double(), mask=MASK, gamma=0.9)
        close(a, oracle.whiten(G, MASK.numpy()), 1e-7)


def test_baselines_whitened_over_tokens():
    for framework, estimator, ddof, mode, leak in (
        ("verl", "reinforce_plus_plus_baseline", 1, "var_add", True),
        ("slime", "reinforce_plus_plus_baseline", 1, "var_add", False),
    ):
        x = oracle.group(X.double(), IDS, "dr_grpo", singleton="raw" if leak else "zero")
        tokens = np.repeat(x, LENGTHS)
        white = oracle.whiten(tokens, np.ones(len(tokens), bool), ddof, 1e-8, mode)
        close(of(framework, estimator, X.double(), group=IDS, lengths=LENGTHS), white[LENGTHS.cumsum(0) - 1], 1e-7)


def test_gdpo_of_verl_and_trl():
    both = torch.stack([X, X.flip(0)], 1).double()
    ids = torch.arange(8) // 4
    verl = sum(oracle.group(both[:, k], ids, "grpo", eps=1e-6) for k in (0, 1))
    tokens = oracle.whiten(np.repeat(verl, LENGTHS), np.ones(int(LENGTHS.sum()), bool))
    close(of("verl", "gdpo", both, group=ids, lengths=LENGTHS), tokens[LENGTHS.cumsum(0) - 1], 1e-7)
    trl = sum(oracle.group(both[:, k], ids, "grpo", eps=1e-4) for k in (0, 1))
    close(of("trl", "gdpo", both, group=ids), oracle.whiten(trl, np.ones(8, bool), 1, 1e-4, "std_add"), 1e-7)


def test_scale_by_the_batch_as_trl_does():
    want = oracle.group(X.double(), IDS, "dr_grpo") / (X.double().numpy().std(ddof=1) + 1e-4)
    close(of("trl", "grpo_batch", X.double(), group=IDS), want, 1e-12)


def test_frameworks_that_refuse_a_group_of_one():
    for framework, estimator in (("openrlhf", "group_norm"), ("openrlhf", "rloo"), ("verl", "grpo_passk")):
        with pytest.raises(ArgumentError, match="fewer than two"):
            of(framework, estimator, group=IDS)


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'openrlhf'"):
        advantage_preset("open_rlhf", "grpo")
    with pytest.raises(UnknownNameError, match="did you mean 'group_norm'"):
        advantage_preset("openrlhf", "groupnorm")
    first = advantage_preset("verl", "grpo")
    first["eps"] = 1.0
    assert advantage_preset("verl", "grpo")["eps"] == 1e-6
