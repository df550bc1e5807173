"""GRPO within one small memory: the plan comes first and bounds the run, rollout and trainer share their weights."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlkernel import nn
from rlkernel.demo import task
from rlkernel.demo.model import Policy, Shape
from rlkernel.demo.rollout import Rollouts
from rlkernel_core.host.memory import Memory
from tests.test_load import peak

FOLDER = Path(__file__).parents[1] / "examples" / "edge_grpo"


@pytest.fixture
def example(monkeypatch):
    """A module of the example, as its script imports it."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        for other in ("plan", "rollout", "train"):
            monkeypatch.delitem(sys.modules, other, raising=False)
        spec = importlib.util.spec_from_file_location(f"edge_grpo_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_it_runs_its_plan_first_and_trainer_and_rollout_agree() -> None:
    command = [sys.executable, str(FOLDER / "train.py"), "--size", "toy", "--fit", "3", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "memory plan"
    assert any(line.startswith("packed: 8 layers in int4_g32") for line in lines)
    updates = [line.split() for line in lines if line.startswith("update")]
    assert len(updates) == 2
    assert max(float(words[words.index("drift") + 1]) for words in updates) < 1e-4  # one copy of the weights


def test_a_device_that_is_not_there_is_told_before_anything_is_fitted(example, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        example("train").main()
    assert "torch sees no GPU, and rlkernel doctor says why" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"])
def test_a_model_of_known_size_is_counted_right(example, name) -> None:
    """Parameters as the models are sold, within what norms and rounding of the name leave."""
    model = example("plan").MODELS[name]
    parameters = model.dense + model.layers * sum(rows * columns for rows, columns in model.linears)
    sold = {"qwen3-0.6b": 0.596e9, "qwen3-1.7b": 1.72e9, "qwen3-4b": 4.02e9}[name]
    assert abs(parameters / sold - 1) < 0.01


def test_what_fits_in_8_gb_and_what_does_not(example) -> None:
    plan = example("plan")
    board = Memory(total=7990 << 20, available=7200 << 20, free=0, cached=0)
    peaks = {name: plan.plan(model, plan.Run()).peak for name, model in plan.MODELS.items()}
    assert [name for name, most in peaks.items() if most <= board.budget] == ["qwen3-0.6b"]
    shorter = plan.Run(context=512, rollouts=8)
    assert plan.plan(plan.MODELS["qwen3-1.7b"], shorter).peak <= board.budget


def test_the_plan_is_what_the_run_takes(example, tmp_path) -> None:
    """At toy size: parts that stay to the byte, the micro-batch as an upper bound that is no more than four times."""
    train, plan = example("train"), example("plan")
    shape = Shape(len(task.ALPHABET), train.CONTEXT, 64, 2, 4)
    told = plan.plan(
        plan.demo(64, 2, vocab=shape.vocab, context=train.CONTEXT),
        plan.Run(train.FORMAT, train.RANK, 512, train.CONTEXT, 512, checkpointed=False, runtime=0),
    )
    from safetensors.torch import save_file

    save_file(Policy(shape).state_dict(), tmp_path / "base.safetensors")
    policy = train.packed(shape, tmp_path / "base.safetensors", "cpu")
    layers = [m for m in policy.modules() if isinstance(m, nn.QuantLinear)]
    adapter = sum(p.nbytes for p in policy.parameters() if p.requires_grad)
    assert told.parts["weights in int4_g32, once for rollout and trainer"] == sum(m.weight.nbytes for m in layers)
    assert told.parts["LoRA of rank 8, gradients, Adam moments"] == 4 * adapter
    assert told.parts["embeddings and head"] == sum(
        t.nbytes for t in (policy.tokens.weight, policy.positions.weight, policy.head.weight)
    )
    given = task.problems(512, torch.Generator().manual_seed(0))
    drawn = Rollouts(given.answers, torch.zeros(given.answers.shape), torch.ones_like(given.answers, dtype=torch.bool))
    taken = peak(lambda: train.logprob(policy, given.prompts, drawn).sum().backward(), 0)
    assert taken < told.parts["activations of a micro-batch"] + 2 * adapter < 4 * taken
