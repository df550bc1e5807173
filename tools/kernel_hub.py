"""Write a repository that Hugging Face's `kernels` loads: `logprob` on Triton behind functions of TRL's names.

    python tools/kernel_hub.py build/hub [--repo-id rlkernel/rlkernel-logprob]

It takes the modules that tools/hub/functions.py imports, directly or through others, as they are: only imports are
made relative, and an `__init__` that nothing is imported from is left empty. A module that imports anything but those,
torch, Triton and the standard library is refused by name. Two runs write the same bytes.

    build.toml, flake.nix, CARD.md, torch-ext/   what kernel-builder reads (edition 5, `torch-noarch`)
    build/torch-cuda, build/torch-rocm           what it builds of that, with digests, as `kernels` loads it
    README.md, LICENSE, tests/                   for readers of the repository

Format: github.com/huggingface/kernels, docs/source/kernel-requirements.md and docs/source/builder/writing-kernels.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from base64 import b64encode
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "backends" / "triton"))
from rlkernel.coverage import matches
from rlkernel_core import __version__
from rlkernel_core.files import write_text
from rlkernel_core.hardware import DEVICES, GPU
from rlkernel_triton import ARCHS, EXCLUDED

HUB: Final = ROOT / "tools" / "hub"
START: Final = HUB / "functions.py"  # becomes the `__init__` of the kernel
PACKAGES: Final[Mapping[str, Path]] = {
    "rlkernel_common": ROOT / "backends" / "common",
    "rlkernel_core": ROOT,
    "rlkernel_triton": ROOT / "backends" / "triton",
}
# Imports modules by names in a table; of formats of weights, which a kernel of logits has none of.
NEVER_CALLED: Final = {Path("rlkernel_core/quant/codec.py")}
OTHERS: Final = sys.stdlib_module_names | {"torch", "triton"}
NAME: Final = "rlkernel-logprob"
REPO: Final = f"rlkernel/{NAME}"
UPSTREAM: Final = "https://github.com/rlkernel/rlkernel"
VERSION: Final = int(__version__.partition(".")[0])  # of the functions; 0: they may change
LICENSE: Final = "apache-2.0"
FLAKE: Final = """{
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }: kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""


class CannotTakeError(ValueError):
    """A module needs what a kernel repository cannot have; the message names both."""


class Import(NamedTuple):
    """A place in a module that names modules of ours."""

    start: int  # in the text
    end: int
    new: str  # what is put there
    needs: tuple[str, ...]  # modules that it runs, as `source` takes them


def taken(start: Path = START) -> dict[str, str]:
    """Path inside the kernel -> text, of a module as `__init__` and of all that it needs.

    Raises:
        CannotTakeError: one of them imports what cannot be taken along.
    """
    out: dict[str, str] = {}
    seen, left = {"."}, ["."]
    while left:
        name = left.pop()
        file = start if name == "." else source(name)
        text = file.read_text(encoding="utf-8")
        found = list(imports(name, text, file))
        new = {need for one in found for need in one.needs} - seen
        seen |= new
        left += new
        for one in sorted(found, reverse=True):
            text = text[: one.start] + one.new + text[one.end :]
        out[_path(name).as_posix()] = text
    for path in list(out):
        for parent in list(Path(path).parents)[:-1]:
            out.setdefault((parent / "__init__.py").as_posix(), "")
    return dict(sorted(out.items()))


def source(name: str) -> Path:
    """The file of a module; "a.b." is the `__init__` of the package a.b. It need not exist."""
    return PACKAGES[name.partition(".")[0]] / _path(name)


def _path(name: str) -> Path:
    return (
        Path(*name.split(".")[:-1], "__init__.py") if name.endswith(".") else Path(*name.split(".")).with_suffix(".py")
    )


def imports(name: str, text: str, file: Path) -> Iterator[Import]:
    """Where a module names modules of ours, and their names in the kernel.

    Raises:
        CannotTakeError: it imports what cannot be taken along, or ours in a form that cannot be made relative.
    """
    shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    lines, dots = text.splitlines(keepends=True), "." * len(_path(name).parts)
    for node, runs in _statements(ast.parse(text)):
        if runs and (strange := _strange(node)):
            raise CannotTakeError(f"{shown} imports {', '.join(strange)}, which a kernel repository cannot have.")
        old, new, at = _relative(node, dots, text)
        if isinstance(node, ast.Call) and not old:
            if shown in NEVER_CALLED:
                continue
            raise CannotTakeError(f"{shown} calls {ast.get_source_segment(text, node)}, which may be any module.")
        before = lines[at.lineno - 1].encode()[: at.col_offset].decode()  # columns are of bytes
        start = sum(map(len, lines[: at.lineno - 1])) + len(before)
        if not text.startswith(old, start):
            raise CannotTakeError(f"{shown} is not written as `{old}` where it imports that.")
        yield Import(start, start + len(old), new, _needs(node) if runs else ())


def _statements(tree: ast.AST, *, runs: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom | ast.Call, bool]]:
    """Imports and calls of import_module, and whether they run: those for type checkers do not."""
    for node in ast.iter_child_nodes(tree):
        called = getattr(node, "func", None)
        imported = getattr(called, "id", getattr(called, "attr", None)) in {"import_module", "__import__"}
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Call) and imported):
            yield node, runs
        checking = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        yield from _statements(node, runs=runs and not checking)


