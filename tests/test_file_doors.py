"""Files and variables have one door each way: what writes a file, parses one or looks up a variable goes through it.

A writer writes to the draft that `rlkernel_core.files.whole` or `whole_folder` gives it, or is one of their functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = [
    path
    for part in ("rlkernel_core", "registry", "backends", "conformance", "benchmarks", "tools", "docs", "examples")
    for path in sorted((ROOT / part).rglob("*.py"))
    if not {"tests", "build", "dist", ".venv"} & set(path.relative_to(ROOT).parts)
]
DOORS = {"rlkernel_core/files.py", "rlkernel_core/documents.py", "rlkernel_core/environment.py"}
DRAFTS = {"whole", "whole_folder"}

# Writers that need no draft: how many of a file, and why.
WRITERS = {
    "backends/triton/rlkernel_triton/aot/recordings.py": (1, "a log to which processes append a line each"),
    "registry/rlkernel/demo/record.py": (1, "a log that is read while it is written; its reader names a line cut off"),
    "registry/rlkernel/child.py": (1, "a switch of the kernel in /proc"),
    "tools/lock.py": (2, "what uv reads, in a temporary folder"),
    "tools/gpu_all.py": (4, "two logs, and metadata in a temporary folder"),
    "conformance/rlkernel_conformance/process_reaper.py": (1, "a switch of the kernel in /proc"),
    "conformance/rlkernel_judge/sandbox.py": (4, "switches of the kernel in /proc, and whether a folder takes a file"),
    "conformance/rlkernel_judge/private_folder.py": (1, "a folder that is locked takes its name"),
    "conformance/rlkernel_judge/supervisor.py": (6, "switches of the kernel in /proc and in a control group"),
    "conformance/rlkernel_judge/worker.py": (1, "the candidate's source, in the scratch folder of its sandbox"),
    "conformance/rlkernel_conformance/source_mutants/plugin_copy.py": (5, "copies of a backend in a temporary folder"),
}
# Parsers of what is no file from outside.
PARSERS = {
    "rlkernel_core/ranks.py": (1, "what other ranks of this run say"),
    "rlkernel_core/tensor_file.py": (1, "a length of eight bytes that were read"),
    "registry/rlkernel/checkpoints/gguf_header.py": (3, "numbers of a header whose ends are looked at first"),
    "registry/rlkernel/probe.py": (1, "the verdict of our own child"),
    "registry/rlkernel/trial.py": (1, "lines of our own child, whose number and size are bounded"),
    "registry/rlkernel/trial_child.py": (1, "the order of our own parent"),
    "conformance/rlkernel_judge/attack_run.py": (1, "the answer of our own trial"),
    "registry/rlkernel/doctor/torchbuild.py": (1, "the answer of our own child"),
    "registry/rlkernel/torchlib/call_codec.py": (1, "a node of a graph that we wrote"),
    "conformance/rlkernel_conformance/isolation.py": (1, "messages of our own worker, each with a secret"),
    "conformance/rlkernel_conformance/worker.py": (1, "the order of our own parent"),
    "conformance/rlkernel_conformance/fork_server.py": (1, "the order of our own parent"),
    "conformance/rlkernel_judge/job_queue.py": (1, "the answer of our own trial"),
    "conformance/rlkernel_judge/sandbox.py": (1, "the answer of our own probe"),
    "conformance/rlkernel_judge/trial.py": (1, "the task of our own server"),
    "conformance/rlkernel_judge/wire.py": (3, "lengths of a frame, which are bounded before anything is allocated"),
    "conformance/rlkernel_judge/worker.py": (1, "the job of our own trial"),
    "benchmarks/gpu_exact_ranks.py": (1, "the answers of our own ranks"),
    "benchmarks/gpu_vllm.py": (1, "the answers of our own engines"),
    "benchmarks/rlkernel_bench/rank.py": (1, "the order of our own parent"),
    "benchmarks/rlkernel_bench/suites/ranks.py": (1, "the answers of our own ranks"),
    "backends/torch/rlkernel_torch/rollout/files.py": (1, "what was serialized a line before, to compare alike"),
    "backends/triton/rlkernel_triton/aot/bundle.py": (2, "a zip whose list and entries are bounded first"),
    "backends/triton/rlkernel_triton/orders/ptx.py": (1, "bits of a number"),
    "backends/rocm/simulator/cdna_simulator/assembly.py": (1, "bits of a number"),
    "backends/jetson/hatch_build.py": (2, "a bundle that this build has just made"),
}
VARIABLES = {
    "benchmarks/rlkernel_bench/rank.py": (2, "torchrun's number of a rank"),
    "conformance/rlkernel_conformance/report.py": (1, "values that a report repeats"),
    "conformance/rlkernel_judge/sandbox.py": (2, "what is passed on, and our own mark"),
    "registry/rlkernel/cli/config.py": (1, "values that `rlkernel config` repeats"),
}
SCRIPTS = ("tools/", "docs/", "examples/", "backends/triton/tools/", "backends/rocm/tools/", "backends/cuda/tools/")


@cache
def parsed(path: Path) -> tuple[ast.AST, ...]:
    """What of a file is looked at, in the order of `ast.walk`."""
    kinds = ast.With, ast.Assign, ast.Call, ast.Subscript
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


def name_of(node: ast.expr) -> str:
    """`draft` of draft, self.draft, draft / "x" and (draft / x).parent."""
    while True:
        match node:
            case ast.BinOp(left=left):
                node = left
            case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                return attr
            case ast.Attribute(value=value):
                node = value
            case ast.Name(id=name):
                return name
            case _:
                return ""


def called(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
    return ""


def drafts(nodes: tuple[ast.AST, ...]) -> set[str]:
    """Names that `with whole(...) as NAME` or `NAME = stack.enter_context(whole_folder(...))` bind, and their files."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.With):
            for item in node.items:
                opened = isinstance(item.context_expr, ast.Call) and name_of(item.context_expr.func) in found
                if (called(item.context_expr) in DRAFTS or opened) and item.optional_vars is not None:
                    found.add(name_of(item.optional_vars))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            given = {called(argument) for argument in node.value.args} & DRAFTS
            of_draft = {name_of(argument) for argument in (*node.value.args, node.value.func)} & found
            if given or of_draft:
                found.add(name_of(node.targets[0]))
        elif isinstance(node, ast.Assign) and name_of(node.value) in found:
            found.add(name_of(node.targets[0]))
    return found


