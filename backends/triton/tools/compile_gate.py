"""Compile every build that the table of workloads launches, for every target, without a GPU; write what each needs.

    python backends/triton/tools/compile_gate.py                # everything that is missing; minutes a target
    python backends/triton/tools/compile_gate.py sm90 gfx942    # for these targets
    python backends/triton/tools/compile_gate.py logprob sm90   # of this operator
    python backends/triton/tools/compile_gate.py none           # compile nothing: forget what is gone, write README.md

Writes backends/triton/builds/<target>.json, and README.md from all of them. A table has one line for each build, whose
key is a hash of all that decides what is compiled (`key`): neither an operator's or a kernel's name nor a workload's is
in it, so that none of them makes a table stale. A line is registers a thread, bytes spilled a thread, and bytes of
shared memory of a program; those of NVIDIA code are read out of the cubin by cuobjdump, those of AMD code out of the
assembly. Triton does not hold shared memory against a target's limit when it compiles; `problems` does.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

TRITON_BACKEND = Path(__file__).resolve().parents[1]
FOLDER: Final = TRITON_BACKEND / "builds"
if __name__ == "__main__":
    sys.path[:0] = [
        *(str(TRITON_BACKEND.parent / b) for b in ("triton", "torch", "common")),
        str(TRITON_BACKEND.parents[1]),
    ]

import triton

from rlkernel_core.files import write_text
from rlkernel_triton.launchers import Build, targets
from rlkernel_triton.launchers.offline import compile_recorded
from rlkernel_triton.recorded import Recorded, recorded
from rlkernel_triton.workloads import WORKLOADS

# By architecture as tables name it: "sm90".
TARGETS: Final = {name.replace("_", ""): chip for name, chip in targets.TARGETS.items() if name != "sm_110"}


class Needs(NamedTuple):
    """What a build takes on a target."""

    registers: int  # of a thread
    spilled: int  # bytes of local memory (scratch) of a thread
    shared: int  # bytes of shared memory (LDS) of a program


class Row(NamedTuple):
    """A build of an operator on a target, with what it needs there; None where nobody compiled it."""

    op: str
    arch: str
    recorded: Recorded
    needs: Needs | None


def shipped(op: str, arch: str) -> tuple[Recorded, ...]:
    """Every build of an operator for a target."""
    return recorded(op, arch.replace("sm", "sm_"))


def rows(ops: Iterable[str] = tuple(WORKLOADS), archs: Iterable[str] = tuple(TARGETS)) -> Iterator[Row]:
    """Every build of operators on targets."""
    ops = tuple(ops)
    for arch in archs:
        known = table(arch)
        for op in ops:
            yield from (Row(op, arch, r, known.get(key(r.build))) for r in shipped(op, arch))


def compiled(build: Build, arch: str) -> Needs:
    """What one build needs on one target."""
    return Needs(*compile_recorded(build, arch)[:3])


def problems(found: Iterable[Row]) -> list[str]:
    """Builds that do not fit their target."""
    return [
        f"{r.recorded.kernel} ({r.op}: {r.recorded.label}) on {r.arch}: {r.needs.shared} bytes of shared memory, "
        f"{TARGETS[r.arch].shared} are there"
        for r in found
        if r.needs is not None and r.needs.shared > TARGETS[r.arch].shared
    ]


@cache
def key(build: Build) -> str:
    """Hash of all that decides what is compiled: what the kernel computes, types, constants and options.

    No name of a kernel or of what is in it, and no comment.
    """
    module, _, name = build.kernel.partition(":")
    function = getattr(import_module(module), name).fn
    place = {name: i for i, name in enumerate(inspect.signature(function).parameters)}
    document = build.document() | {"kernel": meaning(function)}
    for part in ("types", "constants"):
        document[part] = sorted((place[name], value) for name, value in document[part].items())
    for part in ("divisible", "within_32_bits"):
        document[part] = sorted(place[name] for name in document[part])
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]


@cache
def meaning(function: Callable[..., Any]) -> str:
    """Hash of what a function of Triton's language computes: its code, that of what it calls, values that it names.

    Names of functions, parameters and variables, comments, docstrings, decorators and layout do not count.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{function!r} is no function of a file")
    tree.name, tree.decorator_list = "kernel", []
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    own = [n.arg for n in tree.args.args]
    own += [n.id for n in _in_order(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    places = {name: f"v{i}" for i, name in enumerate(dict.fromkeys(own))}
    said = ast.unparse(ast.fix_missing_locations(_Meant(function, places).visit(tree)))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, as they stand in the text."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


class _Meant(ast.NodeTransformer):
    """Names of a module replaced by what they stand for, parameters and variables by the order in which they appear."""

    def __init__(self, function: Callable[..., Any], own: Mapping[str, str]) -> None:
        self._globals, self._own = function.__globals__, own

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """A parameter as its place."""
        node.arg = self._own[node.arg]
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A variable as its place, a function as its hash, a number as its value."""
        if node.id in self._own:
            return ast.Name(self._own[node.id], node.ctx)
        return (_meant(self._globals[node.id]) if node.id in self._globals else None) or node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Keywords of a function of ours as arguments in its order; behind a default that is used, by their places."""
        called = getattr(self._globals.get(getattr(node.func, "id", "")), "fn", None)
        if inspect.isfunction(called) and not called.__module__.startswith("triton."):
            names = list(inspect.signature(called).parameters)
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            while len(node.args) < len(names) and names[len(node.args)] in given:
                node.args.append(given.pop(names[len(node.args)]))
            places = {name: f"v{i}" for i, name in enumerate(names)}
            node.keywords = [ast.keyword(places[name], given[name]) for name in names if name in given]
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """The same, of a module that is named."""
        if isinstance(node.value, ast.Name) and node.value.id not in self._own:
            module = self._globals.get(node.value.id)
            if isinstance(module, ModuleType) and module.__name__.startswith("rlkernel_triton"):
                return _meant(getattr(module, node.attr)) or node
        return self.generic_visit(node)


def _meant(value: Any) -> ast.AST | None:
    called = getattr(value, "fn", None)
    if inspect.isfunction(called) and not called.__module__.startswith("triton."):
        return ast.Name(f"_{meaning(called)}", ast.Load())
    found = value.value if type(value).__name__.lower() == "constexpr" else value
    return ast.Constant(found) if isinstance(found, bool | int | float | str) else None


def path_of(arch: str) -> Path:
    """Where the table of a target lies."""
    return FOLDER / f"{arch}.json"


def table(arch: str) -> dict[str, Needs]:
    """What builds need on a target, by their keys; nothing where another version of Triton compiled them."""
    if not path_of(arch).exists():
        return {}
    stored = json.loads(path_of(arch).read_text())
    return {k: Needs(*v) for k, v in stored["builds"].items()} if stored["triton"] == triton.__version__ else {}


def store(arch: str, found: dict[str, Needs]) -> None:
    """Write the table of a target."""
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(found.items()))
    write_text(path_of(arch), f'{{\n "triton": "{triton.__version__}",\n "builds": {{\n{lines}\n }}\n}}\n')


def missing(ops: Iterable[str], archs: Iterable[str]) -> list[tuple[str, Build]]:
    """(target, build) of what no table has, once each."""
    found = [(r.arch, r.recorded.build) for r in rows(ops, archs) if r.needs is None]
    return list({(arch, key(build)): (arch, build) for arch, build in found}.values())


def tidy(arch: str) -> None:
    """Forget what nothing launches any more."""
    known, wanted = table(arch), {key(r.build) for op in WORKLOADS for r in shipped(op, arch)}
    if known:
        store(arch, {k: v for k, v in known.items() if k in wanted})


def markdown() -> str:
    """All tables, for people: a line for each build, `registers · spilled bytes · KiB of shared memory` by target."""
    lines = [
        f"# What the kernels need, compiled offline (Triton {triton.__version__})",
        "",
        "Written by `tools/compile_gate.py`. Each cell: registers a thread · bytes spilled a thread, where any ·",
        "KiB of shared memory a program. Compiled for these targets, which is not the same as run on them; a cell is",
        "empty where a target has no such build, or nobody compiled it. A build is named by the workload that launches",
        "it (`rlkernel_triton/workloads.py`), with its number where that launches several.",
    ]
    for op in WORKLOADS:
        lines += ["", f"## {op}", "", f"| kernel | build | {' | '.join(TARGETS)} |"]
        lines += ["|---|---|" + "---|" * len(TARGETS)]
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for r in rows([op]):
            if r.needs is not None:
                spilled = f" · **{r.needs.spilled}**" if r.needs.spilled else ""
                own = cells.setdefault((r.recorded.kernel, r.recorded.label), {})
                own[r.arch] = f"{r.needs.registers}{spilled} · {r.needs.shared / 1024:.3g}"
        lines += [
            f"| `{kernel}` | {label} | {' | '.join(found.get(a, '') for a in TARGETS)} |"
            for (kernel, label), found in cells.items()
        ]
    return "\n".join(lines) + "\n"


def main(asked: list[str]) -> None:
    """Compile what is missing, write, and fail where something does not fit.

    Args:
        asked: operators and targets, all where none of a kind is named; "none" to compile nothing.
    """
    FOLDER.mkdir(exist_ok=True)
    if unknown := set(asked) - {*WORKLOADS, *TARGETS, "none"}:
        raise SystemExit(f"{', '.join(sorted(unknown))}: no operator and no target of {[*WORKLOADS, *TARGETS]}")
    ops, archs = ([n for n in asked if n in known] or list(known) for known in (WORKLOADS, TARGETS))
    work = [] if "none" in asked else missing(ops, archs)
    with ProcessPoolExecutor(int(os.environ.get("JOBS", os.cpu_count() or 1)), get_context("spawn")) as pool:
        # What is done is kept if this is stopped.
        made = {pool.submit(compiled, build, arch): (arch, build) for arch, build in work}
        for i, done in enumerate(as_completed(made), 1):
            arch, build = made[done]
            store(arch, {**table(arch), key(build): done.result()})
            print(f"{i} of {len(work)}: {arch} {build.kernel}", file=sys.stderr, flush=True)
    for arch in TARGETS:
        tidy(arch)
    write_text(FOLDER / "README.md", markdown())
    if wrong := problems(rows()):
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
