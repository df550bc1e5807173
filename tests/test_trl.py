"""TRL with rlkernel inside against stock TRL: the same losses and gradients, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rlkernel as rlk
from rlkernel import integrations, record
from rlkernel.integrations import trl as ours
from tests import trl_runs

stock_trl = pytest.importorskip("trl", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

# fp32 on a CPU, both sides: what differs is the order of sums. Measured over twenty steps: 1e-7 and 1e-6.
LOSS, GRADIENT = 2e-6, 1e-5
METRICS = ("entropy", "mean_token_accuracy", "kl", "rewards/chosen", "logits/chosen", "logits/rejected")
USED_TWICE = {"temperature": 0.8, "num_iterations": 2, "gradient_accumulation_steps": 2, "beta": 0.04}


def same(stock, mine) -> None:
    assert len(trl_runs.logged(mine)) == len(trl_runs.logged(stock)) > 0
    for name in ("loss", *METRICS):
        assert trl_runs.logged(mine, name) == pytest.approx(trl_runs.logged(stock, name), rel=1e-4, abs=LOSS)
    for a, b in zip(stock.gradients.steps, mine.gradients.steps, strict=True):
        assert (a - b).norm() <= GRADIENT * a.norm()
    assert max(g.norm() for g in stock.gradients.steps[1:]) > 1e-3


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Twenty steps of GRPO whose every batch is used twice, so that ratios and KL are not trivial."""
    return trl_runs.grpo(tmp_path_factory.mktemp("stock"), steps=20, **USED_TWICE)


def test_twenty_steps_of_grpo_inside_the_block_equal_stock_trl(stock, tmp_path) -> None:
    before = stock_trl.trainer.utils._ChunkedLogProbFunction
    mine = trl_runs.grpo(tmp_path, inside=ours.enabled, steps=20, **USED_TWICE)
    same(stock, mine)
    assert stock_trl.trainer.utils._ChunkedLogProbFunction is before
    assert integrations.active() == []


def test_twenty_steps_of_the_trainer_with_presets_equal_stock_trl(stock, tmp_path) -> None:
    mine = trl_runs.grpo(tmp_path, trainer=ours.grpo_trainer(), steps=20, **USED_TWICE)
    same(stock, mine)
    assert {"advantage", "linear_logprob", "policy_loss"} <= mine.rlkernel.calls.keys()
    assert trl_runs.logged(mine, "clip_ratio/high_mean") == pytest.approx(
        trl_runs.logged(stock, "clip_ratio/high_mean"), abs=1e-6
    )


def test_logits_that_are_saved_for_the_backward_pass_give_the_same_training(stock, tmp_path) -> None:
    mine = trl_runs.grpo(tmp_path, trainer=ours.grpo_trainer(backward="save"), steps=20, **USED_TWICE)
    same(stock, mine)
    assert any("backward:save" in ran.decision.call.features for ran in rlk.status() if ran.op == "linear_logprob@1")


def test_an_unknown_way_backward_is_refused_before_anything_is_patched() -> None:
    with pytest.raises(rlk.ArgumentError, match="backward"), ours.enabled(backward="keep"):
        pass
    assert integrations.active() == []


@pytest.mark.parametrize("kind", ["RLOO", "DPO", "KTO", "SFT"])
def test_two_steps_of_another_trainer_equal_stock_trl(kind, tmp_path) -> None:
    stock = trl_runs.train(kind, tmp_path / "stock")
    same(stock, trl_runs.train(kind, tmp_path / "ours", inside=ours.enabled))


LOSSES = {
    "grpo": {"delta": 1.5, "scale_rewards": "batch", "entropy_coef": 0.01},
    "bnpo": {"importance_sampling_level": "sequence", "epsilon": 0.02, "beta": 0.1, "scale_rewards": "none"},
    "dr_grpo": {"entropy_coef": 0.01},
    "dapo": {"epsilon_high": 0.28, "entropy_coef": 0.02, "beta": 0.1, "use_bias_correction_kl": False},
    "luspo": {"importance_sampling_level": "sequence", "epsilon": 0.02},
    "cispo": {"epsilon_high": 5.0, "multi_objective_aggregation": "normalize_then_sum"},
    "sapo": {"sapo_temperature_pos": 0.9},
}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_trainer_with_presets_equals_stock_trl_whatever_the_loss(kind, tmp_path) -> None:
    options = {"loss_type": kind, "num_iterations": 2, "steps": 4, **LOSSES[kind]}
    stock = trl_runs.grpo(tmp_path / "stock", **options)
    for fused in (False, True):
        mine = trl_runs.grpo(tmp_path / f"{fused}", trainer=ours.grpo_trainer(fused=fused), **options)
        same(stock, mine)
    assert mine.rlkernel.calls["linear_policy_loss"] >= 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss_type": "vespo"}, "loss_type='vespo'"),
        ({"loss_type": "luspo"}, "luspo"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        ({"delta": 1.1}, "delta below"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold"),
    ],
)
def test_an_option_that_no_preset_reproduces_is_refused_by_name(options, named, tmp_path) -> None:
    with pytest.raises(rlk.HostError, match=f"no preset reproduces .*{named}.*enabled"):
        trl_runs.grpo(tmp_path, trainer=ours.grpo_trainer(), **options)


