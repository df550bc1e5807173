"""A stand-in for NVIDIA's compute-sanitizer, which tests put on PATH: no tool looks at anything.

It runs the command, passes everything on, and writes a log in the words that NVIDIA documents. The file STAND_IN_PLAN
holds a line a process: "nothing", a tool whose finding it writes, "cut" for a log without an end, "idle" for a process
that the tool could not look at.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BANNER = "========= COMPUTE-SANITIZER\n"
FINDINGS = {
    "memcheck": """\
========= Invalid __global__ write of size 4 bytes
=========     at fill_kernel(int *, int)+0x70 in /src/fill.cu:34
=========     by thread (3,0,0) in block (7,0,0)
=========     Address 0x7f6510c00010 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f6510c00000 of size 16 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernel [0x2f1234] in libcuda.so.1
=========
========= Invalid __global__ write of size 4 bytes
=========     at fill_kernel(int *, int)+0x70 in /src/fill.cu:34
=========     by thread (4,0,0) in block (7,0,0)
=========     Address 0x7f6510c00014 is out of bounds
=========
========= ERROR SUMMARY: 2 errors
""",
    "racecheck": """\
========= Error: Race reported between Write access at sum_kernel(float *)+0x5f0 in /src/sum.cu:34
=========     and Read access at sum_kernel(float *)+0xc10 in /src/sum.cu:41 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
""",
    "initcheck": """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at add_kernel(int *)+0x70 in /src/add.cu:21
=========     by thread (65,0,0) in block (0,0,0)
=========     Access to 0x7f2bcf400304 in region 0x7f2bcf400200 of size 512 bytes
=========
========= ERROR SUMMARY: 1 error
""",
    "synccheck": """\
========= Barrier error detected. Divergent thread(s) in warp.
=========     at reduce_kernel(float *)+0x1a0 in /src/reduce.cu:61
=========     by thread (32,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
""",
    "cut": "",
    "idle": "========= Error: Target application terminated before first instrumented API call\n",
}
CLEAN = {"racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"}


def log_of(plan: str, tool: str) -> str:
    """What the tool writes in a process of the plan."""
    return BANNER + FINDINGS.get(plan, CLEAN.get(tool, "========= ERROR SUMMARY: 0 errors\n"))


def main(argv: list[str]) -> int:
    """Run the command behind the options, then write the log."""
    options, command = argv[: argv.index(sys.executable)], argv[argv.index(sys.executable) :]
    tool, log = (options[options.index(name) + 1] for name in ("--tool", "--log-file"))
    status = subprocess.call(command, close_fds=False)
    plan = Path(os.environ["STAND_IN_PLAN"])
    first, _, rest = plan.read_text().partition("\n")
    plan.write_text(rest)
    Path(log).write_text(log_of(first or "nothing", tool))
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
