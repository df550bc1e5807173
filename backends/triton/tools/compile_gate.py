"""Compile every build of every kernel for every target, without a GPU, and write what each needs.

    python backends/triton/tools/compile_gate.py        # every table that is stale, some minutes
    python backends/triton/tools/compile_gate.py logprob rlkernel_triton.head_builds sm90

What an operator launches for the calls of `rlkernel_triton.workloads` is recorded and compiled; kernels that no bound
launch reaches yet are named by modules with `builds(arch)` (`rlkernel_triton.builds`). Writes
backends/triton/builds/<operator or module>.json, and README.md from all of them. Registers and local memory of NVIDIA
code are read out of the cubin by cuobjdump, those of AMD code out of the assembly. Triton does not hold shared memory
against a target's limit when it compiles; `problems` does.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, Final

TRITON_BACKEND = Path(__file__).resolve().parents[1]
FOLDER: Final = TRITON_BACKEND / "builds"
if __name__ == "__main__":
    sys.path[:0] = [
        *(str(TRITON_BACKEND.parent / b) for b in ("triton", "torch", "common")),
        str(TRITON_BACKEND.parents[1]),
    ]

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlkernel_triton.aot import targets
from rlkernel_triton.aot.sources import plain
from rlkernel_triton.builds import MODULES, Build
from rlkernel_triton.launchers.offline import compile_recorded
from rlkernel_triton.recorded import Recorded, recorded
from rlkernel_triton.workloads import WORKLOADS

# By architecture as tables name it: "sm90".
TARGETS: Final = {name.replace("_", ""): chip for name, chip in targets.TARGETS.items() if name != "sm_110"}
TABLES: Final = (*WORKLOADS, *MODULES)


def compiled(build: Build | Recorded, arch: str) -> dict[str, Any]:
    """What one build needs on one target: registers, bytes of local memory (spills), bytes of shared memory."""
    if isinstance(build, Recorded):
        registers, spilled, shared, _ = compile_recorded(build.build, arch)
        named = {"kernel": build.kernel, "build": build.label, "arch": arch}
        return {**named, "registers": registers, "spilled": spilled, "shared": shared}
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


def fingerprint(builds: Iterable[Build | Recorded]) -> str:
    """Hash of all that decides what is compiled: what kernels compute, types, constants and options.

    No name of a kernel, and no comment: a table stays right when those change.
    """
    parts = []
    for b in builds:
        if isinstance(b, Recorded):
            module, _, name = b.build.kernel.partition(":")
            function = getattr(importlib.import_module(module), name).fn
            document = {**b.build.document(), "kernel": b.label}
            parts.append((meaning(function), json.dumps(document, sort_keys=True)))
            continue
        options = (
            b.label,
            sorted(b.types.items()),
            sorted(b.constants.items()),
            b.num_warps,
            b.num_stages,
            b.divisible,
            *([sorted(b.options.items())] if b.options else []),
        )
        parts.append((meaning(b.kernel.fn), repr(options)))
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:16]


@cache
def meaning(function: Callable[..., Any]) -> str:
    """Hash of what a function of Triton's language computes: its code, that of what it calls, values that it names.

    Names of functions, comments, docstrings, decorators and the form of the text do not count.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function!r} is no function of a file")
    tree.name, tree.decorator_list = "kernel", []
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    own = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    said = ast.unparse(ast.fix_missing_locations(_Meant(function, own).visit(tree)))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


