"""The demo: it learns, it repeats itself, and its run folder can be read whatever happened."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from rlkernel.cli.demo import time_left
from rlkernel.demo import picture, record, scale, task
from rlkernel.demo.clock import LEAST, Clock
from rlkernel.demo.exact import ExactPolicy
from rlkernel.demo.model import Policy, Shape
from rlkernel.demo.run import Options, run
from rlkernel.demo.scale import SCALES, place
from rlkernel.demo.train import Recipe, improve
from rlkernel_core.errors import ConfigError, FileError

pytestmark = pytest.mark.usefixtures("fresh")

ROOT = Path(__file__).parents[1]
SMALL = Recipe(steps=3, fit_steps=4, prompts=4, group=4)
SIDES = ("rollout", "trainer")
ROLLOUT = {"capture", "qmatmul", "quantize", "sample"}
TRAINER = {"advantage", "linear_logprob", "policy_loss"}


def start(out, **more) -> dict:
    """A small run on the CPU, whatever else is here."""
    watch = more.pop("watch", lambda _: None)
    return run(Options(**{"out": out, "device": "cpu", "recipe": SMALL, **more}), watch)


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
    summary = start(tmp_path / "run")
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "options.json",
        "metrics.jsonl",
        "decisions.json",
        "summary.json",
        "curves.png",
    }
    served = {side: {r["op"].partition("@")[0] for r in summary["served"] if r["side"] == side} for side in SIDES}
    assert served == {"rollout": ROLLOUT, "trainer": TRAINER}
    assert {row["backend"] for row in summary["served"]} == {"torch"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert (summary["complete"], summary["steps"]) == (True, 3)
    assert json.loads((tmp_path / "run" / "decisions.json").read_text())["hash"] == summary["decisions_hash"]


def test_the_same_seed_gives_the_same_curve_and_another_one_another(tmp_path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        start(tmp_path / name, seed=seed)
    assert learned(tmp_path / "a") == learned(tmp_path / "b")
    assert learned(tmp_path / "a") != learned(tmp_path / "c")


def test_an_interruption_leaves_a_readable_run_folder(tmp_path) -> None:
    def interrupt(progress) -> None:
        if progress.phase == "improve" and progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", watch=interrupt)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["complete"], summary["steps"], len(metrics(tmp_path / "run"))) == (False, 2, 2)
    assert (tmp_path / "run" / "curves.png").stat().st_size > 0


def test_an_interruption_before_the_first_update_leaves_a_readable_run_folder(tmp_path) -> None:
    def interrupt(progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", watch=interrupt)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["complete"] is False


def test_a_run_folder_that_exists_is_not_written_over(tmp_path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        start(tmp_path)


def test_an_unknown_backend_is_an_error_before_anything_runs(tmp_path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'torch'"):
        start(tmp_path / "run", order=("toch",))
    assert not (tmp_path / "run").exists()


def test_a_run_takes_the_gpu_that_is_here_and_else_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr(scale, "device_here", lambda: "cpu")
    assert place(None) == (torch.device("cpu"), SCALES["cpu"])
    monkeypatch.setattr(scale, "device_here", lambda: "cuda")
    monkeypatch.setattr(scale, "present", lambda device: device)
    assert place(None) == (torch.device("cuda"), SCALES["cuda"])
    assert place("cuda:1") == (torch.device("cuda:1"), SCALES["cuda"])
    assert place("cpu") == (torch.device("cpu"), SCALES["cpu"])


def test_the_command_refuses_a_device_that_is_not_here_and_writes_nothing(cli, tmp_path) -> None:
    result = cli("demo", "--device", "cuda:99", "--out", str(tmp_path / "run"))
    assert (result.exit_code, (tmp_path / "run").exists()) == (2, False)
    assert "torch sees no such device here" in result.stderr


def test_the_cpu_runs_on_one_thread_and_has_its_threads_back_after(tmp_path) -> None:
    before, seen = torch.get_num_threads(), set()
    torch.set_num_threads(3)
    try:
        start(tmp_path / "run", watch=lambda _: seen.add(torch.get_num_threads()))
        assert (seen, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


def test_activations_in_bf16_as_gpus_have_them_learn_too(tmp_path) -> None:
    assert SCALES["cuda"].recipe.dtype == "bfloat16"
    summary = start(tmp_path / "run", recipe=dataclasses.replace(SMALL, dtype="bfloat16"))
    assert (summary["complete"], summary["steps"], summary["dtype"]) == (True, 3, "bfloat16")


class Hours:
    """A clock whose every step takes so many seconds."""

    def __init__(self, recipe, seconds) -> None:
        self.at = 0.0
        self.clock = Clock(recipe, seconds, now=lambda: self.at)

    def steps(self, phase, *took) -> None:
        for seconds in took:
            self.at += seconds
            self.clock.tick(phase)


def test_the_time_left_is_told_from_the_third_step_on_and_follows_the_pace() -> None:
    hours = Hours(Recipe(fit_steps=4, steps=100), None)
    hours.steps("fit", 9.0, 1.0)
    assert hours.clock.left("fit") is None
    hours.steps("fit", 1.0, 1.0)
    hours.steps("improve", 30.0, 2.0, 2.0)
    assert hours.clock.left("improve") == 97 * 2.0
    hours.steps("improve", *[4.0] * 8)
    assert hours.clock.left("improve") == 89 * 4.0


def test_before_the_first_update_its_time_is_told_from_its_work() -> None:
    hours = Hours(Recipe(fit_steps=100, steps=10, prompts=48, group=16, epochs=1), None)
    hours.steps("fit", 1.0, 1.0, 1.0)
    # An update passes 768 sequences five times forward or as much; a step of fitting 256 three times.
    assert hours.clock.left("fit") == 97 * 1.0 + 10 * 5.0


def test_what_does_not_fit_into_the_time_is_not_begun() -> None:
    hours = Hours(Recipe(fit_steps=300, steps=100), 100.0)
    hours.steps("fit", *[0.25] * 4)
    assert hours.clock.total("fit") == 4 + (40 - 1) / 0.25
    hours.steps("improve", *[2.0] * 3)
    assert hours.clock.total("improve") == 3 + (100 - 7) // 2


def test_too_few_steps_to_learn_anything_are_made_even_when_time_is_over() -> None:
    hours = Hours(Recipe(fit_steps=300, steps=100), 10.0)
    hours.steps("fit", 5.0, 5.0, 5.0)
    hours.steps("improve", 5.0, 5.0, 5.0)
    assert (hours.clock.total("fit"), hours.clock.total("improve")) == (LEAST["fit"], LEAST["improve"])


def test_a_run_without_a_limit_makes_every_step(tmp_path) -> None:
    hours = Hours(Recipe(fit_steps=300, steps=100), None)
    hours.steps("fit", *[999.0] * 4)
    assert hours.clock.total("fit") == 300


def test_a_run_whose_time_is_over_stops_and_says_how_much_was_wanted(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rlkernel.demo.clock.LEAST", {"fit": 4, "improve": 4})
    small = dataclasses.replace(SCALES["cpu"], recipe=dataclasses.replace(SMALL, steps=50, fit_steps=50), seconds=0.0)
    monkeypatch.setattr(scale, "SCALES", {"cpu": small})
    summary = start(tmp_path / "run", recipe=None)
    assert (summary["fit_steps"], summary["steps"], summary["steps_wanted"]) == (4, 4, 50)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "measuring the pace"),
        (0.0, "done"),
        (0.2, "about 5 s left"),
        (41.0, "about 45 s left"),
        (60.0, "about 1 min left"),
        (77.0, "about 1 min 20 s left"),
    ],
)
def test_the_time_left_as_text(seconds, text) -> None:
    assert time_left(seconds) == text


def test_the_command_tells_the_time_left_on_standard_error_and_ends_with_the_picture(
    cli, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(scale, "SCALES", {"cpu": dataclasses.replace(SCALES["cpu"], recipe=SMALL)})
    result = cli("demo", "--device", "cpu", "--out", str(tmp_path / "run"))
    assert "1/2 fitting to careless text 3/4  about" in result.stderr
    assert "2/2 improving by GRPO 3/3  done" in result.stderr
    assert result.stdout.splitlines()[-1].split() == ["picture", str(tmp_path / "run" / "curves.png")]


def test_without_matplotlib_a_run_ends_well_and_says_how_to_get_its_picture(cli, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(record, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    monkeypatch.setattr(scale, "SCALES", {"cpu": dataclasses.replace(SCALES["cpu"], recipe=SMALL)})
    folder = tmp_path / "run"
    result = cli("demo", "--device", "cpu", "--out", str(folder))
    way = f"pip install matplotlib && python -m rlkernel.demo.picture {folder}"
    assert (result.exit_code, way in result.stdout, (folder / picture.FILE).exists()) == (0, True, False)
    assert picture.redraw(folder) == folder / picture.FILE
    assert (folder / picture.FILE).read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_is_no_run_has_no_picture(tmp_path) -> None:
    with pytest.raises(FileError, match=r"summary\.json: does not exist"):
        picture.redraw(tmp_path)


def drawn(tmp_path) -> tuple:
    """A small run's figure, its panels, and every text in it."""
    summary = start(tmp_path / "run")
    figure = picture.figure(metrics(tmp_path / "run"), summary)
    texts = [t.get_text() for axes in figure.axes for t in axes.texts]
    return figure, figure.axes, texts, summary