def _relative(
    node: ast.Import | ast.ImportFrom | ast.Call, dots: str, text: str
) -> tuple[str, str, ast.stmt | ast.expr]:
    """What is written, its replacement, and where; empty strings if the module is not ours."""
    if isinstance(node, ast.ImportFrom) and _ours(node.module):
        return f"from {node.module} import", f"from {dots}{node.module} import", node
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        first = ast.get_source_segment(text, node.args[0]) or ""
        prefix, quoted = first[: -len(first.lstrip("f"))], first.lstrip("f")
        if _ours(quoted[1:]):
            return first, f"{prefix}{quoted[0]}{dots}{quoted[1:]}, __package__", node.args[0]
    return "", "", node


def _strange(node: ast.Import | ast.ImportFrom | ast.Call) -> list[str]:
    """Modules that an import names and a kernel cannot have."""
    if isinstance(node, ast.Import):
        return [a.name for a in node.names if a.name.partition(".")[0] not in OTHERS]
    if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").partition(".")[0] not in OTHERS):
        missing = [n.rstrip(".") for n in _needs(node) if not source(n).exists()]
        return missing if _ours(node.module) else ["." * node.level + (node.module or "")]
    return []


def _needs(node: ast.Import | ast.ImportFrom | ast.Call) -> tuple[str, ...]:
    """The modules of ours behind `from module import names`, as `source` takes them."""
    if not isinstance(node, ast.ImportFrom) or not _ours(node.module):
        return ()
    module = str(node.module)
    if source(module).exists():
        return (module,)
    inside = [(f"{module}.{a.name}", f"{module}.{a.name}.", f"{module}.") for a in node.names]
    return tuple(dict.fromkeys(next((n for n in of if source(n).exists()), of[-1]) for of in inside))


def _ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] in PACKAGES


def architectures() -> dict[str, list[str]]:
    """Backend of the hub -> the architectures that the Triton kernels are compiled for, as it names them."""
    served = [a for a in DEVICES[GPU] if matches(ARCHS, a) and not matches(EXCLUDED, a)]
    capabilities = [a.removeprefix("sm") for a in served if a.startswith("sm")]
    return {"cuda": [f"{n[:-1]}.{n[-1]}" for n in capabilities], "rocm": [a for a in served if a.startswith("gfx")]}


def metadata(files: Mapping[str, str], backend: str) -> str:
    """metadata.json of a build: its names, its architectures and the digest of every file."""
    digests = {path: b64encode(sha256(text.encode()).digest()).decode() for path, text in files.items()}
    unique = sha256("".join(f"{path} {digest}\n" for path, digest in digests.items()).encode()).hexdigest()[:10]
    document = {
        "name": NAME,
        "id": f"_{NAME.replace('-', '_')}_{backend}_{unique}",
        "version": VERSION,
        "license": LICENSE,
        "upstream": UPSTREAM,
        "python-depends": [],
        "backend": {"type": backend, "archs": architectures()[backend]},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return json.dumps(document, indent=2) + "\n"


def manifest(repo_id: str) -> str:
    """build.toml."""
    archs = architectures()
    return f"""[general]
name = "{NAME}"
version = {VERSION}
edition = 5
license = "{LICENSE}"
upstream = "{UPSTREAM}"
backends = {json.dumps(list(archs))}

[general.hub]
repo-id = "{repo_id}"

[torch-noarch]
cuda_capabilities = {json.dumps(archs["cuda"])}
rocm_archs = {json.dumps(archs["rocm"])}
"""


def repository(repo_id: str = REPO) -> dict[str, str]:
    """Path -> text of every file of the repository.

    Raises:
        CannotTakeError: a module imports what cannot be taken along.
    """
    kernel, module, archs = taken(), NAME.replace("-", "_"), architectures()
    tree = ast.parse(kernel["__init__.py"])
    docs = {f.name: ast.get_docstring(f) or "" for f in tree.body if isinstance(f, ast.FunctionDef)}
    table = "\n".join(f"| `{name}` | {text.splitlines()[0]} |" for name, text in sorted(docs.items()) if text)
    words = {
        "{name}": NAME, "{upstream}": UPSTREAM, "{repo_id}": repo_id, "{version}": str(VERSION), "{table}": table,
        "{release}": __version__, "{cuda}": ", ".join(archs["cuda"]), "{rocm}": ", ".join(archs["rocm"]),
    }  # fmt: skip

    def filled(name: str) -> str:
        text = (HUB / name).read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(word, value)
        return text

    card = filled("card.md")
    out = {
        "LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8"),
        "README.md": card, "CARD.md": card, "build/CARD.md": card,
        "build.toml": manifest(repo_id), "flake.nix": FLAKE, "tests/test_functions.py": filled("test_functions.py.in"),
    }  # fmt: skip
    for path, text in kernel.items():
        out[f"torch-ext/{module}/{path}"] = text
    for backend in archs:
        out |= {f"build/torch-{backend}/{path}": text for path, text in kernel.items()}
        out[f"build/torch-{backend}/metadata.json"] = metadata(kernel, backend)
    return out


def main(arguments: list[str] | None = None) -> None:
    """Write the repository into a folder that is empty or absent."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder; absent or empty")
    parser.add_argument("--repo-id", default=REPO, help="where it will be uploaded (default: %(default)s)")
    asked = parser.parse_args(arguments)
    if asked.out.exists() and (not asked.out.is_dir() or any(asked.out.iterdir())):
        parser.error(f"{asked.out} is not an empty folder. Remove it, or name another.")
    for path, text in (files := repository(asked.repo_id)).items():
        (asked.out / path).parent.mkdir(parents=True, exist_ok=True)
        write_text(asked.out / path, text)
    print(f"{asked.out}: {len(files)} files; `kernel-builder upload {asked.out}` sends them to {asked.repo_id}")


if __name__ == "__main__":
    main()
