"""Fresh environments into which a test installs without a network: one sees all of this one, one all but rlkernel."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

_OFFLINE = ("--no-build-isolation", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and a folder to work in."""

    folder: Path
    python: Path
    cache: Path
    offline: bool = True  # pip installs what lies here, and fetches nothing
    resolving: bool = False  # whether pip looks at what a distribution asks for

    def run(
        self, *words: str, cwd: Path | None = None, expected: int = 0, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `rlkernel`, `python`, `pytest` or `pip` of the environment, and compare the exit code."""
        known = {
            "rlkernel": [str(self.python), "-m", "rlkernel"],
            "python": [str(self.python)],
            "pytest": [str(self.python), "-m", "pytest", "-p", "no:cacheprovider"],
            "pip": [sys.executable, "-m", "pip", "--python", str(self.python)],
        }
        argv = [*known[words[0]], *words[1:]]
        if words[0] == "pip" and self.offline:
            argv += _OFFLINE
            argv += () if any(w.startswith("--index-url=file:") for w in words) else ("--no-index",)
            argv += () if self.resolving else ("--no-deps",)
            argv += ("--no-compile",) if words[1] == "install" else ()
        settings = {k: v for k, v in os.environ.items() if not k.startswith(("RLKERNEL_", "PYTHON"))}
        done = subprocess.run(
            argv,
            check=False,
            capture_output=True,
            text=True,
            cwd=cwd or self.folder,
            env={**settings, "COLUMNS": "200", "XDG_CACHE_HOME": str(self.cache), **(variables or {})},
        )
        assert done.returncode == expected, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        return done


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A virtual environment without pip, on top of this one."""
    return made(tmp_path_factory.mktemp("fresh"))


def made(root: Path, *, empty: bool = False) -> Environment:
    """A virtual environment without pip in a folder, on top of this one; or an empty one, into which pip may fetch."""
    # What `--system-site-packages` does for a base interpreter, for an environment, whose .pth files count too.
    below = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    return replace(_made(root, "" if empty else below), offline=not empty)


def without_rlkernel(root: Path, *hidden: str) -> Environment:
    """A virtual environment that sees every package of this one but rlkernel's own and those hidden by name.

    pip takes what it sees for installed, and so asks its wheelhouse for the rest alone.
    """
    theirs = root / "theirs"
    theirs.mkdir()
    ours = ("rlkernel", "cdna_simulator", "_editable", "__editable__", *hidden)
    for folder in (Path(p) for p in sys.path if p.endswith(("site-packages", "dist-packages"))):
        for entry in folder.iterdir():
            link = theirs / entry.name
            if not (entry.name.startswith(ours) or entry.suffix == ".pth" or link.is_symlink()):
                link.symlink_to(entry)
    return replace(_made(root, f"{theirs}\n"), resolving=True)


def _made(root: Path, pth: str) -> Environment:
    """A virtual environment without pip, with a line of a .pth file that says what else it sees."""
    venv.create(root / "env", with_pip=False)
    python = root / "env" / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
    (Path(site) / "below.pth").write_text(pth)
    work = root / "work"
    work.mkdir()
    return Environment(work, python, root / "cache")
