"""First calls of the suite `host`: each in a process of its own, over caches that lie in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Final

from rlkernel_bench.candidates import Candidate
from rlkernel_bench.suites.host_calls import CASES
from rlkernel_bench.suites.host_case import Case
from rlkernel_bench.work import Inputs, Outputs

# rlkernel warmup knows these; `rlkernel warmup --help` says the same.
WARMED: Final = (
    "logprob", "linear_logprob", "policy_loss", "linear_policy_loss", "sample", "lm_head_sample", "advantage",
    "affine_suffix_scan", "whiten", "quantize", "dequantize", "qmatmul",
)  # fmt: skip
WAYS: Final = ("cold", "warm disk", "warmup")


def first_calls(case: Case, backend: str, device: str) -> list[Candidate]:
    """Milliseconds of a first call in three processes, one after the other over the same caches."""

    @cache
    def all_of_them() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            ways = WAYS if case.op in WARMED else WAYS[:2]
            return {way: first_call(case, backend, device, Path(folder), warmed=way == "warmup") for way in ways}

    def measured(way: str, _given: Inputs) -> Outputs:
        return {"milliseconds": all_of_them()[way]}

    ways = WAYS if case.op in WARMED else WAYS[:2]
    return [Candidate(f"{backend}:{way}", "backend", run=partial(measured, way)) for way in ways]


def first_call(case: Case, backend: str, device: str, caches: Path, *, warmed: bool) -> float:
    """Milliseconds of the first call of an operator in a process of its own, whose caches all lie in a folder.

    Raises:
        RuntimeError: the process failed; the message is the end of what it said.
    """
    places = {
        "TRITON_CACHE_DIR": "triton",
        "XDG_CACHE_HOME": "xdg",
        "RLKERNEL_CUDA_CACHE": "cuda",
        "CUDA_CACHE_PATH": "nv",
    }
    environ = {**os.environ, **{name: str(caches / folder) for name, folder in places.items()}}
    command = [sys.executable, "-m", "rlkernel_bench.first_call", str(CASES.index(case)), backend, device]
    command += ["warmup"] if warmed else []
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)  # noqa: S603 ourselves
    if done.returncode:
        raise RuntimeError(f"the first call of {case.op} by {backend}: {done.stderr[-400:]}")
    return float(done.stdout.split()[-1])