def mode_of(node: ast.Call, at: int) -> str:
    given = [*node.args[at : at + 1], *(k.value for k in node.keywords if k.arg == "mode")]
    return str(given[0].value) if given and isinstance(given[0], ast.Constant) else "r"


def written(node: ast.Call) -> ast.expr | None:
    """What a call writes to; None where it writes no file."""
    method = isinstance(node.func, ast.Attribute)
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    module = owner.id if isinstance(owner, ast.Name) else ""
    match called(node):
        case "write_text" | "write_bytes" if method and module != "files":
            return owner
        case "open" if method and module not in {"os", "self"} and set("wax+") & set(mode_of(node, 0)):
            return owner
        case "open" if not method and set("wax+") & set(mode_of(node, 1)):
            return node.args[0]
        case "rename" | "replace" if method and module != "os" and len(node.args) == 1 and not node.keywords:
            return owner
        case "rename" | "replace" if module == "os":
            return node.args[0]
        case "dump" | "save" if module in {"json", "torch", "np", "numpy", "pickle"}:
            return node.args[1] if module in {"json", "torch", "pickle"} else node.args[0]
        case "save_file":
            return node.args[1]
        case "savefig":
            return node.args[0]
        case "ZipFile" if set("wax") & set(mode_of(node, 1)):
            return node.args[0]
        case "copy" | "copy2" | "copyfile" | "copytree" | "move" if module == "shutil":
            return node.args[1]
        case "NamedTemporaryFile" if any(k.arg == "delete" for k in node.keywords):
            return node
    return None


