"""Install from the clone the backends that are made for the GPU that torch sees here; without a GPU, none.

    .venv/bin/python tools/gpu_backends.py

torch itself is asked, since a machine may have a GPU without nvidia-smi, and a driver without a GPU. Dependencies are
left alone where the GPU is AMD's, whose builds of torch and Triton PyPI's would replace.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from rlkernel.discover import FIRST_PARTY
from rlkernel.probe import arch_of, device_here

ROOT = Path(__file__).resolve().parents[1]
PORTABLE = "triton"  # which the others are built on, so it comes first


def folders(kind: str, arch: str | None) -> list[Path]:
    """Folders of the backends to install for a device of a type (`cuda`) and architecture (`sm90`), in order."""
    found = {}
    for file in sorted((ROOT / "backends").glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        names = project.get("entry-points", {}).get("rlkernel.backends", {})
        made = [name for name in names if name in FIRST_PARTY and FIRST_PARTY[name].made_for(kind, arch)]
        if made:
            found[made[0]] = file.parent
    return sorted(found.values(), key=lambda folder: (folder.name != PORTABLE, folder.name))


def main() -> int:
    """Install them; returns pip's exit code."""
    kind = device_here()
    arch = arch_of(kind)
    wanted = folders(kind, arch)
    print(f"{kind} {arch}: {', '.join(f.name for f in wanted) or 'plain torch is the backend here'}", flush=True)
    if not wanted:
        return 0
    import torch

    given = [word for folder in wanted for word in ("-e", str(folder))]
    alone = ["--no-deps"] if torch.version.hip else []
    return subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *alone, *given], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
