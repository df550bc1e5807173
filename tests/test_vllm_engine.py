"""Whole engines of vLLM on a CPU: in this process, spawned, served over HTTP. `make hosts` has their environment."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rlkernel import record, rollouts
from rlkernel.agree.pretrained import pretrained
from tests.vllm_runs import DRAW, ENVIRONMENT, FILTERS, PROMPTS, RECORD, ROOT, SEEDS, SMALL, TOKENS, models, ran

pytest.importorskip("vllm.entrypoints.llm", exc_type=ImportError)
pytest.importorskip("triton_interpreted", reason="pip install --no-deps tests/vllm_cpu; `make hosts` does")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("vllm")
    models(made)
    return made


@pytest.fixture(scope="module")
def inside(folder) -> dict[str, Any]:
    return ran("inside", folder)


@pytest.fixture(scope="module")
def preempted(folder) -> dict[str, Any]:
    return ran("preempted", folder)


@pytest.fixture(scope="module")
def apart(folder) -> dict[str, Any]:
    return ran("apart", folder, VLLM_ENABLE_V1_MULTIPROCESSING="1")


def test_a_request_draws_the_same_tokens_alone_and_in_any_batch(inside) -> None:
    assert inside["alone"] == inside["together"]
    assert len({tuple(ids) for ids in inside["together"]}) == len(PROMPTS)
    assert inside["other seed"][0] != inside["together"][0]


def test_a_model_draws_in_transformers_what_it_draws_in_vllm(inside) -> None:
    assert inside["transformers"] == inside["together"]


def test_greedy_tokens_are_those_of_transformers_alone(inside) -> None:
    assert inside["greedy"] == inside["transformers greedy"]


def test_a_request_that_goes_on_from_its_own_tokens_draws_the_rest_of_them(inside) -> None:
    assert inside["resumed"] == inside["together"]


def test_a_stop_token_ends_a_request_and_changes_no_token_before_it(inside) -> None:
    whole = inside["together"][1]
    assert inside["stopped"] == whole[: whole.index(whole[3]) + 1]


def test_an_aborted_request_changes_no_token_of_the_others(inside) -> None:
    assert inside["aborted"] == {f"r{n}": inside["together"][n] for n in (0, 2, 3, 4)}


def test_raw_logprobs_are_those_of_the_logits(inside) -> None:
    assert inside["raw"] == pytest.approx(inside["raw of transformers"], abs=1e-4)


def test_what_an_engine_drew_is_drawn_again_from_its_record(inside, folder) -> None:
    drawn = rollouts.read(folder / "rollout")
    assert [list(r.ids) for r in drawn.rollouts[::2]] == inside["together"]  # the first of two samples each
    found = rollouts.verify(drawn, rollouts.pretrained(folder / "model"), tolerance=1e-3)
    assert (found.ok, found.same) == (True, 2 * len(PROMPTS) * TOKENS), found.complaints()


def test_a_trainer_scores_what_an_engine_drew(inside, folder) -> None:
    drawn = rollouts.read(folder / "rollout")
    found = rollouts.replay(drawn, pretrained(folder / "model"))
    assert (found.law, found.left_out, found.drift.tokens) == ("raw", 0, 2 * len(PROMPTS) * TOKENS)
    assert found.drift.max < 1e-4
    assert found.mixed is not None  # the engine's temperature is not 1


def test_processed_logprobs_are_those_of_the_law_that_was_drawn_from(preempted) -> None:
    assert preempted["processed"] == pytest.approx(preempted["processed of transformers"], abs=1e-4)


def test_a_preempted_request_draws_the_tokens_that_it_draws_alone(preempted, inside) -> None:
    assert preempted["preemptions"] > 0
    assert preempted["tokens"][:2] == preempted["alone"]
    assert [ids[:TOKENS] for ids in preempted["tokens"]] == inside["together"]  # with a prefix cache, and without one


def test_a_spawned_engine_has_our_formats_and_our_draw(apart, folder, cli) -> None:
    assert apart["first"]["greedy"] == apart["transformers model"]
    through = {entry.host: entry for entry in record.through(folder / "apart")}
    assert through["vllm"].calls["sample"] > 0
    said = cli("status", str(folder / "apart")).stdout
    assert "qmatmul@1" in said
    assert "through vllm quantization" in said


def test_quantized_weights_draw_the_same_where_prompts_are_partly_in_the_prefix_cache(apart) -> None:
    assert apart["hits"] > 0
    assert apart["without hits"] == apart["first"]["drawn"]


def test_reload_weights_fills_quantized_layers_in_place(apart) -> None:
    assert apart["again"] == apart["first"]
    assert apart["updated"]["greedy"] == apart["transformers update"]
    assert apart["updated"]["greedy"] != apart["first"]["greedy"]


def test_two_ranks_and_a_compiled_graph_multiply_by_the_same_weights(folder) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("vLLM binds each rank to a core of its own")
    first, second, *_ = sorted(os.sched_getaffinity(0))
    cores = {"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}"}
    found = ran("ranks", folder, VLLM_ENABLE_V1_MULTIPROCESSING="1", **cores)
    assert found["greedy"] == found["transformers"]
    assert found["record"] == [str(folder / "ranks" / at / "decisions.json") for at in ("", "rank1")]


def test_an_engine_that_asks_for_nothing_of_ours_is_what_it_is_without_us(folder) -> None:
    with_us = ran("stock", folder)
    assert with_us == ran("stock", folder, VLLM_PLUGINS="triton_interpreted")


def test_a_block_whose_engine_is_in_another_process_is_an_error(folder) -> None:
    said = ran("refused", folder, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert len(said["tokens"][0]) == TOKENS
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=1" in said["block"]
    assert DRAW in said["block"]


def test_a_block_or_an_engine_on_model_runner_v1_is_an_error(folder) -> None:
    said = ran("refused", folder, VLLM_USE_V2_MODEL_RUNNER="0")
    for what in ("block", "engine"):
        assert "set VLLM_USE_V2_MODEL_RUNNER=1" in said[what]


class Server:
    """`vllm serve` on a port of this machine."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        options = {
            "quantization": "rlkernel", "logits-processors": DRAW, "worker-extension-cls": RECORD, "dtype": "float32",
            "max-model-len": SMALL["max_model_len"], "max-num-seqs": SMALL["max_num_seqs"], "block-size": 32,
            "port": self.url.rpartition(":")[2], "host": "127.0.0.1", "served-model-name": "tiny",
        }  # fmt: skip
        asked = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self.log = (folder / "serve.log").open("w")
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
        self.process = subprocess.Popen(  # what `vllm serve` runs, whose command looks for a distribution named vllm
            [*command, "--enforce-eager", *asked],
            cwd=ROOT, stdout=self.log, stderr=self.log,
            env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"},
        )  # fmt: skip
        if not self.up():
            self.close()
            raise AssertionError(Path(self.log.name).read_text()[-4000:])

    def up(self) -> bool:
        """Wait until it answers, or has ended."""
        for _ in range(600):
            try:
                return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
            except OSError:  # nobody listens yet
                if self.process.poll() is not None:
                    return False
                time.sleep(0.25)
        return False

    def open(self, path: str, **body: Any) -> Any:
        asked = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return urllib.request.urlopen(asked, timeout=60)

    def tokens(self, prompt: list[int], seed: int, **more: Any) -> list[int]:
        law = {"temperature": 0.9, **FILTERS, "max_tokens": TOKENS, "ignore_eos": True}
        with self.open(
            "/v1/completions", model="tiny", prompt=prompt, seed=seed, return_token_ids=True, **{**law, **more}
        ) as said:
            return json.load(said)["choices"][0]["token_ids"]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


