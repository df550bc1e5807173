"""Whole engines of vLLM on a CPU as RL frameworks hold them: under Ray, with LoRA adapters, with sampling masks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlkernel import record
from tests.vllm_rl_runs import HOT, adapters, dequantized, merged
from tests.vllm_runs import ROOT, models, ran

pytest.importorskip("vllm.entrypoints.llm", exc_type=ImportError)
pytest.importorskip("triton_interpreted", reason="pip install --no-deps tests/vllm_cpu; `make hosts` does")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def found_by(case: str, folder: Path) -> dict[str, Any]:
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"  # of Ray's processes too
    return ran(case, folder, "tests.vllm_rl_runs", PYTHONPATH=path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("vllm")
    models(made)
    return made


@pytest.fixture(scope="module")
def actor(folder) -> dict[str, Any]:
    pytest.importorskip("ray")
    return found_by("actor", folder)


@pytest.fixture(scope="module")
def workers(folder) -> dict[str, Any]:
    pytest.importorskip("ray")
    return found_by("workers", folder)


@pytest.fixture(scope="module")
def adapted(folder) -> Path:
    pytest.importorskip("peft")
    adapters(folder)
    return folder


@pytest.fixture(scope="module")
def lora(adapted) -> dict[str, Any]:
    return found_by("lora", adapted)


@pytest.fixture(scope="module")
def lora_quantized(adapted) -> dict[str, Any]:
    return found_by("lora_quantized", adapted)


@pytest.fixture(scope="module")
def masks(folder) -> dict[str, Any]:
    return found_by("masks", folder)


def test_an_engine_in_an_actor_of_ray_draws_what_it_draws_in_a_process(actor) -> None:
    assert actor["actor"] == actor["process"]


def test_an_engine_in_an_actor_of_ray_says_what_it_ran(actor, folder) -> None:
    assert actor["record"] == [str(folder / "actor" / "decisions.json")]
    through = {entry.host: entry for entry in record.through(folder / "actor")}
    assert through["vllm"].calls["sample"] > 0
    assert "vllm quantization" in through


def test_two_ranks_that_are_actors_of_ray_draw_what_one_process_draws(actor, workers) -> None:
    assert workers["executor"] == "RayExecutorV2"
    assert workers["drawn"] == actor["process"]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_that_is_an_actor_of_ray_says_what_it_ran(workers, folder, rank, cli) -> None:
    at = folder / "workers" / ("", "rank1")[rank]
    assert workers["record"][rank] == str(at / "decisions.json")
    said = json.loads(cli("status", str(at), "--json").stdout)
    assert {"vllm", "vllm quantization"} <= {entry["host"] for entry in said["hosts"]}
    assert {"sample@1", "qmatmul@1"} <= {ran["call"]["op"] for ran in said["decisions"]}


@pytest.mark.parametrize("how", ["lora", "lora_quantized"])
def test_base_and_adapters_draw_together_what_they_draw_alone(request, how) -> None:
    found = request.getfixturevalue(how)
    for rule in ("drawn", "greedy"):
        assert found[rule] == found[f"{rule} alone"]
        assert len({tuple(ids) for ids in found[rule]}) == len(found[rule])


def test_greedy_tokens_of_adapters_are_those_of_transformers_and_peft(lora, adapted) -> None:
    assert lora["greedy"] == merged(adapted)


def test_adapters_on_a_quantized_base_are_those_beside_its_dequantized_weights(lora_quantized, adapted) -> None:
    assert lora_quantized["greedy"] == dequantized(adapted)
    assert lora_quantized["greedy"][0] == lora_quantized["base"]


@pytest.mark.parametrize("heat", ["1.0", str(HOT)])
def test_an_engine_that_returns_sampling_masks_draws_with_sample(masks, heat, folder) -> None:
    assert masks[heat]["drawn"] == masks[heat]["drawn again"]
    through = {entry.host: entry for entry in record.through(folder / "masks")}
    assert through["vllm"].calls["sample"] > 0


@pytest.mark.parametrize("heat", ["1.0", str(HOT)])
def test_a_trainer_with_an_engines_sampling_masks_has_its_processed_logprobs(masks, heat) -> None:
    found = masks[heat]
    assert found["kept"] == found["kept again"]
    assert 1 < max(found["kept"]) <= 20
    assert found["processed of the trainer"] == pytest.approx(found["processed"], abs=1e-4)
    assert found["kept mass of the trainer"] == pytest.approx(found["kept mass of the draw"], abs=1e-4)


def test_kept_mass_at_temperature_one_is_what_a_prompt_lacks_of_processed_logprobs(masks) -> None:
    found = masks["1.0"]
    mass = [raw - processed for raw, processed in zip(found["raw"], found["processed"], strict=True)]
    assert mass == pytest.approx(found["kept mass of the draw"], abs=1e-4)
    assert min(mass) < -0.01
