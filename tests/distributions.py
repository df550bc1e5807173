"""The distributions of the clone, built as `make build` builds them: by hatchling, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT, *sorted(p.parent for p in (ROOT / "backends").rglob("pyproject.toml")))
_CODE = """
import json, os, sys
from hatchling import build
out, folders = sys.argv[1], sys.argv[2:]
found = []
for folder in folders:
    os.chdir(folder)
    found.append([build.build_sdist(out), build.build_wheel(out)])
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Built:
    """A distribution, in two files."""

    sdist: Path
    wheel: Path

    @property
    def name(self) -> str:
        return self.wheel.name.partition("-")[0]

    def unpacked(self, into: Path) -> Path:
        """The folder that the sdist makes, without what the build added to it."""
        with tarfile.open(self.sdist) as archive:
            archive.extractall(into, filter="data")
        folder = into / self.sdist.name.removesuffix(".tar.gz")
        (folder / "PKG-INFO").unlink()
        return folder


def build(folders: list[Path], out: Path, **environment: str) -> list[Built]:
    """Build distributions one after the other in a process of its own."""
    out.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-c", _CODE, str(out), *map(str, folders)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return [Built(out / sdist, out / wheel) for sdist, wheel in json.loads(done.stdout.splitlines()[-1])]
