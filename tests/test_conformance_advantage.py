"""The space of calls of advantage@1: its answers are those of the definition, and what it found stays mended."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.spaces.advantage.answers import answer
from rlkernel_conformance.spaces.advantage.tokens import every_argument
from rlkernel_core.definitions import advantage as definition

B, T = 5, 9


def a_batch(seed: int) -> dict[str, np.ndarray]:
    g = np.random.default_rng(seed)
    return {
        "rewards": g.normal(size=(B, T)),
        "values": g.normal(size=(B, T)),
        "q_values": g.normal(size=(B, T)),
        "ratio": np.exp(g.normal(size=(B, T))),
        "mask": g.random((B, T)) < 0.7,
        "bootstrap": g.normal(size=B),
        "dones": g.random((B, T)) < 0.2,
        "lam": g.random((B, T)),
        "turns": np.sort(g.integers(0, 4, (B, T)), 1),
    }


def answered(by_token: bool = True, **given: object) -> tuple[np.ndarray, np.ndarray | None]:
    shape = (B, T) if by_token or given.get("mask") is not None else None
    found = answer(every_argument(given), shape, (1e-10, 1e-10), by_token=by_token)
    return found["advantages"][0], found["returns"][0] if "returns" in found else None


def taken(batch: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {name: batch[name] for name in ("rewards", "mask", *names)}


RECURSIONS = {
    "gae": (
        {"gamma": 0.9, "kind": "gae"},
        ("values", "bootstrap", "dones", "lam"),
        lambda b, i: definition.gae_row(
            b["rewards"][i], b["values"][i], b["mask"][i], 0.9, b["lam"][i], b["bootstrap"][i], b["dones"][i]
        ),
    ),
    "carry": (
        {"gamma": 0.9, "lam": 0.8, "kind": "gae", "masked_out": "carry"},
        ("values",),
        lambda b, i: definition.gae_row(b["rewards"][i], b["values"][i], b["mask"][i], 0.9, 0.8, carry=True),
    ),
    "masked steps": (
        {"gamma": 0.9, "lam": 0.8, "kind": "gae", "masked_time": "step"},
        ("values",),
        lambda b, i: definition.gae_masked_steps_row(b["rewards"][i], b["values"][i], b["mask"][i], 0.9, 0.8),
    ),
    "turns": (
        {"gamma": 0.9, "lam": 0.8, "kind": "gae"},
        ("values", "turns", "bootstrap"),
        lambda b, i: definition.turn_gae_row(
            b["rewards"][i], b["values"][i], b["mask"][i], b["turns"][i], 0.9, 0.8, b["bootstrap"][i]
        ),
    ),
    "vtrace": (
        {"gamma": 0.9, "lam": 0.8, "kind": "vtrace", "ratio_clip": 0.75, "trace_clip": 1.25},
        ("values", "ratio", "bootstrap", "dones"),
        lambda b, i: definition.vtrace_row(
            b["rewards"][i], b["values"][i], b["mask"][i], b["ratio"][i], 0.9, 0.8, 0.75, 1.25, b["bootstrap"][i],
            b["dones"][i],
        ),
    ),
    "retrace": (
        {"gamma": 0.9, "lam": 0.8, "kind": "retrace", "trace_clip": 1.25},
        ("values", "q_values", "ratio", "bootstrap", "dones"),
        lambda b, i: definition.retrace_row(
            b["rewards"][i], b["values"][i], b["q_values"][i], b["mask"][i], b["ratio"][i], 0.9, 0.8, 1.25,
            b["bootstrap"][i], b["dones"][i],
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECURSIONS)
def test_a_recursion_of_all_sequences_is_that_of_each(name) -> None:
    options, tensors, of_row = RECURSIONS[name]
    for seed in range(5):
        batch = a_batch(seed)
        a, targets = answered(**options, **taken(batch, *tensors))
        rows = [of_row(batch, i) for i in range(B)]
        kept = np.ones((B, T), bool) if name == "carry" else batch["mask"]
        np.testing.assert_allclose(a, np.where(kept, [row[0] for row in rows], 0.0), atol=1e-12)
        np.testing.assert_allclose(targets, np.where(kept, [row[1] for row in rows], 0.0), atol=1e-12)


@pytest.mark.parametrize("masked", ["skip", "step", "reset"])
def test_discounted_returns_pass_masked_tokens_as_the_definition_does(masked) -> None:
    batch = a_batch(7)
    given = taken(batch, "bootstrap", "dones")
    a, _ = answered(kind="returns", gamma=0.9, masked_time=masked, **given)
    for i in range(B):
        want = definition.returns_row(
            batch["rewards"][i], batch["mask"][i], 0.9, batch["bootstrap"][i], batch["dones"][i], masked
        )
        np.testing.assert_allclose(a[i], np.where(batch["mask"][i], want, 0.0), atol=1e-12)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "passk", "gpg"])
@pytest.mark.parametrize("mode", ["std_add", "var_add", "var_clamp", "threshold"])
def test_a_kind_over_groups_is_that_of_the_definition(kind, mode) -> None:
    g = np.random.default_rng(3)
    x, ids, lengths = g.integers(0, 5, 17) / 4, g.integers(0, 5, 17) - 2, g.integers(1, 9, 17)
    options = {"eps_mode": mode, "ddof": 0} if kind not in {"maxrl", "gpg"} else {}
    given = {"rewards": x, "group": ids, "kind": kind, "eps": 0.05, "lengths": lengths, **options}
    given = given if kind != "gpg" else {k: y for k, y in given.items() if k != "eps"}
    found = answer(every_argument(given), None, (1e-10, 1e-10), by_token=False)["advantages"][0]
    want = definition.group(x, ids, kind, ddof=0, eps=0.05, mode=mode, lens=lengths)
    np.testing.assert_allclose(found, want, atol=1e-12)


def test_leaving_one_out_is_that_of_the_definition() -> None:
    x, ids = np.random.default_rng(4).normal(size=17), np.arange(17) % 4
    a, _ = answered(
        by_token=False, rewards=x, group=ids, kind="grpo", leave_one_out=True, low_std="center", ddof=1, eps=1e-6
    )
    np.testing.assert_allclose(a, definition.nemo_grpo(x, ids), atol=1e-12)


def test_a_token_baseline_is_that_of_the_definition() -> None:
    g, batch, ids = np.random.default_rng(5), a_batch(5), np.array([4, -1, 4, 4, 9])
    p = g.random((B, T)) * 0.8 + 0.1
    given = {"logprob": np.log(p), "sum_pi_squared": p**2, "group": ids, "eps": 1e-8}
    a, targets = answered(kind="otb", **taken(batch), **given)
    want, togo = definition.otb(batch["rewards"] * batch["mask"], batch["mask"], np.log(p), p**2, ids)
    np.testing.assert_allclose(a, want, atol=1e-12)
    np.testing.assert_allclose(targets, togo * batch["mask"], atol=1e-12)


def test_targets_of_an_invalid_sequence_are_0_also_where_masked_positions_carry() -> None:
    rewards, values = torch.ones(2, 3), torch.full((2, 3), 2.0)
    rewards[0, 1] = torch.nan
    out = rlk.advantage(rewards, kind="gae", values=values, masked_out="carry")
    assert out.returns[0].tolist() == [0.0, 0.0, 0.0]
    assert out.returns[1].tolist() == [3.0, 2.0, 1.0]


def test_a_token_without_a_score_has_no_baseline() -> None:
    rewards, certain = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
    out = rlk.advantage(rewards, kind="otb", group=2, logprob=certain, sum_pi_squared=certain.exp(), eps=0.0)
    assert out.advantages.tolist() == [[1.0], [3.0]]


def test_no_rewards_of_no_sequences_are_per_sequence_beside_packed_tokens() -> None:
    out = rlk.advantage(
        torch.zeros(0), kind="gae", values=torch.ones(5), cu_seqlens=torch.tensor([2]), gamma=1.0, lam=1.0
    )
    assert out.advantages.tolist() == [0.0] * 5
