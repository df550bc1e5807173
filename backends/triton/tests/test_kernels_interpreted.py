"""The files of kernel tests in a few processes under Triton's interpreter.

Triton decides when it is imported whether it interprets, so the tests of `kernels/` run with `TRITON_INTERPRET=1` in a
child. A child takes seconds to begin: each has several files. On a machine with a GPU run them directly:
`pytest backends/triton/tests/kernels`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CLAUSES, *FILES = sorted(
    (Path(__file__).parent / "kernels").glob("test_*.py"), key=lambda p: (p.stem != "test_clauses", p)
)
HALF = "sample or quant or prepack or qmatmul"  # of the work on clauses
SHARES = ([CLAUSES, "-k", HALF], [CLAUSES, "-k", f"not ({HALF})"], *(FILES[share::4] for share in range(4)))


@pytest.mark.parametrize("share", SHARES, ids=range(len(SHARES)))
def test_the_kernels_pass_in_the_interpreter(share) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, share)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
