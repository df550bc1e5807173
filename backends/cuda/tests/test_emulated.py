"""The tests of `emulated/`, in a process where Triton interprets, which it decides when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here: test_gpu_*.py")
def test_host_code_and_row_kernels_pass_on_a_cpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "emulated")]
    done = subprocess.run(
        command,
        cwd=HERE.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
