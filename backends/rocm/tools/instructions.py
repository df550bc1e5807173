"""Record the instructions of every shipped build as the installed Triton compiles them for CDNA.

    python backends/rocm/tools/instructions.py

Adds to backends/rocm/tests/simulator/instructions.txt one line for each opcode with each set of modifiers; a test binds
all of them in the simulator, so that no shipped kernel meets an instruction that is not known. Writes beside it
backends/rocm/tests/matrix_instructions.json: what every build multiplies matrices with, on CDNA and on RDNA. Takes
minutes.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[3]
FILE: Final = ROOT / "backends/rocm/tests/simulator/instructions.txt"
COMPILED: Final = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
MATRIX: Final = ROOT / "backends/rocm/tests/matrix_instructions.json"
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), *(str(ROOT / "backends" / b) for b in ("common", "torch", "triton", "rocm"))]

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlkernel_rocm.architectures import ARCHITECTURES
from rlkernel_rocm.simulator.assembly import Instruction, instruction, read
from rlkernel_triton.builds import MODULES, Build
from rlkernel_triton.launchers.offline import compile_recorded
from rlkernel_triton.recorded import recorded
from rlkernel_triton.workloads import WORKLOADS


def form(ins: Instruction) -> tuple[object, ...]:
    """What decides how an instruction is bound: opcode, kinds of operands, modifiers."""
    kinds = tuple((o.kind, o.negate, o.absolute) for o in ins.operands)
    return ins.opcode, kinds, tuple(sorted(ins.modifiers.items())) if ins.encoding == "sdwa" else tuple(ins.modifiers)


def assemblies(arch: str) -> Iterator[tuple[str, str, str]]:
    """Every shipped build: how it is listed, its assembly, and the name of its kernel there."""
    for build in (b for module in MODULES for b in importlib.import_module(module).builds(arch)):
        yield f"{build.kernel.__name__}: {build.label}", *compiled(build, arch)
    for op in WORKLOADS:
        for kernel, label, build in recorded(op, arch):
            made = compile_recorded(build, arch).compiled
            yield f"{kernel}: {label}", made.asm["amdgcn"], made.metadata.name


def compiled(build: Build, arch: str) -> tuple[str, str]:
    """The assembly of one build, and the name of its kernel there."""
    names = build.kernel.arg_names
    source = ASTSource(
        build.kernel,
        {n: "constexpr" if n in build.constants else build.types[n] for n in names},
        constexprs=dict(build.constants),
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in build.divisible},
    )
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": True}
    options |= build.options
    made = triton.compile(source, target=GPUTarget("hip", arch, ARCHITECTURES[arch].wave), options=options)
    return made.asm["amdgcn"], made.metadata.name


def matrix(assembly: str) -> list[str]:
    """The matrix instructions of an assembly."""
    return sorted(set(re.findall(r"\bv_s?(?:mfma|mfmac|wmma|wmmac)_\w+", assembly)))


def main() -> None:
    """Compile everything, add what is new."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    seen = {form(instruction(line)) for line in lines}
    multiply: dict[str, dict[str, list[str]]] = {}
    for arch in COMPILED:
        found = multiply[arch] = {}
        for listed, assembly, name in assemblies(arch):
            found[listed] = matrix(assembly)
            for ins in read(assembly, name).code if ARCHITECTURES[arch].wave == 64 else ():
                if form(ins) not in seen:
                    seen.add(form(ins))
                    lines.append(ins.text)
        print(arch, triton.__version__, len(lines), len(found), file=sys.stderr)
    FILE.write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")
    MATRIX.write_text(json.dumps(multiply, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
