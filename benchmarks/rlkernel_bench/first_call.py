"""A process that makes one call of the suite `host` and prints how many milliseconds it took, to the end on the device.

    python -m rlkernel_bench.first_call 0 reference cpu
    python -m rlkernel_bench.first_call 0 triton cuda warmup

The number is the call's place in `host_calls.CASES`. torch and rlkernel are imported and the device is up before the
clock starts; `warmup` runs `rlkernel warmup` at the sizes of that call in this process first. Caches are where the
environment says.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import time
from typing import Any
from unittest import mock

import torch

import rlkernel as rlk
from rlkernel_bench.suites.common import Draw
from rlkernel_bench.suites.host_calls import CASES
from rlkernel_bench.suites.host_case import Case


def main(number: str, backend: str, device: str, *words: str) -> None:
    """Make the call and print the milliseconds."""
    case = CASES[int(number)]
    if "warmup" in words:
        warmed(case, backend, device)
    given: dict[str, Any] = case.make(Draw(device, 0))
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    with rlk.use(**{case.op: backend}):
        wait()
        start = time.perf_counter_ns()
        case.call(getattr(rlk, case.op), given)
        wait()
        sys.stdout.write(f"{(time.perf_counter_ns() - start) / 1e6}\n")


def warmed(case: Case, backend: str, device: str) -> None:
    """Run `rlkernel warmup` for the operator at the sizes of the call, in this process.

    Raises:
        SystemExit: it could not warm the operator up.
    """
    sizes = case.sizes
    rows = sizes.get("N") or sizes.get("M") or sizes.get("B", 1) * sizes.get("T", 1)
    said = {
        "tokens": rows,
        "vocab": sizes.get("V", 1024),
        "hidden": sizes.get("D") or sizes.get("K", 256),
        "length": sizes.get("T", 128),
    }
    words = [word for name, value in said.items() for word in (f"--{name}", str(value))]
    words += ["--format", str(case.options["format"])] if "format" in case.options else []
    order = backend if backend == "reference" else f"{backend},reference"  # which makes the weights of a product
    words += ["--op", case.op, "--dtype", "bfloat16", "--device", device, "--order", order]
    said = io.StringIO()
    with mock.patch.object(sys, "argv", ["rlkernel", "warmup", *words]), contextlib.redirect_stdout(said):
        try:
            runpy.run_module("rlkernel", run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                sys.exit(f"rlkernel warmup ended with {ended.code}: {said.getvalue()[-300:]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
