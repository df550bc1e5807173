"""What is known about each operator on AMD GPUs, as a table; nobody types a tick by hand.

    python backends/rocm/tools/evidence.py            # print it, and the reports that are older than their kernels
    python backends/rocm/tools/evidence.py docs/rocm.md   # write it between the markers of a page

From: the kernel tests that run in Triton's interpreter, the tables of offline compilation, the conformance reports
conformance/reports/rocm-simulated-<arch> (and rocm-<arch>, from real GPUs, once there are any), the signatures recorded
from AITER, and what the benchmarks of an NVIDIA GPU found of the same kernels.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    of = ("common", "torch", "triton", "triton/tools", "rocm")
    sys.path[:0] = [str(ROOT / path) for path in (".", "registry", "conformance", *(f"backends/{path}" for path in of))]

import compile_gate

from rlkernel_conformance.documents import found
from rlkernel_conformance.evidence import manifest_of, older, sources
from rlkernel_core.files import write_text
from rlkernel_core.spec import OPERATORS
from rlkernel_rocm.aiter import backend as amd
from rlkernel_rocm.architectures import ARCHITECTURES
from rlkernel_triton.interpreted import backend as portable

SIMULATED: Final = tuple(name for name, a in ARCHITECTURES.items() if a.wave == 64)
REPORTS: Final = ROOT / "conformance" / "reports"
TRITON: Final = ROOT / "backends" / "triton"
BEGIN: Final = "<!-- evidence: written by `python backends/rocm/tools/evidence.py docs/rocm.md` -->"
EARLIER: Final = ", of earlier kernels"  # beside what a report found of sources that have changed since
END: Final = "<!-- end of evidence -->"
# operators whose interpreted tests stand in a file of another name
TESTS: Final = {
    "affine_suffix_scan": "suffix_scan",
    "whiten": "advantage",
    **dict.fromkeys(("quantize", "dequantize", "prepack", "qmatmul"), "quant"),
}


def _interpreted(op: str) -> str:
    return "yes" if (TRITON / f"tests/kernels/test_{TESTS.get(op, op)}.py").exists() else "-"


def _compiled(op: str) -> str:
    """For how many targets every build of an operator was compiled."""
    archs = [arch for arch, chip in compile_gate.TARGETS.items() if chip.kind == "hip"]
    whole = [arch for arch in archs if all(row.needs for row in compile_gate.rows([op], [arch]))]
    return f"{len(whole)} target{'s' * (len(whole) > 1)}" if whole else "-"


@cache
def _report(name: str) -> dict[str, dict[str, Any]]:
    """Operator -> what a report says of it, and under "older" the clauses of other sources than those of now."""
    content = found(REPORTS / name)
    if content is None:
        return {}
    manifest = manifest_of(content)
    now = sources(manifest, content["device"]) if manifest is not None else {}
    return {op: {**one, "older": older(one, now.get(op))} for op, one in content["operators"].items()}


def _judged(report: str, op_id: str) -> str:
    one = _report(report).get(op_id)
    if one is None:
        return "-"
    outcomes = Counter(clause["status"].replace("_", " ") for clause in one["clauses"])
    held, rest = outcomes.pop("held", 0), [f"{n} {status}" for status, n in sorted(outcomes.items())]
    return f"{held} clauses" + (f" ({', '.join(rest)})" if rest else "") + EARLIER * bool(one["older"])


def _contract(op_id: str) -> str:
    if op_id not in {i.op for i in amd.impls}:
        return "not used"
    versions = json.loads((ROOT / "backends/rocm/rlkernel_rocm/aiter/signatures.json").read_text(encoding="utf-8"))
    return f"bound to {len(versions)} versions, never run"


def _on_cuda(op_id: str) -> str:
    """Clauses that the kernels held on an NVIDIA GPU; shapes within tolerance there, as the benchmarks have them."""
    judged = [found for report in ("triton", "triton-quick") if (found := _judged(report, op_id)) != "-"]
    op = op_id.partition("@")[0]
    with (ROOT / "benchmarks/results/h200/results.csv").open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if (r["op"], r["candidate"]) == (op, "triton")]
    right = [r for r in rows if r["worst_error_over_tolerance"] and float(r["worst_error_over_tolerance"]) <= 1]
    return ", ".join(judged[:1] + ([f"{len(right)} shapes"] if right else [])) or "-"


def stale() -> list[str]:
    """Operators whose kernels have changed since they were simulated."""
    return [
        f"{arch} {op}" for arch in SIMULATED for op, one in _report(f"rocm-simulated-{arch}").items() if one["older"]
    ]


def table() -> str:
    """Markdown."""
    columns = [
        "Operator",
        "interpreted",
        "compiled",
        *(f"simulated {a}" for a in SIMULATED),
        "AITER",
        "the same sources on an H200",
        "run on AMD hardware",
    ]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for op_id in dict.fromkeys(impl.op for impl in portable.impls):
        op = op_id.partition("@")[0]
        simulated = [_judged(f"rocm-simulated-{arch}", op_id) for arch in SIMULATED]
        real = [f"{p.name.removeprefix('rocm-')}" for p in REPORTS.glob("rocm-gfx*") if _judged(p.name, op_id) != "-"]
        cells = [
            f"`{OPERATORS[op].name}`",
            _interpreted(op),
            _compiled(op),
            *simulated,
            _contract(op_id),
            _on_cuda(op_id),
            ", ".join(real) or "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def placed(page: str) -> str:
    """A page with the table between its markers."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


def main(paths: list[str]) -> None:
    """Print, or write into a page."""
    if not paths:
        print(table())
        print("\nolder than their kernels:", ", ".join(stale()) or "none")
    for path in paths:
        file = Path(path)
        write_text(file, placed(file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(sys.argv[1:])
