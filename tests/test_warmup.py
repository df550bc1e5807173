"""`rlkernel warmup`: operators at a run's sizes before the run, and never inside a capture."""

import json

import pytest
import torch

import rlkernel as rlk
from rlkernel.cli.warmup import EXAMPLES_OF, Sizes, warm
from rlkernel_core.errors import CaptureError, ConfigError
from rlkernel_core.spec import OPERATORS

TOY = Sizes(tokens=4, vocab=40, hidden=64, length=2, format="int4_g32")
TINY = ("--tokens", "4", "--vocab", "40", "--hidden", "128", "--length", "2", "--op", "logprob")


def test_operators_without_an_example_compile_nothing_of_their_own() -> None:
    left = {"capture", "group_filter", "prepack", "rollout_buffer", "route", "shape_rewards", "verify"}
    assert set(OPERATORS) - set(EXAMPLES_OF) == left


@pytest.mark.parametrize("op", EXAMPLES_OF)
def test_an_operator_runs_as_the_policy_chooses(op) -> None:
    [found] = warm([op], TOY, "cpu")
    assert (found.op, found.target) == (op, rlk.last_decision(op).target)
    assert found.first_s > 0
    assert found.again_s > 0


def test_inside_a_capture_it_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="do it before"):
        warm(["logprob"], TOY, "cpu")


def test_an_operator_that_compiles_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="group_filter compiles nothing"):
        warm(["group_filter"], TOY, "cpu")


def test_every_size_is_a_line(cli) -> None:
    found = json.loads(cli("warmup", *TINY, "--tokens", "8", "--json").stdout)
    assert [(w["op"], w["tokens"]) for w in found["warmed"]] == [("logprob", 4), ("logprob", 8)]
    assert found["seconds"] == sum(w["first_s"] for w in found["warmed"])


def test_an_operator_that_nobody_takes_ends_with_1_and_says_why(cli) -> None:
    done = cli("warmup", *TINY, "--order", "triton", "--json")
    [found] = json.loads(done.stdout)["warmed"]
    assert (done.exit_code, found["target"]) == (1, None)
    assert found["refused"].startswith("triton: ")
