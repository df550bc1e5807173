"""The suite `trainers`: a step with rlkernel inside is right; a trainer that is not here says what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
from rlkernel_bench import suites
from rlkernel_bench.suites import trainers


def test_a_trainer_that_is_not_installed_says_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(trainers, "find_spec", lambda name: None)
    for work in suites.works(["trainers"], "toy"):
        problem = suites.problem(work, "cpu")
        [found] = trainers.candidates(problem, "cpu", ["reference"], None)
        assert (found.name, found.status) == (work.ruler, "absent")
        assert f"not installed: {work.ruler}" in found.message


@pytest.mark.parametrize("host", trainers.NEEDS)
def test_a_step_with_rlkernel_inside_is_right_beside_the_trainers_own(host) -> None:
    if any(find_spec(name) is None for name in trainers.NEEDS[host]):
        pytest.skip(f"{host} is not installed")
    # In a process of its own: empty modules stand for what the trainer names and does not use.
    command = [sys.executable, "-m", "rlkernel", "bench", "run", "--suite", "trainers", "--work", host, "--json"]
    command += ["--backend", "reference", "--seconds", "0.001"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    [result] = json.loads(done.stdout)["results"]
    assert {c["name"]: c["status"] for c in result["candidates"]}["reference"] == "measured"
    assert {c["status"] for c in result["candidates"]} <= {"measured", "coarse"}
