"""Hold the simulated backends to the clauses of their operators, operator by operator.

    python tools/simulated_reports.py gfx942 whiten logprob
    python tools/simulated_reports.py gfx942 --jobs 14 --to $OUT   # every operator, on many cores
    python tools/simulated_reports.py gfx942 sample --missing --within 600

The first adds to conformance/reports/rocm-simulated-gfx942. The last goes on where an
earlier run had no time left.

A simulator takes minutes where a GPU takes milliseconds, and compilers some more: the profile "toy" draws as many cases
a clause as "quick", fewer where a case is a batch of draws or a weight, and waits longer for an answer.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
ROCM: Final = ROOT / "backends" / "rocm"
PATHS: Final = [
    *(ROOT, ROOT / "registry", ROOT / "conformance", ROOT / "backends" / "triton"),
    *(ROCM, ROCM / "simulator"),
]
if __name__ == "__main__":
    sys.path[:0] = [str(p) for p in PATHS]
    before = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, PATHS), *before])  # of the processes that attack

from rlkernel_conformance.documents import found, put
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.run import Progress, run
from rlkernel_triton.claims import CLAIMS

TOY: Final = Profile("toy", 20, 500, thorough=False)
FEW: Final = 5  # cases for these operators
COSTLY: Final = ("sample", "lm_head_sample", "verify", "quantize", "dequantize", "prepack", "qmatmul")
AGAIN: Final = 2  # times that a fault, which is no verdict, may come: ranks wait 20 s, and may compile for longer
REPORTS: Final = ROOT / "conformance" / "reports"


def tell(progress: Progress) -> None:
    """A line a clause."""
    o = progress.outcome
    at, effort = f"{progress.done}/{progress.due}", f"{o.executed} cases, {o.seconds:.1f} s"
    print(f"{at} {o.op} {o.clause} {o.status} ({effort}) {o.message[:300]}", flush=True)


def judge(arch: str, op: str, folder: Path, jobs: int, within: float, *, missing: bool) -> bool:
    """Hold a backend to an operator, or to the clauses that its report lacks; tells whether any faulted."""
    effort = replace(TOY, examples=FEW) if op in COSTLY else TOY
    earlier = found(folder) if missing else None
    manifest = f"rlkernel_rocm.simulated.{arch}:backend"
    new = run(
        f"simulated-{arch}", effort, ops=(op,), jobs=jobs, manifest=manifest, watch=tell, within=within, earlier=earlier
    )
    put(new, folder)
    return bool(new["summary"]["fault"])


def main(arguments: list[str]) -> None:
    """Judge operators, one after another; what was found so far is written after each."""
    parser = argparse.ArgumentParser(description="Hold the simulated backends to the clauses of their operators.")
    parser.add_argument("arch")
    parser.add_argument("ops", nargs="*", help="default: all that have kernels")
    parser.add_argument("--jobs", type=int, default=1, help="processes that attack")
    parser.add_argument("--to", type=Path, default=REPORTS, help="folder of the report's folder")
    parser.add_argument("--missing", action="store_true", help="only what the report lacks, or has of older sources")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds for each run; what is left is not run")
    asked = parser.parse_args(arguments)
    folder = asked.to / f"rocm-simulated-{asked.arch}"
    for op in asked.ops or [op for op, claim in CLAIMS.items() if claim.kernels]:
        for again in range(1 + AGAIN):
            if again:
                print(f"{op}: again what faulted, with what was compiled", flush=True)
            if not judge(asked.arch, op, folder, asked.jobs, asked.within, missing=asked.missing or again > 0):
                break


if __name__ == "__main__":
    main(sys.argv[1:])
