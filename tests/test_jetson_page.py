"""The page for owners of boards: its commands exist with every option, and its scripts too."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "jetson.md").read_text()
BLOCKS = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines()]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("rlkernel ")])
def test_a_command_of_the_checklist_exists_with_its_options(cli, line) -> None:
    words = shlex.split(line)
    said = cli(words[1], "--help")
    assert said.exit_code == 0, said.output
    assert [word for word in words if word.startswith("--") and word not in said.stdout] == []


def test_scripts_and_folders_of_the_checklist_exist() -> None:
    scripts = [word for line in LINES for word in line.split() if word.endswith(".py")]
    assert scripts
    assert [s for s in scripts if not (ROOT / s).is_file()] == []
    assert all((ROOT / "backends" / name / "pyproject.toml").is_file() for name in ("triton", "jetson"))
