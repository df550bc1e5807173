"""Compile every build of every kernel for sm_90a, without a GPU, and print what each needs.

    python backends/cuda/tools/compile_gate.py

Registers and local memory are read out of the cubin by the cuobjdump that Triton carries.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

CUDA_BACKEND = Path(__file__).resolve().parents[1]
SHARED: Final = 227 << 10  # bytes that a block may use on compute capability 9.0 (CUDA C++ Programming Guide)
if __name__ == "__main__":
    sys.path[:0] = [
        str(CUDA_BACKEND),
        *(str(CUDA_BACKEND.parent / b) for b in ("triton", "torch", "common")),
        str(CUDA_BACKEND.parents[1]),
    ]

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from rlkernel_cuda.builds import Build, builds


def compiled(build: Build) -> dict[str, Any]:
    """What one build needs: registers and bytes of local memory a thread, bytes of shared memory a block."""
    names = build.kernel.arg_names
    types = {n: "constexpr" if n in build.constants else build.types.get(n, "i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].startswith("*")}
    source = (GluonASTSource if build.kernel.is_gluon() else ASTSource)(
        build.kernel, types, constexprs=dict(build.constants), attrs=aligned
    )
    options = {"num_warps": build.num_warps, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code = made.asm["cubin"]
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", _cuobjdump(code, "--dump-resource-usage"))}
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "shared": made.metadata.shared,
        "wgmma": made.asm["ptx"].count("wgmma.mma_async"),
    }


def _cuobjdump(code: bytes, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([str(tool), what, file.name], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    for one in builds():
        print(f"{one.kernel.__name__:20} {one.label:44} {compiled(one)}", flush=True)
