"""Compile every build of every kernel for every target, without a GPU, and write what each needs.

    python backends/triton/tools/compile_gate.py                    # all modules, some minutes
    python backends/triton/tools/compile_gate.py rlkernel_triton.logprob_kernels

Writes backends/triton/builds/<module>.json, and README.md from all of them. Registers and local memory of NVIDIA code
are read out of the cubin by cuobjdump, those of AMD code out of the assembly. Triton does not hold shared memory
against a target's limit when it compiles; `problems` does.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

TRITON_BACKEND = Path(__file__).resolve().parents[1]
FOLDER: Final = TRITON_BACKEND / "builds"
if __name__ == "__main__":
    sys.path[:0] = [str(TRITON_BACKEND), str(TRITON_BACKEND.parents[1])]

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from rlkernel_triton.builds import MODULES, Build


class Target(NamedTuple):
    """A target, and the most shared memory (LDS) that one program may use there, in bytes."""

    kind: str
    arch: int | str
    warp: int
    shared: int  # CUDA C++ Programming Guide, table of technical specifications; AMD's ISA manuals


TARGETS: Final = {
    "sm80": Target("cuda", 80, 32, 163 << 10),
    "sm86": Target("cuda", 86, 32, 99 << 10),
    "sm87": Target("cuda", 87, 32, 163 << 10),
    "sm89": Target("cuda", 89, 32, 99 << 10),
    "sm90": Target("cuda", 90, 32, 227 << 10),
    "sm100": Target("cuda", 100, 32, 227 << 10),
    "sm120": Target("cuda", 120, 32, 99 << 10),
    "gfx90a": Target("hip", "gfx90a", 64, 64 << 10),
    "gfx942": Target("hip", "gfx942", 64, 64 << 10),
    "gfx950": Target("hip", "gfx950", 64, 160 << 10),
    "gfx1100": Target("hip", "gfx1100", 32, 64 << 10),
    "gfx1201": Target("hip", "gfx1201", 32, 64 << 10),
}


def compiled(build: Build, arch: str) -> dict[str, Any]:
    """What one build needs on one target: registers, bytes of local memory (spills), bytes of shared memory."""
    target = TARGETS[arch]
    names = build.kernel.arg_names
    missing = [n for n in names if n not in build.types and n not in build.constants]
    if missing:
        raise SystemExit(f"{build.kernel.__name__} ({build.label}): no type for {', '.join(missing)}")
    source = ASTSource(
        build.kernel,
        {n: "constexpr" if n in build.constants else build.types[n] for n in names},
        constexprs=dict(build.constants),
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in build.divisible},
    )
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": True}
    options |= build.options
    made = triton.compile(source, target=GPUTarget(target.kind, target.arch, target.warp), options=options)
    needs = _of_cubin(made.asm["cubin"]) if target.kind == "cuda" else _of_assembly(made.asm["amdgcn"])
    return {
        "kernel": build.kernel.__name__,
        "build": build.label,
        "arch": arch,
        **needs,
        "shared": made.metadata.shared,
    }


def _of_cubin(code: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


def _of_assembly(text: str) -> dict[str, int]:
    found = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text)}
    return {"registers": found["vgpr_count"], "spilled": found["private_segment_fixed_size"]}


def problems(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Builds that do not fit their target."""
    return [
        f"{r['kernel']} ({r['build']}) on {r['arch']}: {r['shared']} bytes of shared memory, "
        f"{TARGETS[r['arch']].shared} are there"
        for r in rows
        if r["shared"] > TARGETS[r["arch"]].shared
    ]


def fingerprint(builds: Iterable[Build]) -> str:
    """Hash of all that decides what is compiled: the kernels, what they call, types, constants and options."""
    parts = []
    for b in builds:
        sources = sorted({f.src for f in _reached(b.kernel)})
        options = (
            b.label,
            sorted(b.types.items()),
            sorted(b.constants.items()),
            b.num_warps,
            b.num_stages,
            b.divisible,
            *([sorted(b.options.items())] if b.options else []),
        )
        parts.append(repr((sources, options)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _reached(kernel: JITFunction) -> Iterator[JITFunction]:
    """A kernel and every function of ours that it calls."""
    yield kernel
    names = {n.id for n in ast.walk(ast.parse(kernel.src)) if isinstance(n, ast.Name)}
    for name in sorted(names - {kernel.__name__}):
        called = kernel.fn.__globals__.get(name)
        if isinstance(called, JITFunction):
            yield from _reached(called)


def shipped(module: str) -> dict[str, list[Build]]:
    """Every build of a module, by target."""
    builds = importlib.import_module(module).builds
    return {arch: list(builds(arch)) for arch in TARGETS}


def table(module: str) -> dict[str, Any]:
    """Compile a module for every target."""
    per_arch = shipped(module)
    rows = []
    for arch, builds in per_arch.items():
        rows += [compiled(b, arch) for b in builds]
        print(f"{module} {arch}: {len(builds)} builds", file=sys.stderr)
    prints = {arch: fingerprint(builds) for arch, builds in per_arch.items()}
    return {"module": module, "triton": triton.__version__, "fingerprints": prints, "rows": rows}


def path_of(module: str) -> Path:
    """Where the table of a module lies."""
    return FOLDER / f"{module.removeprefix('rlkernel_triton.').replace('.', '-')}.json"


def markdown(tables: Iterable[dict[str, Any]]) -> str:
    """All tables, for people: a line for each build, `registers / spilled bytes / KiB of shared memory` by target."""
    lines = [
        "# What the kernels need, compiled offline",
        "",
        "Written by `tools/compile_gate.py`. Each cell: registers a thread · bytes spilled a thread, where any ·",
        "KiB of shared memory a program. Compiled for these targets, which is not the same as run on them.",
    ]
    for t in tables:
        lines += ["", f"## {t['module']} (Triton {t['triton']})", "", f"| kernel | build | {' | '.join(TARGETS)} |"]
        lines += ["|---|---|" + "---|" * len(TARGETS)]
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for r in t["rows"]:
            spilled = f" · **{r['spilled']}**" if r["spilled"] else ""
            cells.setdefault((r["kernel"], r["build"]), {})[r["arch"]] = (
                f"{r['registers']}{spilled} · {r['shared'] / 1024:.3g}"
            )
        lines += [
            f"| `{kernel}` | {label} | {' | '.join(found.get(a, '') for a in TARGETS)} |"
            for (kernel, label), found in cells.items()
        ]
    return "\n".join(lines) + "\n"


def main(modules: list[str]) -> None:
    """Compile, write, and fail where something does not fit."""
    FOLDER.mkdir(exist_ok=True)
    wrong = []
    for module in modules or MODULES:
        made = table(module)
        wrong += problems(made["rows"])
        path_of(module).write_text(json.dumps(made, indent=1) + "\n")
    tables = [json.loads(path_of(m).read_text()) for m in MODULES if path_of(m).exists()]
    (FOLDER / "README.md").write_text(markdown(tables))
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
