"""The command line in this process, on a machine where only what a test plugs in is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlkernel import cli as command_line
from rlkernel import discover, policy


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Run a command in an empty working folder; only `rlkernel` itself and the test's plugins are installed."""
    listed = discover.entry_points
    site = str(tmp_path / "site")

    def seen(group: str) -> list[Any]:
        return [
            e
            for e in listed(group=group)
            if e.dist is not None and (e.dist.name == "rlkernel" or str(e.dist.locate_file("")).startswith(site))
        ]

    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(discover, "entry_points", seen)

    def run(*arguments: str) -> Result:
        policy.refresh()
        return CliRunner().invoke(command_line.app(), list(arguments))

    yield run
    monkeypatch.undo()
    policy.refresh()


def answer(result: Result) -> Any:
    """The JSON of a command that succeeded in printing it."""
    assert result.exit_code in {0, 1}, result.output
    return json.loads(result.stdout)
