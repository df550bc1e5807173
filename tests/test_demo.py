"""The demo: it learns, it repeats itself, and its run folder can be read whatever happened."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from rlkernel.demo import task
from rlkernel.demo.run import Options, run
from rlkernel.demo.train import Recipe
from rlkernel_core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fresh")

SMALL = Recipe(steps=3, fit_steps=4, prompts=4, group=4)
OPERATORS_USED = {"advantage", "capture", "linear_logprob", "policy_loss", "qmatmul", "quantize", "sample"}


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def learned(folder) -> list[tuple]:
    """What must repeat: everything but the clock."""
    return [(m["reward"], m["loss"], m["drift_max"], m["drift_kl"], m["entropy"]) for m in metrics(folder)]


def test_problems_are_arithmetic_and_their_answers_are_right() -> None:
    given = task.problems(50, torch.Generator().manual_seed(0))
    lines = [task.text(p) + task.text(a) for p, a in zip(given.prompts, given.answers, strict=True)]
    right = [f"{line[:2]}+{line[3]}={int(line[:2]) + int(line[3]):03d}." for line in lines]
    assert lines == right


def test_the_careless_writer_errs_about_half_the_time() -> None:
    wrong = task.problems(4000, torch.Generator().manual_seed(0), error_rate=task.ERROR_RATE)
    lines = [task.text(p) + task.text(a) for p, a in zip(wrong.prompts, wrong.answers, strict=True)]
    share = sum(int(x[:2]) + int(x[3]) == int(x[5:8]) for x in lines) / len(lines)
    assert 0.5 < share < 0.6


def test_the_mask_ends_with_the_first_full_stop() -> None:
    end = task.END
    tokens = torch.tensor([[1, 2, 3, end], [1, end, end, 4], [5, 6, 7, 8]])
    assert task.answer_mask(tokens).tolist() == [[True] * 4, [True, True, False, False], [True] * 4]


def test_the_run_folder_says_what_ran_and_how_it_went(tmp_path) -> None:
    summary = run(Options(out=tmp_path / "run", recipe=SMALL))
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "options.json",
        "metrics.jsonl",
        "decisions.json",
        "summary.json",
        "curves.png",
    }
    assert {row["op"].partition("@")[0] for row in summary["served"]} == OPERATORS_USED
    assert {row["backend"] for row in summary["served"]} == {"torch"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert (summary["complete"], summary["steps"]) == (True, 3)
    assert json.loads((tmp_path / "run" / "decisions.json").read_text())["hash"] == summary["decisions_hash"]


def test_the_same_seed_gives_the_same_curve_and_another_one_another(tmp_path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(Options(out=tmp_path / name, seed=seed, recipe=SMALL))
    assert learned(tmp_path / "a") == learned(tmp_path / "b")
    assert learned(tmp_path / "a") != learned(tmp_path / "c")


def test_an_interruption_leaves_a_readable_run_folder(tmp_path) -> None:
    def interrupt(progress) -> None:
        if progress.phase == "improve" and progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Options(out=tmp_path / "run", recipe=SMALL), interrupt)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["complete"], summary["steps"], len(metrics(tmp_path / "run"))) == (False, 2, 2)
    assert (tmp_path / "run" / "curves.png").stat().st_size > 0


def test_an_interruption_before_the_first_update_leaves_a_readable_run_folder(tmp_path) -> None:
    def interrupt(progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Options(out=tmp_path / "run", recipe=SMALL), interrupt)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["complete"] is False


def test_a_run_folder_that_exists_is_not_written_over(tmp_path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        run(Options(out=tmp_path, recipe=SMALL))


def test_an_unknown_backend_is_an_error_before_anything_runs(tmp_path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        run(Options(out=tmp_path / "run", order=("toch",), recipe=SMALL))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_it_learns(tmp_path) -> None:
    command = [sys.executable, "-m", "rlkernel", "demo", "--json", "--steps", "9", "--out", str(tmp_path / "run")]
    summary = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert summary["reward_rise"] >= 0.2
    assert summary["drift_mean"] < 0.1
    assert summary["parameters"] < 2_000_000