class _Meant(ast.NodeTransformer):
    """Names of a module replaced by what they stand for."""

    def __init__(self, function: Callable[..., Any], own: set[str]) -> None:
        self._globals, self._own = function.__globals__, own

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A function as its hash, a number as its value."""
        if node.id in self._own or node.id not in self._globals:
            return node
        return _meant(self._globals[node.id]) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """The same, of a module that is named."""
        if isinstance(node.value, ast.Name) and node.value.id not in self._own:
            module = self._globals.get(node.value.id)
            if isinstance(module, ModuleType) and module.__name__.startswith("rlkernel_triton"):
                return _meant(getattr(module, node.attr)) or node
        return self.generic_visit(node)


def _meant(value: Any) -> ast.AST | None:
    called = plain(value)
    if called is not None and not called.__module__.startswith("triton."):
        return ast.Name(f"_{meaning(called)}", ast.Load())
    found = value.value if type(value).__name__.lower() == "constexpr" else value
    return ast.Constant(found) if isinstance(found, bool | int | float | str) else None


def shipped(name: str) -> dict[str, list[Build | Recorded]]:
    """Every build of an operator or a module, by target."""
    return {arch: shipped_for(name, arch) for arch in TARGETS}


def shipped_for(name: str, arch: str) -> list[Build | Recorded]:
    """Every build of an operator or a module for a target."""
    if name in WORKLOADS:
        return list(recorded(name, arch.replace("sm", "sm_")))
    return list(importlib.import_module(name).builds(arch))


def _rows(asked: tuple[str, str]) -> list[dict[str, Any]]:
    name, arch = asked
    made = [compiled(b, arch) for b in shipped_for(name, arch)]
    print(f"{name} {arch}: {len(made)} builds", file=sys.stderr, flush=True)
    return made


def table(name: str) -> dict[str, Any]:
    """The table of an operator or a module as it is stored; without rows where there is none."""
    there = path_of(name)
    return json.loads(there.read_text()) if there.exists() else {"of": name, "fingerprints": {}, "rows": []}


def stale(names: Iterable[str], archs: Iterable[str]) -> list[tuple[str, str]]:
    """Tables and targets that were compiled of other kernels, or by another Triton."""
    found = []
    for arch, name in product(archs, names):
        stored = table(name)
        right = stored.get("triton") == triton.__version__
        if not right or stored["fingerprints"].get(arch) != fingerprint(shipped_for(name, arch)):
            found.append((name, arch))
    return found


def store(name: str, arch: str, rows: list[dict[str, Any]]) -> None:
    """Put what a target needs into a table; what another Triton compiled goes."""
    stored = table(name)
    kept = stored if stored.get("triton") == triton.__version__ else {"fingerprints": {}, "rows": []}
    prints = {**kept["fingerprints"], arch: fingerprint(shipped_for(name, arch))}
    every = [r for r in kept["rows"] if r["arch"] != arch] + rows
    made = {
        "of": name,
        "triton": triton.__version__,
        "fingerprints": {a: prints[a] for a in TARGETS if a in prints},
        "rows": [r for a in TARGETS for r in every if r["arch"] == a],
    }
    path_of(name).write_text(json.dumps(made, indent=1) + "\n")


def path_of(name: str) -> Path:
    """Where the table of an operator or a module lies."""
    return FOLDER / f"{name.removeprefix('rlkernel_triton.').replace('.', '-')}.json"


def markdown(made: Iterable[dict[str, Any]]) -> str:
    """All tables, for people: a line for each build, `registers / spilled bytes / KiB of shared memory` by target."""
    lines = [
        "# What the kernels need, compiled offline",
        "",
        "Written by `tools/compile_gate.py`. Each cell: registers a thread · bytes spilled a thread, where any ·",
        "KiB of shared memory a program. Compiled for these targets, which is not the same as run on them.",
        "A build of an operator is named by the workload that launches it, with its number where that launches several",
        "of the kernel.",
    ]
    for t in made:
        lines += ["", f"## {t['of']} (Triton {t['triton']})", "", f"| kernel | build | {' | '.join(TARGETS)} |"]
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


def main(asked: list[str]) -> None:
    """Compile what is stale, write, and fail where something does not fit.

    Args:
        asked: operators, modules and targets; all where none of a kind is named.
    """
    FOLDER.mkdir(exist_ok=True)
    names, archs = ([n for n in asked if n in known] or list(known) for known in (TABLES, TARGETS))
    if unknown := set(asked) - {*TABLES, *TARGETS}:
        raise SystemExit(f"{', '.join(sorted(unknown))}: no operator, module or target of {[*TABLES, *TARGETS]}")
    work = stale(names, archs)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for (name, arch), rows in zip(work, pool.map(_rows, work), strict=True):
            store(name, arch, rows)
    there = [table(n) for n in TABLES if path_of(n).exists()]
    (FOLDER / "README.md").write_text(markdown(there))
    if wrong := [line for t in there for line in problems(t["rows"])]:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
