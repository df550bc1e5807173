"""What is known about each operator on AMD GPUs, as a table; nobody types a tick by hand.

    python backends/rocm/tools/evidence.py            # print it
    python backends/rocm/tools/evidence.py docs/rocm.md   # write it between the markers of a page

From: the kernel tests that run in Triton's interpreter, the tables of offline compilation, and the conformance reports
conformance/reports/rocm-simulated-<arch> (and rocm-<arch>, from real GPUs, once there are any).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "backends" / "triton"), str(ROOT / "backends" / "rocm")]

from rlkernel_core.spec import OPERATORS
from rlkernel_rocm.aiter import backend as amd
from rlkernel_rocm.architectures import ARCHITECTURES
from rlkernel_triton.interpreted import backend as portable

SIMULATED: Final = tuple(name for name, a in ARCHITECTURES.items() if a.wave == 64)
REPORTS: Final = ROOT / "conformance" / "reports"
TRITON: Final = ROOT / "backends" / "triton"
BEGIN: Final = "<!-- evidence: written by `python backends/rocm/tools/evidence.py docs/rocm.md` -->"
END: Final = "<!-- end of evidence -->"
# operator -> the tables of the kernels that it launches most
BUILDS: Final = {
    "logprob": ("logprob_kernels", "law_kernel"),
    "linear_logprob": ("head_builds", "law_kernel"),
    "linear_policy_loss": ("head_builds", "law_kernel", "loss_builds"),
    "policy_loss": ("loss_builds",),
    "advantage": ("scan_builds", "moments_kernels"),
    "affine_suffix_scan": ("scan_builds",),
    "whiten": ("moments_kernels",),
    "sample": ("sampling-builds",),
}


def _interpreted(op: str) -> str:
    names = {op, op.removeprefix("affine_")}
    return "yes" if any((TRITON / f"tests/kernels/test_{name}.py").exists() for name in names) else "-"


def _compiled(op: str) -> str:
    archs: set[str] | None = None
    for name in BUILDS.get(op, ()):
        rows = json.loads((TRITON / "builds" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        here = {r["arch"] for r in rows if r["arch"].startswith("gfx")}
        archs = here if archs is None else archs & here
    return f"{len(archs)} targets" if archs else "-"


def _judged(report: str, op_id: str) -> str:
    path = REPORTS / report / "report.json"
    if not path.exists():
        return "-"
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8"))["operators"].get(op_id)
    if found is None:
        return "-"
    outcomes = [clause["status"] for clause in found["clauses"]]
    held = outcomes.count("held")
    return f"{held} clauses" if held == len(outcomes) else f"{held} of {len(outcomes)} clauses"


def _contract(op_id: str) -> str:
    if op_id not in {i.op for i in amd.impls}:
        return "not used"
    versions = json.loads((ROOT / "backends/rocm/rlkernel_rocm/aiter/signatures.json").read_text(encoding="utf-8"))
    return f"bound to {len(versions)} versions, never run"


def table() -> str:
    """Markdown."""
    columns = [
        "Operator",
        "interpreted",
        "compiled",
        *(f"simulated {a}" for a in SIMULATED),
        "AITER",
        "run on AMD hardware",
    ]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for impl in portable.impls:
        op = impl.op.partition("@")[0]
        simulated = [_judged(f"rocm-simulated-{arch}", impl.op) for arch in SIMULATED]
        real = [f"{p.name.removeprefix('rocm-')}" for p in REPORTS.glob("rocm-gfx*") if _judged(p.name, impl.op) != "-"]
        cells = [
            f"`{OPERATORS[op].name}`",
            _interpreted(op),
            _compiled(op),
            *simulated,
            _contract(impl.op),
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
    for path in paths:
        file = Path(path)
        file.write_text(placed(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