def bypasses(path: Path) -> Iterator[str]:
    nodes = parsed(path)
    known = drafts(nodes)
    for node in nodes:
        if isinstance(node, ast.Call) and (target := written(node)) is not None and name_of(target) not in known:
            yield f"line {node.lineno}: {ast.unparse(node)[:80]}"


def parses(path: Path) -> Iterator[str]:
    for node in parsed(path):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            call = f"{node.func.value.id}.{node.func.attr}"
            if call in {
                "json.load", "json.loads", "tomllib.load", "tomllib.loads", "torch.load", "pickle.load", "pickle.loads",
                "np.load", "numpy.load", "struct.unpack", "struct.unpack_from", "zipfile.ZipFile",
            }:  # fmt: skip
                yield f"line {node.lineno}: {ast.unparse(node)[:80]}"


def looks_up(path: Path) -> Iterator[str]:
    for node in parsed(path):
        match node:
            case (
                ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="os"), attr="environ"), attr="get"))
                | ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="getenv"))
                | ast.Subscript(value=ast.Attribute(value=ast.Name(id="os"), attr="environ"), ctx=ast.Load())
            ):
                yield f"line {node.lineno}: {ast.unparse(node)[:80]}"


def beyond(found: dict[str, list[str]], known: dict[str, tuple[int, str]]) -> dict[str, list[str]]:
    """Files with another number of findings than is known of them."""
    return {
        name: found.get(name, ["none any more"])
        for name in sorted({*found, *known})
        if len(found.get(name, ())) != known.get(name, (0, ""))[0]
    }


def in_code(look: object, *, scripts: bool) -> dict[str, list[str]]:
    paths = {str(path.relative_to(ROOT)): path for path in CODE}
    return {
        name: said
        for name, path in paths.items()
        if name not in DOORS and (scripts or not name.startswith(SCRIPTS)) and (said := list(look(path)))  # type: ignore[operator]
    }


def test_every_writer_writes_whole() -> None:
    assert beyond(in_code(bypasses, scripts=True), WRITERS) == {}


def test_every_parser_of_a_file_is_the_one() -> None:
    assert beyond(in_code(parses, scripts=False), PARSERS) == {}


def test_every_variable_is_looked_up_in_one_place() -> None:
    assert beyond(in_code(looks_up, scripts=False), VARIABLES) == {}


@pytest.mark.parametrize(
    "line",
    [
        "path.write_text('x')", "Path(p).write_bytes(b'')", "open(p, 'w')", "p.open('ab')", "json.dump(x, file)",
        "torch.save(x, p)", "save_file(x, p)", "figure.savefig(p)", "shutil.copy2(a, b)", "p.rename(q)",
        "os.replace(p, q)", "p.replace(q)", "zipfile.ZipFile(p, 'w')", "open(p, mode='x')",
        "tempfile.NamedTemporaryFile(delete=False)", "with whole(p) as draft: other.write_text('x')",
    ],
)  # fmt: skip
def test_a_writer_that_goes_past_the_door_is_found(tmp_path, line) -> None:
    (tmp_path / "x.py").write_text(line)
    assert len(list(bypasses(tmp_path / "x.py"))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "with whole(p) as draft: draft.write_text('x')", "with whole(p) as d: save_file(x, d)", "p.open('rb')",
        "with whole_folder(p) as d: (d / 'x').write_text('x')", "'a'.replace('b', 'c')", "files.write_text(p, 'x')",
        "with whole(p) as new, zipfile.ZipFile(new, 'w') as file: pass", "write_json(p, x)", "open(p)",
    ],
)  # fmt: skip
def test_a_writer_of_a_draft_is_none(tmp_path, line) -> None:
    (tmp_path / "x.py").write_text(line)
    assert list(bypasses(tmp_path / "x.py")) == []
