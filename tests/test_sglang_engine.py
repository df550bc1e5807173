"""Whole engines of SGLang on a CPU, its compiled part a stub: in processes of their own, and served over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlkernel import record, rollouts
from rlkernel.agree.pretrained import pretrained
from tests.sglang_runs import ENVIRONMENT, FILTERS, PROMPTS, ROOT, SEEDS, SMALL, TOKENS
from tests.vllm_runs import models

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("sglang")
    models(made)
    return made


def ran(case: str, folder: Path, **environment: str) -> dict[str, Any]:
    """What a case of `sglang_runs` found, in an engine of its own."""
    asked = {**os.environ, **ENVIRONMENT, **environment}
    command = [sys.executable, "-m", "tests.sglang_runs", case, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=asked, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / f"{case}.json").read_text())


@pytest.fixture(scope="module")
def inside(folder) -> dict[str, Any]:
    return ran("inside", folder, RLKERNEL_RECORD=str(folder / "ran"))


def test_a_request_draws_the_same_tokens_alone_and_in_any_batch(inside) -> None:
    assert inside["alone"] == inside["together"]
    assert len({tuple(ids) for ids in inside["together"]}) == len(PROMPTS)
    assert inside["other seed"][0] != inside["together"][0]


def test_a_prefix_cache_changes_no_token(inside) -> None:
    assert inside["without a cache"] == inside["together"]


def test_a_model_draws_in_transformers_what_it_draws_in_sglang(inside) -> None:
    assert inside["transformers"] == inside["top k"]


def test_greedy_tokens_are_those_of_transformers_alone(inside) -> None:
    assert inside["greedy"] == inside["transformers greedy"]


def test_a_request_that_goes_on_from_its_own_tokens_draws_the_rest_of_them(inside) -> None:
    assert inside["resumed"] == inside["together"]


def test_a_stop_token_ends_a_request_and_changes_no_token_before_it(inside) -> None:
    whole = inside["together"][1]
    assert inside["stopped"] == whole[: whole.index(whole[3]) + 1]


def test_a_request_that_is_sent_back_draws_the_tokens_that_it_draws_at_once(inside, folder) -> None:
    found = ran("retracted", folder, SGLANG_TEST_RETRACT="1")
    assert found["retractions"] > 0
    assert found["tokens"] == inside["together"]


def test_what_an_engine_drew_is_drawn_again_from_its_record(inside, folder) -> None:
    drawn = rollouts.read(folder / "rollout")
    assert [list(r.ids) for r in drawn.rollouts] == inside["together"]
    found = rollouts.verify(drawn, rollouts.pretrained(folder / "model"), tolerance=1e-3)
    assert (found.ok, found.same) == (True, len(PROMPTS) * TOKENS), found.complaints()


def test_a_trainer_scores_what_an_engine_drew(inside, folder) -> None:
    found = rollouts.replay(rollouts.read(folder / "rollout"), pretrained(folder / "model"))
    assert (found.law, found.mixed, found.drift.tokens) == ("tempered", None, len(PROMPTS) * TOKENS)
    assert found.drift.max < 1e-4


@pytest.fixture(scope="module")
def masks(folder) -> dict[str, Any]:
    return ran("masks", folder)


def test_sampling_masks_change_no_token_and_come_to_whom_asks(masks, inside) -> None:
    assert masks["drawn"] == masks["some"] == inside["together"]
    assert masks["masks of some"] == masks["masks"][1::2]
    assert masks["asked for no mask"] == [None] * 3


def test_a_trainer_with_an_engines_sampling_masks_has_its_processed_logprobs(masks) -> None:
    assert masks["kept"] == masks["kept again"]
    assert 1 < max(masks["kept"]) <= 20
    assert masks["processed of the trainer"] == pytest.approx(masks["processed"], abs=1e-4)


def test_kept_mass_of_an_engine_is_that_of_the_trainer(masks) -> None:
    assert masks["kept mass"] == pytest.approx(masks["kept mass of the trainer"], abs=1e-4)
    assert min(masks["kept mass"]) < -0.01


def test_kept_mass_in_a_record_is_judged(masks, folder) -> None:
    drawn = rollouts.read(folder / "masked")
    assert drawn.rollouts[0].log_kept_mass is not None
    assert rollouts.verify(drawn, rollouts.pretrained(folder / "model"), tolerance=1e-3).ok


def test_what_an_engine_ran_is_read_by_status(inside, folder, cli) -> None:
    through = {entry.host: entry for entry in record.through(folder / "ran")}
    assert through["sglang"].calls["sample"] > 0
    assert "sample@1" in cli("status", str(folder / "ran")).stdout


def test_an_engine_that_asks_for_nothing_of_ours_is_what_it_is_without_us(folder) -> None:
    with_us = ran("stock", folder)
    assert with_us == ran("stock", folder, SGLANG_PLUGINS="none")


def test_a_server_draws_over_http_what_an_engine_draws(inside, folder) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {name: value for name, value in SMALL.items() if value is not True}
    flags = [f"--{name.replace('_', '-')}" for name in SMALL if name not in given]
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    place = ["--model-path", str(folder / "model"), "--port", str(port), "--sampling-backend", "rlkernel"]
    command = [sys.executable, "-m", "sglang.launch_server", *place, *flags, *options, "--max-total-tokens", "2048"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log)
        try:
            assert ready(server, port), (folder / "server.log").read_text()[-3000:]
            law = {"temperature": 0.9, **FILTERS, "max_new_tokens": TOKENS, "ignore_eos": True}
            asked = [{**law, "sampling_seed": seed} for seed in SEEDS]
            said = answer(port, "/generate", input_ids=PROMPTS, sampling_params=asked)
        finally:
            server.terminate()
            server.wait(60)
    assert [out["output_ids"] for out in said] == inside["together"]


def ready(server: subprocess.Popen, port: int) -> bool:
    for _ in range(480):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            if server.poll() is not None:
                return False
            time.sleep(0.25)
    return False


def answer(port: int, path: str, **body: Any) -> Any:
    content = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), content)
    with urllib.request.urlopen(asked, timeout=60) as said:
        return json.load(said)


def test_the_benchmark_of_an_engine_draws_each_request_alone_as_in_the_batch(tmp_path) -> None:
    script = ROOT / "benchmarks" / "gpu_sglang.py"
    asked = ["--toy", "--engines", "rlkernel", "--turns", "1", "--output", str(tmp_path / "found.json")]
    done = subprocess.run(
        [sys.executable, str(script), *asked], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["engines"]["rlkernel"]
    assert found["requests_alone_as_in_the_batch"] == [True] * 4
    assert found["record"] == {"tokens": 16, "tolerance": 1e-3, "ok": True, "same": 16}
