"""Pictures of stock hosts beside hosts with rlkernel are drawn from the committed measurements."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("script", "file", "picture"),
    [("gpu_trl.py", "h200/trl.json", "trl.png"), ("gpu_verl.py", "h200/verl/verl.json", "curves.png")],
)
def test_a_picture_is_drawn_beside_the_file(tmp_path, script, file, picture) -> None:
    copy = Path(shutil.copy(RESULTS / file, tmp_path))
    subprocess.run([sys.executable, ROOT / "benchmarks" / script, "plot", copy], check=True, timeout=120)
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