def test_the_picture_names_its_axes_with_units_and_draws_what_was_measured(tmp_path) -> None:
    _, (reward, drift, _), _, _ = drawn(tmp_path)
    assert [(a.get_xlabel(), a.get_ylabel(), a.get_yscale()) for a in (reward, drift)] == [
        ("update", "right answers, % of the batch", "linear"),
        ("update", "nats per token, over the batch", "linear"),
    ]
    [line] = reward.lines
    assert list(line.get_ydata()) == [100 * m["reward"] for m in metrics(tmp_path / "run")]
    lines = {line.get_label(): list(line.get_ydata()) for line in drift.lines}
    assert lines["mean |difference| of log p"] == [m["drift_mean"] for m in metrics(tmp_path / "run")]


def test_no_legend_of_the_picture_covers_data(tmp_path) -> None:
    figure, panels, _, _ = drawn(tmp_path)
    figure.draw_without_rendering()
    legends = [(axes, axes.get_legend()) for axes in panels if axes.get_legend() is not None]
    assert len(legends) == 1
    assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes, legend in legends)


def test_the_picture_names_the_kernel_of_every_operator_on_each_side(tmp_path) -> None:
    _, _, texts, _ = drawn(tmp_path)
    assert [t for t in texts if t in {"Rollout", "Trainer"}] == ["Rollout", "Trainer"]
    between = texts[texts.index("Rollout") : texts.index("Trainer")]
    assert between[1:4] == ["capture", "torch", "capture:capture"]
    assert {*between[1::3]} == ROLLOUT


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (0.5, 0.95, "Right answers rose from 50% to 95% in 7 updates"),
        (0.5, 0.3, "Right answers fell from 50% to 30% in 7 updates"),
        (0.5, 0.51, "Right answers did not change: from 50% to 51% in 7 updates"),
    ],
)
def test_the_title_of_the_picture_is_what_was_found(first, last, words) -> None:
    found = {"reward_first": first, "reward_last": last, "reward_rise": last - first, "steps": 7, "drift_mean": 0.0123}
    assert picture.title(found) == f"{words}; rollout and trainer differed by 0.012 nats per token on average"


