"""The rules of the layout: who may import whom, what importing may do, where a try may stand."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest

from rlkernel_core.spec import OPERATORS

ROOT = Path(__file__).parents[1]
CORE, REGISTRY, BACKENDS = ROOT / "rlkernel_core", ROOT / "registry" / "rlkernel", ROOT / "backends"
COMMON, TORCH = BACKENDS / "common" / "rlkernel_common", BACKENDS / "torch" / "rlkernel_torch"
CONFORMANCE, JUDGE = ROOT / "conformance" / "rlkernel_conformance", ROOT / "conformance" / "rlkernel_judge"
BENCH = ROOT / "benchmarks" / "rlkernel_bench"
PACKAGES = (CORE, REGISTRY, COMMON, TORCH, CONFORMANCE, JUDGE, BENCH)
OURS = {package.name for package in PACKAGES}
LIBRARY = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
# Packages whose own code may import torch when they are imported: the meaning of the operators, what runs only once
# torch traces, the demo, the drift, the proof, and the measuring.
TORCH_HOMES = (
    CORE / "gradients.py",
    CORE / "definitions",
    COMMON,
    TORCH,
    CORE / "quant",
    REGISTRY / "torchlib",
    REGISTRY / "demo",
    REGISTRY / "agree",
    REGISTRY / "nn",
    REGISTRY / "rollouts",
    CONFORMANCE,
    JUDGE,
    BENCH,
)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def below(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a statement's blocks: imports stand in no expression."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, block, ())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below one."""
    for statement in below(node):
        yield statement
        yield from statements(statement)


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Modules a file imports; `if TYPE_CHECKING` blocks do not count."""
    found: set[str] = set()

    def visit(node: ast.AST, *, deep: bool) -> None:
        for child in below(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(a.name for a in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                found.add(child.module)
            elif deep or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, deep=deep)

    visit(tree(path), deep=not top_level_only)
    return found


def roots(modules: set[str]) -> set[str]:
    return {m.partition(".")[0] for m in modules}


def offending(paths: Iterable[Path], found: Callable[[Path], Any]) -> dict[str, Any]:
    """What is found in files where nothing should be."""
    return {str(path.relative_to(ROOT)): what for path in paths if (what := found(path))}


def modules() -> dict[str, Path]:
    """Every module of our own packages by its dotted name; tests are none."""
    found = {}
    for folder in (ROOT, ROOT / "registry", ROOT / "conformance", ROOT / "benchmarks", *BACKENDS.glob("**")):
        for package in folder.glob("rlkernel*/__init__.py"):
            for path in sources(package.parent):
                parts = path.relative_to(folder).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: set[str]) -> set[str]:
    """Modules of ours that a module's import statements name, those inside functions included."""
    found: set[str] = set()
    hidden = {
        id(inner)
        for node in statements(tree(path))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in statements(node)
    }
    for node in statements(tree(path)):
        if isinstance(node, ast.Import) and id(node) not in hidden:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and id(node) not in hidden:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner if inner <= known else {*inner, node.module}
    return (found & known) - {name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules each of which imports, by way of the others, itself."""
    reached = {name: {name} for name in graph}
    for name, seen in reached.items():
        stack = [name]
        while stack:
            new = graph[stack.pop()] - seen
            seen.update(new)
            stack += new
    together = {tuple(sorted(other for other in seen if name in reached[other])) for name, seen in reached.items()}
    return sorted(list(names) for names in together if len(names) > 1)


# Known circles, each to be mended.
KNOWN_CIRCLES = [
    [f"rlkernel_triton.aot.{name}" for name in ("backend", "noting", "recording", "workloads")],
    [f"rlkernel_triton.quant.{name}" for name in ("activations", "codec", "product")],
]


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    found = circles({name: imported(name, path, set(known)) for name, path in known.items()})
    assert [circle for circle in found if circle not in KNOWN_CIRCLES] == []


def test_a_circle_of_imports_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert circles(graph) == [["a", "b", "c"]]


def test_the_core_imports_no_sibling() -> None:
    assert offending(sources(CORE), lambda path: roots(imports(path)) & (OURS - {"rlkernel_core"})) == {}


def test_the_registry_imports_no_backend_and_no_proof() -> None:
    def found(path: Path) -> set[str]:
        allowed = {"rlkernel_core"}
        if path.name == "distributed.py":  # operators over ranks are plain torch, and stand where plain torch does
            allowed |= {"rlkernel_torch"}
        return {m for m in roots(imports(path)) if m.startswith("rlkernel_")} - allowed

    assert offending(sources(REGISTRY), found) == {}


def test_the_suite_imports_neither_the_judge_nor_a_benchmark() -> None:
    assert (
        offending(sources(CONFORMANCE), lambda path: roots(imports(path)) & {"rlkernel_judge", "rlkernel_bench"}) == {}
    )


def test_the_judge_imports_the_suite_and_what_the_suite_imports() -> None:
    allowed = {"rlkernel", "rlkernel_core", "rlkernel_torch", "rlkernel_conformance", "rlkernel_judge"}
    assert offending(sources(JUDGE), lambda path: roots(imports(path)) & OURS - allowed) == {}


def test_a_backend_imports_what_lies_below_it() -> None:
    def found(path: Path) -> set[str]:
        own = path.relative_to(BACKENDS).parts[0]
        allowed = {"rlkernel_core", "rlkernel_common", f"rlkernel_{own}"}
        if own not in {"common", "torch"}:
            allowed |= {"rlkernel_torch", "rlkernel_triton"}
        if {"tests", "tools"} & {*path.parts}:  # which no wheel has
            allowed |= {"rlkernel", "rlkernel_conformance"}
        return {m for m in roots(imports(path)) if m.startswith("rlkernel")} - allowed

    assert offending(sources(BACKENDS), found) == {}


def test_the_simulator_of_amd_gpus_imports_numpy_alone_and_only_the_simulated_backends_import_it() -> None:
    package, users = BACKENDS / "rocm" / "simulator" / "cdna_simulator", BACKENDS / "rocm" / "rlkernel_rocm"
    assert (
        offending(
            sources(package), lambda path: roots(imports(path)) - sys.stdlib_module_names - {"numpy", package.name}
        )
        == {}
    )
    others = [path for path in [*LIBRARY, *sources(users)] if path.parent != users / "simulated"]
    assert offending(others, lambda path: roots(imports(path)) & {package.name}) == {}


def test_torch_is_imported_where_it_is_meant_to_be() -> None:
    light = [path for path in LIBRARY if not any(home in (path, *path.parents) for home in TORCH_HOMES)]
    heavy = {"torch", "numpy", "triton", "matplotlib"}
    assert offending(light, lambda path: roots(imports(path, top_level_only=True)) & heavy) == {}


def test_pydantic_is_used_in_the_manifest_alone() -> None:
    others = [path for path in sources(CORE) if path.name != "manifest.py"]
    assert offending(others, lambda path: roots(imports(path)) & {"pydantic"}) == {}


def test_foreign_exceptions_are_caught_in_discovery_alone() -> None:
    def broad(node: ast.ExceptHandler) -> bool:
        caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"BaseException"}
        return bool(caught & {"Exception", "BaseException"})

    def found(path: Path) -> list[int]:
        return [n.lineno for n in ast.walk(tree(path)) if isinstance(n, ast.ExceptHandler) and broad(n)]

    assert offending(set(LIBRARY) - {REGISTRY / "discover.py"}, found) == {}


def test_library_code_has_no_assert() -> None:
    assert offending(LIBRARY, lambda path: [n.lineno for n in ast.walk(tree(path)) if isinstance(n, ast.Assert)]) == {}


def test_a_module_is_one_idea_of_bounded_length() -> None:
    assert offending(LIBRARY, lambda path: max(0, path.read_text().count("\n") - 400)) == {}


def test_devices_and_dtypes_are_named_in_manifests_specs_and_probes_alone() -> None:
    words = {"cuda", "hip", "bfloat16", "float16", "float32", "float64"}
    exempt = {"probe.py", "discover.py", "doctor.py"}  # discover.py names backends, which share words with devices
    others = [path for path in REGISTRY.glob("*.py") if path.name not in exempt]

    def found(path: Path) -> set[str]:
        strings = (n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
        return words & set(strings)

    assert offending(others, found) == {}


def test_operator_signatures_carry_semantics_only() -> None:
    def found(path: Path) -> set[str]:
        calls = [n for n in tree(path).body if isinstance(n, ast.ClassDef) and n.name.endswith("Call")]
        targets = (n.target for call in calls for n in call.body if isinstance(n, ast.AnnAssign))
        arguments = {target.id for target in targets if isinstance(target, ast.Name)}
        return arguments & {"backend", "impl", "device_kernel", "kwargs"}

    assert offending((CORE / "spec").glob("*.py"), found) == {}


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_every_argument_of_an_operator_is_a_field_of_its_record(op) -> None:
    spec = OPERATORS[op]
    assert {f.name for f in fields(spec.record) if f.init} == set(spec.parameters)
    assert {p.kind for p in spec.parameters.values()} <= {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return done.stdout.strip()


HEAVY = {"torch", "triton", "pydantic", "pluggy", "typer", "rich", "numpy"}


@pytest.mark.parametrize("package", ["rlkernel_core", "rlkernel_core.spec", "rlkernel_core.quant", "rlkernel"])
def test_importing_loads_nothing_heavy(package) -> None:
    assert fresh(f"import sys, {package}; print({HEAVY} & set(sys.modules))") == "set()"


def test_neither_the_manifest_of_the_reference_nor_a_spec_loads_torch() -> None:
    code = (
        "import sys, rlkernel_torch; from rlkernel_core.spec import OPERATORS; "
        "list(OPERATORS.values()); print('torch' in sys.modules)"
    )
    assert fresh(code) == "False"


def test_the_versions_agree() -> None:
    import rlkernel_core

    ours = [path for path in BACKENDS.rglob("pyproject.toml") if path.parent.name != "template"]  # a third party's
    files = [ROOT / "pyproject.toml", *ours]
    versions = {str(f): tomllib.loads(f.read_text())["project"]["version"] for f in files}
    assert set(versions.values()) == {rlkernel_core.__version__}
    assert f"## [{rlkernel_core.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_reason_code_is_created_in_one_place() -> None:
    from rlkernel_core.reasons import STAGES

    created: dict[tuple[str, str], list[str]] = {}
    for path in [*CORE.glob("*.py"), *REGISTRY.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "Reason"
                and node.args
            ):
                stage, code = (ast.unparse(a) for a in node.args[:2])
                for word in re.findall(r"'([a-z-]+)'", code):
                    created.setdefault((stage.strip("'"), word), []).append(f"{path.name}:{node.lineno}")
    twice = {k: v for k, v in created.items() if len(v) > 1}
    assert twice == {}
    assert {s for s, _ in created} <= set(STAGES)
