"""Advantages on Triton against the reference in float64: every recursion in every layout, and rows that go wrong."""

import pytest
import torch

import rlkernel as rlk
from rlkernel_torch.direct import advantage as definition

B, T = 3, 150


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KINDS = {
    "gae": {"values": random(B, T, seed=1), "gamma": 0.99, "lam": 0.95, "bootstrap": random(B, seed=2)},
    "gae, decoupled": {"values": random(B, T, seed=1), "lam": random(B, seed=3).sigmoid(), "lam_value": 0.5},
    "gae, lambda per token": {"values": random(B, T, seed=1), "gamma": 0.9, "lam": random(B, T, seed=3).sigmoid()},
    "gae, by length": {"values": random(B, T, seed=1), "length_adaptive": 0.05},
    "gae, dones": {"values": random(B, T, seed=1), "lam": 0.9, "dones": random(B, T, seed=4) > 1.5},
    "gae, dones before": {
        "values": random(B, T, seed=1), "lam": 0.9, "dones": random(B, T, seed=4) > 1.5, "done_index": "before",
    },
    "returns": {"gamma": 0.99, "bootstrap": random(B, seed=2), "baseline": random(B, seed=5)},
    "reinforce_pp": {"gamma": 0.99, "whiten": "global"},
    "remax": {"baseline": random(B, seed=5)},
    "vtrace": {"values": random(B, T, seed=1), "ratio": random(B, T, seed=6).exp(), "gamma": 0.99, "lam": 0.9},
    "retrace": {"values": random(B, T, seed=1), "ratio": random(B, T, seed=6).exp(), "q_values": random(B, T, seed=7)},
}  # fmt: skip


def laid_out(given, layout):
    """The same batch padded with a mask, padded with lengths, or packed."""
    mask, lengths = random(B, T, seed=8) > -0.5, torch.tensor([0, 33, T])
    if layout == "mask":
        return {**given, "mask": mask}
    if layout == "lengths":
        return {**given, "lengths": lengths}
    keep = torch.arange(T) < lengths[:, None]
    flat = {n: x[keep] if isinstance(x, torch.Tensor) and x.shape == (B, T) else x for n, x in given.items()}
    return {**flat, "cu_seqlens": torch.tensor([0, 0, 33, 33 + T]), "reward_level": "token"}


def agree(given, device, **more):
    """Advantages, returns and flags against the reference; returns what was found."""
    here = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in {**given, **more}.items()}
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in here.items()}
    out, want = rlk.advantage(**here), definition(**wide)
    torch.testing.assert_close(out.advantages.double(), want.advantages, atol=2e-5, rtol=2e-5)
    if want.returns is not None:
        torch.testing.assert_close(out.returns.double(), want.returns, atol=2e-5, rtol=2e-5)
    assert out.stats.invalid.tolist() == want.stats.invalid.tolist()
    return out


LAYOUTS = ("mask", "lengths", "packed")
# Every layout for the longest recursion; the others take turns, for what a layout changes is read by one kernel.
TURNS = [*(("gae", layout) for layout in LAYOUTS), *((name, LAYOUTS[i % 3]) for i, name in enumerate(KINDS) if i)]


@pytest.mark.parametrize(("name", "layout"), TURNS)
def test_every_recursion_and_every_layout(device, name, layout) -> None:
    given = {"rewards": random(B, T), "kind": name.partition(",")[0], **KINDS[name]}
    agree(laid_out(given, layout), device)


@pytest.mark.parametrize("layout", ["mask", "lengths", "packed"])
def test_a_reward_per_sequence_stands_on_the_last_token_that_counts(device, layout) -> None:
    given = laid_out({"kind": "gae", "values": random(B, T, seed=1), "lam": 0.9}, layout)
    agree({**given, "rewards": random(B), "reward_level": "sequence"}, device)


@pytest.mark.parametrize("more", [{"masked_time": "step"}, {"masked_time": "reset"}, {"masked_out": "carry"}])
def test_what_peers_do_with_masked_tokens(device, more) -> None:
    given = {"rewards": random(B, T), "kind": "gae", "values": random(B, T, seed=1), "gamma": 0.9, "lam": 0.8}
    agree(laid_out(given, "mask"), device, **more)


def test_an_end_of_episode_at_a_masked_step_ends_nothing(device) -> None:
    given = {"rewards": random(B, T), "kind": "gae", "values": random(B, T, seed=1), "gamma": 0.9, "lam": 0.8}
    laid = laid_out({**given, "dones": random(B, T, seed=4) > 0}, "mask")
    assert (laid["dones"] & ~laid["mask"]).any()
    agree(laid, device, masked_time="step")
