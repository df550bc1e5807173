"""Advantages by group against the reference in float64: every kind, grouping, layout and policy, and the same bits."""

from dataclasses import fields
from datetime import timedelta

import pytest
import torch
from torch import distributed

import rlkernel as rlk
from rlkernel import policy as policies
from rlkernel_core.spec.advantage import SPEC
from rlkernel_core.spec.advantage_presets import PRESETS
from rlkernel_torch.direct import advantage as definition
from rlkernel_triton.advantage import group_launch
from rlkernel_triton.advantage.group_launch import GROUP_KINDS
from rlkernel_triton.advantage.launch import prepare
from rlkernel_triton.launchers import Recorder, using

B, T = 36, 11
IDS = torch.randint(0, B // 3, (B,), generator=torch.Generator().manual_seed(9)) * 7919 - 2**60
LEVELS = torch.randint(0, 5, (B,), generator=torch.Generator().manual_seed(8)) / 4


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coins(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.7


def batch(kind, group=4):
    """A call of a kind with what it needs."""
    given = {"rewards": random(B), "kind": kind, "group": group}
    if kind in {"maxrl", "gpg", "passk"}:
        given["rewards"] = LEVELS
    if kind == "gdpo":
        given |= {"rewards": random(B, 3), "reward_weights": torch.tensor([1.0, 0.5, 2.0])}
    if kind == "gigpo":
        given |= {"step_rewards": random(B, seed=1), "anchor": torch.arange(B) * 5 % 3, "step_weight": 0.8}
    if kind == "opo":
        given["lengths"] = torch.arange(B) * 7 % 10
    return given


def agree(given, device):
    """Advantages and every statistic against the reference in float64; returns what was found."""
    here = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in here.items()}
    out, want = rlk.advantage(**here), definition(**wide)
    torch.testing.assert_close(out.advantages.double(), want.advantages, atol=2e-5, rtol=2e-5)
    assert (out.returns, out.advantages.dtype) == (None, torch.float32)
    for name in (f.name for f in fields(want.stats)):
        found, expected = getattr(out.stats, name), getattr(want.stats, name)
        assert (found is None) == (expected is None), name
        if expected is None:
            continue
        assert found.dtype == (torch.float32 if expected.dtype == torch.float64 else expected.dtype), name
        torch.testing.assert_close(found.double(), expected.double(), atol=2e-5, rtol=2e-5)
    return out


@pytest.fixture(params=["pairs", "table"])
def compared(request, monkeypatch):
    """Groups by ids are compared in pairs, or fill a table."""
    search(request.param, monkeypatch)
    return request.param


def search(way, monkeypatch) -> None:
    """Plan groups by ids in one of two ways from now on."""
    monkeypatch.setattr(group_launch, "PAIRS", 1 << 20 if way == "pairs" else 0)
    (policies.SCOPE.get() or policies.base()).forget()  # plans of the other way


@pytest.mark.parametrize("kind", sorted(GROUP_KINDS))
def test_every_kind_by_size(device, kind) -> None:
    agree(batch(kind, 3), device)


@pytest.mark.parametrize("size", [1, 2, B // 2, B])
def test_groups_of_every_size(device, size) -> None:
    agree(batch("grpo", size), device)


@pytest.mark.parametrize("kind", sorted(GROUP_KINDS))
def test_every_kind_by_ids(device, kind, compared) -> None:
    agree(batch(kind, IDS), device)


@pytest.mark.parametrize("kind", ["grpo", "opo", "gdpo", "gigpo"])  # one value, lengths, several rewards, two groupings
def test_a_group_has_the_same_bits_by_size_by_ids_and_in_any_order(device, kind, monkeypatch) -> None:
    order = torch.randperm(B, generator=torch.Generator().manual_seed(3))
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in batch(kind).items()}
    given["rewards"] = given["rewards"] + 1000.0  # so that sums in another order would round otherwise
    if kind in {"gdpo", "reinforce_pp_baseline"}:
        given["whiten"] = "none"  # its moments are of the batch in its order
    want = rlk.advantage(**given).advantages
    ids = (-3 * (torch.arange(B) // 4) + 2**40).to(device)
    for way in ("pairs", "table"):
        search(way, monkeypatch)
        assert torch.equal(rlk.advantage(**{**given, "group": ids}).advantages, want)
        moved = {n: x[order] if isinstance(x, torch.Tensor) and len(x) == B else x for n, x in given.items()}
        assert torch.equal(rlk.advantage(**{**moved, "group": ids[order]}).advantages, want[order])


POLICIES = {
    "biased": {"ddof": 0, "eps_mode": "var_add"},
    "clamped": {"eps_mode": "var_clamp", "eps": 0.3},
    "threshold": {"eps_mode": "threshold", "eps": 0.5},
    "low std": {"min_std": 0.4},
    "low std, centered": {"min_std": 0.4, "low_std": "center"},
    "over the batch": {"scale": "batch"},
    "unscaled": {"scale": "none", "singleton": "raw"},
    "raw": {"singleton": "raw", "valid_range": (-0.7, 0.9), "invalid": "raw"},
    "two masks": {"in_stats": coins(B, seed=1), "in_loss": coins(B, seed=2)},
    "weights": {"weights": (random(B, seed=5).abs() * 2).round()},
    "whitened": {"whiten": "global", "in_loss": coins(B, seed=2), "in_stats": coins(B, seed=1)},
    "whitened, weights": {"whiten": "global", "whiten_eps_mode": "std_add", "weights": random(B, seed=5).abs()},
    "deferred": {"whiten": "defer", "whiten_ddof": 0},
    "whitened over tokens": {"whiten": "global", "lengths": torch.arange(B) * 3 % 8},
}


BOTH = ("two masks", "whitened", "deferred", "whitened over tokens")  # where several rewards are another matter


@pytest.mark.parametrize(("kind", "policy"), [*(("grpo", p) for p in POLICIES), *(("gdpo", p) for p in BOTH)])
def test_every_policy_by_size(device, kind, policy) -> None:
    agree({**batch(kind), **POLICIES[policy]}, device)


@pytest.mark.parametrize("policy", ["over the batch", "raw", "two masks", "whitened"])
@pytest.mark.parametrize("kind", ["gdpo"])
def test_policies_by_ids(device, kind, policy, compared) -> None:
    agree({**batch(kind, IDS), **POLICIES[policy]}, device)


# The variance of the others is a difference: where they are nearly equal, eps hides what cancels.
OTHERS = {"kind": "grpo", "leave_one_out": True, "eps": 0.5}


@pytest.mark.parametrize(
    "more", [{}, {"low_std": "center"}, {"in_stats": coins(B, seed=1)}], ids=["", "center", "mask"]
)
@pytest.mark.parametrize("rewards", [random(B), LEVELS], ids=["normal", "ties"])
def test_statistics_over_the_others(device, rewards, more) -> None:
    agree({"rewards": rewards, "group": 4, **OTHERS, **more}, device)


def test_statistics_over_the_others_by_ids(device, compared) -> None:
    agree({"rewards": LEVELS, "group": IDS, "in_stats": coins(B, seed=1), **OTHERS}, device)


@pytest.mark.parametrize("layout", ["mask", "lengths", "packed", "packed, mask"])
@pytest.mark.parametrize("kind", ["opo", "reinforce_pp_baseline"])
def test_rewards_per_token_in_every_layout(device, kind, layout) -> None:
    rewards, lengths = random(B, T, seed=4), torch.arange(B) * 5 % (T + 1)
    keep = torch.arange(T) < lengths[:, None]
    given = {"kind": kind, "group": 6, "output": "token", "reward_level": "token"}
    if layout == "mask":
        given |= {"rewards": torch.where(coins(B, T), rewards, torch.nan), "mask": coins(B, T)}
    elif layout == "lengths":
        given |= {"rewards": rewards, "lengths": lengths}
    else:
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]) + 2  # two tokens before, one after
        flat = torch.cat([torch.full((2,), torch.nan), rewards[keep], torch.full((1,), torch.nan)])
        given |= {"rewards": flat, "cu_seqlens": bounds}
        if "mask" in layout:
            given["mask"] = coins(len(flat), seed=6)
    agree(given, device)


def test_invalid_rewards_harm_no_other(device, compared) -> None:
    x = random(12).to(device)
    x[0], x[5] = torch.nan, torch.inf
    ids = (torch.arange(12, device=device) % 3) - 1
    out = agree({"rewards": x, "kind": "grpo", "group": ids}, device)
    keep = [i for i in range(12) if i not in {0, 5}]
    alone = rlk.advantage(x[keep], kind="grpo", group=ids[keep])
    assert out.stats.invalid.nonzero().flatten().tolist() == [0, 5]
    assert torch.equal(out.advantages[keep], alone.advantages)


def test_a_large_group_keeps_the_precision_of_its_sums(device) -> None:
    x = 1e4 + random(200, seed=2)
    agree({"rewards": x, "kind": "grpo", "group": 200}, device)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8"])
def test_ids_of_every_dtype(device, dtype, compared) -> None:
    ids = (torch.arange(B) % 7 - (3 if dtype != "uint8" else 0)).to(device)
    x = random(B).to(device)
    want = rlk.advantage(x, kind="grpo", group=ids).advantages
    assert torch.equal(rlk.advantage(x, kind="grpo", group=ids.to(getattr(torch, dtype))).advantages, want)


@pytest.mark.parametrize("more", [{"scale": "batch"}, {"whiten": "global"}, {"whiten": "defer"}], ids=str)
def test_moments_merged_over_ranks(device, more) -> None:
    store = distributed.HashStore()
    world = distributed.ProcessGroup(store, 0, 1)
    gloo = distributed.ProcessGroupGloo(store, 0, 1, timedelta(seconds=50))
    for kind in ("cpu", "cuda"):
        world._register_backend(torch.device(kind), distributed.ProcessGroup.BackendType.GLOO, gloo)
    world._set_default_backend(distributed.ProcessGroup.BackendType.GLOO)
    agree({**batch("gdpo"), "whiten": "none", **more, "process_group": world}, device)
    none = {n: x[:0] if isinstance(x, torch.Tensor) and len(x) == B else x for n, x in batch("gdpo").items()}
    agree({**none, **more, "process_group": world}, device)


# One preset of those that are the same call.
SAME = {
    str(preset.kwargs): (f, e)
    for f, table in PRESETS.items()
    for e, preset in table.items()
    if preset.kind in GROUP_KINDS
}
PEERS = sorted(SAME.values())


@pytest.mark.parametrize(("framework", "estimator"), PEERS)
def test_every_preset_over_groups(device, framework, estimator) -> None:
    preset = rlk.advantage_preset(framework, estimator)
    given = batch(preset["kind"]) | {"lengths": torch.arange(B) % 5 + 1}
    if preset.get("leave_one_out"):
        given["rewards"] = LEVELS  # the others are equal, or far from it
    agree({**given, **preset, "singleton": "zero"}, device)


@pytest.mark.parametrize("kind", sorted(GROUP_KINDS - {"gpg"}))
def test_groups_by_size_are_one_launch_unless_whitened(kind) -> None:
    recorder = Recorder()
    whiten = {"whiten": "none"} if kind in {"gdpo", "reinforce_pp_baseline"} else {}
    call = SPEC.call(**{**batch(kind), **whiten})
    with using(recorder):
        prepare(call)(call)
    assert [at.build.kernel for at in recorder.launches] == ["rlkernel_triton.advantage.group_kernels:group_kernel"]
