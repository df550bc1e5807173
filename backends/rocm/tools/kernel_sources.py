"""The sources of an operator's kernels, as one hash: what a report judged, and whether it is still what is there."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import Final

from rlkernel_triton.claims import CLAIMS

TRITON: Final = Path(__file__).resolve().parents[2] / "triton"


def sources(op: str) -> str:
    """Hash of an operator's module in rlkernel-triton and of every module of it that is imported on the way."""
    found, due = {}, [CLAIMS[op].target.partition(":")[0]]
    while due:
        path = TRITON / due.pop().replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file in found or not file.exists():
            continue
        found[file] = file.read_bytes()
        for node in ast.walk(ast.parse(found[file])):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlkernel_triton"):
                due += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return hashlib.sha256(b"".join(found[file] for file in sorted(found))).hexdigest()[:16]