@pytest.fixture(scope="module")
def server(folder):
    made = Server(folder)
    yield made
    made.close()


def test_a_server_draws_over_http_what_an_engine_draws(server, apart) -> None:
    assert [server.tokens(p, s) for p, s in zip(PROMPTS, SEEDS, strict=True)] == apart["first"]["drawn"]


def test_a_client_that_goes_away_changes_no_token_of_the_next(server, apart) -> None:
    left = server.open("/v1/completions", model="tiny", prompt=PROMPTS[1], stream=True, max_tokens=60, ignore_eos=True)
    left.readline()
    left.close()
    whole = apart["first"]["drawn"][0]
    assert server.tokens(PROMPTS[0], SEEDS[0]) == whole
    assert server.tokens(PROMPTS[0], SEEDS[0], stop_token_ids=[whole[5]]) == whole[: whole.index(whole[5]) + 1]


def test_what_a_server_ran_is_read_by_status(server, folder, cli) -> None:
    server.tokens(PROMPTS[0], 1)
    with server.open("/collective_rpc", method="rlkernel_record", args=[str(folder / "served")]) as said:
        assert str(folder / "served" / "decisions.json") in json.dumps(json.load(said))
    found = json.loads(cli("status", str(folder / "served"), "--json").stdout)
    assert {"vllm", "vllm quantization"} <= {entry["host"] for entry in found["hosts"]}
    assert {"sample@1", "qmatmul@1"} <= {ran["call"]["op"] for ran in found["decisions"]}


def test_the_benchmark_of_an_engine_draws_each_request_alone_as_in_the_batch(tmp_path) -> None:
    script = ROOT / "benchmarks" / "gpu_vllm.py"
    asked = ["--toy", "--engines", "ours", "--turns", "1", "--output", str(tmp_path / "found.json")]
    done = subprocess.run(
        [sys.executable, str(script), *asked], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["engines"]["ours"]
    assert found["requests_alone_as_in_the_batch"] == [True] * 4
    assert found["scored"]["record"] == {"tokens": 16, "tolerance": 1e-3, "ok": True, "same": 16}
