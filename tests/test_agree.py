"""`rlkernel agree`: drift is measured where there is some, and is zero where kernels are batch invariant."""

from __future__ import annotations

import json
import math

import pytest
import torch

import rlkernel as rlk
from rlkernel import lock
from rlkernel.agree import CLIP, Drift, builtin, measure
from rlkernel_core import Backend, Impl, Requires
from tests.command_line import answer

SMALL = {"sequences": 5, "prompt": 3, "tokens": 9}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_kernels_on_both_sides_agree_to_the_bit(dtype) -> None:
    found = measure(builtin(invariant=True, dtype=dtype, vocab=1001), score="linear_logprob", temperature=0.7, **SMALL)
    assert (found.drift.max, found.drift.equal, found.hidden) == (0.0, 1.0, 0.0)
    assert found.kernels == found.drift


def test_a_model_that_is_not_batch_invariant_drifts_and_its_kernels_do_not() -> None:
    found = measure(builtin(dtype=torch.bfloat16), score="linear_logprob", **SMALL)
    assert found.drift.max > 1e-3
    assert found.hidden > 0
    assert found.kernels.equal == 1.0


def test_the_invariant_decoder_is_the_same_model() -> None:
    stock, invariant = builtin(seed=4), builtin(seed=4, invariant=True)
    ids = torch.arange(30).view(3, 10)
    for model in (stock, invariant):
        model.start(3, 10)
    torch.testing.assert_close(invariant.full(ids), stock.full(ids), rtol=1e-4, atol=1e-5)
    steps = torch.stack([stock.step(ids[:, t], t) for t in range(10)], 1)
    torch.testing.assert_close(steps, stock.full(ids), rtol=1e-4, atol=1e-5)


def test_the_sides_use_the_orders_they_were_given() -> None:
    target = "rlkernel_torch.linear_logprob:linear_logprob"
    claims = Impl(op="linear_logprob@1", target=target, requires=Requires(device="*"), supports={"grad", "entropy"})
    with rlk.registered(Backend(name="acme", api=(2, 0), impls=(claims,))):
        found = measure(builtin(), rollout=("torch",), trainer=("acme", "torch"), **SMALL)
    assert [d.backend for d in found.rollout] == ["torch"]
    assert [d.backend for d in found.trainer] == ["acme"]


def test_the_numbers_of_a_drift() -> None:
    rollout = torch.zeros(4)
    found = Drift.between(torch.tensor([0.0, 0.1, -0.3, 0.5]), rollout)
    assert (found.tokens, found.equal) == (4, 0.25)
    assert found.max == pytest.approx(0.5)
    assert found.mean == pytest.approx(0.225)
    assert found.kl == pytest.approx(sum(math.exp(x) - 1 - x for x in (0.1, -0.3, 0.5)) / 4)
    assert found.clip == 0.5  # e^0.1 = 1.105 is inside 1 +- 0.2
    assert CLIP == 0.2


def test_an_unknown_score_is_refused() -> None:
    with pytest.raises(rlk.ArgumentError, match="score.*sampler, linear_logprob"):
        measure(builtin(), score="guess")


def test_the_command_writes_a_lock_that_pins_both_sides(cli, tmp_path) -> None:
    pins = tmp_path / "rlkernel.lock"
    found = answer(cli("agree", "--tokens", "3", "--output", str(pins), "--json"))
    assert set(lock.read(str(pins))) == {"lm_head_sample@1", "linear_logprob@1"}
    assert {d["backend"] for side in ("rollout", "trainer") for d in found[side]} == {"torch"}
    with rlk.use(lock=str(pins)):
        measure(builtin(), **SMALL)


def test_a_limit_makes_the_exit_code(cli) -> None:
    over = cli("agree", "--tokens", "3", "--dtype", "bfloat16", "--limit", "0")
    assert over.exit_code == 1
    assert "beyond the limit" in over.stderr
    within = ("--invariant", "--score", "linear_logprob", "--limit", "0")
    assert cli("agree", "--tokens", "3", *within).exit_code == 0


def test_what_cannot_be_measured_is_told(cli, tmp_path) -> None:
    assert "float32, bfloat16" in cli("agree", "--dtype", "int8").stderr
    assert "--invariant is of the built-in" in cli("agree", str(tmp_path), "--invariant").stderr
    assert "--exact is of a model of transformers" in cli("agree", "--exact").stderr


def test_a_model_of_transformers_with_random_weights_and_saved(cli, tmp_path) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    from tests.trl_runs import model

    model(tmp_path)
    path = tmp_path / "model"
    saved = answer(cli("agree", str(path), "--tokens", "4", "--json"))
    assert 0 <= saved["drift"]["max"] < 1e-4
    exact = answer(cli("agree", str(path), "--exact", "--tokens", "4", "--json"))
    assert (exact["drift"]["equal"], exact["hidden"], exact["first"]) == (1.0, 0.0, None)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    fresh = answer(cli("agree", str(tmp_path / "config.json"), "--tokens", "4", "--json"))
    assert "random weights" in fresh["model"]
    assert "nowhere does not exist" in cli("agree", str(tmp_path / "nowhere")).stderr
    shaped = json.loads((path / "config.json").read_text()) | {"logit_scale": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(shaped))
    assert "logit_scale in the configuration" in cli("agree", str(tmp_path / "config.json")).stderr
