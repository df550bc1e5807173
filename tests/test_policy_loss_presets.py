"""Presets reproduce the losses of TRL 1.16 and verl 0.9.1, written here from their formulas in numpy."""

import math

import numpy as np
import pytest
import torch

from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.spec.policy_loss import policy_loss_preset
from rlkernel_core.spec.policy_presets import PRESETS
from rlkernel_torch.direct import policy_loss
from tests.policy_batches import batch, tensor

B = batch(1, B=5, T=8, spread=0.5, empty=True)
T64 = {n: tensor(getattr(B, n)) for n in ("old", "ref", "roll", "entropy", "adv")}
ROLLED = {"rollout_logprob": T64["roll"]}
REF = {"ref_logprob": T64["ref"], "kl_coef": 0.2}
BONUS = {"entropy": T64["entropy"], "entropy_coef": 0.1}
M = B.mask
LP, OLD, REFERENCE, ROLL, ENT = (np.where(M, x, 0.0) for x in (B.lp, B.old, B.ref, B.roll, B.entropy))
A = B.adv[:, None]
R = np.exp(LP - OLD)
ROWS, N, N_I = len(M), M.sum(), M.sum(1)
S = (N_I > 0).sum()


def preset(*names, **given):
    arguments = {"old_logprob": T64["old"], **policy_loss_preset(*names), **given}
    return policy_loss(tensor(B.lp), advantages=T64["adv"], mask=torch.tensor(B.mask), **arguments).loss.item()


def trl_row_mean(x):
    return ((x * M).sum(1) / np.maximum(N_I, 1)).mean()


def clipped(rho, low, high):
    return -np.minimum(rho * A, np.clip(rho, 1 - low, 1 + high) * A)


S_I = np.exp(((LP - OLD) * M).sum(1) / np.maximum(N_I, 1))[:, None]
K3 = np.exp(REFERENCE - LP) - (REFERENCE - LP) - 1
SEQ_W = np.exp(((OLD - ROLL) * M).sum(1))[:, None]
TRL = {
    "trl_grpo": lambda: trl_row_mean(clipped(R, 0.2, 0.2)),
    "trl_bnpo": lambda: (clipped(R, 0.2, 0.2) * M).sum() / N,
    "trl_dapo": lambda: (clipped(R, 0.2, 0.2) * M).sum() / N,
    "trl_gspo": lambda: trl_row_mean(clipped(S_I, 3e-4, 4e-4)),
    "trl_luspo": lambda: (clipped(S_I, 0.2, 0.2) * M).sum(1).mean(),
    "trl_cispo": lambda: (-np.minimum(R, 5.0) * A * LP * M).sum() / N,
    "trl_sapo": lambda: trl_row_mean(-4 / TAU / (1 + np.exp(-TAU * (R - 1))) * A),
}
TAU = np.where(A > 0, 1.0, 1.05)


@pytest.mark.parametrize("name", TRL)
def test_trl_losses(name):
    assert preset(name) == pytest.approx(TRL[name](), rel=1e-12)


def test_trl_dr_grpo_divides_by_all_rows_and_the_completion_length():
    want = (clipped(R, 0.2, 0.2) * M).sum() / (ROWS * 11)
    assert preset("trl_dr_grpo", horizon=11.0) == pytest.approx(want, rel=1e-12)


def test_trl_dapo_with_its_denominator_over_processes():
    want = (clipped(R, 0.2, 0.2) * M).sum() / (100 / 4)
    assert preset("trl_dapo", denominator=torch.tensor(100 / 4)) == pytest.approx(want, rel=1e-12)


def test_trl_kl_entropy_and_rollout_correction_together():
    w = np.where(SEQ_W > 3.0, 0.0, SEQ_W)
    want = trl_row_mean(clipped(R, 0.2, 0.2) * w + 0.04 * K3 * R) - 0.01 * (ENT * M).sum() / N
    got = preset(
        "trl_grpo",
        "trl_kl",
        "trl_entropy",
        "trl_rollout",
        **{**REF, **BONUS, **ROLLED, "kl_coef": 0.04, "entropy_coef": 0.01},
    )
    assert got == pytest.approx(want, rel=1e-12)


