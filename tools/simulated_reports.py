"""Hold the simulated backends to the clauses of their operators, operator by operator.

    python tools/simulated_reports.py gfx942 whiten logprob
    python tools/simulated_reports.py gfx942 --jobs 14 --to $OUT   # every operator, on many cores

The first adds to conformance/reports/rocm-simulated-gfx942.

A simulator takes minutes where a GPU takes milliseconds, and compilers some more: the profile "toy" draws as many cases
a clause as "quick", fewer where a case is a batch of draws or a weight, and waits longer for an answer. An operator's
part of the report names the sources of the kernels that it judged, since it may be older than those of others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
ROCM: Final = ROOT / "backends" / "rocm"
PATHS: Final = [
    *(ROOT, ROOT / "registry", ROOT / "conformance", ROOT / "backends" / "triton"),
    *(ROCM, ROCM / "simulator", ROCM / "tools"),
]
if __name__ == "__main__":
    sys.path[:0] = [str(p) for p in PATHS]
    before = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, PATHS), *before])  # of the processes that attack

from kernel_sources import sources

from rlkernel_conformance.documents import read, write
from rlkernel_conformance.profiles import Profile
from rlkernel_conformance.report import STATUSES, content_hash, worst
from rlkernel_conformance.run import Progress, run
from rlkernel_triton.claims import CLAIMS

TOY: Final = Profile("toy", 20, 500, thorough=False)
FEW: Final = 5  # cases for these operators
COSTLY: Final = ("sample", "lm_head_sample", "verify", "quantize", "dequantize", "prepack", "qmatmul")
AGAIN: Final = 2  # times that a fault, which is no verdict, may come: ranks wait 20 s, and may compile for longer
REPORTS: Final = ROOT / "conformance" / "reports"


def joined(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """A report with the operators of another one, where both are of one profile; else the new one alone."""
    operators, seconds = dict(new["operators"]), new["seconds"]
    if old is not None and old["profile"] == new["profile"]:
        operators = {**old["operators"], **operators}
        seconds = round(seconds + old["seconds"], 1)
    order = [op for name in CLAIMS if (op := f"{name}@1") in operators]
    content = {**new, "operators": {op: operators[op] for op in order}, "seconds": seconds}
    clauses = [c for found in operators.values() for c in found["clauses"]]
    counts = Counter(c["status"] for c in clauses)
    content["summary"] = {s: counts[s] for s in STATUSES} | {"cases": sum(c["executed"] for c in clauses)}
    content["verdict"] = worst(found["verdict"] for found in operators.values())
    content["created"] = datetime.now(UTC).isoformat(timespec="seconds")
    return {**content, "hash": content_hash(content)}


def tell(progress: Progress) -> None:
    """A line a clause."""
    o = progress.outcome
    at, effort = f"{progress.done}/{progress.due}", f"{o.executed} cases, {o.seconds:.1f} s"
    print(f"{at} {o.op} {o.clause} {o.status} ({effort}) {o.message[:300]}", flush=True)


def judged(arch: str, op: str, jobs: int) -> dict[str, Any]:
    """A report on one operator, which names what it judged: the sources as they were before it was."""
    before, manifest = sources(op), f"rlkernel_rocm.simulated.{arch}:backend"
    effort = replace(TOY, examples=FEW) if op in COSTLY else TOY
    found = run(f"simulated-{arch}", effort, ops=(op,), jobs=jobs, manifest=manifest, watch=tell)
    return {**found, "operators": {o: {**one, "sources": before} for o, one in found["operators"].items()}}


def main(arguments: list[str]) -> None:
    """Judge operators, one after another; what was found so far is written after each."""
    parser = argparse.ArgumentParser(description="Hold the simulated backends to the clauses of their operators.")
    parser.add_argument("arch")
    parser.add_argument("ops", nargs="*", help="default: all that have kernels")
    parser.add_argument("--jobs", type=int, default=1, help="processes that attack")
    parser.add_argument("--to", type=Path, default=REPORTS, help="folder of the report's folder")
    asked = parser.parse_args(arguments)
    folder = asked.to / f"rocm-simulated-{asked.arch}"
    for op in asked.ops or [op for op, claim in CLAIMS.items() if claim.kernels]:
        new = judged(asked.arch, op, asked.jobs)
        for _ in range(AGAIN):
            if new["summary"]["fault"]:
                print(f"{op}: again, with what was compiled", flush=True)
                new = judged(asked.arch, op, asked.jobs)
        old = read(folder) if (folder / "report.json").exists() else None
        write(joined(old, new), folder)


if __name__ == "__main__":
    main(sys.argv[1:])
