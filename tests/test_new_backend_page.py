"""docs/write-a-backend.md from its first block to its last, in a fresh environment without a network."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rlkernel.config import validated
from tests.environments import Environment, environment
from tests.test_docs import INSTALLING, ROOT, Block, assert_printed, blocks, sessions

__all__ = ["environment"]
PAGE = INSTALLING[0]


@pytest.mark.slow  # test_new_backend_installed.py installs and attacks the same template in half the time
def test_a_backend_is_written_proved_and_packaged_by_the_page(environment) -> None:
    folder = environment.folder
    for i, block in enumerate(blocks(PAGE)):
        expected = int(block.options.get("exit", "0"))
        if "file" in block.options:
            (folder / block.options["file"]).write_text(block.code)
        elif block.language == "bash":
            for command in block.code.splitlines():
                folder = carried_out(environment, command, folder)
        elif block.language == "console":
            for command, printed in sessions(block.code):
                assert_printed(said(environment, command, folder, expected), printed)
        elif block.language == "diff":
            edit(folder / block.options["in"], block)
        elif block.language == "python":
            environment.run("python", "-c", block.code, cwd=folder)
        elif block.language == "toml":
            described(tomllib.loads(block.code), tomllib.loads((folder / "pyproject.toml").read_text()))
        else:
            assert block.language in {"text", "yaml"}, i
    with zipfile.ZipFile(next((folder / "dist").glob("rlkernel_acme-*.whl"))) as wheel:
        assert "rlkernel_acme/whiten.py" in wheel.namelist()


def test_the_ci_of_the_page_gives_the_reusable_workflow_its_inputs() -> None:
    workflow = ROOT / ".github" / "workflows" / "conformance.yml"
    if not workflow.exists():
        pytest.skip("no .github/workflows/conformance.yml here")
    (page,) = (block.code for block in blocks(PAGE) if "uses:" in block.code)
    given = re.findall(r"^      (\w+):", page.partition("with:\n")[2], re.MULTILINE)
    taken = re.findall(r"^      (\w+):$", workflow.read_text().partition("inputs:\n")[2], re.MULTILINE)
    assert [name for name in given if name not in taken] == []


def carried_out(environment: Environment, command: str, folder: Path) -> Path:
    """Run a command; the working folder after it."""
    words = shlex.split(command)
    variables = dict(w.split("=", 1) for w in itertools.takewhile(lambda w: re.match(r"[A-Z_]+=", w), words))
    words = words[len(variables) :]
    if words[0] == "cd":
        return folder / words[1]
    if words[:3] == ["rlkernel", "conformance", "run"] and "--op" not in words:
        words += ["--op", "whiten"]  # test_new_backend_installed.py attacks every operator of the template
    environment.run(*words, cwd=folder, variables=variables)
    return folder


def said(environment: Environment, command: str, folder: Path, expected: int) -> str:
    done: subprocess.CompletedProcess[str] = environment.run(*shlex.split(command), cwd=folder, expected=expected)
    return done.stdout


def described(shown: dict[str, Any], project: dict[str, Any]) -> None:
    """A table of the page is one that rlkernel takes, or stands in the project so."""
    if "rlkernel" in shown:
        validated(shown["rlkernel"], "page", {"acme"})
    else:
        entry = shown["project"]["entry-points"]
        assert entry == project["project"]["entry-points"]


def edit(path: Path, block: Block) -> None:
    """Replace the lines of a diff that stay or go by those that stay or come; they stand in the file once."""
    lines = block.code.splitlines()
    old, new = ("\n".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} holds {text.count(old)} times:\n{old}"
    path.write_text(text.replace(old, new))
