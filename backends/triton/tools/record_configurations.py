"""Record the configurations that bundles are compiled from: what the conformance suite and a training run would launch.

    python backends/triton/tools/record_configurations.py                  # every target, half an hour
    python backends/triton/tools/record_configurations.py --target sm_87   # one target anew, the others as they are
    python backends/triton/tools/record_configurations.py --add FILE       # what somebody recorded of their own run
    python backends/triton/tools/record_configurations.py --target sm_87 --profile standard --out standard.json

Runs on a CPU. Writes rlkernel_triton/aot/configurations.json, or the file of --out, which is what
`rlkernel aot build --configurations` reads: the standard profile launches three times as many as the quick one.
Operators whose launches depend on the target (products of matrices; on AMD scans and draws too) are recorded for each,
the others once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
PATHS: Final = [
    str(ROOT / p) for p in (".", "registry", "conformance", "backends/common", "backends/torch", "backends/triton")
]
if __name__ == "__main__":
    sys.path[:0] = PATHS

from rlkernel_triton.aot import tables
from rlkernel_triton.aot.backend import OPERATORS
from rlkernel_triton.aot.builds import Build
from rlkernel_triton.aot.recording import VARIABLE
from rlkernel_triton.aot.targets import TARGETS

FIRST: Final = "sm_87"
BY_TARGET: Final = {"cuda": ("linear_logprob", "qmatmul"), "hip": ("advantage", "linear_logprob", "qmatmul", "sample")}
WORKLOADS: Final = (
    "import sys; from importlib import import_module; from rlkernel_triton.aot.workloads import calls; "
    "m = import_module('rlkernel_triton.aot.recording'); "
    "[print(line, flush=True) for line in calls(m.planned, sys.argv[1:])]"
)


def record(target: str, ops: tuple[str, ...], profile: str) -> dict[Build, dict[str, frozenset[str]]]:
    """What these operators launch on a target."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "launches.jsonl"
        file.touch()
        environ = {**os.environ, VARIABLE: f"{file}:{target}", "PYTHONPATH": os.pathsep.join(PATHS)}
        command = [sys.executable, "-m", "rlkernel", "conformance", "run", "recorded", "--profile", profile]
        command += ["--manifest", "rlkernel_triton.aot.recording:backend"]
        # Results are the reference's and not judged here: layouts of the kernels hold nothing that was computed.
        subprocess.run(
            [*command, *(word for op in ops for word in ("--op", op))], check=False, env=environ, stdout=sys.stderr
        )
        launched = tables.recorded(file.read_text(encoding="utf-8").splitlines())
        silent = sorted(set(ops) - {op for uses in launched.values() for op in uses})
        if silent:
            raise SystemExit(
                f"conformance launched nothing of {', '.join(silent)} for {target}: see what it said above"
            )
        subprocess.run([sys.executable, "-c", WORKLOADS, *ops], check=True, env=environ, stdout=sys.stderr)
        return tables.recorded(file.read_text(encoding="utf-8").splitlines())


def everywhere(table: dict[Build, dict[str, frozenset[str]]], kind: str) -> dict[Build, dict[str, frozenset[str]]]:
    """Launches that depend on no target, said of all targets of a kind."""
    names = frozenset(t for t, chip in TARGETS.items() if chip.kind == kind)
    return {
        b: own
        for b, uses in table.items()
        if (own := {op: on | names for op, on in uses.items() if op not in BY_TARGET[kind]})
    }


def without(table: dict[Build, dict[str, frozenset[str]]], target: str) -> dict[Build, dict[str, frozenset[str]]]:
    """A table less what recording a target writes."""

    def again(op: str, on: str) -> bool:
        own = op in BY_TARGET[TARGETS[on].kind]
        return (target == FIRST or own) if on == target else (target == FIRST and not own)

    def kept(op: str, on: frozenset[str]) -> frozenset[str]:
        return frozenset(t for t in on if not again(op, t))

    return {b: own for b, uses in table.items() if (own := {op: k for op, on in uses.items() if (k := kept(op, on))})}


def main() -> None:
    """Record, merge, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, action="append", default=[], help="a recording to add to the table")
    parser.add_argument(
        "--target", action="append", choices=list(TARGETS), help="record these targets, keep the others"
    )
    parser.add_argument("--profile", default="quick", help="of the conformance suite")
    parser.add_argument("--out", type=Path, help="write these targets alone, to this file")
    asked = parser.parse_args()
    table = tables.read() if (asked.target or asked.add) and asked.out is None else {}
    parts = [tables.read(path) for path in asked.add]
    for target in asked.target or ([] if asked.add else TARGETS):
        kind = TARGETS[target].kind
        # Operators that launch the same everywhere are recorded once, unless one target is all that is asked for.
        found = record(target, OPERATORS if target == FIRST or asked.out else BY_TARGET[kind], asked.profile)
        table = without(table, target)
        parts.append(found)
        if target == FIRST and asked.out is None:
            parts += [everywhere(found, k) for k in BY_TARGET]
    tables.write(tables.merged(table, *parts), asked.out or tables.TABLE)


if __name__ == "__main__":
    main()
