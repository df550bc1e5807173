"""Policy losses on Triton against the reference in float64: every kind and level, every option, every layout."""

from dataclasses import fields

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.spec.policy_kinds import AGGREGATES, KINDS, KLS, REQUIRED, Correction, Rejection
from rlkernel_torch.direct import policy_loss as definition

B, T = 3, 50


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(layout="padded", seed=0):
    """A step whose log-probabilities are near the old ones; NaN where masked."""
    shape = (B, T) if layout == "padded" else (B * T,)
    old = random(*shape, seed=seed) - 3
    mask = random(*shape, seed=seed + 1) > -0.7
    logprob = torch.where(mask, old + 0.3 * random(*shape, seed=seed + 2), torch.nan)
    given = {"logprob": logprob, "old_logprob": old, "advantages": random(*shape, seed=seed + 3), "mask": mask}
    if layout == "packed":
        given["cu_seqlens"] = torch.tensor([0, 40, 40, B * T - 9])
    return given


def agree(given, device, **more):
    """Loss, gradients and statistics against the reference; returns what was found."""
    results = []
    for f, dtype in ((rlk.policy_loss, torch.float32), (definition, torch.float64)):
        here = {
            n: x.to(device, dtype if x.is_floating_point() else x.dtype) if isinstance(x, torch.Tensor) else x
            for n, x in {**given, **more}.items()
        }
        leaves = {n: here[n].detach().clone().requires_grad_() for n in ("logprob", "entropy") if n in here}
        out = f(**here | leaves)
        (1.5 * out.loss).backward()
        results.append((out, [x.grad for x in leaves.values()]))
    (out, grads), (want, exact) = results
    torch.testing.assert_close(out.loss.double(), want.loss, atol=1e-6, rtol=2e-5)
    for mine, theirs in zip(grads, exact, strict=True):
        torch.testing.assert_close(
            mine.double(), theirs, atol=1e-8 + 3e-5 * max([0.0, *theirs.abs().flatten().tolist()]), rtol=3e-5
        )
    for field in fields(want.stats):
        mine, theirs = getattr(out.stats, field.name), getattr(want.stats, field.name)
        assert (mine is None) == (theirs is None), field.name
        if theirs is not None:
            torch.testing.assert_close(mine.double(), theirs.double(), atol=2e-6, rtol=2e-5)
    return out


def needed(kind):
    """Options without a default."""
    return {n: (0.2, 0.3) if n == "clip" else 0.1 for n, v in KINDS[kind].options.items() if v == REQUIRED}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("kind", "level"), [(k, level) for k, what in KINDS.items() for level in what.levels])
def test_every_kind_and_level(device, kind, level, layout) -> None:
    agree(
        batch(layout),
        device,
        kind=kind,
        level=level,
        **needed(kind),
        **({"horizon": 60.0} if kind == "dr_grpo" else {}),
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kl", KLS)
def test_every_estimator_with_and_without_importance(device, kl, level) -> None:
    ref = random(B, T, seed=9) - 3
    for importance in (False, True):
        agree(batch(), device, kind="grpo", level=level, ref_logprob=ref, kl=kl, kl_coef=0.1, kl_importance=importance)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_every_aggregation_with_local_and_given_denominators(device, aggregate) -> None:
    for more in ({}, {"denominator": 7.0}, {"denominator": torch.tensor(5)}, {"count_empty": True}):
        if aggregate.startswith("token") and (more.keys() & {"count_empty"} or (aggregate == "token_sum" and more)):
            continue
        agree(batch(), device, kind="ppo", aggregate=aggregate, **more)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_entropy_bonus_aggregated_in_its_own_way(device, level) -> None:
    entropy = random(B, T, seed=5).abs()
    agree(batch(), device, kind="ppo", level=level, entropy=entropy, entropy_coef=torch.tensor(0.1),
          entropy_aggregate="seq_mean_token_mean")  # fmt: skip


@pytest.mark.parametrize(
    "correction",
    [Correction(), Correction(mode="mask", low=0.8, high=1.2), Correction("sequence", high=1.5, normalize=True)],
)
@pytest.mark.parametrize("rejection", [None, Rejection(high=1.2), Rejection("k3", "any", high=0.4)])
def test_corrections_and_rejections(device, correction, rejection) -> None:
    rollout = batch()["old_logprob"] + 0.3 * random(B, T, seed=11)
    rollout[0, 3] = torch.nan
    for kind in ("grpo", "gspo"):
        agree(batch(), device, kind=kind, rollout_logprob=rollout, correction=correction, rejection=rejection)


def test_vespo_folds_the_correction_into_its_gate(device) -> None:
    rollout = batch()["old_logprob"] + 0.3 * random(B, T, seed=11)
    agree(batch(), device, kind="vespo", rollout_logprob=rollout, correction=Correction(mode="mask", high=1.2))


def test_dual_clip_and_advantages_per_sequence(device) -> None:
    agree({**batch(), "advantages": random(B, seed=4) * 2}, device, kind="grpo", dual_clip=1.1)
    agree({**batch("packed"), "advantages": random(B, 1, seed=4) * 2}, device, kind="dapo", dual_clip=1.1)


def test_on_policy_the_ratio_is_one_and_has_its_gradient(device) -> None:
    out = agree({**batch(), "old_logprob": None}, device, kind="grpo")
    assert (out.stats.ratio_min.item(), out.stats.ratio_max.item()) == (1.0, 1.0)


def test_log_ratios_beyond_every_limit_stay_finite(device) -> None:
    given = batch()
    given["logprob"] = given["old_logprob"] + 1e4 * torch.sign(random(B, T, seed=12))
    for kind in ("ppo", "cispo", "sapo", "gspo"):
        out = agree(given, device, kind=kind)
        assert bool(out.loss.isfinite())


def test_no_token_at_all_gives_a_connected_zero(device) -> None:
    given = batch()
    for empty in ({**given, "mask": torch.zeros(B, T, dtype=torch.bool)}, {n: x[:0] for n, x in given.items()}):
        for kind in ("grpo", "gspo"):
            assert agree(empty, device, kind=kind).loss.item() == 0.0


def test_a_batch_of_many_blocks_adds_up_in_one_order(device) -> None:
    given = {n: x.repeat(14, 1) for n, x in batch().items()}
    first, second = (agree(given, device, kind="grpo").loss for _ in range(2))
    assert torch.equal(first, second)
