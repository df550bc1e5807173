"""Gates by delight: against their formulas, as weights of a loss, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

import rlkernel as rlk


def batch(per_token: bool = False) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    logprob = -3 * torch.rand(4, 6, generator=g, dtype=torch.float64)
    return {
        "logprob": logprob,
        "advantages": torch.randn((4, 6) if per_token else (4,), generator=g, dtype=torch.float64),
        "mask": torch.rand(4, 6, generator=g) < 0.7,
    }


def each(advantages: torch.Tensor) -> torch.Tensor:
    return advantages if advantages.dim() == 2 else advantages[:, None].expand(4, 6)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("eta", [0.5, 1.0, 4.0])
def test_the_delight_gate_is_its_formula_token_by_token(per_token, eta) -> None:
    given = batch(per_token)
    found = rlk.delight_gate(**given, eta=eta)
    A = each(given["advantages"])
    for i, t in torch.cartesian_prod(torch.arange(4), torch.arange(6)).tolist():
        chi = float(A[i, t]) * -float(given["logprob"][i, t])
        gate = 1 / (1 + math.exp(-chi / eta)) if given["mask"][i, t] else 0.0
        assert float(found.gate[i, t]) == pytest.approx(gate, rel=1e-12)
        assert float(found.advantages[i, t]) == pytest.approx(gate * float(A[i, t]), rel=1e-12)


@pytest.mark.parametrize("keep", [0.01, 0.3, 0.5, 1.0])
def test_the_kondo_gate_keeps_the_share_of_the_tokens_with_the_most_delight(keep) -> None:
    given = batch()
    found = rlk.kondo_gate(**given, keep=keep)
    chi = (each(given["advantages"]) * -given["logprob"])[given["mask"]].tolist()
    level = sorted(chi, reverse=True)[max(1, round(keep * len(chi))) - 1]
    assert [float(x >= level) for x in chi] == found.gate[given["mask"]].tolist()
    assert not found.gate[~given["mask"]].any()
    assert torch.equal(found.advantages, found.gate * each(given["advantages"]))


def test_ties_with_the_last_kept_token_stay() -> None:
    found = rlk.kondo_gate(torch.tensor([-2.0, -1.0, -1.0, -1.0]), torch.ones(4), keep=0.5)
    assert found.gate.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_a_price_is_the_least_delight_that_stays() -> None:
    found = rlk.kondo_gate(torch.tensor([-1.0, -2.0, -3.0, -3.0]), torch.tensor([1.0, 1.0, 1.0, -1.0]), price=2.0)
    assert found.gate.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_with_a_temperature_a_token_stays_with_the_probability_of_the_gate() -> None:
    logprob, count = torch.full((20000,), -1.5), 20000
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(0))
    found = rlk.kondo_gate(logprob, torch.ones(count), price=1.0, eta=0.25, uniform=uniform)
    p = 1 / (1 + math.exp(-(1.5 - 1.0) / 0.25))
    assert abs(float(found.gate.mean()) - p) < 5 * math.sqrt(p * (1 - p) / count)
    assert torch.equal(found.gate.bool(), uniform < p)


@pytest.mark.parametrize("gate", ["delight", "kondo"])
@pytest.mark.parametrize("kind", ["reinforce", "ppo", "grpo", "dapo", "cispo", "sapo", "gspo_token", "vespo"])
def test_gated_advantages_weigh_the_policy_gradient_of_each_token(kind, gate) -> None:
    given = batch()
    old = given["logprob"] + 0.02 * torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gated = rlk.delight_gate(**given) if gate == "delight" else rlk.kondo_gate(**given, keep=0.4)

    def gradient(advantages: torch.Tensor) -> torch.Tensor:
        at = given["logprob"].clone().requires_grad_()
        rlk.policy_loss(at, old, advantages, mask=given["mask"], kind=kind).loss.backward()
        assert at.grad is not None
        return at.grad

    torch.testing.assert_close(
        gradient(gated.advantages), gated.gate * gradient(each(given["advantages"])), rtol=1e-10, atol=1e-14
    )


def test_packed_sequences_are_gated_as_padded_ones() -> None:
    given = batch()
    starts, flat = torch.tensor([0, 6, 12, 18, 24]), given["logprob"].flatten()
    mask, per_sequence = given["mask"].flatten(), given["advantages"][:, None]
    packed = rlk.delight_gate(flat, per_sequence, mask=mask, cu_seqlens=starts)
    assert torch.equal(packed.gate, rlk.delight_gate(**given).gate.flatten())
    assert torch.equal(packed.advantages, rlk.delight_gate(**given).advantages.flatten())


def test_tokens_of_no_sequence_do_not_count() -> None:
    logprob = torch.tensor([-9.0, -1.0, -2.0, -9.0])
    found = rlk.kondo_gate(logprob, torch.ones(2, 1), keep=0.5, cu_seqlens=torch.tensor([1, 2, 3]))
    assert found.gate.tolist() == [0.0, 0.0, 1.0, 0.0]


def test_what_a_masked_token_holds_reaches_nothing_and_nan_elsewhere_stays() -> None:
    logprob, mask = torch.tensor([-1.0, math.nan, -2.0]), torch.tensor([True, False, True])
    for found in (
        rlk.delight_gate(logprob, torch.tensor([1.0, math.inf, 1.0]), mask=mask),
        rlk.kondo_gate(logprob, torch.tensor([1.0, math.inf, 1.0]), mask=mask, keep=1.0),
    ):
        assert found.advantages[1] == 0
        assert found.advantages.isfinite().all()
    assert rlk.kondo_gate(logprob, torch.ones(3), price=0.0).advantages[1].isnan()


def test_an_advantage_of_zero_stays_zero_at_a_token_without_probability() -> None:
    found = rlk.delight_gate(torch.tensor([-math.inf, -1.0]), torch.tensor([0.0, 1.0]))
    assert found.advantages[0] == 0
    assert found.gate[0] == 0.5


def test_no_gate_has_a_gradient_and_16_bits_are_computed_in_fp32() -> None:
    logprob = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    found = rlk.delight_gate(logprob, torch.ones(2, dtype=torch.bfloat16))
    assert not found.advantages.requires_grad
    assert found.gate.dtype == torch.float32
    assert float(found.gate[0]) == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-6)


def test_gates_read_no_value_on_the_host() -> None:
    given = batch()
    gates = rlk.capture(lambda **x: (rlk.delight_gate(**x).gate, rlk.kondo_gate(**x, keep=0.3).gate), given)
    found = gates(**given)
    assert torch.equal(found[0], rlk.delight_gate(**given).gate)
    assert torch.equal(found[1], rlk.kondo_gate(**given, keep=0.3).gate)


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_batch_without_tokens_that_count_keeps_none(tokens) -> None:
    mask = torch.zeros(tokens, dtype=torch.bool)
    found = rlk.kondo_gate(-torch.ones(tokens), torch.ones(tokens), keep=0.5, mask=mask)
    assert found.gate.tolist() == [0.0] * tokens


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("keep", {}),
        ("keep", {"keep": 0.5, "price": 0.0}),
        ("keep", {"keep": 0.0}),
        ("keep", {"keep": 1.5}),
        ("price", {"price": math.inf}),
        ("eta", {"price": 0.0, "eta": -1.0}),
        ("uniform", {"price": 0.0, "eta": 1.0}),
        ("uniform", {"price": 0.0, "uniform": torch.rand(4, 6)}),
        ("mask", {"price": 0.0, "mask": torch.ones(4, 5, dtype=torch.bool)}),
        ("advantages", {"price": 0.0, "advantages": torch.ones(5)}),
        ("cu_seqlens", {"price": 0.0, "cu_seqlens": torch.tensor([0, 24])}),
    ],
)
def test_arguments_without_meaning_are_refused_by_name(argument, options) -> None:
    given = {"logprob": -torch.ones(4, 6), "advantages": torch.ones(4), **options}
    with pytest.raises(rlk.ArgumentError) as found:
        rlk.kondo_gate(**given)
    assert found.value.argument == argument


def test_a_temperature_that_is_not_positive_is_refused() -> None:
    with pytest.raises(rlk.ArgumentError, match="eta"):
        rlk.delight_gate(-torch.ones(3), torch.ones(3), eta=0.0)