def test_the_callback_covers_the_training_and_writes_what_ran(tmp_path, cli) -> None:
    mine = trl_runs.grpo(tmp_path, callback=ours.callback())
    assert integrations.active() == []
    [through] = record.through(mine.args.output_dir)
    assert (through.host, through.version, through.symbols) == ("trl", "1.16.0", (str(ours.HEAD),))
    assert through.calls["linear_logprob"] >= 2
    said = cli("status", mine.args.output_dir).stdout
    assert f"through trl 1.16.0: {ours.HEAD} (" in said
    assert json.loads(cli("status", mine.args.output_dir, "--json").stdout)["hosts"][0]["host"] == "trl"


def test_a_block_around_construction_alone_is_an_error_that_says_to_train_inside(tmp_path) -> None:
    config = stock_trl.GRPOConfig(**trl_runs.settings(tmp_path, **trl_runs.GROUPS))
    data = {"train_dataset": trl_runs.prompts(), "processing_class": trl_runs.tokenizer()}
    with pytest.raises(rlk.HostError, match=r"no trainer scored a token there; .*trainer\.train\(\)"), ours.enabled():
        stock_trl.GRPOTrainer(trl_runs.model(tmp_path), reward_funcs=trl_runs.vowels, args=config, **data)
    assert integrations.active() == []


def test_the_trainer_and_the_callback_may_be_made_inside_the_block() -> None:
    with pytest.raises(ZeroDivisionError), ours.enabled():
        made = [ours.grpo_trainer(), ours.callback()]
        raise ZeroDivisionError
    assert len(made) == 2


def test_an_error_inside_leaves_nothing_patched() -> None:
    before = stock_trl.trainer.utils._ChunkedLogProbFunction
    with pytest.raises(KeyError), ours.enabled(), ours.enabled() as inner:
        assert [str(a) for a in integrations.active()] == [str(inner)]
        assert stock_trl.trainer.utils._ChunkedLogProbFunction is not before
        raise KeyError
    assert stock_trl.trainer.utils._ChunkedLogProbFunction is before
    assert integrations.active() == []


def test_the_metrics_of_all_heads_are_those_of_trl() -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(50, 16), torch.randn(97, 16), torch.randn(97)
    ids = torch.randint(0, 97, (50,))
    ids[::2] = ((hidden @ weight.T + bias) * 1.3).argmax(-1)[::2]
    for cap, shift in ((None, None), (None, bias), (5.0, bias)):
        args = (hidden, weight, shift, ids, 0.7, 30, cap, 1.3)
        stock = stock_trl.trainer.utils._ChunkedLogProbFunction.apply(*args)
        with ours.enabled():
            mine = stock_trl.trainer.utils._ChunkedLogProbFunction.apply(*args)
        for a, b in zip(stock[:4], mine[:4], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert torch.equal(stock[4], mine[4])
        assert 0 < mine[4].sum() < 50


def test_a_partitioned_head_is_refused() -> None:
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_id = 3
    with pytest.raises(rlk.HostError, match="ZeRO-3.*ZeRO-2 or FSDP2"), ours.enabled():
        stock_trl.trainer.utils._ChunkedLogProbFunction.apply(torch.ones(1, 2), weight, None, torch.zeros(1), 1.0, 8)


def test_somebody_elses_replacement_is_told_of_and_left_alone() -> None:
    utils, theirs = stock_trl.trainer.utils, SimpleNamespace()
    before = utils._ChunkedLogProbFunction
    with pytest.raises(rlk.HostError, match="replaced by somebody else"), ours.enabled():
        utils._ChunkedLogProbFunction = theirs
    assert utils._ChunkedLogProbFunction is theirs
    utils._ChunkedLogProbFunction = before


def test_the_example_gives_one_reward_with_and_without_rlkernel(tmp_path) -> None:
    script = Path(__file__).parents[1] / "examples" / "trl_grpo" / "train.py"
    said = []
    for more in ([], ["--rlkernel"]):
        command = [sys.executable, str(script), "--steps", "4", "--out", str(tmp_path), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(next(line for line in done.stdout.splitlines() if line.startswith("reward")))
    assert said[0] == said[1]
