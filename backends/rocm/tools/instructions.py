"""Record the instructions of every build that the compile gate has compiled, as the installed Triton compiles it.

    python backends/rocm/tools/instructions.py                  # builds that are not recorded yet, for every target
    python backends/rocm/tools/instructions.py gfx942 gfx90a

Adds to backends/rocm/simulator/tests/instructions.txt one line for each opcode with each set of modifiers; a test binds
all of them in the simulator, so that no shipped kernel meets an instruction that is not known. Writes beside it
backends/rocm/tests/matrix_instructions.json: what every build, by its key in the gate's tables, multiplies matrices
with, on CDNA and on RDNA. Takes minutes where Triton's cache has not kept what the gate compiled.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[3]
FILE: Final = ROOT / "backends/rocm/simulator/tests/instructions.txt"
COMPILED: Final = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
MATRIX: Final = ROOT / "backends/rocm/tests/matrix_instructions.json"
if __name__ == "__main__":
    of = ("common", "torch", "triton", "triton/tools", "rocm", "rocm/simulator")
    sys.path[:0] = [str(ROOT), *(str(ROOT / "backends" / path) for path in of)]

import compile_gate
import triton

from cdna_simulator.assembly import Instruction, instruction, read
from rlkernel_core.files import write_text
from rlkernel_rocm.architectures import ARCHITECTURES
from rlkernel_triton.launchers.offline import compile_recorded


def form(ins: Instruction) -> tuple[object, ...]:
    """What decides how an instruction is bound: opcode, kinds of operands, modifiers."""
    kinds = tuple((o.kind, o.negate, o.absolute) for o in ins.operands)
    return ins.opcode, kinds, tuple(sorted(ins.modifiers.items())) if ins.encoding == "sdwa" else tuple(ins.modifiers)


def builds(arch: str) -> dict[str, Any]:
    """Every build that the gate has compiled, by its key."""
    return {compile_gate.key(r.recorded.build): r.recorded.build for r in compile_gate.rows(archs=[arch]) if r.needs}


def matrix(assembly: str) -> list[str]:
    """The matrix instructions of an assembly."""
    return sorted(set(re.findall(r"\bv_s?(?:mfma|mfmac|wmma|wmmac)_\w+", assembly)))


def main(asked: list[str]) -> None:
    """Compile what is new for some targets, all where none is named; forget the builds that are gone."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    seen = {form(instruction(line)) for line in lines}
    multiply: dict[str, dict[str, list[str]]] = json.loads(MATRIX.read_text(encoding="utf-8"))
    for arch in asked or COMPILED:
        known, found = multiply.get(arch, {}), {}
        for listed, build in builds(arch).items():
            if listed in known:
                found[listed] = known[listed]
                continue
            made = compile_recorded(build, arch).compiled
            assembly = made.asm["amdgcn"]
            found[listed] = matrix(assembly)
            for ins in read(assembly, made.metadata.name).code if ARCHITECTURES[arch].wave == 64 else ():
                if form(ins) not in seen:
                    seen.add(form(ins))
                    lines.append(ins.text)
        multiply[arch] = found
        print(arch, triton.__version__, len(lines), len(found), file=sys.stderr)
    write_text(FILE, "\n".join(sorted(lines)) + "\n")
    tables = (
        f' "{arch}": {{\n'
        + ",\n".join(f'  "{key}": {json.dumps(names)}' for key, names in sorted(multiply[arch].items()))
        + "\n }"
        for arch in COMPILED
    )
    write_text(MATRIX, "{\n" + ",\n".join(tables) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
