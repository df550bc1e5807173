"""Write requirements/*.txt: what CI and the images install, each file by version and by the digests that PyPI serves.

    make lock                     # all of them
    python tools/lock.py judge    # one, with uv beside this Python

Torch is in none but the image for NVIDIA's: its builds come from indexes of their own, and where one gets them is not
this project's to say. Our own wheels are not either: they are built from the clone. docs/security.md has the use.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from rlkernel_core.files import write_text

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "requirements"
OURS: Final = (".", "backends/triton", "backends/cuda", "backends/rocm")
_TORCH: Final = r"torch|nvidia-.*|cuda-.*"  # and the libraries that PyPI's build asks for
_IMAGE: Final = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28")
_ANY: Final = ("--universal", "--python-version", "3.11")


class Lock(NamedTuple):
    """A file of requirements."""

    wants: tuple[str, ...]  # what is locked, with all that it asks for
    where: tuple[str, ...]  # uv's options of the platform
    without: str = r"(?!)"  # names that are left out: what is there, or comes from elsewhere
    held: tuple[str, ...] = ()  # constraints
    instead: tuple[str, ...] = ()  # what stands in place of what any package asks for


def _torch() -> str:
    """The torch that CI tries: TORCH of the Makefile."""
    found = re.search(r"^TORCH +\?= (torch==\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit("the Makefile names no TORCH ?= torch==...")
    return found[1]


LOCKS: Final = {
    "tools": Lock(("pip-audit>=2.9", "uv>=0.9"), _ANY),
    "build": Lock(("hatchling>=1.25", "editables>=0.5"), _ANY),
    # The CPU build of torch asks for no Triton, PyPI's for one of its own.
    "ci": Lock(("rlkernel[dev,cpu]",), _ANY, _TORCH, (_torch(),), ("triton>=3.4,<3.10; sys_platform == 'linux'",)),
    "cuda": Lock(("rlkernel[cuda,conformance,bench,judge]",), _IMAGE),
    "judge": Lock(("rlkernel[cpu,judge]", "rlkernel-triton"), _IMAGE, rf"{_TORCH}|triton", (_torch(),)),
    "rocm": Lock(("rlkernel[rocm,conformance,bench]",), _IMAGE, r"numpy"),  # AMD's torch is built with its own
}


def main(names: list[str]) -> None:
    """Write the named files, or all."""
    uv = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "-", "--quiet", "--no-header", "--upgrade"]
    with tempfile.TemporaryDirectory() as folder:
        built = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
        subprocess.run([*built, *OURS], cwd=ROOT, check=True)
        for name in names or LOCKS:
            lock = LOCKS[name]
            held, instead = Path(folder, "held.txt"), Path(folder, "instead.txt")
            held.write_text("\n".join(lock.held), encoding="utf-8")
            instead.write_text("\n".join(lock.instead), encoding="utf-8")
            more = ["--generate-hashes", "--find-links", folder, *lock.where]
            more += ["--constraint", str(held), "--override", str(instead)]
            done = subprocess.run(
                [*uv, *more], input="\n".join(lock.wants), text=True, capture_output=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr}")
            text = _without(done.stdout, rf"rlkernel.*|cdna-simulator|{lock.without}")
            write_text(FOLDER / f"{name}.txt", f"# Made by `make lock` of {', '.join(lock.wants)}.\n{text}")
            print(f"requirements/{name}.txt: {text.count('==')} packages")


def _without(text: str, names: str) -> str:
    """The text of a lock without some packages; comments go too, which name folders of this machine."""
    kept, keep = [], True
    for line in text.splitlines():
        if line.strip().startswith("#"):
            continue
        if not line.startswith(" "):
            keep = re.fullmatch(names, line.partition("==")[0]) is None
        if keep:
            kept.append(line)
    return "\n".join(kept) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
