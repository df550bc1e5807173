"""Devices and architectures as people type them: what is meant, or an error with the nearest right word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkernel.cli.hardware import ARCHS, CHIPS, architecture, device_type
from rlkernel_core.errors import ArgumentError, UnknownNameError


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("sm90", "sm90"), ("sm_87", "sm87"), ("SM90a", "sm90"), ("sm100f", "sm100"), ("gfx90a", "gfx90a"),
     ("h200", "sm90"), ("RTX 4090", "sm89"), ("mi300x", "gfx942"), ("x86_64", "x86_64")],
)  # fmt: skip
def test_an_architecture_is_what_was_meant(typed, meant) -> None:
    assert architecture(typed) == meant


@pytest.mark.parametrize(("typed", "nearest"), [("sm999", "sm90"), ("gfx943", "gfx942"), ("hopper", None)])
def test_an_architecture_that_does_not_exist_is_an_error_with_the_nearest(typed, nearest) -> None:
    with pytest.raises(UnknownNameError, match=typed) as error:
        architecture(typed)
    assert nearest is None or nearest in str(error.value)


@pytest.mark.parametrize(("typed", "meant"), [("cuda", "cuda"), ("cuda:1", "cuda"), ("cpu", "cpu"), ("xpu", "xpu")])
def test_an_index_says_nothing_about_a_device_type(typed, meant) -> None:
    assert device_type(typed) == meant


def test_a_device_type_that_nobody_has_is_an_error_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'cuda'"):
        device_type("cude")


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_in_place_of_a_device_type_is_an_error_with_the_words_for_it(chip) -> None:
    with pytest.raises(ArgumentError, match=f"--device cuda --arch {CHIPS[chip]}"):
        device_type(chip)
    assert CHIPS[chip] in ARCHS


@pytest.mark.parametrize("words", [("--device", "banana"), ("--device", "cuda", "--arch", "sm999")])
@pytest.mark.parametrize(
    "command", [("explain", "logprob"), ("lock", "--output", "made.lock")], ids=["explain", "lock"]
)
def test_a_command_that_is_asked_for_no_device_writes_nothing_and_exits_with_2(cli, command, words) -> None:
    done = cli(*command, *words)
    assert (done.exit_code, done.stdout, list(Path.cwd().iterdir())) == (2, "", [])
    assert words[-1] in done.stderr


def test_explain_takes_the_name_of_a_chip(cli) -> None:
    done = cli("explain", "logprob", "--device", "cuda", "--arch", "h100", "--json")
    assert json.loads(done.stdout)["call"]["arch"] == "sm90"
