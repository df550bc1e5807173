"""The bundle of rlkernel-jetson, built within a time: its size, what its kernels need, what of it no board would take.

    python benchmarks/aot_wheel.py sm_87 48 150 sm_87.zip

Arguments: the target, processes, seconds, the file, and a recording in place of what the workloads launch. What is not
compiled when the time is over is left out and counted. Prints a line of JSON. Needs Triton and no GPU.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections import Counter
from multiprocessing import TimeoutError as OutOfTime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rlkernel_triton.aot import tables
from rlkernel_triton.aot.bundle import Bundle, written
from rlkernel_triton.aot.command import part
from rlkernel_triton.aot.compiling import closed, compiler, limits, require
from rlkernel_triton.aot.noting import launched
from rlkernel_triton.aot.targets import resident

WRITING = 0.1  # of the time, for packing and reading


def timed(work: Any) -> tuple[float, Any]:
    """Seconds of a piece of work, and what it made."""
    start = time.perf_counter()
    made = part(work)
    return time.perf_counter() - start, made


def compiled(target: str, jobs: int, seconds: float, path: Path, table: str) -> dict[str, Any]:
    """Write the bundle; how much of it there was time for, and what it took by kernel."""
    begun = time.monotonic()
    require(target)
    builds = tables.chosen(tables.read(Path(table)), target) if table else launched(target)
    work = [(target, alike, None, True) for alike in closed(builds)]
    random.Random(0).shuffle(work)  # what is left out is of every kind
    codes, failed, took = [], [], Counter[str]()
    with get_context("spawn").Pool(jobs) as pool:
        made = pool.imap_unordered(timed, work)
        done = 0
        while done < len(work):
            try:
                spent, (there, wrong) = made.next(max(0.0, seconds * (1 - WRITING) - (time.monotonic() - begun)))
            except OutOfTime:
                break
            done += 1
            codes += there
            failed += wrong
            took[there[0][0].build.kernel if there else "nothing"] += spent
    written(path, codes, compiler())
    wanted = sum(len(alike) for _, alike, _, _ in work)
    return {
        "target": target, "compiler": compiler(), "processes": jobs, "seconds": time.monotonic() - begun,
        "pieces of work": len(work), "done": done, "builds wanted": wanted, "failed": len(failed), "why": failed[:3],
        "core seconds": sum(took.values()), "core seconds by kernel": dict(took.most_common()),
    }  # fmt: skip


def inspected(target: str, path: Path) -> dict[str, Any]:
    """What a bundle holds, as its machine code tells."""
    bundle = Bundle(path)
    codes = bundle.codes
    spilled = sorted((c for c in codes if c.spilled), key=lambda c: -c.spilled)
    words = [c for c in codes if c.build.kernel.endswith(":word_product")]
    kept = [c for c in words if c.build.divisible]
    return {
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "builds": len(codes),
        "distinct cubins": len({c.files["cubin"] for c in codes}),
        "refused": limits((c, {"ptx": bundle.read(c.files["ptx"])} if "ptx" in c.files else {}) for c in codes),
        "registers": max((c.registers for c in codes), default=0),
        "spilled": Counter(f"{c.build.kernel} {'promised' if c.build.divisible else 'plain'}" for c in spilled),
        "worst": [(c.spilled, c.registers, c.build.text) for c in spilled[:12]],
        "word products": {
            "builds": len(words),
            "spilled where promises are kept": max((c.spilled for c in kept), default=0),
            "spilled": max((c.spilled for c in words), default=0),
            "programs a multiprocessor": min(
                (resident(target, c.registers, c.shared, c.build.num_warps) for c in kept), default=0
            ),
        },
    }


def main(target: str, jobs: str, seconds: str, file: str, table: str = "") -> None:
    """Build and look."""
    path = Path(file)
    took = compiled(target, int(jobs), float(seconds), path, table)
    print(json.dumps({**took, **inspected(target, path)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
