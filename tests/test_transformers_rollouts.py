"""Rollouts of transformers models: what generate and exact.generate drew, recorded, and drawn again from a folder."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel import rollouts
from rlkernel.rollouts import Params
from rlkernel_core.errors import ArgumentError, ConfigError
from tests.command_line import answer

hf = pytest.importorskip("transformers", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")

from rlkernel.integrations import transformers  # noqa: E402
from tests.trl_runs import model as made  # noqa: E402

PROMPTS = [[5, 9, 3], [2, 7, 7, 3, 8]]
PADDED = {"input_ids": torch.tensor([[0, 0, 5, 9, 3], PROMPTS[1]]), "attention_mask": torch.ones(2, 5).long()}
PADDED["attention_mask"][0, :2] = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen2 of random weights, saved in `model`."""
    folder = tmp_path_factory.mktemp("tiny")
    made(folder)
    return folder


def generated(folder, dtype=torch.float32, **options):
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    drawing = transformers.drawing(seeds=[11, 12])
    model.generate(**PADDED, **{"max_new_tokens": 12, **options}, custom_generate=drawing)
    return drawing


@pytest.mark.parametrize(
    ("options", "law"),
    [
        ({"do_sample": True, "top_k": 0}, {}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9}, {}),
        ({"do_sample": True, "top_k": 0, "top_p": 0.9, "min_p": 0.02}, {"filter_order": "joint"}),
        ({"do_sample": False}, {"temperature": 0.0}),
    ],
)
def test_what_generate_drew_is_drawn_again(folder, options, law) -> None:
    drawing = generated(folder, **options)
    record = rollouts.from_drawing(drawing, weights="step 4")
    first = record.rollouts[0]
    assert [list(r.prompt) for r in record.rollouts] == PROMPTS
    assert [(r.seed, r.step) for r in record.rollouts] == [(11, 3), (12, 5)]
    want = {"tie": "keep_all", "stop_ids": (1,), "max_new_tokens": 12}
    want |= {name: options[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in options} | law
    assert first.params == Params(**want)
    found = rollouts.verify(record, rollouts.pretrained(folder / "model"), tolerance=1e-4)
    assert (found.ok, found.same) == (True, record.tokens), found.complaints()


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({"max_new_tokens": None, "max_length": 9}, {"stop_ids": (1,), "max_new_tokens": 4}),
        ({"max_new_tokens": None}, {"stop_ids": (1,), "max_new_tokens": 20}),  # transformers' default
        ({"max_time": 0.0}, {}),
    ],
)
def test_where_a_sequence_ends_is_stated_as_generate_was_told_or_not_at_all(folder, options, ends) -> None:
    record = rollouts.from_drawing(generated(folder, do_sample=True, top_k=0, **options), weights="w")
    assert {r.params for r in record.rollouts} == {Params(tie="keep_all", **ends)}
    assert rollouts.verify(record, rollouts.pretrained(folder / "model"), tolerance=1e-4).complaints() == []


def test_a_rollout_in_bf16_passes_the_command_and_another_model_does_not(cli, folder, tmp_path) -> None:
    record = rollouts.from_drawing(generated(folder, torch.bfloat16, do_sample=True, top_k=0), weights="w")
    rollouts.write(tmp_path / "r", record)
    said = answer(cli("verify-rollout", str(tmp_path / "r"), "--model", str(folder / "model"), "--json"))
    assert (said["ok"], said["tokens"], said["law"]) == (True, record.tokens, "processed")
    other = hf.AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    other.save_pretrained(tmp_path / "other")
    assert cli("verify-rollout", str(tmp_path / "r"), "--model", str(tmp_path / "other")).exit_code == 1


@pytest.mark.parametrize("score", ["linear_logprob", "logprob"])
def test_what_exact_generate_drew_is_drawn_again_in_its_bits(cli, folder, tmp_path, score) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    params = Params(0.7, top_p=0.95, stop_ids=(1,), max_new_tokens=10)
    asked = {"max_new_tokens": 10, "temperature": 0.7, "top_p": 0.95, "stop_ids": [1], "seed": 3, "score": score}
    with rlk.exact(model) as exact:
        drawn = exact.generate(PROMPTS, **asked)
    record = rollouts.from_generated(PROMPTS, drawn, seed=3, params=params, weights="w")
    rollouts.write(tmp_path / "r", record)
    arguments = ("--model", str(folder / "model"), "--exact", "--score", score, "--dtype", "bfloat16", "--json")
    said = answer(cli("verify-rollout", str(tmp_path / "r"), *arguments))
    assert (said["ok"], said["tolerance"], said["same"], said["open"]) == (True, 1e-4, record.tokens, 0)
    assert said["needed"] < 5e-6


def test_what_a_record_cannot_state_is_refused(folder) -> None:
    with pytest.raises(ArgumentError, match="has drawn nothing"):
        rollouts.from_drawing(transformers.drawing(seeds=[1]), weights="w")
    with pytest.raises(ArgumentError, match="RepetitionPenaltyLogitsProcessor"):
        rollouts.from_drawing(generated(folder, repetition_penalty=1.2), weights="w")
    filters = {"do_sample": True, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    with pytest.raises(ArgumentError, match="are in an order that `sample` has not"):
        rollouts.from_drawing(generated(folder, **filters), weights="w")


def test_a_folder_without_weights_is_refused(folder, tmp_path) -> None:
    (tmp_path / "config.json").write_text((folder / "model" / "config.json").read_text())
    with pytest.raises(ConfigError, match="no weights there"):
        rollouts.pretrained(tmp_path)


def test_equal_prompts_with_one_seed_are_refused_unless_greedy(folder) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "model")
    twice = {"input_ids": torch.tensor([[5, 9, 3]] * 2), "attention_mask": torch.ones(2, 3).long()}
    with pytest.raises(ArgumentError, match="^seeds: .* got 4 for rows 0 and 1"):
        model.generate(**twice, max_new_tokens=2, custom_generate=transformers.drawing([4, 4]), do_sample=True)
    same = model.generate(**twice, max_new_tokens=2, custom_generate=transformers.drawing([4, 4]), do_sample=False)
    assert torch.equal(same[0], same[1])
