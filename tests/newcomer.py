"""Four users type what README and the first pages say, command by command, in a fresh environment.

    python -m tests.newcomer              # on top of the packages that are here; names the steps that need the network
    python -m tests.newcomer --network    # in an empty environment, pip as it stands on the pages

Prints every step with its seconds and ends with 1 where one failed. Blocks are read as `tests.test_docs` reads them;
Python blocks of a page are one script, after its commands. `make test` is left out: it is what CI runs. Without the
network so are the scripts that `tests.test_docs` runs, and a command that the user has typed before in the same folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.environments import Environment, made
from tests.test_docs import INSTALLING, ROOT, assert_printed, blocks, sessions

USERS: Final[Mapping[str, tuple[str, ...]]] = {
    "trainer": (
        "README.md",
        "docs/start/quickstart.md",
        "docs/start/gpu.md",
        "docs/start/trl.md",
        "docs/start/verl.md",
    ),
    "vendor": ("docs/start/vendor.md",),
    "jetson owner": ("docs/start/jetson.md",),
    "kernel researcher": ("docs/judge.md",),
}
IN_CLONE: Final = ("make", "pip install -e .", "pip install -e backends", "pip install -e '.", "python examples")
WANTS: Final = {"python examples/trl_grpo": "trl"}  # what a command imports that the clone does not bring


class Step(NamedTuple):
    """A command of a page, and what became of it."""

    page: str
    command: str
    left_out: str  # why it was not run; empty where it was
    seconds: float


def steps(user: str, environment: Environment) -> Iterator[Step]:
    """Everything that a user types, in order.

    Raises:
        AssertionError: a command failed, or printed something else than the page says; the message has its output.
    """
    typed: set[tuple[Path, str]] = set()
    for page in USERS[user]:
        folder = environment.folder / user / Path(page).stem
        folder.mkdir(parents=True)
        script = []
        for block in blocks(ROOT / page):
            if "file" in block.options:
                (folder / block.options["file"]).write_text(block.code)
            elif block.language == "python":
                script.append(block.code)
            elif block.language in {"bash", "console"}:
                lines = block.code.replace("\\\n", " ").splitlines()
                entered = sessions(block.code) if block.language == "console" else [(line, []) for line in lines]
                for line, printed in entered:
                    command = line.partition("#")[0].strip()
                    if command.startswith("cd "):
                        folder /= command.removeprefix("cd ")
                    elif command:
                        where = place(command, folder)
                        if environment.offline and not printed and (where, command) in typed:
                            yield Step(page, command, "before", 0.0)
                        else:
                            yield typing(page, command, printed, where, environment)
                        typed.add((where, command))
        if script and environment.offline and ROOT / page not in INSTALLING:
            yield Step(page, f"python: {len(script)} blocks", "docs", 0.0)
        elif script:
            begun = time.monotonic()
            environment.run("python", "-c", "\n".join(script), cwd=folder)
            yield Step(page, f"python: {len(script)} blocks", "", time.monotonic() - begun)


def place(command: str, folder: Path) -> Path:
    """Where a reader of a page types a command: in the clone what is of the clone, else in a folder of their own."""
    own = (folder / "pyproject.toml").exists()  # a plugin that the page has made
    return ROOT if command.startswith(IN_CLONE) and not own else folder


def typing(page: str, command: str, printed: list[str], cwd: Path, environment: Environment) -> Step:
    """Run one command."""
    why = left_out(command, offline=environment.offline)
    if why:
        return Step(page, command, why, 0.0)
    begun = time.monotonic()
    if command.startswith("make"):
        subprocess.run([*shlex.split(command), f"VENV={environment.folder / 'made'}"], check=True, cwd=cwd)
    else:
        assert_printed(environment.run(*shlex.split(command), cwd=cwd).stdout, printed)
    return Step(page, command, "", time.monotonic() - begun)


def left_out(command: str, *, offline: bool) -> str:
    """Why a command is not run: it needs the network, or is this very test. Empty where it is run."""
    words = shlex.split(command)
    if words == ["make", "test"]:
        return "CI"
    if not offline:
        return ""
    named = [word for word in words[2:] if not word.startswith("-")]
    fetches = words[0] == "pip" and not all(name.startswith((".", "backends/")) for name in named)
    wanted = next((name for start, name in WANTS.items() if command.startswith(start)), None)
    lacks = wanted is not None and importlib.util.find_spec(wanted) is None
    return "network" if words[0] == "make" or fetches or lacks else ""


def main() -> int:
    """All users; prints a line a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="store_true", help="an empty environment, and every step")
    asked = parser.parse_args()
    begun, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        for user in USERS:
            environment = made(Path(folder) / user, empty=asked.network)
            print(user)
            try:
                for step in steps(user, environment):
                    print(f"  {step.left_out or f'{step.seconds:.1f} s':>8}  {step.command}  ({step.page})", flush=True)
            except (AssertionError, subprocess.CalledProcessError) as error:
                failed += 1
                print(f"    FAILED  {error}", flush=True)
    print(f"{time.monotonic() - begun:.0f} s, {failed} of {len(USERS)} users failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
