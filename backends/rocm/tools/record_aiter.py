"""Record the signatures of the AITER functions that are called, from its sources, without importing them.

    python backends/rocm/tools/record_aiter.py 0.1.20.post1 amd_aiter-0.1.20.post1-cp312-linux.whl
    python backends/rocm/tools/record_aiter.py 0.1.16 path/to/a/clone/of/ROCm-aiter

Adds to backends/rocm/rlkernel_rocm/aiter/signatures.json what this version has: the names of the parameters, in order,
and which of them have defaults.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Final

ROCM = Path(__file__).resolve().parents[1]
FILE: Final = ROCM / "rlkernel_rocm" / "aiter" / "signatures.json"
if __name__ == "__main__":
    sys.path[:0] = [str(ROCM), *(str(ROCM.parent / b) for b in ("triton", "torch", "common")), str(ROCM.parents[1])]

from packaging.version import Version

from rlkernel_core.files import write_text
from rlkernel_rocm.aiter.calls import CALLS, CallSpec


def source(where: Path, spec: CallSpec) -> str:
    """The module of a function, from a wheel or a folder."""
    name = spec.module.replace(".", "/") + ".py"
    if where.is_dir():
        return (where / name).read_text(encoding="utf-8")
    with zipfile.ZipFile(where) as wheel:
        return wheel.read(name).decode()


def signature(text: str, function: str) -> list[str]:
    """Parameters of the last definition of a function in a module: "x", "y=" with a default, "*z" by keyword alone."""
    made = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == function]
    if not made:
        raise SystemExit(f"no function {function}")
    a = made[-1].args
    positional = [*a.posonlyargs, *a.args]
    first = len(positional) - len(a.defaults)
    named = [f"{p.arg}{'=' if i >= first else ''}" for i, p in enumerate(positional)]
    keywords = zip(a.kwonlyargs, a.kw_defaults, strict=True)
    return [*named, *(f"*{p.arg}{'=' if default is not None else ''}" for p, default in keywords)]


def main(version: str, where: str) -> None:
    """Add one version."""
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    known[version] = {s.name: signature(source(Path(where), s), s.function) for s in CALLS}
    rows = [f' "{v}": {json.dumps(found)}' for v, found in sorted(known.items(), key=lambda row: Version(row[0]))]
    write_text(FILE, "{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
