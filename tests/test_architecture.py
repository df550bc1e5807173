"""The rules of the layout: who may import whom, what importing may do, where a try may stand."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from inspect import Parameter
from pathlib import Path

import pytest

from rlkernel_core.spec import OPERATORS

ROOT = Path(__file__).parents[1]
CORE, REGISTRY, BACKENDS = ROOT / "rlkernel_core", ROOT / "registry" / "rlkernel", ROOT / "backends"
COMMON, TORCH = BACKENDS / "common" / "rlkernel_common", BACKENDS / "torch" / "rlkernel_torch"
OURS = {"rlkernel", "rlkernel_core", "rlkernel_common", "rlkernel_torch", "rlkernel_conformance", "rlkernel_bench"}
CONFORMANCE, BENCH = ROOT / "conformance" / "rlkernel_conformance", ROOT / "benchmarks" / "rlkernel_bench"
LIBRARY = sorted(
    path for package in (CORE, REGISTRY, COMMON, TORCH, CONFORMANCE, BENCH) for path in package.rglob("*.py")
)
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
    CONFORMANCE,
    BENCH,
)


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Modules a file imports; `if TYPE_CHECKING` blocks do not count."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()

    def visit(node: ast.AST, *, deep: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(a.name for a in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                found.add(child.module)
            elif deep or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                visit(child, deep=deep)

    visit(tree, deep=not top_level_only)
    return found


def roots(modules: set[str]) -> set[str]:
    return {m.partition(".")[0] for m in modules}


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_imports_no_sibling(path) -> None:
    assert roots(imports(path)) & (OURS - {"rlkernel_core"}) == set()


@pytest.mark.parametrize("path", sorted(REGISTRY.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_registry_imports_no_backend_and_no_proof(path) -> None:
    allowed = {"rlkernel_core"}
    if path.name == "distributed.py":  # operators over ranks are plain torch, and stand where plain torch does
        allowed |= {"rlkernel_torch"}
    assert {m for m in roots(imports(path)) if m.startswith("rlkernel_")} <= allowed


@pytest.mark.parametrize("path", sorted(CONFORMANCE.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_proof_imports_no_benchmark(path) -> None:
    assert "rlkernel_bench" not in roots(imports(path))


@pytest.mark.parametrize("path", sorted(BACKENDS.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_backend_imports_what_lies_below_it(path) -> None:
    own = path.relative_to(BACKENDS).parts[0]
    allowed = {"rlkernel_core", "rlkernel_common", f"rlkernel_{own}"}
    if own not in {"common", "torch"}:
        allowed |= {"rlkernel_torch", "rlkernel_triton"}
    if "tests" in path.parts:
        allowed |= {"rlkernel", "rlkernel_conformance"}
    assert {m for m in roots(imports(path)) if m.startswith("rlkernel")} <= allowed


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_is_imported_where_it_is_meant_to_be(path) -> None:
    if not any(home in (path, *path.parents) for home in TORCH_HOMES):
        assert roots(imports(path, top_level_only=True)) & {"torch", "numpy", "triton", "matplotlib"} == set()


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_pydantic_is_used_in_the_manifest_alone(path) -> None:
    assert "pydantic" not in roots(imports(path)) or path.name == "manifest.py"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_foreign_exceptions_are_caught_in_discovery_alone(path) -> None:
    broad = {"Exception", "BaseException"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler) and path != REGISTRY / "discover.py":
            caught = (
                {"BaseException"}
                if node.type is None
                else {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            )
            assert caught & broad == set(), f"line {node.lineno}"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_library_code_has_no_assert(path) -> None:
    assert [n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)] == []


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_is_one_idea_of_bounded_length(path) -> None:
    assert path.read_text().count("\n") <= 400


@pytest.mark.parametrize("path", sorted(REGISTRY.glob("*.py")), ids=lambda p: p.name)
def test_devices_and_dtypes_are_named_in_manifests_specs_and_probes_alone(path) -> None:
    words = {"cuda", "hip", "bfloat16", "float16", "float32", "float64"}
    if path.name in {
        "probe.py",
        "discover.py",
        "doctor.py",
    }:  # discover.py names backends, which share words with devices
        return
    tree = ast.parse(path.read_text())
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert strings & words == set()


@pytest.mark.parametrize("path", sorted((CORE / "spec").glob("*.py")), ids=lambda p: p.name)
def test_operator_signatures_carry_semantics_only(path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Call"):
            arguments = {
                n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            }
            assert arguments & {"backend", "impl", "device_kernel", "kwargs"} == set()


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_every_argument_of_an_operator_is_a_field_of_its_record(op) -> None:
    spec = OPERATORS[op]
    assert {f.name for f in fields(spec.record) if f.init} == set(spec.parameters)
    assert {p.kind for p in spec.parameters.values()} <= {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return done.stdout.strip()


HEAVY = {"torch", "triton", "pydantic", "pluggy", "typer", "rich", "numpy"}


@pytest.mark.parametrize("package", ["rlkernel_core", "rlkernel_core.spec", "rlkernel"])
def test_importing_loads_nothing_heavy(package) -> None:
    assert fresh(f"import sys, {package}; print({HEAVY} & set(sys.modules))") == "set()"


def test_importing_the_reference_manifest_loads_no_torch() -> None:
    assert fresh("import sys, rlkernel_torch; print('torch' in sys.modules)") == "False"


def test_every_operator_has_a_spec_that_loads_no_torch() -> None:
    code = (
        "import sys; from rlkernel_core.spec import OPERATORS; list(OPERATORS.values()); print('torch' in sys.modules)"
    )
    assert fresh(code) == "False"


def test_the_versions_agree() -> None:
    import rlkernel_core

    ours = [path for path in BACKENDS.glob("*/pyproject.toml") if path.parent.name != "template"]  # a third party's
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