def making(*arguments: str) -> str:
    """What make would do for the demo."""
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "demo", "PYTHON=python3", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_make_demo_installs_backends_where_a_gpu_is_and_only_there() -> None:
    with_gpu, without = making("GPU=/dev/nvidia0", "OWN_TORCH="), making("GPU=", "OWN_TORCH=")
    assert ("tools/gpu_backends.py" in with_gpu, "tools/gpu_backends.py" in without) == (True, False)
    assert with_gpu.splitlines()[-1] == ".venv-gpu/bin/rlkernel demo"
    assert without.splitlines()[-1] == ".venv/bin/rlkernel demo"


@pytest.mark.parametrize(
    ("arch", "folders"),
    [
        ("sm80", ["triton"]),
        ("sm90", ["triton", "cuda"]),
        ("gfx942", ["triton", "rocm"]),
        ("sm87", ["triton", "jetson"]),
    ],
)
def test_the_backends_for_a_gpu_are_those_made_for_its_architecture(arch, folders) -> None:
    spec = spec_from_file_location("gpu_backends", ROOT / "tools" / "gpu_backends.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert [folder.name for folder in module.folders("cuda", arch)] == folders
    assert module.folders("cpu", "x86_64") == []


@pytest.mark.parametrize(("dtype", "steps"), [("float32", 200), ("bfloat16", 10)])
def test_an_exact_run_differs_in_no_bit_over_many_updates(dtype, steps, monkeypatch) -> None:
    # A reward that an untrained model has a part of, so that every update moves the weights.
    monkeypatch.setattr(task, "rewards", lambda tokens, _: tokens.double().mean(1))
    torch.manual_seed(0)
    recipe = Recipe(steps=steps, prompts=2, group=2, epochs=1, exact=True, dtype=dtype)
    shape = Shape(len(task.ALPHABET), task.PROMPT + task.ANSWER, hidden=32, layers=1, heads=2)
    policy = ExactPolicy.of(Policy(shape), recipe.weights, recipe.activations)
    before = [p.detach().clone() for p in policy.parameters()]
    taken = list(improve(policy, recipe, torch.Generator().manual_seed(0), seed=0))
    assert [step.differ for step in taken] == [0] * steps
    assert not any(torch.equal(p, old) for p, old in zip(policy.parameters(), before, strict=True))


def test_int4_weights_that_the_trainer_does_not_see_differ(tmp_path) -> None:
    assert start(tmp_path / "run")["tokens_that_differ"] > 0


@pytest.mark.slow  # the longest test of the demo
def test_it_learns(tmp_path) -> None:
    command = [
        sys.executable,
        "-m",
        "rlkernel",
        "demo",
        "--device",
        "cpu",
        "--json",
        "--steps",
        "9",
        "--out",
        str(tmp_path / "run"),
    ]
    summary = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert summary["reward_rise"] >= 0.2
    assert summary["drift_mean"] < 0.1
    assert summary["parameters"] < 2_000_000
