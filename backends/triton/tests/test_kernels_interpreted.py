"""The kernel tests in a few processes under Triton's interpreter.

Triton decides when it is imported whether it interprets, so the tests of `kernels/` run with `TRITON_INTERPRET=1` in a
child. A child takes seconds to begin, so each has many tests: one of every SHARES, which makes shares of about the same
length (kernels/conftest.py). On a machine with a GPU run them directly: `pytest backends/triton/tests/kernels`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = Path(__file__).parent / "kernels"
SHARES = 2


@pytest.mark.parametrize("share", range(SHARES))
def test_the_kernels_pass_in_the_interpreter(share) -> None:
    passes("not slow", f"{share}/{SHARES}")


@pytest.mark.slow
def test_slow_clauses_hold_in_the_interpreter() -> None:
    passes("slow", "0/1")


def passes(marked: str, share: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marked, str(KERNELS)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "SHARE": share}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
