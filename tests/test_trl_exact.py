"""TRL's GRPO on an exact model: completions by `exact_rollout`, scored by TRL's own code, in the same bits."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import rlkernel as rlk
from rlkernel.integrations import trl as ours
from tests import trl_runs

stock_trl = pytest.importorskip("trl", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


class Scored(stock_trl.GRPOTrainer):
    """What TRL computes for the tokens that were drawn, and what the rollout said of them, step by step."""

    def _compute_loss(self, model, inputs):
        if not hasattr(self, "pairs"):
            self.pairs, self.drawn = [], []
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            found = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]
        there = inputs["completion_mask"].bool()
        self.pairs.append((found[there], inputs["sampling_per_token_logps"][there]))
        self.drawn.append(inputs["completion_ids"])
        return super()._compute_loss(model, inputs)


def trained(folder, *, inside: Any = ours.enabled, steps: int = 3, other: bool = False, **options: Any) -> Any:
    model = trl_runs.model(folder)
    settings = trl_runs.settings(folder, learning_rate=1e-2, max_steps=steps, **trl_runs.GROUPS, **options)
    with rlk.exact(model) as exact, inside():
        trainer = Scored(
            trl_runs.model(folder) if other else model,
            args=stock_trl.GRPOConfig(**settings),
            train_dataset=trl_runs.prompts(),
            processing_class=trl_runs.tokenizer(),
            reward_funcs=trl_runs.vowels,
            rollout_func=ours.exact_rollout(exact),
        )
        trainer.train()
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("exact"), temperature=0.8, top_k=20, top_p=0.9)


def test_trl_scores_each_token_with_the_bits_of_the_rollout(run) -> None:
    assert [torch.equal(a, b) for a, b in run.pairs] == [True] * 3
    assert min(len(a) for a, _ in run.pairs) > 8


def test_the_weights_change_from_step_to_step(run, tmp_path) -> None:
    assert min(trl_runs.logged(run, "grad_norm")) > 0
    assert not torch.equal(run.model.lm_head.weight, trl_runs.model(tmp_path).lm_head.weight)


def test_a_run_draws_the_same_tokens_again(run, tmp_path) -> None:
    again = trained(tmp_path, steps=1, temperature=0.8, top_k=20, top_p=0.9)
    assert torch.equal(again.drawn[0], run.drawn[0])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"other": True}, "another model"),
        ({"bf16": True}, "mixed precision 'bf16'"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32"),
    ],
)
def test_what_a_rollout_would_leave_out_is_refused_by_name(options, why, tmp_path) -> None:
    with pytest.raises(rlk.HostError, match=f"exact rollout has no form for {why}"):
        trained(tmp_path, steps=1, **options)


def test_the_benchmark_of_a_training_finds_no_difference_with_an_exact_rollout_alone(tmp_path) -> None:
    main = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "gpu_trl_grpo.py"))["main"]
    try:
        main(["--toy", "--warm", "0", "--steps", "2", "--output", str(tmp_path / "found.json")])
    finally:
        rlk.configure()
    runs = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["runs"]
    assert [runs[name]["differ"] > 0 for name in ("stock", "ours", "exact")] == [True, True, False]
    assert min(run["tokens"] for run in runs.values()) > 64