def test_trl_vespo():
    log_w = np.clip((np.clip(LP - OLD, -20, 20) * M).sum(1, keepdims=True), math.log(1e-8), 20)
    k, lam = np.where(A >= 0, 2.0, 3.0), np.where(A >= 0, 3.0, 2.0)
    want = (-np.exp(lam + k * log_w - lam * np.exp(log_w)) * A * LP * M).sum() / N
    assert preset("trl_vespo") == pytest.approx(want, rel=1e-12)


def verl_row_mean(x):
    return ((x * M).sum(1) / (N_I + 1e-8))[N_I > 0].sum() / S


P, OLD_P = np.exp(LP), np.exp(OLD)
KEEP = np.where(A > 0, P - OLD_P <= 0.2, P - OLD_P >= -0.2)
VERL = {
    "verl_ppo": lambda: (
        (np.where(A < 0, np.minimum(-3.0 * A, clipped(R, 0.2, 0.2)), clipped(R, 0.2, 0.2)) * M).sum() / N
    ),
    "verl_gspo": lambda: (clipped(S_I, 0.2, 0.2) * M).sum() / N,
    "verl_sapo": lambda: verl_row_mean(-4 / TAU / (1 + np.exp(-TAU * (R - 1))) * A),
    "verl_cispo": lambda: (-np.clip(R, 0.8, 1.2) * A * LP * M).sum() / N,
    "verl_dppo_tv": lambda: (-A * np.minimum(R, 3.0) * LP * KEEP * M).sum() / N,
    "verl_gpg": lambda: (-A * LP * M).sum() / N,
}


@pytest.mark.parametrize("name", VERL)
def test_verl_losses(name):
    # 1e-7: verl adds 1e-8 to the token count of a sequence.
    assert preset(name) == pytest.approx(VERL[name](), rel=1e-7)


def test_verl_geometric_mean():
    d, sign = LP - OLD, np.sign(A)
    d = sign * np.minimum(sign * d, sign * np.clip(d, -0.2, 0.2))
    want = (-B.adv * np.exp((d * M).sum(1) / (N_I + 1e-8)))[N_I > 0].sum() / ROWS
    assert preset("verl_geo_mean") == pytest.approx(want, rel=1e-7)


def test_verl_bypass_reinforce_weighs_the_current_policy_against_the_rollout():
    w = np.minimum(np.exp(LP - ROLL), 2.0)
    want = (-w * A * LP * M).sum() / N
    got = preset("verl_reinforce", "verl_rollout_token", old_logprob=None, **ROLLED)
    assert got == pytest.approx(want, rel=1e-12)


def test_verl_low_variance_kl_is_clamped():
    q = np.clip(REFERENCE - LP, -20, 20)
    want = (clipped(R, 0.2, 0.2) * M).sum() / N + 0.001 * (np.clip(np.exp(q) - q - 1, -10, 10) * M).sum() / N
    got = preset("verl_ppo", "verl_kl", ref_logprob=T64["ref"], dual_clip=50.0)
    assert got == pytest.approx(want, rel=1e-12)


def test_every_preset_is_accepted_by_the_operator():
    extra = {"trl_dr_grpo": {"horizon": 8.0}, "verl_dro": {"dro_beta": 0.1}}
    for name in PRESETS:
        if "kind" in PRESETS[name]:
            assert math.isfinite(preset(name, **extra.get(name, {})))
        else:
            assert math.isfinite(preset(name, **{**REF, **BONUS, **ROLLED}))


def test_presets_are_named_and_do_not_clash():
    with pytest.raises(UnknownNameError, match="trl_grpo"):
        policy_loss_preset("trl_grop")
    with pytest.raises(ArgumentError, match="kind"):
        policy_loss_preset("trl_grpo", "verl_ppo")
